"""Golden checkpoints: layers with a recurrent state."""

from __future__ import annotations

from typing import Any

from golden_case import LINEAR, SMALL, Case

# Rates and decays that differ by head, and matter after a few positions and after many.
_GATES = {
    r"A_log$": (-1.5, 1.2),
    r"dt_bias$": (-1.0, 1.0),
    r"in_proj_(b|ba)\b": (0.0, 0.3),
    r"conv1d": (0.2, 0.5),
    r"(layernorm|\.[qk]_norm|model\.norm)\.weight": (0.2, 0.4),
}
_DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
_LFM2_SMALL = {**{key: value for key, value in SMALL.items() if key != "rms_norm_eps"}, "norm_eps": 1.0}
_LFM2 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "block_auto_adjust_ff_dim": False,
}
_LFM2_GATES = {r"\.conv\.conv\.weight": (0.2, 0.5), r"in_proj": (0.0, 0.3)}
_VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 1,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}


def by_interval(config: dict[str, Any]) -> None:
    """Which layers attend, by their interval: as the first checkpoints have it."""
    assert config.pop("layer_types") == ["linear_attention"] * 2 + ["full_attention"]
    config["full_attention_interval"] = 3


def by_index(config: dict[str, Any]) -> None:
    """Which layers attend, listed; and older names of two keys."""
    kinds = config.pop("layer_types")
    config["full_attn_idxs"] = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    config["block_ff_dim"] = config.pop("intermediate_size")
    config["tie_embedding"] = config.pop("tie_word_embeddings")


def _text(settings: dict[str, Any]) -> dict[str, Any]:
    return {**SMALL, **settings}


CASES: tuple[Case, ...] = (
    Case("qwen3-next", "Qwen3Next", {**_DELTA, **_EXPERTS}, random=_GATES),
    Case(
        "qwen3-next-dense",
        "Qwen3Next",
        {**_DELTA, **_EXPERTS, "mlp_only_layers": [0], "norm_topk_prob": False, "attention_bias": True},
        random=_GATES,
    ),
    Case(
        "qwen3-next-interval",
        "Qwen3Next",
        {
            **_DELTA,
            **_EXPERTS,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention"] * 2 + ["full_attention"],
            "decoder_sparse_step": 2,
            "linear_num_value_heads": 2,
            "rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5},
        },
        random=_GATES,
        dialects={"interval": by_interval},
    ),
    Case("qwen3-5-text", "Qwen3_5Text", _DELTA, classes=("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"), random=_GATES),
    Case(
        "qwen3-5",
        "Qwen3_5",
        {"text_config": {**_text(_DELTA), "tie_word_embeddings": True}, "vision_config": _VISION},
        base={"tie_word_embeddings": True},
        classes=("Qwen3_5Config", "Qwen3_5ForConditionalGeneration"),
        random=_GATES,
    ),
    Case(
        "qwen3-5-moe",
        "Qwen3_5Moe",
        {"text_config": _text({**_DELTA, **_EXPERTS, "num_experts": 5}), "vision_config": _VISION},
        base={},
        classes=("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration"),
        random=_GATES,
    ),
    Case("lfm2", "Lfm2", _LFM2, base=_LFM2_SMALL, random=_LFM2_GATES, dialects={"index": by_index}),
    Case(
        "lfm2-biased",
        "Lfm2",
        {
            **_LFM2,
            "conv_bias": True,
            "conv_L_cache": 5,
            "tie_word_embeddings": False,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.3,
            "num_hidden_layers": 2,
            "layer_types": ["conv", "full_attention"],
        },
        base=_LFM2_SMALL,
        random=_LFM2_GATES,
    ),
    Case(
        "lfm2-moe",
        "Lfm2Moe",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "routed_scaling_factor": 1.7,
        },
        base=_LFM2_SMALL,
        random={**_LFM2_GATES, r"expert_bias": (0.0, 0.3)},
    ),
    Case(
        "lfm2-moe-unbiased",
        "Lfm2Moe",
        {
            "num_hidden_layers": 2,
            "layer_types": ["conv", "full_attention"],
            "num_dense_layers": 0,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "use_expert_bias": False,
            "norm_topk_prob": False,
        },
        base=_LFM2_SMALL,
        random=_LFM2_GATES,
    ),
)
