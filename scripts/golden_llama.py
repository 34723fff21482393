"""Golden checkpoints: Llama's relatives."""

from __future__ import annotations

from typing import Any

from golden_case import LLAMA3, SMALL, WIDE_HEADS, YARN, Case, Dialect, rope

_PLAIN = {"rope_type": "default", "rope_theta": 500.0}
_BIASED = {"attention_bias": True, "mlp_bias": True}
_TWO = {"num_hidden_layers": 2}
# Of families that name what is added to the variance otherwise, or add a constant.
_WITHOUT_EPS = {name: value for name, value in SMALL.items() if name != "rms_norm_eps"}
# Attention that is less sharp, and less sensitive to rounding.
_MILD = {"[qk]_proj": (0.0, 0.15)}
# Wide heads by default, and many of them: little else fits in a small folder.
_ONE_WIDE = {"num_hidden_layers": 1, "num_attention_heads": 2, "rms_norm_eps": 1e-5, "head_dim": 128}
_EIGHT_WIDE = {
    **_ONE_WIDE,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}


def _without(*names: str) -> Dialect:
    """Leave out keys that follow from others."""

    def change(config: dict[str, Any]) -> None:
        for name in names:
            del config[name]

    return change


def _renamed(**names: str) -> Dialect:
    """Keys under the names of the authors' own code."""

    def change(config: dict[str, Any]) -> None:
        for name, other in names.items():
            config[other] = config.pop(name)

    return change


def _olmo3_flat(config: dict[str, Any]) -> None:
    """As transformers 4: a theta for all layers, and a scaling for those without a window."""
    full = config.pop("rope_parameters")["full_attention"]
    config |= {"rope_theta": full.pop("rope_theta"), "rope_scaling": full}
    del config["layer_types"]


def _letters(config: dict[str, Any]) -> None:
    """The pattern as EXAONE 4 writes it beside the list that it stands for."""
    config["sliding_window_pattern"] = "LG"


_NOPE = (
    Case(
        "smollm3",
        "SmolLM3",
        {"no_rope_layer_interval": 2, "tie_word_embeddings": False, "rope_parameters": _PLAIN, **_BIASED},
        dialects={"interval": _without("no_rope_layers", "layer_types")},
    ),
    Case(
        "smollm3-defaults",
        "SmolLM3",
        {"num_hidden_layers": 4, "num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
    ),
    Case(
        "smollm3-window",
        "SmolLM3",
        {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 10, "no_rope_layers": [0, 1, 1, 0]},
        dialects={"no-types": _without("layer_types")},
    ),
    Case(
        "exaone4",
        "Exaone4",
        {"sliding_window": 10, "sliding_window_pattern": 2, **rope(LLAMA3)},
        dialects={"pattern": _without("layer_types"), "letters": _letters},
    ),
    Case("exaone4-full", "Exaone4", {**_TWO, "sliding_window": None, "layer_types": ["full_attention"] * 2}),
)

_OLMO = (
    Case(
        "olmo",
        "Olmo",
        {**_TWO, "clip_qkv": 1.1, "attention_bias": True, "rope_parameters": _PLAIN},
        base=_WITHOUT_EPS,
        random={"embed": (0.0, 0.005)},  # so that the constant added to the variance shows
    ),
    Case("olmo-plain", "Olmo", {**_TWO, "num_key_value_heads": None, "tie_word_embeddings": True}, base=_WITHOUT_EPS),
    Case("olmo2", "Olmo2", {**_TWO, "attention_bias": True, "rope_parameters": _PLAIN}),
    Case(
        "olmo3",
        "Olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 10,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "rope_parameters": {
                "full_attention": {**YARN, "beta_fast": 1.5, "beta_slow": 0.5, "rope_theta": 500000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            },
        },
        dialects={"v4": _olmo3_flat},
    ),
    Case(
        "olmo3-layer-types",
        "Olmo3",
        {
            **_TWO,
            "sliding_window": 10,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": _PLAIN, "sliding_attention": {**_PLAIN, "rope_theta": 50.0}},
        },
    ),
)

