"""How the families with latent attention write their config.json, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tinyllm.config.config import Config
from tinyllm.config.layers import LatentAttentionConfig, MoeConfig, QueryScaling, RouterConfig
from tinyllm.errors import ConfigError, UnsupportedQuantizationError

SHAPES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 4,
}
YARN = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.7, "original_max_position_embeddings": 4096}


def read(model_type: str, **more: Any) -> Config:
    values = {"model_type": model_type, **SHAPES, **more}
    if model_type in ("youtu", "minicpm3"):
        del values["num_experts_per_tok"]
    return Config.from_dict(values)


def attention(config: Config) -> LatentAttentionConfig:
    found = config.layers[0].attention
    assert isinstance(found, LatentAttentionConfig)
    return found


def router(config: Config) -> RouterConfig:
    found = config.layers[-1].feed_forward
    assert isinstance(found, MoeConfig)
    return found.router


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "minicpm3"])
def test_scale_grows_with_mscale_all_dim(model_type: str) -> None:
    plain, stretched = attention(read(model_type)), attention(read(model_type, rope_scaling=YARN))
    assert plain.scale == (plain.plain_dim + plain.rope.dims) ** -0.5
    assert stretched.scale == pytest.approx(plain.scale * (0.1 * 0.7 * math.log(40) + 1) ** 2)
    assert attention(read(model_type, rope_scaling={**YARN, "mscale_all_dim": 0})).scale == plain.scale
    assert plain.norm.eps == 1e-6


@pytest.mark.parametrize(
    ("more", "sparse"),
    [
        ({}, [False] * 3 + [True] * 3),
        ({"first_k_dense_replace": 1}, [False] + [True] * 5),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, [False, False, True, False, True, False]),
        ({"first_k_dense_replace": None}, [True] * 6),
    ],
)
def test_first_layers_are_dense(more: dict[str, Any], sparse: list[bool]) -> None:
    config = read("deepseek_v3", **more)
    assert [config.is_moe_layer(i) for i in range(6)] == sparse


def test_kinds_of_layers_are_listed() -> None:
    kinds = ["sparse", "dense", "dense", "sparse", "dense", "sparse"]
    config = read("glm4_moe_lite", mlp_layer_types=kinds, first_k_dense_replace=3)
    assert [config.is_moe_layer(i) for i in range(6)] == [kind == "sparse" for kind in kinds]


def test_groups_are_for_the_method_that_asks_for_them() -> None:
    groups = {"n_group": 8, "topk_group": 3}
    assert router(read("deepseek_v2", topk_method="greedy", **groups)).groups == 1
    limited = router(read("deepseek_v2", topk_method="group_limited_greedy", **groups))
    assert (limited.groups, limited.top_groups, limited.group_score) == (8, 3, "best")
    third = router(read("deepseek_v3", **groups))
    assert (third.groups, third.top_groups, third.group_score) == (8, 3, "two best")


def test_no_shared_experts() -> None:
    network = read("deepseek_v3", n_shared_experts=None).layers[-1].feed_forward
    assert isinstance(network, MoeConfig) and network.shared is None


@pytest.mark.parametrize(
    ("model_type", "more", "message"),
    [
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 8}, "needs 'topk_group'"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        ("deepseek_v3", {"mlp_bias": True}, "mlp_bias = True"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads (2) must be num_attention_heads (4)"),
        ("deepseek_v3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not computed"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 1, "num_experts_per_tok": 33}, "33 experts a token"),
        ("deepseek_v3", {"n_routed_experts": 8, "n_group": 8}, "no two best"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "for each of 6 layers"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"] * 5 + ["mixed"]}, "'dense' or 'sparse'"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "'fp8'"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(model_type: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, UnsupportedQuantizationError)) as raised:
        read(model_type, **more)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_queries_of_mistral_4_grow_with_their_positions() -> None:
    """By default, and not at all where the file has other rotary parameters without the word."""
    assert attention(read("mistral4")).query_scaling == QueryScaling(0.1, 8192)
    assert attention(read("mistral4", rope_scaling={**YARN, "llama_4_scaling_beta": 0.3})).query_scaling == (
        QueryScaling(0.3, 4096)
    )
    assert attention(read("mistral4", rope_scaling=YARN)).query_scaling is None


def test_depth_and_width_scale_minicpm() -> None:
    config = read("minicpm3", scale_depth=2.0, dim_model_base=16, scale_emb=3)
    assert config.layers[0].branch_scale == 2 / math.sqrt(6)
    assert (config.logit_scale, config.embedding_scale) == (0.5, 3)
    config = read("minicpm3", scale_depth=None, dim_model_base=None)
    assert (config.layers[0].branch_scale, config.logit_scale) == (1, 1)
    assert attention(config).value_dim == 8


@pytest.mark.parametrize(
    ("model_type", "ranks", "widths"),
    [
        ("deepseek_v2", (1536, 512), (128, 64, 128)),
        ("deepseek_v3", (1536, 512), (128, 64, 128)),
        ("glm4_moe_lite", (768, 512), (192, 64, 256)),
        ("mistral4", (1024, 256), (64, 64, 128)),
        ("youtu", (1536, 512), (128, 64, 128)),
        ("minicpm3", (768, 256), (64, 32, 8)),
    ],
)
def test_absent_sizes_are_those_of_transformers(
    model_type: str, ranks: tuple[int, int], widths: tuple[int, int, int]
) -> None:
    """minicpm3's values are hidden_size / num_attention_heads wide."""
    shape = attention(read(model_type))
    assert (shape.query_rank, shape.latent_rank) == ranks
    assert (shape.plain_dim, shape.rope.dims, shape.value_dim) == widths


def test_expanding_pays_for_many_queries() -> None:
    """DeepSeek's sizes: 512 * 256 multiplications to make a key and a value, 1088 - 320 saved a query."""
    shape = attention(read("deepseek_v3"))
    assert [shape.expands(n) for n in (1, 170, 171)] == [False, False, True]


def test_head_dim_is_another_name_of_what_glm_rotates() -> None:
    """As in transformers, in this family alone: elsewhere `head_dim` has no effect."""
    assert read("glm4_moe_lite", head_dim=32) == read("glm4_moe_lite", qk_rope_head_dim=32)
    with pytest.raises(ConfigError, match="'qk_rope_head_dim' and 'head_dim' contradict"):
        read("glm4_moe_lite", head_dim=96, qk_rope_head_dim=32)
    assert read("deepseek_v3", head_dim=96) == read("deepseek_v3")
