"""The tensors of the files are those that config.json asks for, or one line says all that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny

from tinyllm.checkpoint.safetensors_header import BITS, TensorInfo
from tinyllm.checkpoint.tensor_table import StoredTensor
from tinyllm.checkpoint.verify import check_tensors
from tinyllm.config.config import Config
from tinyllm.config.tensors import tensor_shapes
from tinyllm.errors import TensorMismatchError

FOLDER = Path("model")
UP = "model.layers.0.mlp.up_proj"
PACKED = {"hidden_size": 64, "intermediate_size": 64, "quantization": {"group_size": 32, "bits": 4}}


def info(name: str, shape: tuple[int, ...], dtype: str = "BF16") -> StoredTensor:
    size = BITS[dtype] // 8
    for n in shape:
        size *= n
    return StoredTensor((TensorInfo(name, FOLDER / "model.safetensors", dtype, shape, 0, size),))


def tensors_of(config: Config) -> dict[str, StoredTensor]:
    return {name: info(name, shape) for name, shape in tensor_shapes(config).items()}


def pack(tensors: dict[str, StoredTensor], module: str, bits: int = 4, group_size: int = 32) -> None:
    rows, columns = tensors[f"{module}.weight"].shape
    tensors[f"{module}.weight"] = info("", (rows, columns * bits // 32), "U32")
    for part in ("scales", "biases"):
        tensors[f"{module}.{part}"] = info("", (rows, columns // group_size))


def read(**overrides: Any) -> tuple[Config, dict[str, StoredTensor]]:
    config = Config.from_dict(tiny.config(**overrides))
    return config, tensors_of(config)


def refusal(tensors: dict[str, StoredTensor], config: Config) -> str:
    with pytest.raises(TensorMismatchError) as failure:
        check_tensors(tensors, config, FOLDER)
    message = str(failure.value)
    assert message.startswith("model: ")
    assert message.isprintable()
    return message


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_tensors_that_a_family_needs_fit(model_type: str) -> None:
    config, tensors = read(model_type=model_type)
    assert check_tensors(tensors, config, FOLDER) == frozenset()


def test_a_family_has_the_biases_and_norms_that_it_has() -> None:
    assert f"{UP}.bias" in tensor_shapes(read(mlp_bias=True)[0])
    attention = "model.layers.1.self_attn"
    llama, biased, qwen2, qwen3 = (
        {name.removeprefix(f"{attention}.") for name in tensor_shapes(read(**said)[0]) if name.startswith(attention)}
        for said in ({}, {"attention_bias": True}, {"model_type": "qwen2"}, {"model_type": "qwen3"})
    )
    assert biased - llama == {"q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"}
    assert qwen2 - llama == {"q_proj.bias", "k_proj.bias", "v_proj.bias"}
    assert qwen3 - llama == {"q_norm.weight", "k_norm.weight"}


def test_all_that_is_wrong_is_told_at_once() -> None:
    config, tensors = read()
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.lora_A"] = info("", (2, 2))
    tensors[f"{UP}.weight"] = info("", (3, 5))
    tensors["lm_head.weight"] = info("", (288, 32), "U32")
    message = refusal(tensors, config)
    assert "missing 1: model.norm.weight" in message
    assert "surplus 1: model.layers.0.self_attn.q_proj.lora_A" in message
    assert f"mis-shaped 1: {UP}.weight is [3, 5], not [48, 32]" in message
    assert "lm_head.weight is U32, not F32 or F16 or BF16" in message


def test_the_same_fault_of_many_layers_is_told_once() -> None:
    config, tensors = read(num_hidden_layers=12)
    for i in (0, 1, 2, 3, 7, 10, 11):
        del tensors[f"model.layers.{i}.mlp.down_proj.weight"]
        tensors[f"model.layers.{i}.mlp.up_proj.weight"] = info("", (1, 1))
    message = refusal(tensors, config)
    assert "missing 7: model.layers.{0-3,7,10-11}.mlp.down_proj.weight" in message
    assert "mis-shaped 7: model.layers.{0-3,7,10-11}.mlp.up_proj.weight is [1, 1], not [48, 32]" in message


def test_thousands_of_unknown_names_are_cut_to_a_few() -> None:
    config, tensors = read()
    tensors |= {f"adapter.{i}": info("", (1,)) for i in range(5000)}
    message = refusal(tensors, config)
    assert "surplus 5000: " in message
    assert "and 4994 more" in message
    assert len(message) < 1000


@pytest.mark.parametrize("name", ["model.layers." + "9" * 5000 + ".x", "{}", "model.layers.1.{}", "\n", ".layers.1."])
def test_a_strange_name_is_surplus_and_no_crash(name: str) -> None:
    config, tensors = read()
    tensors[name] = info("", (1,))
    assert "surplus 1: " in refusal(tensors, config)


def test_a_recomputed_table_is_left_out() -> None:
    config, tensors = read()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors[name] = info("", (4,), "F32")
    assert check_tensors(tensors, config, FOLDER) == {name}


# Fault 02: tying.


@pytest.mark.parametrize("spare", ["lm_head.weight", "lm_head.scales"])
def test_fault_02_a_spare_head_of_a_tied_model_is_left_out(spare: str) -> None:
    config, tensors = read(tie_word_embeddings=True)
    assert "lm_head.weight" not in tensors
    tensors[spare] = info("", (288, 32))
    assert check_tensors(tensors, config, FOLDER) == {spare}


def test_fault_02_an_untied_model_without_a_head_is_refused() -> None:
    config, tensors = read()
    del tensors["lm_head.weight"]
    assert "missing 1: lm_head.weight" in refusal(tensors, config)


# Packed matrices.


def test_packed_and_dense_matrices_stand_side_by_side() -> None:
    config, tensors = read(**PACKED)
    for module in (UP, "model.embed_tokens", "lm_head"):
        pack(tensors, module)
    assert check_tensors(tensors, config, FOLDER) == frozenset()


def test_fault_05_a_layer_packed_otherwise_than_config_json_says_is_named() -> None:
    config, tensors = read(**PACKED)
    pack(tensors, UP, bits=8)
    assert f"{UP}.weight is [64, 16], not [64, 8]" in refusal(tensors, config)
    config, tensors = read(**PACKED)
    pack(tensors, UP, group_size=64)
    assert f"{UP}.scales is [64, 1], not [64, 2]" in refusal(tensors, config)


@pytest.mark.parametrize("quantization", [..., {"group_size": 32, "bits": 4, UP: False}])
def test_a_matrix_packed_against_config_json_is_named(quantization: Any) -> None:
    config, tensors = read(**{**PACKED, "quantization": quantization})
    pack(tensors, UP)
    assert f"{UP} is packed, but config.json says that it is not" in refusal(tensors, config)
    del tensors[f"{UP}.weight"]
    assert f"{UP} is packed, but config.json says that it is not" in refusal(tensors, config)


@pytest.mark.parametrize("part", ["weight", "scales", "biases"])
def test_a_packed_matrix_needs_all_its_parts(part: str) -> None:
    config, tensors = read(**PACKED)
    pack(tensors, UP)
    del tensors[f"{UP}.{part}"]
    refusal(tensors, config)


@pytest.mark.parametrize(
    ("part", "dtype"), [("weight", "BF16"), ("weight", "U8"), ("scales", "U32"), ("scales", "U8"), ("biases", "U16")]
)
def test_the_parts_of_a_packed_matrix_are_of_their_types(part: str, dtype: str) -> None:
    config, tensors = read(**PACKED)
    pack(tensors, UP)
    tensors[f"{UP}.{part}"] = info("", tensors[f"{UP}.{part}"].shape, dtype)
    assert f"{UP}.{part} is {dtype}, not " in refusal(tensors, config)


def test_groups_that_do_not_divide_the_columns_are_refused() -> None:
    config, tensors = read(**{**PACKED, "hidden_size": 48})
    pack(tensors, UP)
    assert f"{UP} has 48 columns, which groups of 32 do not divide" in refusal(tensors, config)


@pytest.mark.parametrize("name", ["model.norm.scales", "model.layers.0.input_layernorm.scales", f"{UP}.bias.scales"])
def test_scales_of_what_is_no_matrix_are_surplus(name: str) -> None:
    config, tensors = read(**PACKED, mlp_bias=True)
    tensors[name] = info("", (64, 2))
    assert f"surplus 1: {name}" in refusal(tensors, config)


@pytest.mark.parametrize("dtype", ["U8", "U16", "U32"])
def test_a_dense_tensor_of_whole_numbers_is_refused(dtype: str) -> None:
    config, tensors = read()
    tensors["model.norm.weight"] = info("", (32,), dtype)
    assert f"model.norm.weight is {dtype}, not F32 or F16 or BF16" in refusal(tensors, config)
