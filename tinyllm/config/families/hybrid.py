"""Layers with a recurrent state beside others that attend. No mlx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tinyllm.config.families import keys
from tinyllm.config.family import CONV, FULL, LINEAR, Experts, Family, Found, every, listed, read_layer_types
from tinyllm.config.fused import (
    Split,
    grouped_delta,
    grouped_delta_gates,
    query_and_gate,
    stacked_delta,
    stacked_gate_up,
)
from tinyllm.config.layers import ConvConfig, DeltaConfig
from tinyllm.config.reader import ConfigReader, Key
from tinyllm.errors import ConfigError

_DELTA_KEYS = {
    "num_key_heads": Key("linear_num_key_heads", int, 16, minimum=1),
    "num_value_heads": Key("linear_num_value_heads", int, 32, minimum=1),
    "key_dim": Key("linear_key_head_dim", int, 128, minimum=1),
    "value_dim": Key("linear_value_head_dim", int, 128, minimum=1),
    "kernel": Key("linear_conv_kernel_dim", int, 4, minimum=2),
}


def _delta(reader: ConfigReader, row: Mapping[str, Any]) -> DeltaConfig:
    shape = {name: reader.read(key) for name, key in _DELTA_KEYS.items()}
    if shape["num_value_heads"] % shape["num_key_heads"]:
        raise reader.fail(
            ConfigError,
            f"linear_num_value_heads ({shape['num_value_heads']}) is not a multiple of linear_num_key_heads"
            f" ({shape['num_key_heads']})",
        )
    return DeltaConfig(**shape, norm=replace(row["norm"], offset=0.0), activation=row["activation"])


def _conv(reader: ConfigReader, row: Mapping[str, Any]) -> ConvConfig:
    return ConvConfig(
        width=row["hidden_size"],
        kernel=reader.read(Key("conv_L_cache", int, 3, minimum=2)),
        biased=reader.read(Key("conv_bias", bool, False)),
    )


def _sparse_layers(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Every layer whose number is a multiple of `decoder_sparse_step`, but `mlp_only_layers` (from 0 on)."""
    dense = reader.read(Key("mlp_only_layers", list, None, nullable=True)) or ()
    step = reader.read(Key("decoder_sparse_step", int, 1, minimum=1))
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))


