"""Which layers have experts, and what of a mixture's config.json is read, refused, or one thing by two names."""

from __future__ import annotations

from typing import Any

import pytest

from tinyllm.config.config import Config
from tinyllm.config.layers import AttentionConfig, MoeConfig, QueryScaling
from tinyllm.config.reach import Chunk, Window
from tinyllm.config.rope import YarnScaling
from tinyllm.errors import ConfigError, UnsupportedModelError

SHAPES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def read(model_type: str, **values: Any) -> Config:
    return Config.from_dict({**SHAPES, "model_type": model_type, **values})


def sparse(config: Config) -> list[int]:
    return [i for i in range(config.num_hidden_layers) if config.is_moe_layer(i)]


def mixture(config: Config) -> MoeConfig:
    found = config.layers[-1].feed_forward
    assert isinstance(found, MoeConfig)
    return found


@pytest.mark.parametrize(
    ("model_type", "said", "layers"),
    [
        ("qwen3_moe", {}, [0, 1, 2, 3, 4, 5]),
        ("qwen3_moe", {"decoder_sparse_step": 2}, [1, 3, 5]),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [3, 5]),
        ("qwen3_moe", {"num_experts": 0}, []),
        ("llama4_text", {}, [0, 1, 2, 3, 4, 5]),
        ("llama4_text", {"interleave_moe_layer_step": 3}, [2, 5]),
        ("llama4_text", {"interleave_moe_layer_step": 3, "moe_layers": [0, 4]}, [0, 4]),
        ("llama4_text", {"moe_layers": []}, []),
        ("glm4_moe", {}, [1, 2, 3, 4, 5]),
        ("glm4_moe", {"first_k_dense_replace": 3}, [3, 4, 5]),
        ("ernie4_5_moe", {}, [1, 2, 3, 4, 5]),
        ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_interval": 2, "moe_layer_end_index": 3}, [1, 3]),
    ],
)
def test_layers_with_experts(model_type: str, said: dict[str, Any], layers: list[int]) -> None:
    assert sparse(read(model_type, **said)) == layers


@pytest.mark.parametrize("said", [[True], ["1"], "1"])
def test_lists_of_layers_hold_numbers(said: Any) -> None:
    with pytest.raises(ConfigError, match="mlp_only_layers"):
        read("qwen3_moe", mlp_only_layers=said)


def test_two_names_of_one_thing() -> None:
    assert mixture(read("qwen3_moe", num_local_experts=12)).router.num_experts == 12
    assert mixture(read("gpt_oss", experts_per_token=3, num_experts_per_tok=3)).router.top_k == 3
    with pytest.raises(ConfigError, match="'num_experts_per_tok' and 'experts_per_token' contradict"):
        read("gpt_oss", experts_per_token=3, num_experts_per_tok=4)


def test_qwens_window_counts_only_where_it_is_used() -> None:
    assert {layer.attention.reach for layer in read("qwen3_moe", sliding_window=7).layers} == {None}
    used = read("qwen3_moe", sliding_window=7, use_sliding_window=True)
    assert {layer.attention.reach for layer in used.layers} == {Window(7)}
    other = read("qwen2_moe", sliding_window=7, use_sliding_window=True, max_window_layers=3)
    assert [layer.attention.reach for layer in other.layers] == [Window(7), None, Window(7), None, None, None]


@pytest.mark.parametrize("tuned", [4, True, ...])  # 4 is what the first files say
def test_layers_of_llama_4(tuned: Any) -> None:
    values = {} if tuned is ... else {"attn_temperature_tuning": tuned}
    attention = [layer.attention for layer in read("llama4_text", **values).layers]
    assert [shape.reach for shape in attention] == [Chunk(8192)] * 3 + [None] + [Chunk(8192)] * 2
    for i, shape in enumerate(attention):
        assert isinstance(shape, AttentionConfig)
        full = i == 3
        assert (shape.rope is None) == (shape.qk_norm is None) == full
        assert shape.query_scaling == (QueryScaling(0.1, 8192, 1) if full else None)


def test_temperature_of_llama_4_is_switched_off_or_refused() -> None:
    off = read("llama4_text", attn_temperature_tuning=False)
    assert {layer.attention.query_scaling for layer in off.layers} == {None}
    with pytest.raises(ConfigError, match="attn_temperature_tuning"):
        read("llama4_text", attn_temperature_tuning="yes")


def test_rope_of_gpt_oss_is_yarn_where_nothing_is_said() -> None:
    rope = read("gpt_oss").layers[0].attention.rope
    assert rope.theta == 150000
    assert rope.scaling == YarnScaling(32.0, 4096, truncate=False)


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("gpt_oss", "swiglu_alpha", 1.0),
        ("gpt_oss", "hidden_act", "gelu"),
        ("minimax_m2", "attn_type_list", [1, 0]),
        ("minimax_m2", "shared_intermediate_size", 64),
        ("phimoe", "num_experts_per_tok", 3),
        ("dots1", "topk_method", "greedy"),
        ("ernie4_5_moe", "moe_use_aux_free", False),
        ("hunyuan_v1_moe", "use_cla", True),
        ("hunyuan_v1_moe", "num_shared_expert", [1, 2]),
        ("hunyuan_v1_moe", "moe_topk", [1, 2]),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_name(model_type: str, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=key):
        read(model_type, **{key: value})


@pytest.mark.parametrize("said", [0, [], "2", [2, True]])
def test_experts_a_token_of_hunyuan_are_a_number_or_one_for_each_layer(said: Any) -> None:
    assert mixture(read("hunyuan_v1_moe", num_experts=8, moe_topk=[2] * 6)).router.top_k == 2
    with pytest.raises(ConfigError, match="moe_topk"):
        read("hunyuan_v1_moe", num_experts=8, moe_topk=said)


@pytest.mark.parametrize(
    ("model_type", "module"),
    [
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj"),
        ("qwen3_moe", "model.layers.1.mlp.switch_mlp.down_proj"),
        ("mixtral", "model.layers.1.block_sparse_moe.switch_mlp.down_proj"),
        ("llama4_text", "model.layers.1.feed_forward.experts.down_proj"),
    ],
)
def test_modules_in_quantization_have_the_names_of_their_matrices(model_type: str, module: str) -> None:
    quantization = read(model_type, quantization={"bits": 4, "group_size": 32, module: False}).quantization
    assert quantization is not None
    assert quantization.format_of("model.layers.1.mlp.experts.down_proj") is None
    assert quantization.format_of("model.layers.2.mlp.experts.down_proj") is not None
