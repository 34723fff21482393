"""Golden checkpoints: multi-head latent attention."""

from __future__ import annotations

from typing import Any

from golden_case import LINEAR, RAMP, SMALL, YARN, Case

LATENT = {
    **SMALL,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
EXPERTS = {
    **LATENT,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 12,
    "routed_scaling_factor": 1.6,
    "first_k_dense_replace": 1,
}
GROUPS = {"n_group": 4, "topk_group": 2}
STRETCHED = {"rope_parameters": {**YARN, **RAMP, "mscale": 1.0, "mscale_all_dim": 0.7}, "qk_rope_head_dim": 8}
BY_POSITION = {
    "rope_parameters": {
        **STRETCHED["rope_parameters"],
        "original_max_position_embeddings": 12,
        "llama_4_scaling_beta": 0.4,
        "partial_rotary_factor": 0.5,
    },
    "qk_rope_head_dim": 8,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.7],
    "long_factor": [2.0, 8.0],
    "original_max_position_embeddings": 64,
    "factor": 2.0,
}


def as_the_authors(config: dict[str, Any]) -> None:
    """The keys that the authors' own files have, and the reference's class has not."""
    config |= {"aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1, "moe_layer_freq": 1}
    third = config["model_type"] != "deepseek_v2"
    config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"} if third else {"scoring_func": "softmax"}
    for name in ("head_dim", "qk_head_dim"):
        config.pop(name, None)


AUTHORS = {"authors": as_the_authors}

CASES: tuple[Case, ...] = (
    Case("deepseek_v2", "DeepseekV2", base=EXPERTS, dialects=AUTHORS),
    Case(
        "deepseek_v2-groups",
        "DeepseekV2",
        {"topk_method": "group_limited_greedy", **GROUPS, "q_lora_rank": None},
        base=EXPERTS,
    ),
    Case("deepseek_v2-yarn", "DeepseekV2", {**STRETCHED, "num_hidden_layers": 1}, base=EXPERTS),
    Case("deepseek_v2-biased", "DeepseekV2", {"attention_bias": True, "mlp_bias": True}, base=EXPERTS),
    Case("deepseek_v3", "DeepseekV3", GROUPS, base=EXPERTS, dialects=AUTHORS),
    Case(
        "deepseek_v3-yarn",
        "DeepseekV3",
        {**STRETCHED, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "q_lora_rank": None},
        base=EXPERTS,
    ),
    Case(
        "deepseek_v3-half-split",
        "DeepseekV3",
        {**GROUPS, "rope_interleave": False, "attention_bias": True, "rope_parameters": LINEAR},
        base=EXPERTS,
    ),
    Case("glm4_moe_lite", "Glm4MoeLite", {"n_group": 1, "topk_group": 1}, base=EXPERTS),
    Case("glm4_moe_lite-kinds", "Glm4MoeLite", {**GROUPS, "mlp_layer_types": ["sparse", "dense"]}, base=EXPERTS),
    Case("youtu", "Youtu", base=LATENT),
    Case("youtu-untied-yarn", "Youtu", {"tie_word_embeddings": False, **STRETCHED}, base=LATENT),
    Case("mistral4", "Mistral4", {**GROUPS, **BY_POSITION}, base=EXPERTS),
    Case("minicpm3", "MiniCPM3", {"dim_model_base": 20, "scale_emb": 3}, base=LATENT),
    Case(
        "minicpm3-longrope",
        "MiniCPM3",
        {
            "scale_depth": None,
            "dim_model_base": None,
            "v_head_dim": None,
            "scale_emb": 1.5,
            "rope_parameters": LONGROPE,
        },
        base=LATENT,
    ),
)
