"""What a GGUF file says of its model, as the config.json of the checkpoint that it was made from. No mlx.

Names are those of the gguf library's tables (gguf.constants); what a converter leaves out, because llama.cpp knows it
of the architecture, stands in that one's function here.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tinyllm.checkpoint.gguf_header import GgufHeader
from tinyllm.config.family import FULL, SLIDING
from tinyllm.config.reader import REQUIRED, ConfigReader, Key
from tinyllm.errors import CheckpointError, UnsupportedModelError

__all__ = ["ARCHITECTURES", "FACTORS", "Architecture", "architecture_of", "config_values", "special_ids"]

# Tensors that are part of what a file says of its model: factors of wavelengths.
FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_TOKEN_IDS = ("eos", "eot")  # either ends an answer
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_MOST_LAYERS = 10_000
_NOT_BEYOND = 1e-4  # relative: factors are stored in float32
# Keys of an architecture that say nothing of the numbers, or nothing at these values.
_INERT = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
_HARMLESS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("expert_count", "expert_used_count", "leading_dense_block_count", "rope.scaling.yarn_log_multiplier"),
        lambda value: not value,
    ),
    **dict.fromkeys(
        ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"),
        lambda value: value == 1,
    ),
    "attention.causal": lambda value: value is True,
    "rope.scaling.original_context_length": lambda value: True,  # where nothing is scaled
}


@dataclass(frozen=True)
class Architecture:
    """How an architecture's files differ from a Llama's checkpoint: `own` has the keys of its config.json.

    `paired` files hold the rows of q and k as llama.cpp rotates them, neighbours together. `norm_shift` is what their
    norms have added. `names` are of tensors of a layer that, where they are all there, mean something else than in a
    Llama.
    """

    own: Callable[[_Facts], dict[str, Any]]
    paired: bool = False
    norm_shift: float = 0.0
    names: Mapping[str, str] = field(default_factory=dict)


class _Facts:
    """The values of an architecture, of which none may be left unread, and the tensors that there are."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        prefix = f"{architecture}."
        values = {
            name.removeprefix(prefix): _same_in_all(value)
            for name, value in header.metadata.items()
            if name.startswith(prefix)
        }
        self.reader = ConfigReader(values, str(header.file))
        self._header = header

    def count(self, name: str, default: Any = REQUIRED, *, least: int = 0, most: int | None = None) -> Any:
        """Read a whole number, of at least 0."""
        return self.reader.read(Key(name, int, default, minimum=least, maximum=most))

    def number(self, name: str, default: float | None) -> Any:
        """Read a number, of at least 0."""
        return self.reader.read(Key(name, float, default, minimum=0))

    def theta(self, default: float = 10000.0, name: str = "rope.freq_base") -> float:
        """Read the base of rotation."""
        found: float = self.reader.read(Key(name, float, default, minimum=2))
        return found

    def has(self, tensor: str) -> bool:
        """Whether the first layer, or the file, has a tensor of that name."""
        return f"blk.0.{tensor}" in self._header.tensors or tensor in self._header.tensors

    def factors(self, tensor: str) -> list[float] | None:
        """Read a short tensor of float32, if there is one."""
        found = self._header.tensors.get(tensor)
        if found is None:
            return None
        if found.type.name != "F32" or len(found.shape) != 1 or found.shape[0] > 1 << 12:
            raise CheckpointError(f"{self._header.file}: {tensor!r} is no list of factors")
        with self._header.file.open("rb") as file:
            file.seek(found.start)
            return list(struct.unpack(f"<{found.shape[0]}f", file.read(found.end - found.start)))

    @property
    def rows(self) -> int:
        """Rows of the embedding."""
        found = self._header.tensors.get("token_embd.weight")
        if found is None or len(found.shape) != 2:
            raise CheckpointError(f"{self._header.file}: has no matrix 'token_embd.weight': not a language model")
        return found.shape[0]


def architecture_of(header: GgufHeader) -> Architecture:
    """Return the row of a file's architecture. Raises UnsupportedModelError for one that is not in the table."""
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"{header.file}: is of type {kind!r:.40}, not a language model")
    if header.metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedModelError(
            f"{header.file}: is one of several parts of a model: join them with llama-gguf-split --merge"
        )
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
    facts = _Facts(header, header.metadata["general.architecture"])
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
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in _TOKEN_IDS]
    known = list(dict.fromkeys(end for end in ends if end is not None))
    return {**ids, **({"eos_token_id": known[0] if len(known) == 1 else known} if known else {})}


