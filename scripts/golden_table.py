"""The table of golden checkpoints: the one thing that each has and its neighbours have not. See make_golden.py."""

from __future__ import annotations

import golden_experts
import golden_gemma
import golden_gpt
import golden_hybrid
import golden_latent
import golden_llama
from golden_case import LINEAR, LLAMA3, LONG, PAST_WINDOW, QWEN_WINDOW, RAMP, WIDE_HEADS, YARN, Case, rope

_CASES = (
    Case("llama", "Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    Case("llama-tied", "Llama", {"tie_word_embeddings": True}, dtype="float16"),
    Case(
        "llama-biased",
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2},
        dtype="float32",
    ),
    Case("llama-head-dim", "Llama", {"head_dim": 20, "num_attention_heads": 2, "num_key_value_heads": 1}),
    Case("llama-sharded", "Llama", {"num_hidden_layers": 2}, shard_size="16KB"),
    Case(
        "llama-long",
        "Llama",
        {**LONG, "max_position_embeddings": 2048, **rope({"rope_type": "default", "rope_theta": 500000.0})},
        length=1100,
        keep=16,
    ),
    Case("llama-linear", "Llama", rope(LINEAR)),
    Case("llama-llama3", "Llama", rope(LLAMA3)),
    Case("llama-yarn", "Llama", rope(YARN)),
    Case("llama-yarn-ramp", "Llama", rope(YARN, **RAMP)),
    Case("llama-yarn-no-truncate", "Llama", rope(YARN, **RAMP, truncate=False)),
    Case("llama-yarn-mscale", "Llama", rope(YARN, mscale=1.0, mscale_all_dim=0.6)),
    Case("llama-yarn-attention-factor", "Llama", rope(YARN, attention_factor=1.3)),
    Case("llama-yarn-no-factor", "Llama", rope(YARN, factor=None)),
    Case("llama-partial", "Llama", rope({"rope_type": "default", "rope_theta": 500.0}, partial_rotary_factor=0.5)),
    Case("llama-partial-yarn", "Llama", rope(YARN, **RAMP, partial_rotary_factor=0.5)),
    Case("mistral", "Mistral", {"sliding_window": 12}),
    Case("mistral-head-dim", "Mistral", {"sliding_window": 20, **WIDE_HEADS, "rope_parameters": LINEAR}),
    Case("mistral-yarn", "Mistral", {"sliding_window": 24, **rope(YARN, **RAMP)}),
    Case("mistral-no-window", "Mistral", {"sliding_window": None, **PAST_WINDOW}, length=4160, keep=16),
    Case(
        "mistral-defaults",
        "Mistral",
        {
            "head_dim": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-6,
            "sliding_window": 12,
        },
    ),
    Case("mistral-window-default", "Mistral", PAST_WINDOW, length=4160, keep=16),
    Case("qwen2", "Qwen2", {"tie_word_embeddings": True, **rope({"rope_type": "default", "rope_theta": 500.0})}),
    Case("qwen2-window", "Qwen2", QWEN_WINDOW),
    Case("qwen2-yarn", "Qwen2", rope(YARN)),
    Case("qwen2-linear", "Qwen2", rope(LINEAR)),
    Case(
        "qwen2-defaults",
        "Qwen2",
        {
            "head_dim": 4,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
        },
    ),
    Case("qwen3", "Qwen3", WIDE_HEADS),
    Case("qwen3-biased-tied", "Qwen3", {"attention_bias": True, "tie_word_embeddings": True, **WIDE_HEADS}),
    Case("qwen3-window", "Qwen3", {**QWEN_WINDOW, **WIDE_HEADS}),
    Case(
        "qwen3-layer-types",
        "Qwen3",
        {**QWEN_WINDOW, **rope(LINEAR), "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    Case(
        "qwen3-head-dim-default",
        "Qwen3",
        {"num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1},
    ),
    Case("qwen3-yarn", "Qwen3", rope(YARN, **RAMP)),
    Case("qwen3-linear", "Qwen3", rope(LINEAR)),
    Case("mistral3", "Mistral3", {"sliding_window": None, **rope(YARN)}),
    Case("mistral3-tied", "Mistral3", {"sliding_window": 12, "tie_word_embeddings": True}),
)

CASES = (
    *_CASES,
    *golden_llama.CASES,
    *golden_gemma.CASES,
    *golden_gpt.CASES,
    *golden_experts.CASES,
    *golden_latent.CASES,
    *golden_hybrid.CASES,
)

QUANTIZED = (
    Case("mlx-lm-4bit", "Llama", {"hidden_size": 64, "intermediate_size": 64, "tie_word_embeddings": True}),
    Case("mlx-lm-mixed", "Qwen2", {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}),
    Case("mlx-lm-mistral3", "Mistral3", {"hidden_size": 64, "intermediate_size": 64, "sliding_window": 12}),
)