_MULTIPLIERS = (
    Case(
        "granite",
        "Granite",
        {
            **_TWO,
            **_BIASED,
            "embedding_multiplier": 2.5,
            "logits_scaling": 0.7,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
        },
    ),
    Case(
        "granite_swa",
        "GraniteSWA",
        {
            "num_hidden_layers": 4,
            "sliding_window": 10,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "layer_rope_theta": [0, 50.0, 900.0, 0],
            "attention_multiplier": 0.3,
        },
    ),
    Case(
        "granite-defaults",
        "Granite",
        {**_TWO, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
        random=_MILD,  # for scores that nothing divides
    ),
    Case(
        "hyperclovax",
        "HyperCLOVAX",
        {
            **_TWO,
            **WIDE_HEADS,
            "embedding_multiplier": 2.5,
            "logits_scaling": 0.7,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
        },
    ),
    Case("hyperclovax-scale", "HyperCLOVAX", {**_TWO, **_BIASED, "tie_word_embeddings": True}),
)

_INTERLEAVED = (
    Case(
        "ernie4_5",
        "Ernie4_5",
        {**_TWO, **WIDE_HEADS, "use_bias": True, "tie_word_embeddings": False, "rope_parameters": _PLAIN},
    ),
    Case("ernie4_5-defaults", "Ernie4_5", {**_ONE_WIDE, "max_position_embeddings": 131072}),
    Case("helium", "Helium", {**_TWO, "head_dim": 8, **_BIASED}),
    Case("glm", "Glm", {**_TWO, "attention_bias": False, **rope(_PLAIN, partial_rotary_factor=0.25)}),
    Case(
        "glm-defaults",
        "Glm",
        {**_ONE_WIDE, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-07},
    ),
    Case("glm4", "Glm4", {**_TWO, "tie_word_embeddings": True, **rope(_PLAIN, partial_rotary_factor=0.5)}),
)

_SCALED_QUERIES = {
    **YARN,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}
_MINISTRAL = (
    Case(
        "ministral",
        "Ministral",
        {
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            **rope(_PLAIN),
        },
        random=_MILD,
    ),
    Case("ministral3", "Ministral3", {**_TWO, **rope(_SCALED_QUERIES)}),
    Case(
        "mistral3-ministral3",
        "Mistral3",
        {"model_type": "ministral3", **_TWO, "sliding_window": 12, **rope(_SCALED_QUERIES)},
    ),
)

_ONE_PLUS = {"norm.*weight": (0.2, 0.4)}
_UNGATED = (
    Case(
        "starcoder2",
        "Starcoder2",
        {"norm_epsilon": 0.2, "sliding_window": 12, "rope_parameters": _PLAIN},
        base=_WITHOUT_EPS,
    ),
    Case(
        "starcoder2-plain",
        "Starcoder2",
        {**_TWO, "use_bias": False, "tie_word_embeddings": False, "hidden_act": "gelu"},
        base=_WITHOUT_EPS,
    ),
    Case(
        "stablelm",
        "StableLm",
        {
            **_TWO,
            "layer_norm_eps": 0.2,
            "use_qkv_bias": True,
            "qk_layernorm": True,
            "rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.5},
        },
        base=_WITHOUT_EPS,
    ),
    Case(
        "stablelm-parallel",
        "StableLm",
        {**_TWO, "use_parallel_residual": True, "num_attention_heads": 2, "num_key_value_heads": 1},
        base=_WITHOUT_EPS,
        dialects={"no-rope": _without("rope_parameters")},
    ),
    Case(
        "nemotron",
        "Nemotron",
        {**_TWO, **_BIASED, "norm_eps": 0.2, **rope(_PLAIN, partial_rotary_factor=0.25)},
        base=_WITHOUT_EPS,
        random=_ONE_PLUS,
    ),
    Case(
        "nemotron-defaults",
        "Nemotron",
        {**_TWO, "max_position_embeddings": 4096},
        base=_WITHOUT_EPS,
        random=_ONE_PLUS,
    ),
    Case("jais2", "Jais2", {**_TWO, "layer_norm_eps": 0.2}, base=_WITHOUT_EPS),
    Case("arcee", "Arcee", {**_TWO, **_BIASED, **rope(YARN)}),
    Case("apertus", "Apertus", {**_TWO, "attention_bias": True, **rope(LLAMA3)}),
)

_ALPHA = {
    "rope_type": "dynamic",
    "rope_theta": 100.0,
    "alpha": 30.0,
    "factor": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_RENAMED = (
    Case("seed_oss", "SeedOss", {**_TWO, **WIDE_HEADS, "attention_out_bias": True, "mlp_bias": True}),
    Case("seed_oss-defaults", "SeedOss", {**_EIGHT_WIDE, "max_position_embeddings": 524288, "rms_norm_eps": 1e-6}),
    Case(
        "cwm",
        "Cwm",
        {"sliding_window": 10, "mlp_bias": True, **rope(LLAMA3)},
        dialects={"no-types": _without("layer_types")},
    ),
    Case(
        "internlm3",
        "InternLM3",
        {**_TWO, **_BIASED, **WIDE_HEADS},
        classes=("InternLM3Config", "LlamaForCausalLM"),
        dialects={"own": _renamed(attention_bias="qkv_bias", mlp_bias="bias")},
    ),
    Case(
        "internlm3-dynamic",
        "InternLM3",
        {
            **_TWO,
            "max_position_embeddings": 24,
            **rope({"rope_type": "dynamic", "rope_theta": 50.0, "factor": 3.0}),
        },
        classes=("InternLM3Config", "LlamaForCausalLM"),
    ),
    Case(
        "iquestcoder",
        "IQuestCoder",
        {**_TWO, **WIDE_HEADS},
        classes=("IQuestCoderConfig", "LlamaForCausalLM"),
    ),
    Case(
        "exaone",
        "Exaone",
        {**_TWO, **rope(LLAMA3)},
        classes=("ExaoneConfig", "LlamaForCausalLM"),
        dialects={
            "own": _renamed(
                num_hidden_layers="num_layers", rms_norm_eps="layer_norm_epsilon", hidden_act="activation_function"
            )
        },
    ),
    Case("hunyuan_v1_dense", "HunYuanDenseV1", {**_TWO, "attention_bias": True, **rope(_ALPHA)}),
    Case("hunyuan_v1_dense-tied", "HunYuanDenseV1", {**_TWO, **WIDE_HEADS, "tie_word_embeddings": True}),
)

CASES: tuple[Case, ...] = (
    *_NOPE,
    *_OLMO,
    *_MULTIPLIERS,
    *_INTERLEAVED,
    *_MINISTRAL,
    *_UNGATED,
    *_RENAMED,
)
