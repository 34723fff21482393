"""Multi-head latent attention: DeepSeek's families, and others with its attention. No mlx."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tinyllm.config.families import keys
from tinyllm.config.family import FULL, Experts, Family, Found, LayerRule, mlp_kinds, of, scaling_by_position
from tinyllm.config.fused import Split, stacked_gate_up
from tinyllm.config.layers import LatentAttentionConfig, NormConfig
from tinyllm.config.reader import ConfigReader, Key
from tinyllm.config.rope import RopeConfig, YarnScaling
from tinyllm.errors import ConfigError, UnsupportedModelError

_INNER_EPS = 1e-6  # of the norms within attention, whatever config.json says of the others


def latent_attention(
    *, latent_rank: int = 512, query_rank: int = 1536, plain_dim: int = 128, value_dim: int | None = 128
) -> Callable[[ConfigReader, Mapping[str, Any]], LatentAttentionConfig]:
    """Return what reads a layer's attention, with these defaults; a `value_dim` of None is hidden_size / heads."""
    ranks = (
        Key("kv_lora_rank", int, latent_rank, minimum=1),
        Key("q_lora_rank", int, query_rank, nullable=True, minimum=1),
    )
    widths = (
        Key("qk_nope_head_dim", int, plain_dim, minimum=1),
        Key("v_head_dim", int, value_dim, nullable=value_dim is None, minimum=1),
    )

    def read(reader: ConfigReader, row: Mapping[str, Any]) -> LatentAttentionConfig:
        heads, rope = row["num_attention_heads"], row["rope"]
        if row["num_key_value_heads"] != heads:
            raise reader.fail(
                ConfigError,
                f"num_key_value_heads ({row['num_key_value_heads']}) must be num_attention_heads ({heads}):"
                " all heads share one latent",
            )
        plain, values = (reader.read(key) for key in widths)
        latent, query = (reader.read(key) for key in ranks)
        return LatentAttentionConfig(
            num_heads=heads,
            query_rank=query,
            latent_rank=latent,
            plain_dim=plain,
            value_dim=values or row["hidden_size"] // heads,
            scale=_scale(plain + rope.dims, rope),
            rope=rope,
            norm=NormConfig(_INNER_EPS),
            qkv_bias=row["qkv_bias"],
            output_bias=row["output_bias"],
            query_scaling=row["query_scaling"],
        )

    return read


def _scale(width: int, rope: RopeConfig) -> float:
    """Return 1 / sqrt(width); with yarn's `mscale_all_dim`, times the square of what that makes of the factor."""
    scaling, scale = rope.scaling, float(width**-0.5)
    if not isinstance(scaling, YarnScaling) or not scaling.mscale_all_dim or scaling.factor <= 1:
        return scale
    return scale * (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1) ** 2


