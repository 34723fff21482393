"""The table of model families: how each `model_type` writes its config.json and names its tensors. No mlx.

A field of a row is a constant of the architecture, or a `Key` to be read. The defaults are those of the config
classes of transformers 5.24, since config.json may leave out what equals them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from tinyllm.config.reader import ConfigReader, Key
from tinyllm.errors import ConfigError, UnsupportedModelError

FULL, SLIDING = "full_attention", "sliding_attention"


def all_full(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    """Every layer attends to everything before it."""
    return (FULL,) * layers


def all_sliding(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    """Every layer has the window, where there is one."""
    return (SLIDING,) * layers


def sliding_from_max_window_layers(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    """Qwen's rule: only if `use_sliding_window`, then as `layer_types` says, else from `max_window_layers` on."""
    windowed = reader.read(Key("use_sliding_window", bool, False))
    first = reader.read(Key("max_window_layers", int, 28, minimum=0))
    listed = read_layer_types(reader, layers)
    if not windowed:
        if listed and SLIDING in listed:
            raise reader.fail(
                ConfigError, f"layer_types lists {SLIDING!r} layers, but use_sliding_window is not true"
            )
        return (FULL,) * layers
    return listed or tuple(SLIDING if i >= first else FULL for i in range(layers))


def read_layer_types(reader: ConfigReader, layers: int) -> tuple[str, ...] | None:
    """Read the list `layer_types`, one known kind a layer; None where it is absent."""
    listed = reader.read(Key("layer_types", list, None, nullable=True))
    if listed is None:
        return None
    if len(listed) != layers:
        raise reader.fail(ConfigError, f"layer_types has {len(listed)} entries, but num_hidden_layers is {layers}")
    unknown = sorted({str(kind) for kind in listed} - {FULL, SLIDING})
    if unknown:
        raise reader.fail(
            UnsupportedModelError, f"layer_types asks for {', '.join(unknown)}, not computed by tinyllm"
        )
    return tuple(listed)


