"""Rotary parameters: both dialects of config.json say the same thing, and no scheme is dropped unread."""

from __future__ import annotations

import math
from reprlib import repr as brief
from typing import Any

import pytest
import tiny

from tinyllm.config.config import Config
from tinyllm.config.rope import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, RopeConfig, YarnScaling
from tinyllm.errors import ConfigError, MissingKeyError, UnknownKeyError, UnsupportedModelError

LINEAR = {"factor": 4.0}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
SCHEMES = {"linear": LINEAR, "llama3": LLAMA3, "yarn": YARN}


def ropes(**overrides: Any) -> list[RopeConfig]:
    return [layer.attention.rope for layer in Config.from_dict(tiny.config(**overrides)).layers]


@pytest.mark.parametrize("name", SCHEMES)
def test_fault_09_type_and_rope_type_mean_the_same(name: str) -> None:
    parameters = SCHEMES[name]
    old = ropes(rope_scaling={"type": name, **parameters})
    assert old == ropes(rope_scaling={"rope_type": name, **parameters})
    assert old == ropes(rope_scaling={"type": name, "rope_type": name, **parameters})
    assert old == ropes(rope_scaling={"type": None, "rope_type": name, **parameters})
    assert old[0].scaling is not None


@pytest.mark.parametrize(
    "said",
    [
        {"rope_scaling": None},
        {"rope_scaling": {}},
        {"rope_scaling": {"type": "default"}},
        {"rope_scaling": {"rope_type": "default"}},
        {"rope_scaling": {"type": None}},
        {"rope_parameters": None},
        {"rope_parameters": {"rope_type": "default"}},
    ],
    ids=repr,
)
def test_fault_09_null_is_no_scaling(said: dict[str, Any]) -> None:
    assert ropes(**said) == ropes() == [RopeConfig(dims=8, theta=10000.0)] * 2


@pytest.mark.parametrize("dialect", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("name", ["ntk-by-parts", "axial", "invented"])
def test_fault_09_an_unknown_type_is_refused_by_name(dialect: str, key: str, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"RoPE of type '{name}'"):
        ropes(**{dialect: {key: name, "factor": 2.0}})


@pytest.mark.parametrize("name", [[], ["yarn"], {}, {"a": 1}, 0, 1, False, True, 1.5], ids=repr)
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_fault_09_a_type_that_is_no_string_is_refused(key: str, name: Any) -> None:
    with pytest.raises(ConfigError, match=f"'{key}'"):
        ropes(rope_scaling={key: name, "factor": 2.0})


def test_fault_09_two_types_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="'linear', but 'rope_type' is 'yarn'"):
        ropes(rope_scaling={"type": "linear", "rope_type": "yarn", **YARN})


@pytest.mark.parametrize("name", SCHEMES)
def test_fault_09_a_surplus_key_of_a_scheme_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnknownKeyError, match="surprise"):
        ropes(rope_scaling={"type": name, **SCHEMES[name], "surprise": 3})


def test_fault_09_a_factor_without_a_scheme_is_refused() -> None:
    with pytest.raises(UnknownKeyError, match="factor"):
        ropes(rope_scaling={"factor": 8.0})


def test_the_schemes_become_what_they_say() -> None:
    assert ropes(rope_scaling={"type": "linear", **LINEAR})[0].scaling == LinearScaling(4.0)
    assert ropes(rope_scaling={"type": "llama3", **LLAMA3})[0].scaling == Llama3Scaling(8.0, 1.0, 4.0, 64)
    assert ropes(rope_scaling={"type": "yarn", **YARN})[0].scaling == YarnScaling(
        factor=4.0,
        attention_factor=None,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=None,
        mscale_all_dim=None,
        original_max_position_embeddings=64,
        truncate=True,
    )


# Fault 10: where theta stands.

FIVE = {"rope_theta": 500000.0, "rope_type": "default"}


def test_fault_10_theta_inside_rope_parameters_alone_is_used() -> None:
    assert ropes(rope_theta=..., rope_parameters=FIVE) == ropes(rope_theta=500000.0)


def test_fault_10_theta_inside_rope_parameters_wins_over_a_stale_one_outside() -> None:
    assert ropes(rope_theta=10000.0, rope_parameters=FIVE) == ropes(rope_theta=500000.0)


