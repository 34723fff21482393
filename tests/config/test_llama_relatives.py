"""What Llama's relatives write in config.json, where golden checkpoints do not show it: see families/llama.py."""

from __future__ import annotations

from typing import Any

import pytest
import tiny

from tinyllm.config.config import Config
from tinyllm.config.layers import AttentionConfig, MLPConfig, QueryScaling
from tinyllm.config.reach import Window
from tinyllm.config.rope import Llama3Scaling, RopeConfig, YarnScaling
from tinyllm.errors import ConfigError, UnknownKeyError, UnsupportedModelError


def read(model_type: str, **overrides: Any) -> Config:
    return Config.from_dict(tiny.config(model_type=model_type, **overrides))


def attention(config: Config) -> list[AttentionConfig]:
    mixers = [layer.attention for layer in config.layers]
    assert all(isinstance(mixer, AttentionConfig) for mixer in mixers)
    return mixers  # type: ignore[return-value]


def ropes(config: Config) -> list[RopeConfig | None]:
    return [mixer.rope for mixer in attention(config)]


def windows(config: Config) -> list[int | None]:
    reaches = [mixer.reach for mixer in attention(config)]
    return [reach.size if isinstance(reach, Window) else None for reach in reaches]


# ---------------------------------------------------------------- which layers do what


def test_smollm3_rotates_in_all_but_every_fourth_layer() -> None:
    assert [rope is not None for rope in ropes(read("smollm3", num_hidden_layers=8))] == [True, True, True, False] * 2
    said = read("smollm3", num_hidden_layers=2, no_rope_layers=[0, 1])
    assert [rope is not None for rope in ropes(said)] == [False, True]


def test_smollm3_has_windows_only_where_nothing_rotates_and_they_are_asked_for() -> None:
    keys = {"num_hidden_layers": 4, "sliding_window": 9}
    assert windows(read("smollm3", **keys)) == [None] * 4
    assert windows(read("smollm3", use_sliding_window=True, **keys)) == [None, None, None, 9]
    with pytest.raises(ConfigError, match="use_sliding_window is not true"):
        read("smollm3", layer_types=["sliding_attention"] * 4, **keys)


def test_exaone4_rotates_where_there_is_a_window_or_nowhere_is_one() -> None:
    windowed = read("exaone4", num_hidden_layers=4, sliding_window=9)
    assert windows(windowed) == [9, 9, 9, None]
    assert [rope is not None for rope in ropes(windowed)] == [True, True, True, False]
    without = read("exaone4", num_hidden_layers=4, sliding_window=None, sliding_window_pattern=None)
    assert windows(without) == [None] * 4
    assert None not in ropes(without)


def test_exaone4_letters_mean_nothing_without_the_list_that_they_stand_for() -> None:
    with pytest.raises(ConfigError, match="'sliding_window_pattern' must be of type int"):
        read("exaone4", sliding_window_pattern="LLLG")


def test_olmo3_scales_positions_of_full_layers_alone() -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    config = read("olmo3", num_hidden_layers=4, rope_theta=500000.0, rope_scaling=scaling)
    scaled = [rope is not None and isinstance(rope.scaling, YarnScaling) for rope in ropes(config)]
    assert scaled == [False, False, False, True]
    assert windows(config) == [4096, 4096, 4096, None]


def test_cwm_begins_with_a_full_layer() -> None:
    assert windows(read("cwm", num_hidden_layers=5)) == [None, 8192, 8192, 8192, None]
    assert windows(read("cwm", num_hidden_layers=5, sliding_window=0)) == [None] * 5


@pytest.mark.parametrize("thetas", [[1.0, 0], [100.0], [True, 100.0], ["a", 0]])
def test_granite_refuses_thetas_of_layers_that_make_no_sense(thetas: list[Any]) -> None:
    with pytest.raises(ConfigError, match="layer_rope_theta"):
        read("granite_swa", layer_rope_theta=thetas)


def test_granite_has_one_theta_where_layers_have_none_of_their_own() -> None:
    said = ropes(read("granite_swa", layer_rope_theta=None, rope_theta=77.0))
    assert [rope.theta if rope else None for rope in said] == [77.0, 77.0]
    said = ropes(read("granite_swa", layer_rope_theta=[0, 88.0]))
    assert [rope.theta if rope else None for rope in said] == [None, 88.0]


# ---------------------------------------------------------------- rotary parameters that are not everybody's


@pytest.mark.parametrize(("name", "factor", "theta"), [("cwm", 16.0, 1e6), ("apertus", 8.0, 12e6)])
def test_rotary_parameters_that_are_absent_are_the_familys_own(name: str, factor: float, theta: float) -> None:
    """Even beside a theta, which these replace as in transformers."""
    activation = {} if name == "cwm" else {"hidden_act": "xielu"}
    for absent in ({}, {"rope_scaling": None}, {"rope_parameters": None}):
        rope = ropes(read(name, **activation, **absent))[0]
        assert rope is not None
        assert rope.scaling == Llama3Scaling(factor, 1.0, 4.0, 8192)
        assert rope.theta == theta
    said = ropes(read(name, **activation, rope_parameters={"rope_type": "default"}))[0]
    assert said is not None
    assert said.scaling is None


