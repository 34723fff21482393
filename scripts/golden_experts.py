"""Golden checkpoints: mixtures of experts."""

from __future__ import annotations

from typing import Any

from golden_case import LLAMA3, RAMP, SMALL, WIDE_HEADS, YARN, Case, rope

FEW = {**SMALL, "num_hidden_layers": 2}
QWEN = {**FEW, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LOCAL = {**FEW, "intermediate_size": 12, "num_local_experts": 6, "num_experts_per_tok": 2}
ROUTED = {**FEW, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "n_shared_experts": 1}
ERNIE = {**FEW, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 12}
LLAMA4 = {
    **LOCAL,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "intermediate_size_mlp": 24,
    "attention_chunk_size": 12,
    "floor_scale": 8,
    "attn_scale": 0.5,
}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
BALANCE = {"e_score_correction_bias": (0.0, 0.2)}
FINE_BALANCE = {"e_score_correction_bias": (0.0, 0.05)}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.4, 3.0, 4.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0],
    "short_mscale": 1.2,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 80,
}


def without_rope(config: dict[str, Any]) -> None:
    """gpt-oss has YaRN where its config says nothing."""
    del config["rope_parameters"]


def with_rotary_dim(config: dict[str, Any]) -> None:
    """As MiniMax says what of a head is rotated."""
    del config["rope_parameters"]["partial_rotary_factor"]
    config["rotary_dim"] = 8


def with_top_k_by_layer(config: dict[str, Any]) -> None:
    """As Hunyuan's own files say it."""
    config["moe_topk"] = [config["moe_topk"]] * config["num_hidden_layers"]