def after_dense(first: int) -> LayerRule:
    """Experts from layer `first_k_dense_replace` on, in every `moe_layer_freq`-th."""

    def rule(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
        dense = reader.read(Key("first_k_dense_replace", int, first, nullable=True, minimum=0)) or 0
        every = reader.read(Key("moe_layer_freq", int, 1, minimum=1))
        return tuple(i >= dense and i % every == 0 for i in range(layers))

    return rule


def _if_grouped(name: str) -> Found:
    """Return the number that a key says, or 1 where `topk_method` chooses among all experts at once."""

    def read(reader: ConfigReader) -> int:
        method = reader.read(Key("topk_method", str, "greedy"))
        limited = method == "group_limited_greedy"
        if not limited and method != "greedy":
            raise reader.fail(UnsupportedModelError, f"topk_method {method!r} is not computed by tinyllm")
        said = reader.read(Key(name, int, None, nullable=not limited, minimum=1))
        if limited and said is None:
            raise reader.fail(ConfigError, f"topk_method {method!r} needs {name!r}, which is absent")
        return int(said) if limited else 1

    return Found(read)


def _is_falsy(value: Any) -> bool:
    return not value


_EXPERTS_V2 = Experts(
    layers=after_dense(0),
    num_experts=Key("n_routed_experts", int, 64, minimum=1),
    intermediate_size=Key("moe_intermediate_size", int, 1407, minimum=1),
    renormalise=False,
    scale=Key("routed_scaling_factor", float, 1.0),
    groups=_if_grouped("n_group"),
    top_groups=_if_grouped("topk_group"),
    shared_experts=Key("n_shared_experts", int, 2, nullable=True, minimum=0),
)
_V2 = Family(
    "deepseek_v2",
    num_key_value_heads=keys.kv_heads(None),
    head_dim=Key("qk_rope_head_dim", int, 64, minimum=1),
    mixers={FULL: latent_attention()},
    qkv_bias=keys.ATTENTION_BIAS,
    output_bias=keys.ATTENTION_BIAS,
    mlp_bias=Key("mlp_bias", bool, False),
    rope_interleaved=True,
    experts=_EXPERTS_V2,
    inert=frozenset({"aux_loss_alpha", "ep_size", "head_dim", "pretraining_tp", "qk_head_dim", "seq_aux"}),
    # The reference does not read norm_topk_prob, and the authors' network divides by the sum in place of scaling.
    refused={
        "norm_topk_prob": _is_falsy,
        "scoring_func": lambda value: value == "softmax",
    },
    renames=(
        (r"\.shared_experts\.", ".shared_expert."),
        (r"\.switch_mlp\.", ".experts."),
        (r"\.experts\.(gate_up|down)_proj$", r".experts.\1_proj.weight"),
    ),
    splits=(Split(".experts.gate_up_proj", stacked_gate_up),),
)
_EXPERTS_V3 = replace(
    _EXPERTS_V2,
    layers=after_dense(3),
    num_experts=Key("n_routed_experts", int, 256, minimum=1),
    top_k=Key("num_experts_per_tok", int, 8, minimum=1),
    intermediate_size=Key("moe_intermediate_size", int, 2048, minimum=1),
    scoring="sigmoid",
    renormalise=of(bool, Key("norm_topk_prob", bool, True, nullable=True)),
    scale=Key("routed_scaling_factor", float, 2.5),
    groups=Key("n_group", int, 8, minimum=1),
    top_groups=Key("topk_group", int, 4, minimum=1),
    group_score="two best",
    selection_bias=True,
    epsilon=1e-20,
    shared_experts=Key("n_shared_experts", int, 1, nullable=True, minimum=0),
)
_V3 = replace(
    _V2,
    model_type="deepseek_v3",
    num_key_value_heads=keys.kv_heads(128),
    max_position_embeddings=keys.positions(4096),
    rope_interleaved=of(bool, Key("rope_interleave", bool, True, nullable=True)),
    experts=_EXPERTS_V3,
    mlp_bias=False,
    extra_layers=Key("num_nextn_predict_layers", int, 1, minimum=0, also=("num_mtp_layers",)),
    refused={
        "mlp_bias": _is_falsy,
        "scoring_func": lambda value: value == "sigmoid",
        "topk_method": lambda value: value == "noaux_tc",
    },
)
_GLM = replace(
    _V3,
    model_type="glm4_moe_lite",
    num_key_value_heads=keys.kv_heads(20),
    head_dim=Key("qk_rope_head_dim", int, 64, minimum=1, also=("head_dim",)),
    max_position_embeddings=keys.positions(202752),
    norm_eps=keys.eps(1e-5),
    mixers={FULL: latent_attention(query_rank=768, plain_dim=192, value_dim=256)},
    experts=replace(
        _EXPERTS_V3,
        layers=mlp_kinds(after_dense(1)),
        num_experts=Key("n_routed_experts", int, 64, minimum=1),
        top_k=Key("num_experts_per_tok", int, 4, minimum=1),
        intermediate_size=Key("moe_intermediate_size", int, 1536, minimum=1),
        scale=Key("routed_scaling_factor", float, 1.8),
        groups=Key("n_group", int, 1, minimum=1),
        top_groups=Key("topk_group", int, 1, minimum=1),
    ),
)
_YOUTU = replace(
    _V3,
    model_type="youtu",
    num_key_value_heads=keys.kv_heads(16),
    max_position_embeddings=keys.positions(131072),
    tie_word_embeddings=keys.tied(True),
    experts=None,
    extra_layers=0,
    inert=frozenset({"embedding_initializer_range", "head_dim", "qk_head_dim"}),
    refused={"mlp_bias": _is_falsy},
)


_MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_MISTRAL4_CONTEXT = keys.positions(1048576)
_MISTRAL4 = replace(
    _V3,
    model_type="mistral4",
    num_key_value_heads=keys.kv_heads(32),
    max_position_embeddings=_MISTRAL4_CONTEXT,
    mixers={FULL: latent_attention(latent_rank=256, query_rank=1024, plain_dim=64)},
    query_scaling=scaling_by_position(_MISTRAL4_ROPE, _MISTRAL4_CONTEXT),
    rotary_dims=Key("qk_rope_head_dim", int, 64, minimum=1),  # whatever part of a head the file calls it
    rope_parameters=_MISTRAL4_ROPE,
    rope_inert=frozenset({"llama_4_scaling_beta", "max_position_embeddings"}),
    experts=replace(
        _EXPERTS_V3,
        layers=after_dense(0),
        num_experts=Key("n_routed_experts", int, 128, minimum=1),
        top_k=Key("num_experts_per_tok", int, 4, minimum=1),
        scoring="softmax",
        scale=Key("routed_scaling_factor", float, 1.0),
        groups=Key("n_group", int, 1, minimum=1),
        top_groups=Key("topk_group", int, 1, minimum=1),
        selection_bias=False,
    ),
    extra_layers=0,
    refused={"mlp_bias": _is_falsy},
)


def _depth_scale(reader: ConfigReader) -> float:
    depth = reader.read(Key("scale_depth", float, 1.4, nullable=True, minimum=0))
    layers = reader.read(Key("num_hidden_layers", int, minimum=1))
    return 1.0 if depth is None else float(depth / math.sqrt(layers))


def _width_scale(reader: ConfigReader) -> float:
    base = reader.read(Key("dim_model_base", int, 256, nullable=True, minimum=1))
    return 1.0 if base is None else float(base / reader.read(Key("hidden_size", int, minimum=1)))


_MINICPM3 = Family(
    "minicpm3",
    num_key_value_heads=keys.kv_heads(40),
    head_dim=Key("qk_rope_head_dim", int, 32, minimum=1),
    max_position_embeddings=keys.positions(32768),
    tie_word_embeddings=keys.tied(True),
    mixers={FULL: latent_attention(latent_rank=256, query_rank=768, plain_dim=64, value_dim=None)},
    qkv_bias=keys.ATTENTION_BIAS,
    output_bias=keys.ATTENTION_BIAS,
    mlp_bias=Key("mlp_bias", bool, False),
    norm_eps=keys.eps(1e-5),
    branch_scale=Found(_depth_scale),
    embedding_scale=Key("scale_emb", float, 12.0),
    logit_scale=Found(_width_scale),
    inert=frozenset({"head_dim", "pretraining_tp", "qk_head_dim"}),
)

ROWS = (_V2, _V3, _GLM, _YOUTU, _MISTRAL4, _MINICPM3)
