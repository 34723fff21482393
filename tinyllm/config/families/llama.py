"""Llama, and those that differ from it in few things. No mlx."""

from __future__ import annotations

from dataclasses import replace

from tinyllm.config.family import Family, all_sliding, sliding_from_max_window_layers
from tinyllm.config.reader import Key

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

ROWS = (
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
        qk_norm="head",
    ),
)
