"""What a GGUF file says of its model, as the config.json of the checkpoint that it was made from. No mlx."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tinyllm.checkpoint.gguf_architectures import ARCHITECTURES, Architecture
from tinyllm.checkpoint.gguf_facts import Facts
from tinyllm.checkpoint.gguf_header import GgufHeader
from tinyllm.errors import UnsupportedModelError

__all__ = ["architecture_of", "config_values", "special_ids"]

_TOKEN_IDS = ("eos", "eot", "eom")  # each ends an answer
# So do these control tokens, which files do not always name as such; as in llama.cpp.
_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <turn|> <|endoftext|> </s>"
    " <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <｜end▁of▁sentence｜>".split()
)
_CONTROL_TYPES = (3, 4)  # control, user-defined
# Keys of an architecture that say nothing of the numbers, or nothing at these values.
_INERT = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
_HARMLESS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("expert_count", "expert_used_count", "leading_dense_block_count", "rope.scaling.yarn_log_multiplier"),
        lambda value: not value,
    ),
    **dict.fromkeys(
        ("expert_gating_func", "expert_group_count", "expert_group_used_count", "expert_weights_scale"),
        lambda value: value in (0, 1),
    ),
    **dict.fromkeys(
        ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"),
        lambda value: value == 1,
    ),
    "attention.causal": lambda value: value is True,
    "rope.scaling.original_context_length": lambda value: True,  # where nothing is scaled
}


def architecture_of(header: GgufHeader) -> Architecture:
    """Return the row of a file's architecture. Raises UnsupportedModelError for one that is not in the table."""
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"{header.file}: is of type {kind!r:.40}, not a language model")
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{header.file}: GGUF files of the architecture {name!r:.40} are not read by tinyllm"
            f" ({', '.join(sorted(ARCHITECTURES))}); look for the model in safetensors"
        )
    return ARCHITECTURES[name]


def config_values(header: GgufHeader) -> dict[str, Any]:
    """Return the config.json that a file stands for, for `Config.from_dict` to check.

    Raises UnsupportedModelError as `architecture_of`, and ConfigError (or a class below it) for a value that is
    absent, malformed, or unknown.
    """
    architecture = architecture_of(header)
    facts = Facts(header, header.metadata["general.architecture"])
    reader = facts.reader
    values = architecture.own(facts)
    context = values.get("max_position_embeddings", 0)
    window = reader.values.get("attention.sliding_window")
    if not window or (isinstance(window, int) and window >= context):
        reader.discard(["attention.sliding_window"])
    reader.discard(_INERT)
    reader.discard_where(_HARMLESS)
    reader.finish()
    return {**values, **special_ids(header.metadata)}


def special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ids of special tokens by the names that config.json gives them."""
    ids = {
        f"{name}_token_id": metadata[f"tokenizer.ggml.{key}_token_id"]
        for name, key in (("bos", "bos"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id{plural}") for key in _TOKEN_IDS for plural in ("", "s")]
    stated = [id for end in ends if end is not None for id in (end if isinstance(end, tuple) else (end,))]
    known = list(dict.fromkeys([*stated, *_ends_by_text(metadata)]))
    return {**ids, **({"eos_token_id": known[0] if len(known) == 1 else known} if known else {})}


def _ends_by_text(metadata: Mapping[str, Any]) -> list[int]:
    tokens, types = (metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if not isinstance(tokens, tuple) or not isinstance(types, tuple) or len(tokens) != len(types):
        return []
    found = {token: i for i, token in enumerate(tokens) if token in _ENDS and types[i] in _CONTROL_TYPES}
    if {"<|return|>", "<|call|>"} <= found.keys():
        found.pop("<|end|>", None)  # ends a message of several, in gpt-oss
    return sorted(found.values())
