"""The table of GGUF's architectures: how the files of each say what config.json says, and what they store otherwise.

What a converter leaves out, because llama.cpp knows it of the architecture, stands in that one's function. No mlx.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tinyllm.checkpoint import gguf_mixtures as mixtures
from tinyllm.checkpoint.gguf_facts import (
    Facts,
    attention_bias,
    layer_eps,
    llama_like,
    renamed,
    rotation,
    shape,
    windows,
    with_head_dim,
)
from tinyllm.config.family import FULL, SLIDING
from tinyllm.errors import UnsupportedModelError

__all__ = ["ARCHITECTURES", "Architecture"]


@dataclass(frozen=True)
class Architecture:
    """How an architecture's files differ from a Llama's checkpoint: `own` has the keys of its config.json.

    `paired` files hold the rows of q and k as llama.cpp rotates them, neighbours together. `tiled` ones hold of the
    value heads of linear attention the first of each key head, then the second of each. `norm_shift` is what their
    norms have added. `names` are of tensors that, where all of them are there, mean something else than in a Llama.
    """

    own: Callable[[Facts], dict[str, Any]]
    paired: bool = False
    tiled: bool = False
    norm_shift: float = 0.0
    names: Mapping[str, str] = field(default_factory=dict)


# ---------------------------------------------------------------- Llama and those that differ in few things


def _of_type(
    model_type: str, *more: Callable[[Facts], dict[str, Any]], theta: float = 10000.0
) -> Callable[[Facts], dict[str, Any]]:
    """An architecture that says what a Llama does, and `more`; with the size of a head, which may have a default."""

    def own(facts: Facts) -> dict[str, Any]:
        values = {"model_type": model_type, **with_head_dim(llama_like(facts, theta))}
        for part in more:
            values |= part(facts)
        return values

    return own


def _plain(model_type: str) -> Callable[[Facts], dict[str, Any]]:
    """An architecture that says no more than a Llama does."""
    return lambda facts: {"model_type": model_type, **llama_like(facts)}


def _mlp_bias(facts: Facts) -> dict[str, Any]:
    return {"mlp_bias": facts.has("ffn_up.bias")}


def _use_bias(facts: Facts) -> dict[str, Any]:
    return {"use_bias": facts.has("attn_q.bias")}


def _output_bias(facts: Facts) -> dict[str, Any]:
    return {"attention_out_bias": facts.has("attn_output.bias")}


def _llama(facts: Facts) -> dict[str, Any]:
    """Llama, Mistral and Mixtral, which converters do not tell apart."""
    values = llama_like(facts)
    if facts.count("expert_count", 0):
        return mixtures.mixtral(facts, values)
    window = facts.count("attention.sliding_window", None)
    if window and window < values["max_position_embeddings"]:
        return {"model_type": "mistral", **values, "sliding_window": window}
    return {"model_type": "llama", **values, **attention_bias(facts), **_mlp_bias(facts)}


def _phi3(facts: Facts) -> dict[str, Any]:
    values = llama_like(facts)
    original = facts.count("rope.scaling.original_context_length", values["max_position_embeddings"])
    return {
        "model_type": "phi3",
        **values,
        "original_max_position_embeddings": original,
        "sliding_window": facts.count("attention.sliding_window", 0) or None,
    }


def _olmo2(facts: Facts) -> dict[str, Any]:
    values = {**llama_like(facts), **attention_bias(facts)}
    window = facts.count("attention.sliding_window", None)
    if not window:
        return {"model_type": "olmo2", **values}
    kinds = windows(facts, values["num_hidden_layers"], 4)
    return {
        "model_type": "olmo3",
        **values,
        **_local_rotation(values, values["rope_parameters"]["rope_theta"]),
        "sliding_window": window,
        "layer_types": kinds,
    }


def _local_rotation(values: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """Layers with windows turn by a theta of their own, as far as text is long in a window."""
    return {
        "rope_parameters": {
            FULL: values["rope_parameters"],
            SLIDING: {"rope_type": "default", "rope_theta": theta},
        }
    }


def _exaone4(facts: Facts) -> dict[str, Any]:
    values = with_head_dim(llama_like(facts))
    window = facts.count("attention.sliding_window", 0) or None
    layers = values["num_hidden_layers"]
    kinds = windows(facts, layers, 4) if window else [FULL] * layers
    return {"model_type": "exaone4", **values, "sliding_window": window, "layer_types": kinds}


def _glm(model_type: str) -> Callable[[Facts], dict[str, Any]]:
    """GLM, half of whose heads turn unless a file says otherwise."""

    def own(facts: Facts) -> dict[str, Any]:
        values = with_head_dim(llama_like(facts))
        rope = {"partial_rotary_factor": 1.0, **values["rope_parameters"]}
        return {"model_type": model_type, **values, "rope_parameters": rope, **attention_bias(facts)}

    return own


# ---------------------------------------------------------------- Gemma and Cohere


def _gemma_scale(values: Mapping[str, Any], largest: int) -> dict[str, Any]:
    """Scores are scaled by the size of a head, but by the hidden size for each head in the largest model."""
    whole: int = values["hidden_size"] // values["num_attention_heads"]
    return {"query_pre_attn_scalar": whole if values["num_hidden_layers"] == largest else values["head_dim"]}


def _gemma2(facts: Facts) -> dict[str, Any]:
    values = with_head_dim(llama_like(facts))
    return {
        "model_type": "gemma2",
        **values,
        **attention_bias(facts),
        **_gemma_scale(values, 46),
        "sliding_window": facts.count("attention.sliding_window", 4096),
        "attn_logit_softcapping": facts.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 30.0),
    }


def _gemma3(facts: Facts) -> dict[str, Any]:
    values = with_head_dim(llama_like(facts, theta=1e6))
    window = facts.count("attention.sliding_window", None)
    layers = values["num_hidden_layers"]
    return {
        "model_type": "gemma3_text",
        **values,
        **attention_bias(facts),
        **_gemma_scale(values, 62),
        "sliding_window": window or None,
        "layer_types": windows(facts, layers, 6) if window else [FULL] * layers,
        **_local_rotation(values, facts.theta(name="rope.freq_base_swa")),
        "final_logit_softcapping": facts.number("final_logit_softcapping", None),
    }


def _cohere(facts: Facts) -> dict[str, Any]:
    found = shape(facts)
    return {
        "model_type": "cohere",
        **found,
        **layer_eps(facts, "layer_norm_eps"),
        "rope_parameters": rotation(facts, found),
        **attention_bias(facts),
        "use_qk_norm": facts.has("attn_q_norm.weight"),
        "logit_scale": facts.number("logit_scale", 1.0),
    }


def _cohere2(facts: Facts) -> dict[str, Any]:
    window = facts.count("attention.sliding_window", least=1)
    values = renamed(_cohere(facts), use_qk_norm=None)
    kinds = windows(facts, values["num_hidden_layers"], 4)
    return {**values, "model_type": "cohere2", "sliding_window": window, "layer_types": kinds}


# ---------------------------------------------------------------- LayerNorm, or networks that are not gated


def _starcoder2(facts: Facts) -> dict[str, Any]:
    found = shape(facts)
    return {
        "model_type": "starcoder2",
        **found,
        **layer_eps(facts, "norm_epsilon"),
        "rope_parameters": rotation(facts, found),
        "use_bias": facts.has("attn_q.bias"),
        "sliding_window": facts.count("attention.sliding_window", None) or None,
    }


def _gpt2(facts: Facts) -> dict[str, Any]:
    found = renamed(shape(facts), num_key_value_heads=None, intermediate_size="n_inner")
    return {"model_type": "gpt2", **found, **layer_eps(facts, "layer_norm_epsilon")}


def _starcoder(facts: Facts) -> dict[str, Any]:
    found = shape(facts)
    shared = found["num_key_value_heads"] == 1
    values = renamed(found, num_key_value_heads=None, intermediate_size="n_inner")
    return {
        "model_type": "gpt_bigcode",
        **values,
        **layer_eps(facts, "layer_norm_epsilon"),
        "multi_query": shared,
    }


def _falcon(facts: Facts) -> dict[str, Any]:
    found = shape(facts)
    new = facts.has("attn_norm_2.weight") or found["num_key_value_heads"] > 1
    return {
        "model_type": "falcon",
        **renamed(found, num_key_value_heads="num_kv_heads", intermediate_size="ffn_hidden_size"),
        **layer_eps(facts, "layer_norm_epsilon"),
        "rope_parameters": rotation(facts, found),
        "new_decoder_architecture": new,
        "multi_query": True,
        "parallel_attn": True,
        "num_ln_in_parallel_attn": 2 if facts.has("attn_norm_2.weight") else 1,
        "bias": facts.has("attn_qkv.bias"),
    }


def _stablelm(facts: Facts) -> dict[str, Any]:
    found = shape(facts)
    return {
        "model_type": "stablelm",
        **found,
        **layer_eps(facts, "layer_norm_eps"),
        "rope_parameters": rotation(facts, found, usual=0.25),
        "use_parallel_residual": facts.flag("use_parallel_residual", True),
        "use_qkv_bias": facts.has("attn_q.bias"),
        "qk_layernorm": facts.has("attn_q_norm.weight"),
    }


def _phi2(facts: Facts) -> dict[str, Any]:
    found = shape(facts)
    return {
        "model_type": "phi",
        **found,
        **layer_eps(facts, "layer_norm_eps"),
        "rope_parameters": rotation(facts, found, usual=0.5),
    }


def _gpt_neox(facts: Facts) -> dict[str, Any]:
    found = shape(facts)
    return {
        "model_type": "gpt_neox",
        **renamed(found, num_key_value_heads=None),
        **layer_eps(facts, "layer_norm_eps"),
        "rope_parameters": rotation(facts, found, usual=0.25),
        "use_parallel_residual": facts.flag("use_parallel_residual", True),
        "attention_bias": facts.has("attn_qkv.bias"),
    }


def _bloom(facts: Facts) -> dict[str, Any]:
    names = {"num_key_value_heads": None, "intermediate_size": "n_inner", "max_position_embeddings": "seq_length"}
    return {
        "model_type": "bloom",
        **renamed(shape(facts), **names),
        **layer_eps(facts, "layer_norm_epsilon"),
    }


def _mpt(facts: Facts) -> dict[str, Any]:
    names = {
        "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len", "intermediate_size": None, "num_key_value_heads": None,
    }  # fmt: skip
    found = shape(facts)
    if found["num_key_value_heads"] != found["num_attention_heads"]:
        raise facts.reader.fail(UnsupportedModelError, "an MPT whose heads share keys is not computed by tinyllm")
    attention = {
        "alibi": True,
        "alibi_bias_max": _whole(facts.number("attention.max_alibi_bias", 8.0)),
        "clip_qkv": facts.number("attention.clamp_kqv", None) or None,
    }
    return {
        "model_type": "mpt",
        **renamed(found, **names),
        **layer_eps(facts, "layer_norm_epsilon"),
        "expansion_ratio": _whole(found["intermediate_size"] / found["hidden_size"]),
        "attn_config": attention,
    }


def _whole(number: float) -> float:
    """Return a whole number as such: transformers takes no other for what it calls an int."""
    return int(number) if number.is_integer() else number


def _olmo(facts: Facts) -> dict[str, Any]:
    found = shape(facts)
    eps = facts.number("attention.layer_norm_epsilon", _OLMO_EPS)
    if eps != _OLMO_EPS:
        raise facts.reader.fail(UnsupportedModelError, f"an OLMo with an epsilon of {eps} is not computed by tinyllm")
    return {
        "model_type": "olmo",
        **found,
        "rope_parameters": rotation(facts, found),
        **attention_bias(facts),
        "clip_qkv": facts.number("attention.clamp_kqv", None) or None,
    }


_OLMO_EPS = 1e-5


def _layer_normed(model_type: str, eps: str, *, usual: float = 1.0) -> Callable[[Facts], dict[str, Any]]:
    """Nemotron, and those that are like it."""

    def own(facts: Facts) -> dict[str, Any]:
        found = with_head_dim(shape(facts))
        return {
            "model_type": model_type,
            **found,
            **layer_eps(facts, eps),
            "rope_parameters": rotation(facts, found, usual=usual),
            **attention_bias(facts),
            **_mlp_bias(facts),
        }

    return own


# ---------------------------------------------------------------- the table

_SANDWICH = {"ffn_norm": "pre_feedforward_layernorm"}
_TWO_NORMS = {"attn_norm": "post_attention_layernorm", "attn_norm_2": "input_layernorm"}
_LAST_NORM = {"token_embd_norm": "model.norm"}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(_llama, paired=True),
    "mistral3": Architecture(mixtures.mistral3, paired=True),
    "smollm3": Architecture(_plain("smollm3"), paired=True),
    "granite": Architecture(mixtures.granite, paired=True),
    "arcee": Architecture(_of_type("arcee", attention_bias, _mlp_bias), paired=True),
    "qwen2": Architecture(_plain("qwen2")),
    "qwen3": Architecture(_of_type("qwen3", attention_bias)),
    "seed_oss": Architecture(_of_type("seed_oss", attention_bias, _output_bias, _mlp_bias)),
    "exaone": Architecture(_of_type("exaone", attention_bias, _mlp_bias)),
    "exaone4": Architecture(_exaone4),
    "hunyuan-dense": Architecture(_of_type("hunyuan_v1_dense", attention_bias)),
    "ernie4_5": Architecture(_of_type("ernie4_5", _use_bias, theta=500000.0)),
    "chatglm": Architecture(_glm("glm")),
    "glm4": Architecture(_glm("glm4"), names=_SANDWICH),
    "phi3": Architecture(_phi3),
    "olmo": Architecture(_olmo, paired=True),
    "olmo2": Architecture(_olmo2),
    "gemma": Architecture(_of_type("gemma", attention_bias), norm_shift=1.0),
    "gemma2": Architecture(_gemma2, norm_shift=1.0, names=_SANDWICH),
    "gemma3": Architecture(_gemma3, norm_shift=1.0, names=_SANDWICH),
    "command-r": Architecture(_cohere),
    "cohere2": Architecture(_cohere2),
    # LayerNorm, or networks that are not gated
    "phi2": Architecture(_phi2),
    "starcoder": Architecture(_starcoder),
    "starcoder2": Architecture(_starcoder2),
    "stablelm": Architecture(_stablelm),
    "nemotron": Architecture(_layer_normed("nemotron", "norm_eps", usual=0.5), norm_shift=1.0),
    "jais2": Architecture(_layer_normed("jais2", "layer_norm_eps")),
    "gpt2": Architecture(_gpt2),
    "gptneox": Architecture(_gpt_neox),
    "falcon": Architecture(_falcon, names=_TWO_NORMS),
    "bloom": Architecture(_bloom),
    "mpt": Architecture(_mpt),
    # experts, latent attention, recurrent layers
    "gpt-oss": Architecture(mixtures.gpt_oss),
    "qwen2moe": Architecture(mixtures.qwen2_moe),
    "qwen3moe": Architecture(mixtures.qwen3_moe),
    "olmoe": Architecture(mixtures.olmoe),
    "granitemoe": Architecture(mixtures.granite_moe, paired=True),
    "glm4moe": Architecture(mixtures.glm4_moe),
    "dots1": Architecture(mixtures.dots1),
    "minimax-m2": Architecture(mixtures.minimax_m2),
    "ernie4_5-moe": Architecture(mixtures.ernie4_5_moe),
    "hunyuan-moe": Architecture(mixtures.hunyuan_moe),
    "deepseek2": Architecture(mixtures.deepseek2),
    "lfm2": Architecture(mixtures.lfm2, names=_LAST_NORM),
    "lfm2moe": Architecture(mixtures.lfm2_moe, names=_LAST_NORM),
    "qwen3next": Architecture(mixtures.qwen3_next, norm_shift=1.0),
    "qwen35": Architecture(mixtures.qwen3_5(experts=False), norm_shift=1.0, tiled=True),
    "qwen35moe": Architecture(mixtures.qwen3_5(experts=True), norm_shift=1.0, tiled=True),
}