@dataclass(frozen=True)
class Family:
    """One row: how a family's config.json is read, and which of its tensor names differ from Llama's."""

    model_type: str
    vocab_size: Any = Key("vocab_size", int, minimum=1)
    hidden_size: Any = Key("hidden_size", int, minimum=1)
    num_hidden_layers: Any = Key("num_hidden_layers", int, minimum=1, maximum=10_000)
    num_attention_heads: Any = Key("num_attention_heads", int, minimum=1)
    num_key_value_heads: Any = Key("num_key_value_heads", int, None, nullable=True, minimum=1)
    head_dim: Any = Key("head_dim", int, None, nullable=True, minimum=1)
    intermediate_size: Any = Key("intermediate_size", int, minimum=1)
    activation: Any = Key("hidden_act", str, "silu")
    max_position_embeddings: Any = Key("max_position_embeddings", int, 2048, minimum=1)
    rms_norm_eps: Any = Key("rms_norm_eps", float, 1e-6, minimum=0)
    tie_word_embeddings: Any = Key("tie_word_embeddings", bool, False)
    sliding_window: Any = None
    layer_types: Callable[[ConfigReader, int], tuple[str, ...]] = all_full
    rope_theta: float = 10000.0
    qkv_bias: Any = False
    output_bias: Any = False
    mlp_bias: Any = False
    qk_norm: bool = False
    inert: frozenset[str] = frozenset()
    renames: tuple[tuple[str, str], ...] = ()  # regular expressions over tensor names, applied in order

    def values(self, reader: ConfigReader) -> dict[str, Any]:
        """Resolve every field of the row that is a `Key` by reading it; constants pass through."""
        return {
            name: reader.read(value) if isinstance(value, Key) else value for name, value in self.__dict__.items()
        }

    def canonical_name(self, name: str) -> str:
        """Translate a tensor's (or module's) name in the file to the canonical one, Llama's."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name


_LLAMA = Family(
    "llama",
    qkv_bias=Key("attention_bias", bool, False),
    output_bias=Key("attention_bias", bool, False),
    mlp_bias=Key("mlp_bias", bool, False),
    inert=frozenset({"pretraining_tp"}),
)
_QWEN2 = Family(
    "qwen2",
    num_key_value_heads=Key("num_key_value_heads", int, 32, nullable=True, minimum=1),
    max_position_embeddings=Key("max_position_embeddings", int, 32768, minimum=1),
    sliding_window=Key("sliding_window", int, 4096, nullable=True, minimum=1),
    layer_types=sliding_from_max_window_layers,
    qkv_bias=True,
)

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        _LLAMA,
        Family(
            "mistral",
            num_key_value_heads=Key("num_key_value_heads", int, 8, nullable=True, minimum=1),
            max_position_embeddings=Key("max_position_embeddings", int, 4096 * 32, minimum=1),
            sliding_window=Key("sliding_window", int, 4096, nullable=True, minimum=1),
            layer_types=all_sliding,
        ),
        _QWEN2,
        replace(
            _QWEN2,
            model_type="qwen3",
            head_dim=Key("head_dim", int, 128, nullable=True, minimum=1),
            qkv_bias=Key("attention_bias", bool, False),
            output_bias=Key("attention_bias", bool, False),
            qk_norm=True,
        ),
    )
}


@dataclass(frozen=True)
class Wrapper:
    """A multimodal `model_type` whose text model stands under `text_config`, run here without its other towers."""

    model_type: str
    text_prefixes: tuple[str, ...]  # of tensor names, longest first: "model." follows in their place
    skipped: tuple[str, ...]  # prefixes of tensors that belong to the other towers
    tie_word_embeddings: bool  # where neither config says
    inert: frozenset[str] = frozenset()


WRAPPERS: Mapping[str, Wrapper] = {
    wrapper.model_type: wrapper
    for wrapper in (
        Wrapper(
            "mistral3",
            text_prefixes=("model.language_model.", "language_model.model."),
            skipped=(
                "model.vision_tower.",
                "model.multi_modal_projector.",
                "vision_tower.",
                "multi_modal_projector.",
            ),
            tie_word_embeddings=True,
            inert=frozenset(
                {
                    "vision_config",
                    "image_token_index",
                    "image_token_id",
                    "vision_feature_layer",
                    "projector_hidden_act",
                    "multimodal_projector_bias",
                    "spatial_merge_size",
                }
            ),
        ),
    )
}


def family_of(reader: ConfigReader) -> Family:
    """Find the row for the file's `model_type`; UnsupportedModelError names the nearest known ones."""
    model_type = reader.read(Key("model_type", str))
    if model_type not in FAMILIES:
        near = get_close_matches(model_type, FAMILIES, n=3, cutoff=0.5) or sorted(FAMILIES)
        raise reader.fail(
            UnsupportedModelError,
            f"model_type {model_type!r} is not one that tinyllm runs; the nearest that it does: {', '.join(near)}",
        )
    return FAMILIES[model_type]


# Keys without effect on the numbers of inference, whatever their value.
INERT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path _sliding_window
    architectures attention_dropout attn_implementation attn_pdrop auto_map bos_token_id classifier_dropout
    embd_pdrop embedding_dropout finetuning_task gradient_checkpointing hidden_dropout hidden_dropout_prob id2label
    initializer_range is_llama_config keys_to_ignore_at_inference label2id language license max_sequence_length
    mlx_version model_max_length model_name model_type name_or_path neftune_noise_alpha num_labels
    output_attentions output_hidden_states output_router_logits pad_token_id prefix problem_type resid_pdrop
    return_dict return_dict_in_generate sep_token_id summary_type task_specific_params
    tf_legacy_loss tokenizer_class tokenizer_model_max_length tokenizer_padding_side torchscript
    transformers.js_config transformers_version unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache
    vocab_file
    """.split()
)

# Generation settings that older files keep here; generation_config.json is where they are read from.
GENERATION = frozenset(
    """
    bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id length_penalty max_length max_new_tokens min_length min_p no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values renormalize_logits
    repetition_penalty suppress_tokens temperature top_k top_p typical_p
    """.split()
)


def _falsy(value: Any) -> bool:
    return not value


# Keys that would change the computation, at the values with which they do not.
HARMLESS: Mapping[str, Callable[[Any], bool]] = {
    "add_cross_attention": _falsy,
    "chunk_size_feed_forward": lambda value: True,
    "cross_attention_hidden_size": _falsy,
    "is_decoder": lambda value: True,
    "is_encoder_decoder": _falsy,
    "layer_types": lambda value: isinstance(value, list) and set(map(str, value)) <= {FULL},
    "max_window_layers": lambda value: True,
    "pruned_heads": _falsy,
    "rope_interleaved": _falsy,
    "sliding_window": _falsy,
    "tie_encoder_decoder": _falsy,
    "use_mrope": _falsy,
    "use_sliding_window": _falsy,
}