def test_fault_10_theta_nested_by_layer_type_is_used_for_those_layers() -> None:
    config = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    nested = {"full_attention": FIVE, "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0}}
    assert [rope.theta for rope in ropes(**config, rope_theta=..., rope_parameters=nested)] == [500000.0, 3000.0]


@pytest.mark.parametrize("name", SCHEMES)
def test_fault_10_the_new_dialect_says_what_the_old_one_does(name: str) -> None:
    parameters = SCHEMES[name]
    new = ropes(rope_theta=..., rope_parameters={"rope_type": name, "rope_theta": 7000.0, **parameters})
    assert new == ropes(rope_theta=7000.0, rope_scaling={"type": name, **parameters})


def test_fault_10_a_kind_of_layer_that_the_nested_parameters_leave_out_is_named() -> None:
    config = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    with pytest.raises(MissingKeyError, match="rope_parameters: 'sliding_attention' is absent"):
        ropes(**config, rope_parameters={"full_attention": FIVE})


def test_fault_10_nested_parameters_of_a_kind_that_no_layer_has_do_no_harm() -> None:
    nested = {"full_attention": FIVE, "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0}}
    assert ropes(rope_parameters=nested) == ropes(rope_theta=500000.0)


def test_fault_10_both_dialects_at_once_agree_on_theta_or_are_refused() -> None:
    """A file may carry rope_scaling for older readers beside rope_parameters: what the latter says is not lost."""
    said = {"rope_theta": ..., "rope_parameters": {"rope_type": "linear", "rope_theta": 7000.0, **LINEAR}}
    try:
        both = ropes(**said, rope_scaling={"type": "linear", **LINEAR})
    except ConfigError as error:
        assert "rope_parameters" in str(error)
    else:
        assert both == ropes(**said)


def test_fault_10_dialects_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="rope_scaling"):
        ropes(rope_scaling={"type": "linear", **LINEAR}, rope_parameters={"rope_type": "yarn", **YARN})


def test_a_part_of_each_head_is_rotated_where_that_is_said() -> None:
    assert ropes(partial_rotary_factor=0.5)[0].dims == 4
    assert ropes(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5})[0].dims == 4
    assert ropes(partial_rotary_factor=None)[0].dims == 8


@pytest.mark.parametrize("family", ["mistral", "qwen3", "olmo2", "gpt_oss", "mixtral"])
def test_a_part_is_refused_where_the_reference_rotates_whole_heads(family: str) -> None:
    """Its networks ignore the key: whoever computed what the file says would give other numbers."""
    model = {"model_type": family}
    inside = {"rope_type": "default", "partial_rotary_factor": 0.5}
    for said in ({"partial_rotary_factor": 0.5}, {"rope_parameters": inside}, {"rope_scaling": inside}):
        with pytest.raises(UnsupportedModelError, match="rotates whole heads in this family"):
            ropes(**model, **said)
    whole = {"partial_rotary_factor": 1.0, "rope_parameters": {**inside, "partial_rotary_factor": 1}}
    assert [rope.dims for rope in ropes(**model, **whole)] == [rope.dims for rope in ropes(**model)]


@pytest.mark.parametrize("partial", [0, 0.01, 0.4, 1.25, 1e30, -0.5])
def test_a_part_that_is_no_even_number_of_elements_is_refused(partial: float) -> None:
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        ropes(partial_rotary_factor=partial)


# Absurd parameters.


@pytest.mark.parametrize("theta", [0, 0.0, -1.0, 1, 1e-300, 1e308, 10**400, True, "1e4", [], {}], ids=brief)
@pytest.mark.parametrize("dialect", ["top level", "rope_parameters"])
def test_a_theta_that_makes_no_sense_is_refused_by_name(dialect: str, theta: Any) -> None:
    said = {"rope_theta": theta}
    with pytest.raises(ConfigError, match="'rope_theta'"):
        ropes(**said if dialect == "top level" else {"rope_parameters": said})


def test_a_null_theta_is_the_familys_default() -> None:
    assert ropes(rope_theta=None) == ropes(rope_theta=...) == ropes(rope_theta=10000.0)