def _after_dense_layers(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    dense = reader.read(Key("num_dense_layers", int, 2, minimum=0))
    return tuple(i >= dense for i in range(layers))


def _attending_layers(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    """As `layer_types` says; where it is absent, those that `full_attn_idxs` lists attend, by default all."""
    said = read_layer_types(reader, layers, (FULL, CONV))
    attending = reader.read(Key("full_attn_idxs", list, None, nullable=True))
    return said or tuple(FULL if attending is None or i in attending else CONV for i in range(layers))


def _adjusted_size(reader: ConfigReader) -> int:
    """Read LFM2's width: two thirds of the one said, times a factor, rounded up to a multiple."""
    said = reader.read(Key("intermediate_size", int, 12288, minimum=1))
    size: int = reader.read(Key("block_ff_dim", int, None, nullable=True, minimum=1)) or said
    adjusts = reader.read(Key("block_auto_adjust_ff_dim", bool, True))
    multiplier = reader.read(Key("block_ffn_dim_multiplier", float, 1.0, nullable=True, minimum=0))
    multiple = reader.read(Key("block_multiple_of", int, 256, minimum=1))
    if not adjusts:
        return size
    size = int(2 * size / 3)
    return size if multiplier is None else -(-int(multiplier * size) // multiple) * multiple


def _tied(reader: ConfigReader) -> bool:
    said: bool = reader.read(keys.tied(True))
    older: bool | None = reader.read(Key("tie_embedding", bool, None, nullable=True))
    return said if older is None else older


# The experts of transformers 5 have no ".weight"; mlx-lm calls them switch_mlp.
_EXPERT_NAMES = ((r"(\.experts\.(?:gate_up|down)_proj)$", r"\1.weight"), (r"\.switch_mlp\b", ".experts"))
_QWEN_EXPERTS = Experts(
    num_experts=Key("num_experts", int, 256, minimum=1),
    top_k=Key("num_experts_per_tok", int, 8, minimum=1),
    intermediate_size=Key("moe_intermediate_size", int, 512, minimum=1),
    shared_size=Key("shared_expert_intermediate_size", int, 512, minimum=1),
    shared_gate=True,
)
_QWEN3_5 = Family(
    "qwen3_5_text",
    num_key_value_heads=Key("num_key_value_heads", int, 4, minimum=1),
    head_dim=Key("head_dim", int, 256, minimum=1),
    max_position_embeddings=keys.positions(32768),
    layer_types=listed(every(Key("full_attention_interval", int, 4, minimum=1), others=LINEAR), (FULL, LINEAR)),
    mixers={LINEAR: _delta},
    qkv_bias=keys.ATTENTION_BIAS,
    output_bias=keys.ATTENTION_BIAS,
    qk_norm="head",
    gate=True,
    partial_rotary_factor=keys.rotated(0.25),
    rope_inert=frozenset({"mrope_section", "mrope_interleaved"}),  # text has one position for all axes of an image
    norm_offset=1.0,
    inert=frozenset({key.name for key in _DELTA_KEYS.values()})
    | {"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "router_aux_loss_coef"},
    refused={
        "attn_output_gate": lambda value: value is True,
        "decoder_sparse_step": lambda value: value == 1,
        "mlp_only_layers": lambda value: not value,
        "norm_topk_prob": lambda value: value is True,
    },
    renames=(
        (r"^model\.language_model\.", "model."),
        (r"\.linear_attn\.in_proj_([zba])\b", r".linear_attn.\1_proj"),
        *_EXPERT_NAMES,
    ),
    depthwise=r"\.linear_attn\.conv1d$",
    splits=(
        Split(".linear_attn.in_proj_qkvz", grouped_delta),
        Split(".linear_attn.in_proj_ba", grouped_delta_gates),
        Split(".linear_attn.in_proj_qkv", stacked_delta),
        Split(".self_attn.q_proj", query_and_gate),
        Split(".experts.gate_up_proj", stacked_gate_up),
    ),
    skipped=r"^mtp\.",
)
_LFM2 = Family(
    "lfm2",
    num_key_value_heads=Key("num_key_value_heads", int, 8, minimum=1),
    intermediate_size=Found(_adjusted_size),
    max_position_embeddings=keys.positions(128_000),
    tie_word_embeddings=Found(_tied),
    layer_types=_attending_layers,
    mixers={CONV: _conv},
    qk_norm="head",
    rope_theta=1_000_000.0,
    activation="silu",
    norm_eps=Key("norm_eps", float, 1e-5, minimum=0),
    inert=frozenset(
        """
        block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_xavier_init conv_L_cache
        conv_bias conv_dim conv_dim_out conv_use_xavier_init num_heads
        """.split()
    ),
    refused={"block_use_swiglu": lambda value: value is True, "use_pos_enc": lambda value: value is True},
    renames=(
        (r"\.operator_norm\b", ".input_layernorm"),
        (r"\.ffn_norm\b", ".post_attention_layernorm"),
        (r"\.feed_forward\b", ".mlp"),
        (r"\.w1\b", ".gate_proj"),
        (r"\.w2\b", ".down_proj"),
        (r"\.w3\b", ".up_proj"),
        (r"\.self_attn\.out_proj\b", ".self_attn.o_proj"),
        (r"\.([qk])_layernorm\b", r".\1_norm"),
        (r"^model\.embedding_norm\b", "model.norm"),
        (r"\.mlp\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
        *_EXPERT_NAMES,
    ),
    depthwise=r"\.conv\.conv$",
    splits=(Split(".experts.gate_up_proj", stacked_gate_up),),
)

ROWS: tuple[Family, ...] = (
    replace(
        _QWEN3_5,
        model_type="qwen3_next",
        num_key_value_heads=Key("num_key_value_heads", int, 2, minimum=1),
        experts=replace(
            _QWEN_EXPERTS,
            layers=_sparse_layers,
            num_experts=Key("num_experts", int, 512, minimum=1),
            top_k=Key("num_experts_per_tok", int, 10, minimum=1),
            renormalise=Key("norm_topk_prob", bool, True),
        ),
        refused={},
    ),
    _QWEN3_5,
    replace(
        _QWEN3_5,
        model_type="qwen3_5_moe_text",
        num_key_value_heads=Key("num_key_value_heads", int, 2, minimum=1),
        intermediate_size=Key("moe_intermediate_size", int, 512, minimum=1),
        experts=_QWEN_EXPERTS,
        inert=_QWEN3_5.inert | {"intermediate_size"},  # no layer is dense
    ),
    _LFM2,
    replace(
        _LFM2,
        model_type="lfm2_moe",
        intermediate_size=Key("intermediate_size", int, minimum=1),
        experts=Experts(
            layers=_after_dense_layers,
            num_experts=Key("num_experts", int, 32, minimum=1),
            top_k=Key("num_experts_per_tok", int, 4, minimum=1),
            intermediate_size=Key("moe_intermediate_size", int, 1792, minimum=1),
            scoring="sigmoid",
            renormalise=Key("norm_topk_prob", bool, True),
            scale=Key("routed_scaling_factor", float, 1.0, minimum=0),
            selection_bias=Key("use_expert_bias", bool, True),
            epsilon=1e-6,
        ),
    ),
)