CASES: tuple[Case, ...] = (
    Case("qwen3-moe", "Qwen3Moe", {"norm_topk_prob": True, **WIDE_HEADS}, base=QWEN, seed=1),
    Case(
        "qwen3-moe-some-dense",
        "Qwen3Moe",
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "tie_word_embeddings": True},
        base=QWEN,
    ),
    Case(
        "qwen3-moe-window",
        "Qwen3Moe",
        {"use_sliding_window": True, "sliding_window": 12, "attention_bias": True, **WIDE_HEADS},
        base=QWEN,
    ),
    Case("qwen3-moe-yarn", "Qwen3Moe", {"norm_topk_prob": True, **rope(YARN)}, base=QWEN),
    Case(
        "qwen3-moe-defaults",
        "Qwen3Moe",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "num_experts": 16,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 8,
        },
        base=QWEN,
        seed=8,
    ),
    Case("mixtral", "Mixtral", {"rope_parameters": PLAIN}, base=LOCAL),
    Case("mixtral-window", "Mixtral", {"sliding_window": 12, "tie_word_embeddings": True}, base=LOCAL),
    Case(
        "mixtral-defaults",
        "Mixtral",
        {
            "head_dim": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 8,
        },
        base=LOCAL,
    ),
    Case(
        "gpt-oss",
        "GptOss",
        {"num_experts_per_tok": 3, "sliding_window": 10, "swiglu_limit": 1.2, **rope(YARN, **RAMP, truncate=False)},
        base=LOCAL,
        random={"sinks": (0.5, 1.0)},
    ),
    Case(
        "gpt-oss-other-layers",
        "GptOss",
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 10,
            "attention_bias": False,
            "tie_word_embeddings": True,
            **rope(PLAIN),
        },
        base=LOCAL,
        v4=False,
    ),
    Case(
        "gpt-oss-defaults",
        "GptOss",
        {
            "hidden_size": 16,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 4,
        },
        base=LOCAL,
        length=180,
        keep=32,
        random={"sinks": (3.0, 1.0)},
        dialects={"no-rope": without_rope},
    ),
    Case(
        "llama4",
        "Llama4Text",
        {"interleave_moe_layer_step": 2, "rope_parameters": PLAIN},
        base=LLAMA4,
        classes=("Llama4TextConfig", "Llama4ForCausalLM"),
    ),
    Case(
        "llama4-listed-layers",
        "Llama4Text",
        {
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "moe_layers": [1, 2],
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "num_experts_per_tok": 1,
            **rope(LLAMA3, high_freq_factor=1.0),
        },
        base=LLAMA4,
        classes=("Llama4TextConfig", "Llama4ForCausalLM"),
    ),
    Case(
        "llama4-no-chunks",
        "Llama4Text",
        {"num_hidden_layers": 2, "no_rope_layer_interval": 2, "attention_chunk_size": None},
        base=LLAMA4,
        classes=("Llama4TextConfig", "Llama4ForCausalLM"),
    ),
    Case(
        "llama4-multimodal",
        "Llama4",
        {
            "text_config": {**LLAMA4, "num_hidden_layers": 2, "no_rope_layers": [1, 0], "pad_token_id": None},
            "vision_config": {
                "hidden_size": 8,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "patch_size": 4,
                "image_size": 8,
                "projector_input_dim": 8,
                "projector_output_dim": 8,
                "vision_output_dim": 8,
            },
        },
        base={},
        classes=("Llama4Config", "Llama4ForConditionalGeneration"),
    ),
    Case(
        "llama4-defaults",
        "Llama4Text",
        {
            "hidden_size": 16,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "intermediate_size": 8,
            "attn_scale": 0.1,
        },
        base=LLAMA4,
        classes=("Llama4TextConfig", "Llama4ForCausalLM"),
    ),
    Case("qwen2-moe", "Qwen2Moe", {"shared_expert_intermediate_size": 20, "rope_parameters": PLAIN}, base=QWEN),
    Case(
        "qwen2-moe-window",
        "Qwen2Moe",
        {
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 10,
            "max_window_layers": 2,
            "decoder_sparse_step": 2,
            "qkv_bias": False,
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": 16,
        },
        base=QWEN,
    ),
    Case("olmoe", "Olmoe", {"num_experts": 6, "clip_qkv": 0.8}, base=LOCAL),
    Case(
        "olmoe-biased",
        "Olmoe",
        {"num_experts": 6, "attention_bias": True, "norm_topk_prob": True, "tie_word_embeddings": True},
        base=LOCAL,
    ),
    Case(
        "granitemoe",
        "GraniteMoe",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
        base=LOCAL,
    ),
    Case(
        "granitemoe-defaults",
        "GraniteMoe",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "num_local_experts": 8,
            "attention_bias": True,
        },
        base=LOCAL,
    ),
    Case(
        "granitemoeshared",
        "GraniteMoeShared",
        {"attention_multiplier": 0.2, "residual_multiplier": 0.6, "shared_intermediate_size": 20},
        base=LOCAL,
    ),
    Case("granitemoeshared-none", "GraniteMoeShared", {"attention_multiplier": 0.2}, base=LOCAL),
    Case(
        "granitemoe-swa",
        "GraniteMoeSWA",
        {
            "num_hidden_layers": 3,
            "sliding_window": 10,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "layer_rope_theta": [50.0, 0, 900.0],
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.6,
            "embedding_multiplier": 2.5,
            "logits_scaling": 0.7,
            "shared_intermediate_size": 20,
            "tie_word_embeddings": True,
        },
        base=LOCAL,
        random={"sinks": (0.5, 1.0)},
    ),
    Case(
        "solar-open",
        "SolarOpen",
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, **rope(YARN)},
        base=ROUTED,
        random=BALANCE,
    ),
    Case(
        "mellum",
        "Mellum",
        {
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "sliding_window": 10,
            "attention_bias": True,
            "norm_topk_prob": True,
            "head_dim": 16,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN},
        },
        base=QWEN,
        v4=False,
    ),
    Case(
        "glm4-moe",
        "Glm4Moe",
        {
            "num_hidden_layers": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
            "use_qk_norm": True,
            "attention_bias": True,
            **rope(PLAIN),
        },
        base=ROUTED,
        random=BALANCE,
    ),
    Case(
        "glm4-moe-plain",
        "Glm4Moe",
        {"first_k_dense_replace": 0, "norm_topk_prob": False, **rope(PLAIN, partial_rotary_factor=0.25)},
        base=ROUTED,
        random=BALANCE,
    ),
    Case(
        "glm4-moe-defaults",
        "Glm4Moe",
        {
            "head_dim": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "n_routed_experts": 16,
            "num_experts_per_tok": 8,
        },
        base=ROUTED,
        random=BALANCE,
    ),
    Case(
        "dots1",
        "Dots1",
        {
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.4,
            "sliding_window": 10,
            "max_window_layers": 1,
            **WIDE_HEADS,
        },
        base=ROUTED,
        random=BALANCE,
    ),
    Case(
        "dots1-defaults",
        "Dots1",
        {"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
        base={**ROUTED, "head_dim": 4, "n_routed_experts": 6},
        random=BALANCE,
        seed=1,
    ),
    Case("ernie4-5-moe", "Ernie4_5_Moe", {"num_hidden_layers": 3}, base=ERNIE, random=FINE_BALANCE),
    Case(
        "ernie4-5-moe-biased",
        "Ernie4_5_Moe",
        {
            "num_hidden_layers": 4,
            "use_bias": True,
            "tie_word_embeddings": False,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 2,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 1,
        },
        base=ERNIE,
        random=FINE_BALANCE,
    ),
    Case("ernie4-5-moe-no-shared", "Ernie4_5_Moe", {"moe_num_shared_experts": 0}, base=ERNIE, random=FINE_BALANCE),
    Case(
        "minimax-m2",
        "MiniMaxM2",
        {"num_experts_per_tok": 3, **rope(PLAIN, partial_rotary_factor=0.5)},
        base=LOCAL,
        random=BALANCE,
        dialects={"rotary-dim": with_rotary_dim},
    ),
    Case("phimoe", "Phimoe", {"router_jitter_noise": 0.3, "rope_parameters": PLAIN}, base=LOCAL),
    Case(
        "phimoe-biased",
        "Phimoe",
        {"router_jitter_noise": 0.2, "attention_bias": True, "lm_head_bias": True, "sliding_window": 12},
        base=LOCAL,
    ),
    Case(
        "phimoe-longrope",
        "Phimoe",
        {"original_max_position_embeddings": 80, "max_position_embeddings": 160, **rope(LONGROPE)},
        base=LOCAL,
    ),
    Case("flex-olmo", "FlexOlmo", {"num_experts": 6}, base=LOCAL),
    Case(
        "flex-olmo-defaults",
        "FlexOlmo",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 4096,
            "num_experts": 7,
            "num_experts_per_tok": 5,
        },
        base=LOCAL,
        seed=6,
    ),
    Case(
        "hunyuan-v1-moe",
        "HunYuanMoEV1",
        {"num_experts": 6, "moe_topk": 2, **WIDE_HEADS},
        base={**FEW, "intermediate_size": 12},
        dialects={"top-k-by-layer": with_top_k_by_layer},
    ),
)
