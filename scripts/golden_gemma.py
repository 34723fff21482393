"""Golden checkpoints: Gemma's relatives, and others with Gemma's ways."""

from __future__ import annotations

from typing import Any

from golden_case import SMALL, WIDE_HEADS, Case

# Weights of Gemma's norms have 1 added to them; its embeddings are multiplied by the root of the width.
ONE_ADDED = {"norm": (0.2, 0.4), r"embed_tokens\.weight": (0.0, 0.25)}
NARROW = {"hidden_size": 16, "intermediate_size": 24, "head_dim": 8}
LAYER_NORMS = {**{key: SMALL[key] for key in SMALL if key != "rms_norm_eps"}, "layer_norm_eps": 0.2}
GEMMA2 = {
    **WIDE_HEADS,
    "sliding_window": 12,
    "query_pre_attn_scalar": 10,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
GEMMA3 = {**NARROW, "num_hidden_layers": 7, "sliding_window": 12, "query_pre_attn_scalar": 10}
GEMMA4 = {
    **NARROW,
    "global_head_dim": 16,
    "sliding_window": 12,
    "final_logit_softcapping": 2.0,
    "vocab_size_per_layer_input": 96,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 300.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 40.0},
    },
}
SHARING = {
    **GEMMA4,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
}
GEMMA4_CLASSES = ("Gemma4TextConfig", "Gemma4ForCausalLM")
SCALED = {
    "layer_scalar": (0.8, 0.2),
    "self_attn.[qk]_norm": (0.45, 0.15),  # scores are not divided by anything
    r"router\.scale": (1.0, 0.3),
    "per_expert_scale": (1.0, 0.3),
    r"embed_tokens\.weight": (0.0, 0.25),
}
SHORT, LONG = [1.0, 1.3, 1.7, 2.5], [1.0, 2.0, 4.0, 9.0]
LONGROPE = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": SHORT, "long_factor": LONG}


def as_first_gemma(config: dict[str, Any]) -> None:
    """The activation by the name that the first files have."""
    config |= {"hidden_act": "gelu", "hidden_activation": None}


def as_first_gemma2(config: dict[str, Any]) -> None:
    """No layer_types, and keys that say the same again."""
    del config["layer_types"]
    config |= {"hidden_act": "gelu_pytorch_tanh", "sliding_window_size": 12, "cache_implementation": "hybrid"}


def as_first_gemma3(config: dict[str, Any]) -> None:
    """A base of local layers beside rope_theta and rope_scaling, which are for the others, and no layer_types."""
    parameters = config.pop("rope_parameters")
    config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
    others = parameters["full_attention"]
    config["rope_theta"] = others.pop("rope_theta")
    config["rope_scaling"] = None if others["rope_type"] == "default" else others
    del config["layer_types"]
    config |= {"sliding_window_pattern": 6, "cache_implementation": "hybrid", "attn_logit_softcapping": None}


def as_larger_gemma3(config: dict[str, Any]) -> None:
    """What the files of the larger ones have, and what is not as in those."""
    as_first_gemma3(config)
    for key in (
        "attention_bias attention_dropout attn_logit_softcapping bos_token_id cache_implementation"
        " final_logit_softcapping hidden_activation initializer_range max_position_embeddings pad_token_id"
        " rope_local_base_freq rope_scaling rope_theta sliding_window_pattern tie_word_embeddings use_cache"
        " use_bidirectional_attention"
    ).split():
        config.pop(key, None)


def as_first_gemma4(config: dict[str, Any]) -> None:
    """What is other in layers that see everything beside what is usual."""
    del config["per_layer_config"]
    config |= {"global_head_dim": 16, "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"}


def as_first_phi3(config: dict[str, Any]) -> None:
    """What LongRoPE was called at first."""
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    del parameters["rope_type"], parameters["partial_rotary_factor"]
    config["rope_scaling"] = {"type": "su", **parameters}