@pytest.mark.parametrize("value", [-1.0, True, "8", [], {}, 1e308, 10**400, float("nan")], ids=brief)
@pytest.mark.parametrize(
    ("name", "key"), [("linear", "factor"), *(("llama3", key) for key in LLAMA3), ("yarn", "beta_fast")]
)
def test_a_parameter_that_makes_no_sense_is_refused_by_name(name: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        ropes(rope_scaling={"type": name, **SCHEMES[name], key: value})


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor"])
def test_an_absent_parameter_of_llama3_is_named(key: str) -> None:
    parameters = {name: value for name, value in LLAMA3.items() if name != key}
    with pytest.raises(MissingKeyError, match=f"'{key}'"):
        ropes(rope_scaling={"type": "llama3", **parameters})


@pytest.mark.parametrize("value", [[], "yarn", 1, True, [{}]], ids=repr)
@pytest.mark.parametrize("dialect", ["rope_scaling", "rope_parameters"])
def test_rope_parameters_of_the_wrong_type_are_refused(dialect: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=dialect):
        ropes(**{dialect: value})


@pytest.mark.parametrize("value", [[1], "default", 1, True], ids=repr)
def test_nested_parameters_of_the_wrong_type_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"rope_parameters: .*full_attention"):
        ropes(rope_parameters={"full_attention": value})


# What depends on the length of the sequence.

LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2, 4.0, 8.0, 16.0],
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("dialect", ["rope_scaling", "rope_parameters"])
def test_dynamic_starts_from_the_models_length(dialect: str) -> None:
    """The reference does not read the original one that some files give."""
    said = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 7}
    scaling = ropes(**{dialect: said}, max_position_embeddings=256)[0].scaling
    assert scaling == DynamicScaling(factor=2.0, original_max_position_embeddings=256)
    assert ropes(**{dialect: said})[0].boundary is None


@pytest.mark.parametrize("name", ["longrope", "su"])
@pytest.mark.parametrize(
    ("said", "attention_factor"),
    [
        ({}, math.sqrt(1 + math.log(4) / math.log(64))),  # of the lengths' ratio
        ({"factor": 2.0}, math.sqrt(1 + math.log(2) / math.log(64))),
        ({"factor": 1.0}, 1.0),
        ({"attention_factor": 1.25, "factor": 2.0}, 1.25),
    ],
    ids=repr,
)
def test_longrope_has_two_lists_and_one_factor(name: str, said: dict[str, Any], attention_factor: float) -> None:
    rope = ropes(rope_scaling={**LONG, "rope_type": name, **said}, max_position_embeddings=256)[0]
    scaling = rope.scaling
    assert isinstance(scaling, LongRopeScaling)
    assert (scaling.short_factor, scaling.long_factor) == ((1.0, 1.5, 2.0, 2.5), (2, 4.0, 8.0, 16.0))
    assert scaling.attention_factor == pytest.approx(attention_factor)
    assert scaling.original_max_position_embeddings == rope.boundary == 64


@pytest.mark.parametrize(
    "change",
    [
        {"short_factor": [1.0] * 3},
        {"long_factor": [1.0] * 5},
        {"long_factor": [1.0, 1.0, 1.0, "1"]},
        {"long_factor": [1.0, 1.0, 1.0, True]},
        {"short_factor": [1.0, 0, 1.0, 1.0]},
        {"short_factor": [1.0, float("nan"), 1.0, 1.0]},
        {"short_factor": None},
    ],
    ids=repr,
)
def test_longrope_needs_a_number_for_each_pair(change: dict[str, Any]) -> None:
    [name] = change
    with pytest.raises(ConfigError, match=name):
        ropes(rope_scaling={**LONG, **change})


def test_longrope_needs_the_length_that_it_was_trained_at() -> None:
    said = {name: value for name, value in LONG.items() if not name.startswith("original")}
    with pytest.raises(MissingKeyError, match="original_max_position_embeddings"):
        ropes(rope_scaling=said)


@pytest.mark.parametrize("dialect", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "said",
    [
        {"rope_type": "default", "mrope_section": [16, 24, 24]},
        {"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24]},
        {"rope_type": "linear", "factor": 2.0, "beta_fast": 32, "original_max_position_embeddings": 4096},
        {"type": "linear", "rope_type": "linear", "factor": 2.0, "finetuned": True, "extrapolation_factor": 1},
        {"rope_type": "yarn", "factor": 2.0, "attn_factor": 1, "original_max_position_embeddings": 64.0},
    ],
)
def test_keys_of_a_scheme_that_is_not_in_force_have_no_effect(dialect: str, said: dict[str, Any]) -> None:
    plain = {key: said[key] for key in ("rope_type", "factor") if key in said}
    if said["rope_type"] == "yarn":
        plain["original_max_position_embeddings"] = 64
    read = [Config.from_dict(tiny.config(**{dialect: values})).layers for values in (said, plain)]
    assert read[0] == read[1]


def test_half_an_original_length_is_refused() -> None:
    said = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64.5}
    with pytest.raises(ConfigError, match="whole number"):
        Config.from_dict(tiny.config(rope_scaling=said))
