"""config.json of GGUF's architectures with experts, latent attention or recurrent layers. No mlx.

What a converter leaves out, because llama.cpp knows it of the architecture, stands in that one's function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tinyllm.checkpoint.gguf_facts import (
    Facts,
    attention_bias,
    llama_like,
    renamed,
    rotation,
    sizes,
    windows,
    with_head_dim,
)
from tinyllm.config.family import CONV, FULL, LINEAR

__all__ = [
    "deepseek2", "dots1", "ernie4_5_moe", "glm4_moe", "gpt_oss", "granite", "granite_moe", "hunyuan_moe", "lfm2",
    "lfm2_moe", "minimax_m2", "mistral3", "mixtral", "olmoe", "qwen2_moe", "qwen3_5", "qwen3_moe", "qwen3_next",
]  # fmt: skip

_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
_OF_EXPERTS = ("expert", "leading_dense_block_count")
_DEEPSEEKS_TENTH = 0.1  # that DeepSeek's files have in their log multiplier, and no other's


def _experts(
    facts: Facts, count: str = "num_experts", *, width: str | None = "moe_intermediate_size"
) -> dict[str, Any]:
    """Return how many experts there are and how many a token takes, and how wide they are."""
    found = {count: facts.count("expert_count"), "num_experts_per_tok": facts.count("expert_used_count")}
    wide = facts.width("expert_feed_forward_length", "ffn_up_exps.weight")
    return found if width is None else {**found, width: wide}


def _balanced(facts: Facts, default: str = "sigmoid", known: tuple[str, ...] = ("sigmoid",)) -> dict[str, Any]:
    """Return what is said of experts, some of them shared, after layers that have none."""
    facts.count("expert_shared_feed_forward_length", 0)  # as wide as so many shared ones are together
    return {
        **_experts(facts, "n_routed_experts"),
        "scoring_func": facts.scores(known, default),
        "first_k_dense_replace": facts.count("leading_dense_block_count", 0),
        "n_shared_experts": facts.count("expert_shared_count", 0),
        "routed_scaling_factor": facts.number("expert_weights_scale", None) or 1.0,
        "norm_topk_prob": facts.flag("expert_weights_norm", False),
        "n_group": facts.count("expert_group_count", 1) or 1,
        "topk_group": facts.count("expert_group_used_count", 1) or 1,
    }


def mixtral(facts: Facts, values: dict[str, Any]) -> dict[str, Any]:
    """A Llama with experts; `values` are those of a Llama."""
    window = facts.count("attention.sliding_window", None)
    found = _experts(facts, "num_local_experts", width=None)
    return {"model_type": "mixtral", **values, "sliding_window": window or None, **found}


def qwen2_moe(facts: Facts) -> dict[str, Any]:
    """Qwen 1.5 and 2."""
    shared = facts.width("expert_shared_feed_forward_length", "ffn_up_shexp.weight")
    return {
        "model_type": "qwen2_moe",
        **llama_like(facts),
        **_experts(facts),
        "shared_expert_intermediate_size": shared,
        "qkv_bias": facts.has("attn_q.bias"),
        "norm_topk_prob": False,
    }


def qwen3_moe(facts: Facts) -> dict[str, Any]:
    """Qwen 3."""
    return {"model_type": "qwen3_moe", **llama_like(facts), **_experts(facts), "norm_topk_prob": True}


def olmoe(facts: Facts) -> dict[str, Any]:
    """OLMoE."""
    clip = facts.number("attention.clamp_kqv", None)
    experts = _experts(facts, width=None)
    return {"model_type": "olmoe", **llama_like(facts), **experts, "norm_topk_prob": False, "clip_qkv": clip}


def gpt_oss(facts: Facts) -> dict[str, Any]:
    """gpt-oss, of whose YaRN no file says that its bounds are not whole numbers."""
    values = with_head_dim(llama_like(facts, theta=150000.0))
    rope = values["rope_parameters"]
    return {
        "model_type": "gpt_oss",
        **values,
        "rope_parameters": {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope,
        **_experts(facts, "num_local_experts", width="intermediate_size"),
        **attention_bias(facts),
        "sliding_window": facts.count("attention.sliding_window", 128),
        "layer_types": windows(facts, values["num_hidden_layers"], 2),
    }


def granite(facts: Facts) -> dict[str, Any]:
    """Granite."""
    return {
        "model_type": "granite",
        **llama_like(facts),
        **attention_bias(facts),
        "mlp_bias": facts.has("ffn_up.bias"),
        "attention_multiplier": facts.number("attention.scale", 1.0),
        "embedding_multiplier": facts.number("embedding_scale", 1.0),
        "residual_multiplier": facts.number("residual_scale", 1.0),
        "logits_scaling": facts.number("logit_scale", 1.0),
    }


def granite_moe(facts: Facts) -> dict[str, Any]:
    """Granite with experts; without any, it is a Granite."""
    values = granite(facts)
    shared = facts.width("expert_shared_feed_forward_length", "ffn_up_shexp.weight")
    if not facts.has("ffn_gate_inp.weight"):
        return values
    return {
        **renamed(values, mlp_bias=None),
        "model_type": "granitemoeshared" if shared else "granitemoe",
        **_experts(facts, "num_local_experts", width="intermediate_size"),
        **({"shared_intermediate_size": shared} if shared else {}),
    }


def glm4_moe(facts: Facts) -> dict[str, Any]:
    """GLM 4.5 and later."""
    values = with_head_dim(llama_like(facts))
    rope = {"partial_rotary_factor": 1.0, **values["rope_parameters"]}
    experts = renamed(_balanced(facts), scoring_func=None)
    qk_norm = facts.has("attn_q_norm.weight")
    return {
        "model_type": "glm4_moe",
        **values,
        "rope_parameters": rope,
        **experts,
        **attention_bias(facts),
        "use_qk_norm": qk_norm,
        "num_nextn_predict_layers": 0,
    }


def dots1(facts: Facts) -> dict[str, Any]:
    """dots.llm1."""
    values = with_head_dim(llama_like(facts))
    layers = [FULL] * values["num_hidden_layers"]
    return {
        "model_type": "dots1",
        **values,
        **_balanced(facts),
        **attention_bias(facts),
        "layer_types": layers,
        "sliding_window": None,
    }


def minimax_m2(facts: Facts) -> dict[str, Any]:
    """MiniMax M2."""
    values = with_head_dim(llama_like(facts))
    facts.scores(("sigmoid",), "sigmoid")
    return {
        "model_type": "minimax_m2",
        **values,
        **_experts(facts, "num_local_experts", width="intermediate_size"),
    }


def ernie4_5_moe(facts: Facts) -> dict[str, Any]:
    """Ernie 4.5; what its files say of the width of shared experts is not that."""
    values = llama_like(facts, theta=500000.0)
    facts.count("expert_shared_feed_forward_length", 0)
    facts.scores(("softmax",), "softmax")
    experts = _experts(facts, "moe_num_experts")
    return {
        "model_type": "ernie4_5_moe",
        **values,
        **renamed(experts, num_experts_per_tok="moe_k"),
        "moe_layer_start_index": facts.count("leading_dense_block_count", 0),
        "moe_layer_interval": facts.count("interleave_moe_layer_step", 1, least=1),
        "moe_num_shared_experts": facts.count("expert_shared_count", 0),
        "use_bias": facts.has("attn_q.bias"),
    }


def hunyuan_moe(facts: Facts) -> dict[str, Any]:
    """Hunyuan, whose theta is that which is said times what its alpha makes of it."""
    values = with_head_dim(llama_like(facts))
    facts.count("expert_shared_feed_forward_length", 0)
    experts = _experts(facts, width="intermediate_size")
    return {
        "model_type": "hunyuan_v1_moe",
        **values,
        **renamed(experts, num_experts_per_tok="moe_topk"),
        **attention_bias(facts),
        "num_shared_expert": facts.count("expert_shared_count", 1),
    }


# ---------------------------------------------------------------- latent attention


def deepseek2(facts: Facts) -> dict[str, Any]:
    """DeepSeek V2 and V3, and those that have their attention; the way of scoring tells these two apart.

    Newer files have keys and values as one head that all share, and the sizes of the original's under names of
    their own.
    """
    found = sizes(facts)
    rank, turned = facts.count("attention.kv_lora_rank"), facts.count("rope.dimension_count")
    length, values = (facts.count(f"attention.{part}_length", 0) for part in ("key", "value"))
    length = facts.count("attention.key_length_mla", length)
    values = facts.count("attention.value_length_mla", values)
    facts.count("attention.head_count_kv", 1)
    mscale = facts.number(_LOG_MULTIPLIER, 0.0) / _DEEPSEEKS_TENTH
    common = {
        **found,
        "num_key_value_heads": found["num_attention_heads"],
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_parameters": _with_mscale(rotation(facts, found, head_dim=turned), mscale),
        "kv_lora_rank": rank,
        "q_lora_rank": facts.count("attention.q_lora_rank", None),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": length - turned,
        "v_head_dim": values,
    }
    if not facts.has("ffn_gate_inp.weight"):
        facts.reader.discard(name for name in facts.reader.values if name.startswith(_OF_EXPERTS))
        return {"model_type": "youtu", **common}
    experts = _balanced(facts, "sigmoid" if facts.has("exp_probs_b.bias") else "softmax", ("softmax", "sigmoid"))
    if experts["scoring_func"] == "sigmoid":
        return {"model_type": "deepseek_v3", **common, **experts, "num_nextn_predict_layers": 0}
    grouped = experts["n_group"] > 1
    return {
        "model_type": "deepseek_v2",
        **common,
        **experts,
        "topk_method": "group_limited_greedy" if grouped else "greedy",
    }


def _with_mscale(rope: dict[str, Any], mscale: float) -> dict[str, Any]:
    """Add YaRN's mscale, of which a file has one for both of config.json's: they are equal in all that there are."""
    return {**rope, "mscale": mscale, "mscale_all_dim": mscale} if rope["rope_type"] == "yarn" and mscale else rope


def mistral3(facts: Facts) -> dict[str, Any]:
    """Mistral Small 3 and Ministral 3, without the tower for images."""
    values = with_head_dim(llama_like(facts))
    mscale = facts.number(_LOG_MULTIPLIER, 0.0) or 1.0
    beta = facts.number("attention.temperature_scale", None)
    facts.count("attention.temperature_length", 0)  # the original context
    rope = _with_mscale(values["rope_parameters"], mscale)
    rope |= {"llama_4_scaling_beta": beta} if beta else {}
    window = facts.count("attention.sliding_window", None)
    return {"model_type": "ministral3", **values, "rope_parameters": rope, "sliding_window": window or None}


# ---------------------------------------------------------------- recurrent layers


def lfm2(facts: Facts) -> dict[str, Any]:
    """LFM2, whose layers have heads for keys and values, or a convolution and none."""
    conv = facts.layers_with("shortconv.conv.weight")
    values = renamed(llama_like(facts, theta=1e6), rms_norm_eps="norm_eps")
    return {
        "model_type": "lfm2",
        **values,
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": facts.count("shortconv.l_cache"),
        "conv_bias": facts.has("shortconv.conv.bias"),
        "layer_types": [CONV if i in conv else FULL for i in range(values["num_hidden_layers"])],
    }


def lfm2_moe(facts: Facts) -> dict[str, Any]:
    """LFM2 with experts."""
    values = renamed(lfm2(facts), block_auto_adjust_ff_dim=None)
    facts.scores(("sigmoid",), "sigmoid")
    return {
        **values,
        "model_type": "lfm2_moe",
        **_experts(facts),
        "num_dense_layers": facts.count("leading_dense_block_count", 0),
        "norm_topk_prob": facts.flag("expert_weights_norm", True),
        "routed_scaling_factor": facts.number("expert_weights_scale", None) or 1.0,
        "use_expert_bias": facts.has("exp_probs_b.bias"),
    }


def _delta(facts: Facts) -> dict[str, Any]:
    """Return what Qwen's files say of layers with the gated delta rule, and which they are."""
    found = with_head_dim(llama_like(facts))
    recurrent = facts.layers_with("ssm_a")
    heads = facts.count("ssm.time_step_rank", least=1)
    facts.count("full_attention_interval", 0)  # which layers these are, their tensors show
    return {
        **found,
        "rope_parameters": {"partial_rotary_factor": 1.0, **found["rope_parameters"]},
        "attention_bias": facts.has("attn_k.bias"),
        "layer_types": [LINEAR if i in recurrent else FULL for i in range(found["num_hidden_layers"])],
        "linear_conv_kernel_dim": facts.count("ssm.conv_kernel"),
        "linear_key_head_dim": facts.count("ssm.state_size"),
        "linear_num_key_heads": facts.count("ssm.group_count", least=1),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": facts.count("ssm.inner_size") // heads,
    }


def _shared_expert(facts: Facts) -> dict[str, Any]:
    wide = facts.width("expert_shared_feed_forward_length", "ffn_up_shexp.weight")
    return {"shared_expert_intermediate_size": wide}


def qwen3_next(facts: Facts) -> dict[str, Any]:
    """Qwen 3 Next."""
    values = {"model_type": "qwen3_next", **_delta(facts), **_experts(facts), **_shared_expert(facts)}
    return {**values, "norm_topk_prob": True}


def qwen3_5(*, experts: bool) -> Callable[[Facts], dict[str, Any]]:
    """Qwen 3.5, whose sections of positions are of images."""

    def own(facts: Facts) -> dict[str, Any]:
        values = _delta(facts)
        facts.reader.discard(["rope.dimension_sections"])
        if not experts:
            return {"model_type": "qwen3_5_text", **values}
        return {
            "model_type": "qwen3_5_moe_text",
            **renamed(values, intermediate_size=None),
            **_experts(facts),
            **_shared_expert(facts),
        }

    return own