def as_command_r7b(config: dict[str, Any]) -> None:
    """As the first Cohere 2 has it."""
    config |= {"sliding_window_pattern": 4, "layer_switch": 4, "order_of_interleaved_layers": "local_attn_first"}
    config |= {"position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "use_qk_norm": False}
    config |= {"use_parallel_block": True, "use_gated_activation": True, "cache_implementation": "hybrid"}
    del config["layer_types"]


CASES = (
    Case(
        "gemma",
        "Gemma",
        {**WIDE_HEADS, "num_key_value_heads": 1},
        random=ONE_ADDED,
        dialects={"hub": as_first_gemma},
    ),
    Case("gemma2", "Gemma2", GEMMA2, random=ONE_ADDED, dialects={"hub": as_first_gemma2}),
    Case(
        "gemma2-no-caps",
        "Gemma2",
        {
            **GEMMA2,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
        random=ONE_ADDED,
    ),
    Case(
        "gemma3_text",
        "Gemma3Text",
        {**GEMMA3, "max_position_embeddings": 131072},
        classes=("Gemma3TextConfig", "Gemma3ForCausalLM"),
        random=ONE_ADDED,
        dialects={"v4": as_first_gemma3, "larger": as_larger_gemma3},
    ),
    Case(
        "gemma3_text-linear",
        "Gemma3Text",
        {
            **GEMMA3,
            "final_logit_softcapping": 2.0,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 40.0},
            },
        },
        classes=("Gemma3TextConfig", "Gemma3ForCausalLM"),
        random=ONE_ADDED,
        dialects={"v4": as_first_gemma3},
    ),
    Case(
        "gemma3",
        "Gemma3",
        {
            "text_config": {**SMALL, **GEMMA3, "max_position_embeddings": 131072, "pad_token_id": None},
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "patch_size": 2,
                "image_size": 8,
            },
            "mm_tokens_per_image": 4,
        },
        base={},
        classes=("Gemma3Config", "Gemma3ForConditionalGeneration"),
        random=ONE_ADDED,
        dialects={"v4": as_first_gemma3, "larger": as_larger_gemma3},
    ),
    Case("phi3", "Phi3"),
    Case(
        "phi3-window",
        "Phi3",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "sliding_window": 12,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.75},
        },
    ),
    Case(
        "phi3-longrope-short",
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
        dialects={"su": as_first_phi3},
    ),
    Case(
        "phi3-longrope-long",
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
        dialects={"su": as_first_phi3},
    ),
    Case("cohere", "Cohere", {"logit_scale": 0.3}, base=LAYER_NORMS),
    Case(
        "cohere-qk-norm",
        "Cohere",
        {"logit_scale": 0.5, "use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False},
        base=LAYER_NORMS,
    ),
    Case(
        "cohere2",
        "Cohere2",
        {"num_hidden_layers": 5, "logit_scale": 0.3, "sliding_window": 12},
        base=LAYER_NORMS,
        dialects={"hub": as_command_r7b},
    ),
    Case("phi", "Phi", {"num_attention_heads": 2, "num_key_value_heads": 2}, base=LAYER_NORMS),
    Case(
        "phi-qk-norm",
        "Phi",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "qk_layernorm": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.4},
        },
        base=LAYER_NORMS,
    ),
    Case("vaultgemma", "VaultGemma", GEMMA2, random=ONE_ADDED),
    Case(
        "gemma4_text", "Gemma4Text", SHARING, classes=GEMMA4_CLASSES, random=SCALED, dialects={"hub": as_first_gemma4}
    ),
    Case(
        "gemma4_text-experts",
        "Gemma4Text",
        {
            **GEMMA4,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 12,
        },
        classes=GEMMA4_CLASSES,
        random=SCALED,
        seed=2,
        dialects={"hub": as_first_gemma4},
    ),
    Case(
        "gemma4",
        "Gemma4",
        {
            "text_config": {**SMALL, **SHARING, "pad_token_id": 0},
            "vision_config": {
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "num_key_value_heads": 1,
                "head_dim": 8,
                "patch_size": 2,
                "position_embedding_size": 16,
            },
            "audio_config": None,
        },
        base={},
        classes=("Gemma4Config", "Gemma4ForConditionalGeneration"),
        random=SCALED,
        seed=1,
    ),
)
