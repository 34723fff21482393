"""config.json becomes one frozen Config: every key read, known to be inert, or refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from reprlib import repr as brief
from typing import Any

import pytest
import tiny
from golden_cases import GOLDEN

from tinyllm.config.config import Config
from tinyllm.config.reach import Window
from tinyllm.config.reader import read_json_object
from tinyllm.config.tensors import tensor_shapes
from tinyllm.errors import ConfigError, MissingKeyError, TinyllmError, UnknownKeyError, UnsupportedModelError


def read(**overrides: Any) -> Config:
    return Config.from_dict(tiny.config(**overrides))


def test_the_config_keeps_hugging_faces_names() -> None:
    config = read()
    assert (config.model_type, config.vocab_size, config.hidden_size) == ("llama", 288, 32)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert (config.num_hidden_layers, config.intermediate_size) == (2, 48)
    assert (config.rms_norm_eps, config.rope_theta, config.tie_word_embeddings) == (1e-5, 10000.0, False)
    assert (config.eos_token_ids, config.dtype, config.quantization) == ((2,), "float32", None)
    assert len(config.layers) == 2
    assert not config.is_moe_layer(0)


def test_the_config_and_its_layers_are_frozen() -> None:
    config = read()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.layers[0].attention.reach = None  # type: ignore[misc]


def test_a_folder_and_its_config_json_read_alike(tmp_path: Path) -> None:
    tiny.write_json(tmp_path / "config.json", tiny.config())
    assert Config.from_json_file(tmp_path) == Config.from_json_file(str(tmp_path / "config.json")) == read()


@pytest.mark.parametrize("prefix", ["model.layers.1.self_attn", "layers.1", "model.layers.1.mlp.up_proj"])
def test_layer_at_finds_the_layer_of_a_name(prefix: str) -> None:
    config = read(model_type="qwen2", use_sliding_window=True, max_window_layers=1, sliding_window=7)
    assert config.layer_at(prefix) is config.layers[1]
    assert config.layers[1].attention.reach == Window(7)


@pytest.mark.parametrize("prefix", ["model.layers.2.mlp", "model.norm", "layers.", "model.layers.9999999999"])
def test_layer_at_refuses_a_name_outside_of_the_layers(prefix: str) -> None:
    with pytest.raises(ConfigError, match="2 layers"):
        read().layer_at(prefix)


# Fault 11: head_dim that is null, and heads that do not divide the width.


@pytest.mark.parametrize("head_dim", [..., None, 8])
def test_fault_11_head_dim_is_derived_where_it_is_null_or_absent(head_dim: Any) -> None:
    assert read(head_dim=head_dim) == read(head_dim=8)
    assert read(hidden_size=64, head_dim=None).head_dim == 64 // 4


def test_fault_11_heads_that_do_not_divide_the_width_name_both_fields() -> None:
    with pytest.raises(ConfigError, match=r"hidden_size \(64\) .* num_attention_heads \(7\)"):
        read(hidden_size=64, num_attention_heads=7, num_key_value_heads=7, head_dim=None)


def test_fault_11_a_head_dim_of_its_own_need_not_divide_the_width() -> None:
    config = read(hidden_size=64, num_attention_heads=7, num_key_value_heads=7, head_dim=6)
    assert tensor_shapes(config)["model.layers.0.self_attn.q_proj.weight"] == (42, 64)


def test_fault_11_key_value_heads_that_do_not_divide_the_heads_name_both_fields() -> None:
    with pytest.raises(ConfigError, match=r"num_attention_heads \(4\) .* num_key_value_heads \(3\)"):
        read(num_key_value_heads=3)


@pytest.mark.parametrize("head_dim", [1, 7])
def test_fault_11_an_odd_head_dim_cannot_be_rotated(head_dim: int) -> None:
    with pytest.raises(ConfigError, match=f"head_dim {head_dim}"):
        read(head_dim=head_dim)


# Fault 12: absent keys.


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "model_type"],
)
def test_fault_12_an_absent_key_without_default_is_named_with_the_file(tmp_path: Path, key: str) -> None:
    tiny.write_json(tmp_path / "config.json", tiny.config(**{key: ...}))
    with pytest.raises(MissingKeyError) as failure:
        Config.from_json_file(tmp_path)
    assert f"'{key}'" in str(failure.value)
    assert str(tmp_path / "config.json") in str(failure.value)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("model_type", "heads", "expected"),
    [("llama", 4, 4), ("llama", 16, 16), ("mistral", 16, 8), ("qwen2", 32, 32), ("qwen3", 64, 32)],
)
def test_fault_12_absent_key_value_heads_are_the_familys_own_default(
    model_type: str, heads: int, expected: int
) -> None:
    config = read(model_type=model_type, num_attention_heads=heads, num_key_value_heads=..., hidden_size=128)
    assert config.num_key_value_heads == expected


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_fault_12_null_key_value_heads_are_as_many_as_the_heads(model_type: str) -> None:
    assert read(model_type=model_type, num_key_value_heads=None).num_key_value_heads == 4


@pytest.mark.parametrize(
    ("model_type", "attribute", "expected"),
    [
        ("llama", "max_position_embeddings", 2048),
        ("mistral", "max_position_embeddings", 131072),
        ("qwen2", "max_position_embeddings", 32768),
        ("qwen3", "max_position_embeddings", 32768),
        ("llama", "rms_norm_eps", 1e-6),
        ("llama", "tie_word_embeddings", False),
        ("llama", "rope_theta", 10000.0),
        ("llama", "head_dim", 8),
        ("mistral", "head_dim", 8),
        ("qwen2", "head_dim", 8),
        ("qwen3", "head_dim", 128),
    ],
)
def test_fault_12_other_absent_keys_are_the_familys_own_default(
    model_type: str, attribute: str, expected: object
) -> None:
    assert getattr(read(model_type=model_type, **{attribute: ...}), attribute) == expected


# Fault 02: tying said in one place or another.


@pytest.mark.parametrize(
    ("inner", "outer", "tied"),
    [
        (True, ..., True),
        (False, ..., False),
        (..., True, True),
        (..., ..., True),
        (False, True, True),
        (True, False, False),
    ],
)
def test_fault_02_tying_is_said_by_the_outer_config_else_by_the_nested_one_else_it_is_so(
    inner: Any, outer: Any, tied: bool
) -> None:
    text = tiny.config(model_type="mistral", tie_word_embeddings=inner)
    values = {"model_type": "mistral3", "text_config": text, "tie_word_embeddings": outer}
    config = Config.from_dict({key: value for key, value in values.items() if value is not ...})
    assert config.tie_word_embeddings is tied


# Windows.


@pytest.mark.parametrize(("said", "reach"), [(..., Window(4096)), (None, None), (7, Window(7))])
def test_mistrals_window_is_4096_when_absent_and_none_when_null(said: Any, reach: Window | None) -> None:
    layers = read(model_type="mistral", sliding_window=said).layers
    assert {layer.attention.reach for layer in layers} == {reach}


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_qwens_window_holds_only_where_it_is_used_and_from_the_layer_on_that_is_said(model_type: str) -> None:
    said: dict[str, Any] = {"model_type": model_type, "sliding_window": 7, "num_hidden_layers": 4}
    reaches = [layer.attention.reach for layer in read(**said, use_sliding_window=True, max_window_layers=1).layers]
    assert reaches == [None, *[Window(7)] * 3]
    assert {layer.attention.reach for layer in read(**said, max_window_layers=1).layers} == {None}


def test_layer_types_override_qwens_rule() -> None:
    kinds = ["sliding_attention", "full_attention"]
    config = read(model_type="qwen2", use_sliding_window=True, sliding_window=7, layer_types=kinds)
    assert [layer.attention.reach for layer in config.layers] == [Window(7), None]


@pytest.mark.parametrize(
    "kinds", [["sliding_attention"] * 2, ["chunked_attention"] * 2, ["full_attention"], [{}, []], "full_attention"]
)
def test_layer_types_that_contradict_the_rest_are_refused(kinds: Any) -> None:
    with pytest.raises(ConfigError, match="layer_types"):
        read(model_type="qwen2", layer_types=kinds)


def test_a_window_in_a_family_without_one_is_refused_by_name() -> None:
    with pytest.raises(UnknownKeyError, match="sliding_window = 4096"):
        read(sliding_window=4096)
    assert read(sliding_window=None) == read()


# What is unknown.


@pytest.mark.parametrize(
    ("model_type", "nearest"),
    [
        *((name, "llama") for name in ("lama", "llama17", "LLAMA", "../llama")),
        ("gemma3n", "gemma3"),
        ("mistral3v", "mistral3"),
        ("tinylm", "tinyllm"),
    ],
)
def test_an_unknown_model_type_is_refused_with_the_nearest_known(model_type: str, nearest: str) -> None:
    """Of families, of multimodal models and of the native schema."""
    with pytest.raises(UnsupportedModelError, match=rf"the nearest that it does: (.*, )?{nearest}\b"):
        read(model_type=model_type)


def test_where_none_is_near_all_are_named_and_none_is_called_so() -> None:
    with pytest.raises(UnsupportedModelError, match=r"tinyllm runs; it does: apertus, .*, youtu$"):
        read(model_type="zzz")


@pytest.mark.parametrize("activation", ["quick_gelu", "tanh", "relu6", "", "SiLU"])
def test_another_activation_is_refused_by_name(activation: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"activation '{activation}'"):
        read(hidden_act=activation)


@pytest.mark.parametrize(
    ("said", "activation"),
    [
        ("swish", "silu"),
        ("gelu", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"),
        ("relu2", "relu2"),
    ],
)
def test_names_of_one_activation_are_one(said: str, activation: str) -> None:
    assert [layer.feed_forward.activation for layer in read(hidden_act=said).layers] == [activation] * 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("num_experts", 8),
        ("logit_scale", 0.5),
        ("is_encoder_decoder", True),
        ("use_mrope", True),
        ("qk_layernorm", True),
    ],
)
def test_a_key_that_would_change_the_numbers_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(UnknownKeyError, match=key):
        read(**{key: value})


def test_keys_without_effect_change_nothing() -> None:
    inert = {"use_cache": True, "transformers_version": "4.0", "attention_dropout": 0.1, "temperature": 0.6}
    assert read(**inert, is_encoder_decoder=False, pretraining_tp=1) == read()


# Absurd values.

ABSURD = {
    "zero": 0,
    "negative": -1,
    "a float": 8.0,
    "a fraction": 0.5,
    "true": True,
    "false": False,
    "a string": "8",
    "null": None,
    "a list": [8],
    "an object": {"a": 8},
    "a billion": 10**9,
    "beyond 64 bits": 10**400,
    "beyond a float": 1e308,
    "nan": float("nan"),
    "infinity": float("inf"),
    "minus infinity": float("-inf"),
}
SIZES = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
NUMBERS = [*SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta"]


@pytest.mark.parametrize("value", ABSURD.values(), ids=ABSURD.keys())
@pytest.mark.parametrize("key", NUMBERS)
def test_an_absurd_number_is_refused_by_name_or_read_as_it_is(key: str, value: Any) -> None:
    try:
        config = read(**{key: value})
    except ConfigError as error:
        assert key in str(error)
        assert "\n" not in str(error)
        assert len(str(error)) < 700
    else:
        assert value in (None, getattr(config, key))  # null, where it is allowed, has a meaning of its own


@pytest.mark.parametrize("value", [0, -1, 8.0, True, "8", None, [8], 10**400], ids=brief)
@pytest.mark.parametrize("key", SIZES)
def test_a_size_is_a_positive_whole_number(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"'{key}'"):
        read(**{key: value})


def test_a_billion_layers_are_refused_before_anything_is_made_of_them() -> None:
    with pytest.raises(ConfigError, match="'num_hidden_layers' is 1000000000"):
        read(num_hidden_layers=10**9)


@pytest.mark.parametrize("value", ["yes", 1, 0, None, [], {}], ids=repr)
@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
def test_a_flag_is_true_or_false(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"'{key}'"):
        read(**{key: value})


@pytest.mark.parametrize("value", ["2", -1, 2.0, True, {}, [2, "3"], [2, None], [[2]], [True]], ids=repr)
def test_an_eos_token_is_an_id_or_a_list_of_them(value: Any) -> None:
    with pytest.raises(ConfigError, match="eos_token_id"):
        read(eos_token_id=value)


@pytest.mark.parametrize(("value", "ids"), [(..., ()), (None, ()), (7, (7,)), ([1, 7, 1], (1, 7)), ([], ())])
def test_eos_tokens_are_read_once_each(value: Any, ids: tuple[int, ...]) -> None:
    assert read(eos_token_id=value).eos_token_ids == ids


@pytest.mark.parametrize("value", [None, [], "llama", 1, True, {}, [tiny.config()]], ids=lambda value: str(value)[:9])
def test_a_nested_config_of_the_wrong_type_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="text_config"):
        Config.from_dict({"model_type": "mistral3", "text_config": value})


@pytest.mark.parametrize("value", [None, 1, [], {}, ["llama"], True, {"llama": 1}], ids=repr)
def test_a_model_type_that_is_no_string_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="model_type"):
        read(model_type=value)


# Fault 52: Python named in config.json.


@pytest.mark.parametrize("key", ["model_file", "auto_map"])
def test_fault_52_a_python_file_that_config_json_names_is_never_run(tmp_path: Path, key: str) -> None:
    marker = tmp_path / "marker"
    for name in ("custom.py", "modeling_custom.py", "configuration_custom.py"):
        (tmp_path / name).write_text(f"open({str(marker)!r}, 'w').close()")
    value = "custom.py" if key == "model_file" else {"AutoConfig": "configuration_custom.C", "AutoModel": "custom.M"}
    tiny.write_json(tmp_path / "config.json", tiny.config(**{key: value}))
    try:
        Config.from_json_file(tmp_path)
    except TinyllmError as error:
        assert key in str(error)
    assert not marker.exists()


OFF = [
    ("qwen3_moe", {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}),
    ("gpt2", {"n_special": 0, "predict_special_tokens": True}),
    (
        "starcoder2",
        {
            "attention_softmax_in_fp32": True,
            "scale_attention_softmax_in_fp32": True,
            "scale_attn_weights": True,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    ("phimoe", {"expert_dropout": 0.0}),
    ("gemma4_text", {"expert_intermediate_size": None}),
    ("llama", {"some_scale": 1.0, "use_something": False, "something_size": 0, "something": None, "list": []}),
    (
        "llama",
        {"_anything": 7, "my_dropout": 0.3, "training_loss_weight": 2, "a_version": "1", "a_path": "x"},
    ),
]


def golden(model_type: str) -> dict[str, Any]:
    found = (read_json_object(file) for file in sorted(GOLDEN.glob("*/config.json")))
    return next(values for values in found if values["model_type"] == model_type)


@pytest.mark.parametrize(("model_type", "keys"), OFF, ids=lambda value: value if isinstance(value, str) else "")
def test_keys_that_switch_nothing_on_do_not_refuse_a_model(model_type: str, keys: dict[str, Any]) -> None:
    values = golden(model_type)
    assert Config.from_dict({**values, **keys}) == Config.from_dict(values)


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("qwen3_moe", {"qkv_bias": True}),
        ("qwen3_moe", {"use_qk_norm": False}),
        ("starcoder2", {"scale_attn_weights": False}),
        ("llama", {"some_scale": 2.0}),
        ("llama", {"some_scale": 0}),
        ("llama", {"use_something": True}),
    ],
    ids=str,
)
def test_keys_that_switch_something_on_refuse_it(model_type: str, keys: dict[str, Any]) -> None:
    with pytest.raises((UnknownKeyError, UnsupportedModelError), match=next(iter(keys))):
        Config.from_dict({**golden(model_type), **keys})
