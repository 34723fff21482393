"""How config.json says that weights are packed: MLX's formats layer by layer, and a refusal for all others."""

from __future__ import annotations

from typing import Any

import pytest
import tiny

from tinyllm.config.config import Config
from tinyllm.config.quantization import QuantFormat, QuantizationConfig
from tinyllm.errors import ConfigError, TinyllmError, UnknownKeyError, UnsupportedQuantizationError

DEFAULT = {"group_size": 64, "bits": 4}
MXFP4 = {"mode": "mxfp4", "bits": 4, "group_size": 32}
UP = "model.layers.0.mlp.up_proj"
DOWN = "model.layers.0.mlp.down_proj"


def read(packing: Any, key: str = "quantization", **overrides: Any) -> QuantizationConfig:
    quantization = Config.from_dict(tiny.config(**{key: packing}, **overrides)).quantization
    assert quantization is not None
    return quantization


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_the_format_is_read_from_either_key(key: str) -> None:
    assert read(DEFAULT, key).format_of(UP) == QuantFormat(bits=4, group_size=64, mode="affine")


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_every_affine_format_of_mlx_is_known(bits: int, group_size: int) -> None:
    assert read({"bits": bits, "group_size": group_size}).default == QuantFormat(bits, group_size)


@pytest.mark.parametrize(("mode", "bits", "group_size"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_every_floating_point_format_of_mlx_is_known(mode: str, bits: int, group_size: int) -> None:
    said = {"mode": mode, "bits": bits, "group_size": group_size}
    assert read(said).default == QuantFormat(bits, group_size, mode)


# Fault 05: overrides of single layers, under names that are changed on loading.


def test_fault_05_each_layer_gets_its_own_bits_group_and_mode() -> None:
    quantization = read(
        {
            **MXFP4,
            UP: {"bits": 6, "group_size": 64},
            DOWN: {"bits": 8, "group_size": 32},
            "model.embed_tokens": False,
            "lm_head": True,
        }
    )
    assert quantization.format_of(UP) == QuantFormat(6, 64, "affine")
    assert quantization.format_of(DOWN) == QuantFormat(8, 32, "affine")
    assert quantization.format_of("model.embed_tokens") is None
    assert quantization.format_of("lm_head") == QuantFormat(4, 32, "mxfp4")
    assert quantization.format_of("model.layers.1.mlp.up_proj") == QuantFormat(4, 32, "mxfp4")


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model."])
def test_fault_05_an_override_follows_its_tensor_to_the_canonical_name(prefix: str) -> None:
    packing = {
        **DEFAULT,
        f"{prefix}layers.0.mlp.up_proj": {"bits": 8, "group_size": 32},
        "language_model.lm_head": False,
    }
    text = tiny.config(model_type="mistral")
    config = Config.from_dict({"model_type": "mistral3", "text_config": text, "quantization": packing})
    assert config.quantization is not None
    assert config.quantization.format_of(UP) == QuantFormat(8, 32)
    assert config.quantization.format_of("lm_head") is None
    assert config.canonical_name(f"{prefix}layers.0.mlp.up_proj.weight") == f"{UP}.weight"


def test_fault_05_an_override_that_leaves_a_value_out_takes_mlxs_default() -> None:
    quantization = read({"bits": 8, "group_size": 32, UP: {"bits": 6}, DOWN: {}})
    assert quantization.format_of(UP) == QuantFormat(6, 64)
    assert quantization.format_of(DOWN) == QuantFormat(4, 64)


def test_null_is_mlxs_default_as_mixed_recipes_of_mlx_lm_write_it() -> None:
    """`mlx_lm.convert -q --quant-predicate mixed_3_6` writes this."""
    packing = {"bits": 4, "group_size": 128, UP: {"group_size": None, "bits": 3, "mode": "affine"}}
    assert read(packing).format_of(UP) == QuantFormat(3, 64)
    assert read({**packing, UP: {"group_size": None, "bits": None, "mode": "mxfp8"}}).format_of(UP) == QuantFormat(
        8, 32, "mxfp8"
    )
    assert read({"bits": 4, "group_size": None}).default == QuantFormat(4, 64)


# Fault 06: the formats of other libraries; tests/checkpoint/test_forms.py has those that are read.


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


@pytest.mark.parametrize(
    "packing",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        *({"quant_method": name, "bits": 4} for name in "aqlm auto-round bitnet eetq higgs hqq quanto spqr".split()),
        *({"quant_method": name} for name in "fp_quant nvfp4 quark torchao vptq".split()),
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv", "zero_point": True},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False},
        {"quant_method": "awq", "bits": 8},
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "gptq", "bits": 4, "group_size": 16},
        {"quant_method": "gptq", "bits": 4, "group_size": 0},
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*down.*": {}}},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "fp8", "expert_dtype": "fp4"},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "compressed-tensors", "config_groups": {}},
        compressed("marlin-24", num_bits=4),
        compressed("nvfp4-pack-quantized", num_bits=4, type="float"),
        compressed("pack-quantized", num_bits=3, group_size=128),
        compressed("pack-quantized", num_bits=4, group_size=16),
        compressed("int-quantized", num_bits=8, group_size=128),
        compressed("float-quantized", num_bits=4, type="float"),
        {**compressed("int-quantized"), "sparsity_config": {"format": "sparse-24-bitmask"}},
        {**compressed("int-quantized"), "transform_config": {"R1": {}}},
        {
            **compressed("pack-quantized"),
            "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}},
        },
        {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        {"quant_method": "modelopt"},
        {"producer": {"name": "another"}},
        {"quant_method": ["awq"], "bits": 4},
        {"quant_method": {}, "bits": 4},
    ],
    ids=repr,
)
def test_fault_06_another_librarys_format_is_refused_in_one_line(packing: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedQuantizationError) as failure:
        read(packing, "quantization_config")
    message = str(failure.value)
    assert str(packing.get("quant_method") or "unnamed").casefold() in message.casefold()
    assert str(packing.get("quant_algo", "")) in message
    assert message.startswith("config.json")
    assert "\n" not in message
    assert len(message) < 250


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "mxfp4", "modelopt"])
def test_a_key_that_nobody_knows_is_refused(method: str) -> None:
    with pytest.raises(UnknownKeyError, match="surprise"):
        read({"quant_method": method, "quant_algo": "FP8", "bits": 4, "surprise": 1}, "quantization_config")