def _same_in_all(value: Any) -> Any:
    """Return what is said of every layer alike, once."""
    if isinstance(value, tuple) and value and not isinstance(value[0], (str, bool)) and len(set(value)) == 1:
        return value[0]
    return value


# ---------------------------------------------------------------- what architectures have in common


def _shape(facts: _Facts) -> dict[str, Any]:
    """Sizes, by the names that most families have for them."""
    heads, hidden = facts.count("attention.head_count", least=1), facts.count("embedding_length", least=1)
    head_dim = facts.count("attention.key_length", None)
    values = facts.count("attention.value_length", None)
    if values is not None and values != (head_dim or hidden // heads):
        raise facts.reader.fail(UnsupportedModelError, "its keys and values are of different lengths")
    return {
        "vocab_size": facts.rows,
        "hidden_size": hidden,
        "intermediate_size": facts.count("feed_forward_length"),
        "num_hidden_layers": facts.count("block_count", least=1, most=_MOST_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.count("attention.head_count_kv", heads),
        "max_position_embeddings": facts.count("context_length"),
        "tie_word_embeddings": not facts.has("output.weight"),
        **({} if head_dim is None or head_dim * heads == hidden else {"head_dim": head_dim}),
    }


def _renamed(values: Mapping[str, Any], **names: str | None) -> dict[str, Any]:
    """Give values other names, or take them away."""
    return {names.get(name, name) or "": value for name, value in values.items() if names.get(name, name) is not None}


def _rms_eps(facts: _Facts) -> dict[str, Any]:
    return {"rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon", 1e-5)}


def _layer_eps(facts: _Facts, name: str) -> dict[str, Any]:
    return {name: facts.number("attention.layer_norm_epsilon", 1e-5)}


def _llama_like(facts: _Facts, theta: float = 10000.0) -> dict[str, Any]:
    shape = _shape(facts)
    return {**shape, **_rms_eps(facts), "rope_parameters": _rope(facts, shape, theta)}


def _rope(facts: _Facts, shape: Mapping[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    dims = facts.count("rope.dimension_count", head_dim)
    rope = {"rope_type": "default", "rope_theta": facts.theta(theta)}
    if dims != head_dim:
        rope["partial_rotary_factor"] = math.nextafter(dims / max(head_dim, 1), math.inf)  # it is rounded down
    return {**rope, **_scaling(facts, shape["max_position_embeddings"])}


def _scaling(facts: _Facts, context: int) -> dict[str, Any]:
    kind = facts.reader.read(Key("rope.scaling.type", str, "none"))
    factor = facts.number("rope.scaling.factor", None)
    factors = {name: facts.factors(f"rope_factors_{name}.weight") for name in ("short", "long")}
    if factors["short"] and factors["long"]:
        return {
            "rope_type": "longrope",
            "short_factor": factors["short"],
            "long_factor": factors["long"],
            "attention_factor": facts.number("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": facts.count("rope.scaling.original_context_length", context),
        }
    stretched = facts.factors("rope_freqs.weight")
    if stretched is not None:
        return _stretched(stretched, facts, context)
    if kind == "linear" and factor is not None:
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        betas = {
            name: facts.number(f"rope.scaling.yarn_{name}", 0.0)
            for name in ("beta_fast", "beta_slow")
            if facts.reader.has(f"rope.scaling.yarn_{name}")
        }
        original = facts.count("rope.scaling.original_context_length", context)
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **betas}
    if kind != "none" and factor not in (None, 1.0, 0.0):
        raise facts.reader.fail(UnsupportedModelError, f"rope.scaling.type {kind!r} is not computed by tinyllm")
    return {}


def _stretched(factors: list[float], facts: _Facts, context: int) -> dict[str, Any]:
    """Name the scheme that gives these factors of wavelengths: Llama 3's, else any.

    The converter writes the factors alone, and of Llama 3's numbers but one never differs between its models.
    """
    theta = facts.theta()
    factor, original = max(factors), _LLAMA3["original_max_position_embeddings"]
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]

    def llama3(pair: int) -> float:
        turns: float = original / (2 * math.pi * theta ** (pair / len(factors)))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        return 1 / ((1 - smooth) / factor + smooth)

    if factor >= 1 and all(math.isclose(llama3(i), f, rel_tol=_NOT_BEYOND) for i, f in enumerate(factors)):
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    lists = {"short_factor": factors, "long_factor": factors}
    return {"rope_type": "longrope", **lists, "attention_factor": 1.0, "original_max_position_embeddings": context}


def _attention_bias(facts: _Facts) -> dict[str, Any]:
    return {"attention_bias": facts.has("attn_q.bias")}


def _windows(facts: _Facts, layers: int, period: int) -> list[str]:
    """Return the kind of each layer: as a list says which are windowed, else every so many-th is full."""
    said = facts.reader.take("attention.sliding_window_pattern")
    if isinstance(said, tuple):
        return [SLIDING if windowed else FULL for windowed in said]
    period = said if isinstance(said, int) and said > 0 else period
    return [SLIDING if (i + 1) % period else FULL for i in range(layers)]


# ---------------------------------------------------------------- architectures


def _llama(facts: _Facts) -> dict[str, Any]:
    """Llama, Mistral and Mixtral, which converters do not tell apart."""
    values = _llama_like(facts)
    window = facts.count("attention.sliding_window", None)
    experts = facts.count("expert_count", 0)
    if experts:
        return {
            "model_type": "mixtral",
            **values,
            "sliding_window": window or None,
            "num_local_experts": experts,
            "num_experts_per_tok": facts.count("expert_used_count"),
        }
    if window and window < values["max_position_embeddings"]:
        return {"model_type": "mistral", **values, "sliding_window": window}
    return {"model_type": "llama", **values, **_attention_bias(facts), "mlp_bias": facts.has("ffn_up.bias")}


def _of_type(model_type: str, **more: Any) -> Callable[[_Facts], dict[str, Any]]:
    """An architecture that says no more than a Llama does."""
    return lambda facts: {"model_type": model_type, **_llama_like(facts), **more}


def _qwen3_moe(facts: _Facts) -> dict[str, Any]:
    values = _llama_like(facts)
    return {
        "model_type": "qwen3_moe",
        **values,
        "num_experts": facts.count("expert_count"),
        "num_experts_per_tok": facts.count("expert_used_count"),
        "moe_intermediate_size": facts.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _olmoe(facts: _Facts) -> dict[str, Any]:
    return {
        "model_type": "olmoe",
        **_llama_like(facts),
        "num_experts": facts.count("expert_count"),
        "num_experts_per_tok": facts.count("expert_used_count"),
        "norm_topk_prob": False,
        "clip_qkv": facts.number("attention.clamp_kqv", None),
    }


def _with_head_dim(values: dict[str, Any]) -> dict[str, Any]:
    """Say the size of a head, whose default in some families is a number of its own."""
    return {**values, "head_dim": values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]}


def _qwen3(facts: _Facts) -> dict[str, Any]:
    return {"model_type": "qwen3", **_with_head_dim(_llama_like(facts)), **_attention_bias(facts)}


def _gemma(facts: _Facts) -> dict[str, Any]:
    return {"model_type": "gemma", **_with_head_dim(_llama_like(facts)), **_attention_bias(facts)}


def _gemma_scale(values: Mapping[str, Any], largest: int) -> dict[str, Any]:
    """Scores are scaled by the size of a head, but by the hidden size for each head in the largest model."""
    whole: int = values["hidden_size"] // values["num_attention_heads"]
    return {"query_pre_attn_scalar": whole if values["num_hidden_layers"] == largest else values["head_dim"]}


def _gemma2(facts: _Facts) -> dict[str, Any]:
    values = _with_head_dim(_llama_like(facts))
    return {
        "model_type": "gemma2",
        **values,
        **_attention_bias(facts),
        **_gemma_scale(values, 46),
        "sliding_window": facts.count("attention.sliding_window", 4096),
        "attn_logit_softcapping": facts.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 30.0),
    }


def _gemma3(facts: _Facts) -> dict[str, Any]:
    values = _with_head_dim(_llama_like(facts, theta=1e6))
    window = facts.count("attention.sliding_window", None)
    layers = values["num_hidden_layers"]
    return {
        "model_type": "gemma3_text",
        **values,
        **_attention_bias(facts),
        **_gemma_scale(values, 62),
        "sliding_window": window or None,
        "layer_types": _windows(facts, layers, 6) if window else [FULL] * layers,
        "rope_local_base_freq": facts.theta(name="rope.freq_base_swa"),
        "final_logit_softcapping": facts.number("final_logit_softcapping", None),
    }


def _phi3(facts: _Facts) -> dict[str, Any]:
    values = _llama_like(facts)
    original = facts.count("rope.scaling.original_context_length", values["max_position_embeddings"])
    return {
        "model_type": "phi3",
        **values,
        "original_max_position_embeddings": original,
        "sliding_window": facts.count("attention.sliding_window", 0) or None,
    }


def _starcoder2(facts: _Facts) -> dict[str, Any]:
    shape = _shape(facts)
    return {
        "model_type": "starcoder2",
        **shape,
        **_layer_eps(facts, "norm_epsilon"),
        "rope_parameters": _rope(facts, shape),
        "use_bias": facts.has("attn_q.bias"),
        "sliding_window": facts.count("attention.sliding_window", None) or None,
    }


def _gpt2(facts: _Facts) -> dict[str, Any]:
    shape = _renamed(_shape(facts), num_key_value_heads=None, intermediate_size="n_inner")
    return {"model_type": "gpt2", **shape, **_layer_eps(facts, "layer_norm_epsilon")}


def _falcon(facts: _Facts) -> dict[str, Any]:
    shape = _shape(facts)
    new = facts.has("attn_norm_2.weight") or shape["num_key_value_heads"] > 1
    return {
        "model_type": "falcon",
        **_renamed(shape, num_key_value_heads="num_kv_heads", intermediate_size="ffn_hidden_size"),
        **_layer_eps(facts, "layer_norm_epsilon"),
        "rope_parameters": _rope(facts, shape),
        "new_decoder_architecture": new,
        "multi_query": True,
        "parallel_attn": True,
        "num_ln_in_parallel_attn": 2 if facts.has("attn_norm_2.weight") else 1,
        "bias": facts.has("attn_qkv.bias"),
    }


def _stablelm(facts: _Facts) -> dict[str, Any]:
    shape = _shape(facts)
    return {
        "model_type": "stablelm",
        **shape,
        **_layer_eps(facts, "layer_norm_eps"),
        "rope_parameters": _rope(facts, shape),
        "use_parallel_residual": facts.reader.read(Key("use_parallel_residual", bool, True)),
        "use_qkv_bias": facts.has("attn_q.bias"),
        "qk_layernorm": facts.has("attn_q_norm.weight"),
    }


def _olmo2(facts: _Facts) -> dict[str, Any]:
    values = {**_llama_like(facts), **_attention_bias(facts)}
    window = facts.count("attention.sliding_window", None)
    if not window:
        return {"model_type": "olmo2", **values}
    rope = values["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    kinds = _windows(facts, values["num_hidden_layers"], 4)
    return {
        "model_type": "olmo3",
        **values,
        "rope_parameters": {FULL: rope, SLIDING: local},
        "sliding_window": window,
        "layer_types": kinds,
    }


def _granite(facts: _Facts) -> dict[str, Any]:
    return {
        "model_type": "granite",
        **_llama_like(facts),
        **_attention_bias(facts),
        "mlp_bias": facts.has("ffn_up.bias"),
        "attention_multiplier": facts.number("attention.scale", 1.0),
        "embedding_multiplier": facts.number("embedding_scale", 1.0),
        "residual_multiplier": facts.number("residual_scale", 1.0),
        "logits_scaling": facts.number("logit_scale", 1.0),
    }


_SANDWICH = {"ffn_norm": "pre_feedforward_layernorm"}
_TWO_NORMS = {"attn_norm": "post_attention_layernorm", "attn_norm_2": "input_layernorm"}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(_llama, paired=True),
    "smollm3": Architecture(_of_type("smollm3"), paired=True),
    "granite": Architecture(_granite, paired=True),
    "qwen2": Architecture(_of_type("qwen2")),
    "qwen3": Architecture(_qwen3),
    "qwen3moe": Architecture(_qwen3_moe),
    "olmo2": Architecture(_olmo2),
    "olmoe": Architecture(_olmoe),
    "gemma": Architecture(_gemma, norm_shift=1.0),
    "gemma2": Architecture(_gemma2, norm_shift=1.0, names=_SANDWICH),
    "gemma3": Architecture(_gemma3, norm_shift=1.0, names=_SANDWICH),
    "phi3": Architecture(_phi3),
    "starcoder2": Architecture(_starcoder2),
    "stablelm": Architecture(_stablelm),
    "gpt2": Architecture(_gpt2),
    "falcon": Architecture(_falcon, names=_TWO_NORMS),
}
