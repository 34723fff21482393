"""Configs of families whose layers keep states, as their authors write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from golden_cases import GOLDEN, TOLERANCE, difference, expected

from tinyllm._mx import mx
from tinyllm.config.config import Config
from tinyllm.config.layers import AttentionConfig, ConvConfig, DeltaConfig, MLPConfig, MoeConfig
from tinyllm.errors import ConfigError, UnsupportedModelError
from tinyllm.model.load import load_model

NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "decoder_sparse_step": 1, "eos_token_id": 2, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5120, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [],
    "model_type": "qwen3_next", "moe_intermediate_size": 512,
    "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10,
    "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": False, "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_5: dict[str, Any] = {
    "model_type": "qwen3_5", "image_token_id": 9, "video_token_id": 8, "vision_start_token_id": 7,
    "vision_end_token_id": 6, "tie_word_embeddings": True, "vision_config": {"depth": 12},
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
        "eos_token_id": 2, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 1024,
        "initializer_range": 0.02, "intermediate_size": 3584, "layer_types": (["linear_attention"] * 3
        + ["full_attention"]) * 6, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False, "num_attention_heads": 8, "num_hidden_layers": 24,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "use_cache": True, "vocab_size": 248320,
        "mamba_ssm_dtype": "float32", "tie_word_embeddings": True,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
                            "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    },
}  # fmt: skip
LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True, "bos_token_id": 1,
    "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": True,
    "eos_token_id": 7, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "initializer_range": 0.02,
    "max_position_embeddings": 128000, "model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 32,
    "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16", "use_cache": True, "use_pos_enc": True, "vocab_size": 65536,
}  # fmt: skip


def test_qwen3_next_attends_in_every_fourth_layer() -> None:
    config = Config.from_dict(NEXT)
    mixers = [layer.attention for layer in config.layers]
    assert [i for i, mixer in enumerate(mixers) if isinstance(mixer, AttentionConfig)] == list(range(3, 48, 4))
    delta, attention = mixers[0], mixers[3]
    assert isinstance(delta, DeltaConfig) and isinstance(attention, AttentionConfig)
    assert (delta.num_key_heads, delta.num_value_heads, delta.key_dim, delta.kernel) == (16, 32, 128, 4)
    assert (delta.norm.offset, config.layers[0].norm.offset) == (0.0, 1.0)
    assert attention.rope is not None and (attention.rope.dims, attention.rope.theta, attention.gate) == (
        64,
        1e7,
        True,
    )
    assert all(isinstance(layer.feed_forward, MoeConfig) for layer in config.layers)


def test_qwen3_5_is_read_from_within_its_wrapper() -> None:
    config = Config.from_dict(QWEN3_5)
    attention = config.layers[3].attention
    assert isinstance(attention, AttentionConfig) and attention.rope is not None
    assert (attention.rope.dims, attention.rope.theta, config.tie_word_embeddings) == (64, 1e7, True)
    assert config.targets("mtp.layers.0.mlp.up_proj.weight") == ()
    assert config.targets("model.visual.blocks.0.norm1.weight") == ()


def test_lfm2_is_read_as_it_was_first_written() -> None:
    config = Config.from_dict(LFM2)
    attending = [i for i, layer in enumerate(config.layers) if isinstance(layer.attention, AttentionConfig)]
    assert attending == LFM2["full_attn_idxs"]
    assert config.layers[0].attention == ConvConfig(width=2048, kernel=3, biased=False)
    assert isinstance(config.layers[0].feed_forward, MLPConfig)
    assert config.layers[0].feed_forward.intermediate_size == 8192
    assert (config.tie_word_embeddings, config.rope_theta) == (True, 1e6)


@pytest.mark.parametrize(
    ("values", "changes", "error", "said"),
    [
        (NEXT, {"linear_num_value_heads": 24}, ConfigError, "24.* is not a multiple of linear_num_key_heads"),
        (NEXT, {"layer_types": ["mamba"] * 48}, UnsupportedModelError, "layer_types asks for mamba"),
        (NEXT, {"linear_conv_kernel_dim": 1}, ConfigError, "linear_conv_kernel_dim"),
        (LFM2, {"use_pos_enc": False}, UnsupportedModelError, "use_pos_enc = False is not computed"),
        (LFM2, {"block_use_swiglu": False}, UnsupportedModelError, "block_use_swiglu = False is not computed"),
        (QWEN3_5["text_config"], {"attn_output_gate": False}, UnsupportedModelError, "attn_output_gate = False"),
    ],
)
def test_what_is_not_computed_is_refused(
    values: dict[str, Any], changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        Config.from_dict({**values, **changes})


@pytest.mark.parametrize("form", ["fused", "stacked by mlx-lm"])
@pytest.mark.parametrize(("name", "network"), [("qwen3-5-moe", "mlp"), ("lfm2-moe", "feed_forward")])
def test_experts_are_read_in_the_forms_that_others_write(tmp_path: Path, name: str, network: str, form: str) -> None:
    """Golden checkpoints have one tensor for each expert."""
    arrays = {
        key: array.astype(mx.float32) for key, array in mx.load(str(GOLDEN / name / "model.safetensors")).items()
    }
    gate, up, down = ("w1", "w3", "w2") if network == "feed_forward" else ("gate_proj", "up_proj", "down_proj")
    for prefix in {key.partition(".experts.0.")[0] for key in arrays if ".experts.0." in key}:
        count = sum(key.startswith(f"{prefix}.experts.") for key in arrays) // 3
        stacked = {
            part: mx.stack([arrays.pop(f"{prefix}.experts.{i}.{part}.weight") for i in range(count)])
            for part in (gate, up, down)
        }
        if form == "fused":
            arrays[f"{prefix}.experts.gate_up_proj"] = mx.concatenate([stacked[gate], stacked[up]], axis=1)
            arrays[f"{prefix}.experts.down_proj"] = stacked[down]
        else:
            for part, known in ((gate, "gate_proj"), (up, "up_proj"), (down, "down_proj")):
                arrays[f"{prefix}.switch_mlp.{known}.weight"] = stacked[part]
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
    (tmp_path / "config.json").write_text(json.dumps(json.loads((GOLDEN / name / "config.json").read_text())))
    ids, wanted = expected(name)
    assert difference(load_model(tmp_path, dtype=mx.float32)(ids)[0], wanted) <= TOLERANCE