def test_of_gpt_oss_own_blocks_experts_alone_are_packed() -> None:
    quantization = read({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "quantization_config")
    assert quantization.format_of("model.layers.0.mlp.experts.up_proj") == QuantFormat(4, 32, "mxfp4")
    assert quantization.format_of("model.layers.0.self_attn.q_proj") is None


def test_fault_05_an_override_of_a_fused_matrix_is_one_of_each_part() -> None:
    qkv = "model.layers.0.self_attn.qkv_proj"
    quantization = read({**DEFAULT, qkv: {"bits": 8, "group_size": 32}}, model_type="phi3", pad_token_id=0)
    for part in "qkv":
        assert quantization.format_of(f"model.layers.0.self_attn.{part}_proj") == QuantFormat(8, 32)
    assert quantization.format_of("model.layers.0.self_attn.o_proj") == QuantFormat(4, 64)


# Absurd values.


@pytest.mark.parametrize(
    "packing",
    [
        {"bits": 7, "group_size": 64},
        {"bits": 4, "group_size": 48},
        {"bits": 4, "group_size": 0},
        {"bits": "4", "group_size": 64},
        {"bits": 4.0, "group_size": 64},
        {"bits": True, "group_size": 64},
        {"bits": 10**400, "group_size": 64},
        {**DEFAULT, "mode": "int4"},
        {**DEFAULT, "mode": None},
        {**DEFAULT, "mode": ["affine"]},
        {**DEFAULT, "mode": {}},
        {**DEFAULT, "mode": "mxfp4", "bits": 8},
        {**DEFAULT, "surprise": 3},
        {**DEFAULT, UP: {"bits": 4, "surprise": 3}},
        {**DEFAULT, UP: {"bits": "x"}},
        {**DEFAULT, UP: 8},
        {**DEFAULT, UP: None},
        {**DEFAULT, UP: {"mode": []}},
        [],
        "4bit",
        4,
        True,
    ],
    ids=repr,
)
def test_a_format_that_makes_no_sense_is_refused_by_name(packing: Any) -> None:
    with pytest.raises(TinyllmError, match="quanti") as failure:
        read(packing)
    assert isinstance(failure.value, (ConfigError, UnsupportedQuantizationError))
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("packing", [None, ...])
def test_nothing_said_is_nothing_packed(packing: Any) -> None:
    assert Config.from_dict(tiny.config(quantization=packing)).quantization is None


def test_two_keys_that_stand_for_different_formats_are_refused_and_equal_ones_are_not() -> None:
    four, eight = {"bits": 4, "group_size": 64}, {"bits": 8, "group_size": 64}
    same = Config.from_dict(tiny.config(quantization=four, quantization_config={**four, "mode": "affine"}))
    assert same.quantization is not None and same.quantization.default.bits == 4
    with pytest.raises(ConfigError, match="quantization and quantization_config contradict"):
        Config.from_dict(tiny.config(quantization=four, quantization_config=eight))


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "gptq", "method": "gptq", "format": "gptq", "checkpoint_format": "gptq", "bits": 4},
        {"quant_method": "awq", "method": "awq", "format": "gemm", "checkpoint_format": "gemm", "bits": 4},
        {"quant_method": "fp8", "weight_per_tensor": False, "act_per_tensor": False},
    ],
    ids=lambda said: said["quant_method"],
)
def test_newer_files_say_the_same_with_more_keys(said: dict[str, Any]) -> None:
    older = {key: said[key] for key in ("quant_method", "bits") if key in said}
    read = [Config.from_dict(tiny.config(quantization_config=values)).quantization for values in (said, older)]
    assert read[0] == read[1]


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "gptq", "method": "other", "bits": 4},
        {"quant_method": "awq", "checkpoint_format": "gemv", "bits": 4},
        {"quant_method": "fp8", "weight_per_tensor": True},
    ],
    ids=lambda said: said["quant_method"],
)
def test_newer_keys_that_ask_for_something_else_are_refused(said: dict[str, Any]) -> None:
    with pytest.raises(TinyllmError):
        Config.from_dict(tiny.config(quantization_config=said))