def test_ministral3_scales_queries_by_a_value_among_the_rotary_parameters() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    absent = attention(read("ministral3"))[0]
    assert absent.query_scaling == QueryScaling(0.1, 16384)
    assert absent.rope is not None
    assert absent.rope.scaling == YarnScaling(16.0, 16384, mscale=1.0, mscale_all_dim=1.0)
    assert absent.rope.theta == 1e6
    for name in ("rope_scaling", "rope_parameters"):
        said = read("ministral3", **{name: {**yarn, "llama_4_scaling_beta": 0.5}})
        assert attention(said)[0].query_scaling == QueryScaling(0.5, 32)
        assert attention(read("ministral3", **{name: yarn}))[0].query_scaling is None
    with pytest.raises(UnknownKeyError, match="llama_4_scaling_beta"):
        read("mistral", rope_scaling={**yarn, "llama_4_scaling_beta": 0.5})


def test_hunyuan_stretches_theta_by_alpha_and_others_do_not_know_it() -> None:
    dynamic = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "mscale": 1.0}
    for model_type in ("hunyuan_v1_dense", "hunyuan_v1_moe"):
        rope = ropes(read(model_type, head_dim=128, rope_scaling=dynamic))[0]
        assert rope is not None
        assert rope.scaling is None
        assert rope.theta == pytest.approx(10000.0 * 1000.0 ** (128 / 126))
    with pytest.raises(UnknownKeyError, match="alpha"):
        read("llama", rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0})
    with pytest.raises(ConfigError, match="more than one pair"):
        read("hunyuan_v1_dense", head_dim=2, rope_scaling=dynamic)


# ---------------------------------------------------------------- keys and names of their own


def test_exaone_has_its_own_names_for_keys() -> None:
    own = {"num_layers": 3, "layer_norm_epsilon": 0.25, "activation_function": "gelu"}
    config = read("exaone", num_hidden_layers=..., rms_norm_eps=..., hidden_act=..., **own)
    assert (config.num_hidden_layers, config.rms_norm_eps) == (3, 0.25)
    assert all(isinstance(layer.feed_forward, MLPConfig) for layer in config.layers)
    assert {layer.feed_forward.activation for layer in config.layers} == {"gelu"}  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="'num_hidden_layers' and 'num_layers' contradict each other"):
        read("exaone", num_layers=3, num_hidden_layers=2)


def test_exaone_has_its_own_names_for_tensors() -> None:
    config = read("exaone")
    names = {
        "transformer.wte.weight": "model.embed_tokens.weight",
        "transformer.h.1.ln_1.weight": "model.layers.1.input_layernorm.weight",
        "transformer.h.1.attn.attention.q_proj.weight": "model.layers.1.self_attn.q_proj.weight",
        "transformer.h.1.attn.attention.out_proj.weight": "model.layers.1.self_attn.o_proj.weight",
        "transformer.h.1.ln_2.weight": "model.layers.1.post_attention_layernorm.weight",
        "transformer.h.1.mlp.c_fc_0.weight": "model.layers.1.mlp.gate_proj.weight",
        "transformer.h.1.mlp.c_fc_1.weight": "model.layers.1.mlp.up_proj.weight",
        "transformer.h.1.mlp.c_proj.weight": "model.layers.1.mlp.down_proj.weight",
        "transformer.ln_f.weight": "model.norm.weight",
    }
    assert {name: config.canonical_name(name) for name in names} == names


def test_internlm3_has_two_names_for_biases() -> None:
    config = read("internlm3", qkv_bias=True, bias=True)
    assert [(mixer.qkv_bias, mixer.output_bias) for mixer in attention(config)] == [(True, True)] * 2
    assert config == read("internlm3", attention_bias=True, mlp_bias=True)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("apertus", "post_norm", True),
        ("apertus", "qk_norm", False),
        ("cwm", "attention_bias", True),
        ("hunyuan_v1_dense", "use_cla", True),
        ("hunyuan_v1_dense", "use_qk_norm", False),
        ("hyperclovax", "use_post_norm", False),
        ("iquestcoder", "clip_qkv", 8.0),
        ("starcoder2", "norm_type", "rms_norm"),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_name(name: str, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{key} = "):
        read(name, rms_norm_eps=... if name == "starcoder2" else 1e-5, **{key: value})


def test_an_activation_with_parameters_stands_in_plain_networks_alone() -> None:
    assert read("apertus", hidden_act="xielu").layers[0].feed_forward.activation == "xielu"  # type: ignore[union-attr]
    with pytest.raises(UnsupportedModelError, match="the activation 'xielu'"):
        read("llama", hidden_act="xielu")
