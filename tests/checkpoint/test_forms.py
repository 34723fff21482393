"""Matrices of other libraries' files give the numbers that these stand for (fault 06).

Each is packed here with numpy, by the library's published layout, and written out dense beside it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm._mx import mx
from tinyllm.anatomy.subject import open_subject
from tinyllm.checkpoint import weights
from tinyllm.checkpoint.contents import read_contents
from tinyllm.checkpoint.forms import TYPES_OF_PARTS, MadeTensor
from tinyllm.checkpoint.quantization import make
from tinyllm.checkpoint.safetensors_header import BITS, TensorInfo, read_safetensors_header
from tinyllm.checkpoint.summary import summarize
from tinyllm.checkpoint.tensor_table import READABLE, gather
from tinyllm.checkpoint.verify import check_tensors
from tinyllm.checkpoint.weights import DenseWeight, QuantizedWeight, WeightStore
from tinyllm.config.config import Config
from tinyllm.config.quantization import QuantFormat
from tinyllm.errors import CheckpointError, TensorMismatchError, UnsupportedQuantizationError
from tinyllm.model.transformer import ModelForCausalLM
from tinyllm.ops.features import ModelFeatures

Array = npt.NDArray[Any]
Tensors = dict[str, Array]
Packer = Callable[[np.random.Generator, int, int], tuple[Tensors, Array]]

SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 96}
UP = "model.layers.0.mlp.up_proj"
TYPES = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64", "int8": "I8", "uint8": "U8"}
TYPES |= {"uint16": "BF16"}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Fp8(np.ndarray):
    """Bytes that the file calls numbers of e4m3."""


def packed_along(fields: Array, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Array:
    """Pack so many fields of an axis into a word, the first (or the first of the `order`) lowest: int32."""
    each = 32 // bits
    fields = np.moveaxis(fields.astype(np.uint64), axis, -1)
    fields = fields.reshape(*fields.shape[:-1], -1, each)[..., list(order or range(each))]
    words = sum(fields[..., i] << np.uint64(bits * i) for i in range(each))
    assert isinstance(words, np.ndarray)
    return np.ascontiguousarray(np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis))


def drawn(
    random: np.random.Generator, rows: int, columns: int, group: int, bits: int, zeros: tuple[int, int]
) -> tuple[Array, Array, Array, Array]:
    """Draw fields (rows, columns), scales and zeros (rows, groups), and what they stand for."""
    groups = 1 if group == -1 else columns // group
    fields = random.integers(0, 2**bits, (rows, columns))
    scales = (random.uniform(0.5, 1.5, (rows, groups)) * 2.0**-bits / 4).astype(np.float16)
    zero = random.integers(*zeros, (rows, groups))
    wide = columns // groups
    dense = np.repeat(scales.astype(np.float64), wide, 1) * (fields - np.repeat(zero, wide, 1))
    return fields, scales, zero, dense.astype(np.float32)


def gptq(bits: int, group: int, *, offset: int = 1) -> Packer:
    def pack(random: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, Array]:
        # of version 1 the zero of zero is stored as -1, the highest number
        fields, scales, zeros, dense = drawn(random, rows, columns, group, bits, (0, 2**bits))
        return {
            ".qweight": packed_along(fields.T, bits, 0),
            ".qzeros": packed_along((zeros.T - offset) % 2**bits, bits, 1),
            ".scales": np.ascontiguousarray(scales.T),
            ".g_idx": (np.arange(columns) // (columns if group == -1 else group)).astype(np.int32),
        }, dense

    return pack


def awq(group: int) -> Packer:
    def pack(random: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, Array]:
        fields, scales, zeros, dense = drawn(random, rows, columns, group, 4, (0, 16))
        return {
            ".qweight": packed_along(fields.T, 4, 1, AWQ_ORDER),
            ".qzeros": packed_along(zeros.T, 4, 1, AWQ_ORDER),
            ".scales": np.ascontiguousarray(scales.T),
        }, dense

    return pack


def ints(bits: int, group: int, *, symmetric: bool) -> Packer:
    """What compressed-tensors calls pack-quantized: signed numbers, moved up by half of the range."""

    def pack(random: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, Array]:
        middle = 2 ** (bits - 1)
        zeros = (middle, middle + 1) if symmetric else (0, 2**bits)
        fields, scales, zero, dense = drawn(random, rows, columns, group, bits, zeros)
        parts = {
            ".weight_packed": packed_along(fields, bits, 1),
            ".weight_scale": scales,
            ".weight_shape": np.array([rows, columns], np.int64),
        }
        return parts if symmetric else parts | {".weight_zero_point": packed_along(zero, bits, 0)}, dense

    return pack


def int8(*, symmetric: bool, by_row: bool = True) -> Packer:
    def pack(random: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, Array]:
        fields, scales, zero, dense = drawn(random, rows, columns, -1, 8, (128, 129) if symmetric else (0, 256))
        parts = {".weight": (fields - 128).astype(np.int8), ".weight_scale": scales}
        if not by_row:
            parts[".weight_scale"] = scales[0]
            dense = np.float32(scales[0, 0]) * (fields - 128).astype(np.float32)
        return parts if symmetric else parts | {".weight_zero_point": (zero - 128).astype(np.int8)}, dense

    return pack


def e4m3(codes: Array) -> Array:
    """One bit of sign, four of exponent (of bias 7), three of mantissa."""
    sign, exponent, mantissa = codes >> 7, (codes >> 3) & 15, (codes & 7).astype(np.float64)
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where(sign == 1, -value, value)


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4(random: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, Array]:
    """Two numbers of e2m1 a byte, the low half first, times a power of two for each 32."""
    codes = random.integers(0, 16, (rows, columns))
    exponents = random.integers(118, 124, (rows, columns // 32))
    dense = FP4[codes] * np.repeat(2.0 ** (exponents - 127), 32, 1)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return {".weight_packed": packed, ".weight_scale": exponents.astype(np.uint8)}, dense.astype(np.float32)


def fp8(
    scale_shape: Callable[[int, int], tuple[int, ...]],
    leaf: str = ".weight_scale",
    block: tuple[int, int] = (48, 80),
) -> Packer:
    """`scale_shape` is of rows and columns; scales of blocks are repeated until they cover the matrix."""

    def pack(random: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, Array]:
        codes = random.integers(0, 256, (rows, columns)).astype(np.uint8)
        codes[codes & 127 == 127] = 0  # no number
        shape = scale_shape(rows, columns)
        scales = random.uniform(1e-4, 1e-3, shape).astype(np.float32)
        full = scales.reshape(shape if len(shape) == 2 else (-1, 1)).astype(np.float64)
        if len(shape) == 2 and shape not in ((rows, 1), (1, 1)):
            full = np.repeat(np.repeat(full, block[0], 0)[:rows], block[1], 1)[:, :columns]
        return {".weight": codes.view(Fp8), leaf: scales}, (e4m3(codes) * full).astype(np.float32)

    return pack


def nvfp4(random: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, Array]:
    """Two numbers of e2m1 a byte, the low half first, times an e4m3 number for each 16, times one for all."""
    codes = random.integers(0, 16, (rows, columns))
    scales = random.integers(1, 127, (rows, columns // 16)).astype(np.uint8)
    whole = np.array(random.uniform(1e-5, 1e-4), np.float32)
    dense = FP4[codes] * np.repeat(e4m3(scales), 16, 1) * whole.astype(np.float64)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    parts = {".weight": packed, ".weight_scale": scales.view(Fp8), ".weight_scale_2": whole}
    return {**parts, ".input_scale": np.array(0.5, np.float32)}, dense.astype(np.float32)


def blocks(rows: int, columns: int) -> tuple[int, int]:
    """Of 48 rows and 80 columns, neither of which divides anything here."""
    return -(-rows // 48), -(-columns // 80)


def gptq_says(bits: int, group: int, **others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, **others}


def awq_says(group: int) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "GEMM", "zero_point": True}


def compressed_says(layout: str, **weights: Any) -> dict[str, Any]:
    weights = {"dynamic": False, "observer": "minmax", "observer_kwargs": {}, "symmetric": True, **weights}
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
    }


def packs_says(bits: int, group: int, *, symmetric: bool) -> dict[str, Any]:
    strategy = "channel" if group == -1 else "group"
    sizes = {"group_size": None if group == -1 else group, "strategy": strategy}
    return compressed_says("pack-quantized", num_bits=bits, type="int", symmetric=symmetric, **sizes)


FLOAT8 = compressed_says("float-quantized", num_bits=8, type="float", strategy="channel")
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 80], "fmt": "e4m3"}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}


def modelopt_says(algorithm: str, **others: Any) -> dict[str, Any]:
    """As `export_hf_checkpoint` of ModelOpt 0.47 writes it."""
    return {
        "config_groups": {
            "group_0": {"weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}}
        },
        "ignore": ["lm_head"],
        "quant_algo": algorithm,
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quant_method": "modelopt",
        **others,
    }


# name -> what config.json says, how matrices are packed, and which MLX format they are to have (None: dense)
CASES: Mapping[str, tuple[dict[str, Any], Packer, QuantFormat | None]] = {
    **{
        f"gptq-{bits}-{group}": (gptq_says(bits, group), gptq(bits, group), QuantFormat(bits, max(group, 0) or 64))
        for bits in (4, 8)
        for group in (32, 64, 128, -1)
    },
    "gptq-v2": (
        gptq_says(4, 64, checkpoint_format="gptq_v2"),
        gptq(4, 64, offset=0),
        QuantFormat(4, 64),
    ),
    **{
        f"awq-{group}": (awq_says(group), awq(group), QuantFormat(4, max(group, 0) or 64))
        for group in (32, 64, 128, -1)
    },
    **{
        f"pack-{bits}-{group}-{'plain' if symmetric else 'zeros'}": (
            packs_says(bits, group, symmetric=symmetric),
            ints(bits, group, symmetric=symmetric),
            QuantFormat(bits, max(group, 0) or 64),
        )
        for bits in (4, 8)
        for group in (32, 128, -1)
        for symmetric in (True, False)
    },
    "int8-rows": (
        compressed_says("int-quantized", num_bits=8, type="int", strategy="channel"),
        int8(symmetric=True),
        QuantFormat(8, 64),
    ),
    "int8-zeros": (
        compressed_says("naive-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
        int8(symmetric=False),
        QuantFormat(8, 64),
    ),
    "int8-whole": (
        compressed_says("int-quantized", num_bits=8, type="int", strategy="tensor"),
        int8(symmetric=True, by_row=False),
        QuantFormat(8, 64),
    ),
    "mxfp4": (
        compressed_says("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        mxfp4,
        QuantFormat(4, 32, "mxfp4"),
    ),
    "fp8-compressed-rows": (FLOAT8, fp8(lambda rows, columns: (rows, 1)), None),
    "fp8-compressed-whole": (FLOAT8, fp8(lambda rows, columns: (1,)), None),
    "fp8-naive": ({**FLOAT8, "format": "naive-quantized"}, fp8(lambda rows, columns: (1,)), None),
    **{
        f"fp8-compressed-blocks-{type(said).__name__}": (
            compressed_says("float-quantized", num_bits=8, type="float", strategy="block", block_structure=said),
            fp8(blocks),
            None,
        )
        for said in ([48, 80], "48x80")
    },
    "fp8-blocks": (BLOCKS, fp8(blocks, ".weight_scale_inv"), None),
    "fp8-usual-blocks": (
        {**BLOCKS, "weight_block_size": [128, 128]},
        fp8(lambda rows, columns: (-(-rows // 128), -(-columns // 128)), ".weight_scale_inv", (128, 128)),
        None,
    ),
    "fp8-whole": (STATIC, fp8(lambda rows, columns: (), ".weight_scale_inv"), None),
    "modelopt-fp8": (modelopt_says("FP8"), fp8(lambda rows, columns: ()), None),
    "modelopt-fp8-rows": (
        modelopt_says("FP8_PER_CHANNEL_PER_TOKEN", quant_method=None, quant_library="modelopt"),
        fp8(lambda rows, columns: (rows,)),
        None,
    ),
    "modelopt-nvfp4": (modelopt_says("NVFP4"), nvfp4, None),
    "fp8-fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        fp8(lambda rows, columns: (rows, 1)),
        None,
    ),
}


def write_tensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write a safetensors file, every type as it is; uint16 is bfloat16."""
    header: dict[str, Any] = {}
    data: list[bytes] = []
    position = 0
    for name, array in tensors.items():
        content = np.ascontiguousarray(array).tobytes()
        kind = "F8_E4M3" if isinstance(array, Fp8) else TYPES[str(array.dtype)]
        end = position + len(content)
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [position, end]}
        data.append(content)
        position = end
    tiny.write_raw_safetensors(path, json.dumps(header).encode(), data)


def write_folder(folder: Path, values: Mapping[str, Any], tensors: Mapping[str, Array]) -> Path:
    folder.mkdir()
    tiny.write_json(folder / "config.json", values)
    write_tensors(folder / "model.safetensors", tensors)
    tiny.write_tokenizer(folder)
    return folder


def is_packed(name: str) -> bool:
    """Whether a library packs it: the matrices of layers, but no router."""
    return ".layers." in name and name.endswith("_proj.weight")


def write_pair(
    folder: Path,
    values: Mapping[str, Any],
    said: Mapping[str, Any],
    pack: Packer,
    *,
    fused: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[Path, Path]:
    """Write a checkpoint of packed matrices, and the dense one that it stands for; `fused` parts are one matrix."""
    random = np.random.default_rng(5)
    packed: Tensors = {}
    dense: Tensors = {}
    drawn = dict(tiny.random_tensors(values))
    for whole, parts in (fused or {}).items():
        for layer in range(int(values["num_hidden_layers"])):
            names = [f"model.layers.{layer}.{part}.weight" for part in parts]
            drawn[f"model.layers.{layer}.{whole}.weight"] = np.concatenate([drawn.pop(name) for name in names])
    for name, array in drawn.items():
        if is_packed(name):
            made, dense[name] = pack(random, *array.shape)
            packed |= {name.removesuffix(".weight") + leaf: part for leaf, part in made.items()}
        else:
            packed[name] = dense[name] = array
    return (
        write_folder(folder / "packed", {**values, "quantization_config": said}, packed),
        write_folder(folder / "dense", values, dense),
    )


def store_of(folder: Path, *, expand: bool = False) -> WeightStore:
    return WeightStore.from_path(folder).cast(mx.float32, expand=expand)


def logits(folder: Path, features: ModelFeatures | None = None) -> Array:
    config = Config.from_json_file(folder)
    model = ModelForCausalLM(config, store_of(folder), features or ModelFeatures())
    return np.array(model(mx.array([[(7 * i * i + 3) % 90 for i in range(12)]])))


@pytest.mark.parametrize("name", CASES)
def test_matrices_are_what_the_layout_says(name: str, tmp_path: Path) -> None:
    """To the last bit, in float32: nothing is rounded on the way."""
    said, pack, form = CASES[name]
    packed, dense = write_pair(tmp_path, tiny.config(**SIZES, num_hidden_layers=1), said, pack)
    store, wanted = store_of(packed), store_of(dense)
    for module in ("self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        found = store.linear(f"model.layers.0.{module}")
        assert isinstance(found, DenseWeight) if form is None else found.form == form
        assert mx.array_equal(store.dense(f"model.layers.0.{module}"), wanted.dense(f"model.layers.0.{module}")), (
            module
        )


@pytest.mark.parametrize(
    "name", ["gptq-4-128", "gptq-8-32", "awq-64", "pack-4-32-zeros", "int8-rows", "fp8-blocks", "modelopt-nvfp4"]
)
def test_logits_are_those_of_the_dense_matrices(name: str, tmp_path: Path) -> None:
    said, pack, _ = CASES[name]
    packed, dense = write_pair(tmp_path, tiny.config(**SIZES), said, pack)
    wanted = logits(dense, ModelFeatures.reference())
    assert wanted.std() > 0.1
    assert np.abs(logits(packed) - wanted).max() <= 2e-5 * wanted.std()
    assert np.abs(logits(packed, ModelFeatures.reference()) - wanted).max() <= 2e-5 * wanted.std()


FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


@pytest.mark.parametrize(
    "name", ["gptq-4-64", "awq-128", "pack-8-32-zeros", "int8-zeros", "fp8-blocks", "modelopt-nvfp4"]
)
def test_fused_matrices_are_taken_apart(name: str, tmp_path: Path) -> None:
    """Phi-3's q, k and v are one matrix, gate and up another: what is packed across rows is unpacked first."""
    said, pack, _ = CASES[name]
    values = tiny.config(**SIZES, model_type="phi3", pad_token_id=0)
    packed, dense = write_pair(tmp_path, values, said, pack, fused=FUSED)
    for module in ("self_attn.v_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj"):
        name = f"model.layers.1.{module}"
        assert mx.array_equal(store_of(packed).dense(name), store_of(dense).dense(name)), module


@pytest.mark.parametrize("name", ["gptq-4-32", "awq-32", "int8-rows", "mxfp4", "fp8-blocks", "modelopt-nvfp4"])
def test_experts_are_stacked(name: str, tmp_path: Path) -> None:
    """Mixtral has a matrix an expert, under names of its own; the router is dense."""
    said, pack, form = CASES[name]
    values = tiny.config(**SIZES, model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    random = np.random.default_rng(5)
    packed: Tensors = {}
    dense: Tensors = {}
    parts = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    for canonical, array in tiny.random_tensors(values).items():
        module = canonical.removesuffix(".weight")
        if ".experts." not in canonical:
            packed[canonical.replace(".mlp.gate.", ".block_sparse_moe.gate.")] = dense[canonical] = array
            continue
        stacked = []
        for expert in range(4):
            made, matrix = pack(random, *array.shape[1:])
            before, part = module.split(".mlp.experts.")
            named = f"{before}.block_sparse_moe.experts.{expert}.{parts[part]}"
            packed |= {named + leaf: leaf_array for leaf, leaf_array in made.items()}
            stacked.append(matrix)
        dense[canonical] = np.stack(stacked)
    folder = write_folder(tmp_path / "packed", {**values, "quantization_config": said}, packed)
    for module in ("gate_proj", "down_proj"):
        canonical = f"model.layers.1.mlp.experts.{module}"
        found = store_of(folder).linear(canonical)
        assert isinstance(found, DenseWeight) if form is None else found.form == form
        assert np.array_equal(np.array(store_of(folder).dense(canonical)), dense[f"{canonical}.weight"])


def test_gpt_oss_own_blocks(tmp_path: Path) -> None:
    """Two numbers of e2m1 a byte, the low half first, times a power of two for each 32; gate and up in turns."""
    values = tiny.config(
        model_type="gpt_oss",
        hidden_size=64,
        intermediate_size=32,
        vocab_size=96,
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
        sliding_window=16,
        attention_bias=True,
        rope_theta=...,
    )
    random, experts = np.random.default_rng(3), 3
    packed: Tensors = {}
    dense: Tensors = {}
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    for canonical, array in tiny.random_tensors(values).items():
        if ".experts." in canonical:
            dense[canonical] = array
        else:
            packed[canonical.replace(".mlp.gate.", ".mlp.router.")] = array
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        for part, rows, columns in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
            nibbles = random.integers(0, 16, (experts, rows, columns))
            exponents = random.integers(118, 124, (experts, rows, columns // 32))
            matrix = FP4[nibbles] * np.repeat(2.0 ** (exponents - 127), 32, -1)
            pairs = nibbles.reshape(experts, rows, columns // 32, 16, 2)
            packed[f"{prefix}.{part}_blocks"] = (pairs[..., 0] | pairs[..., 1] << 4).astype(np.uint8)
            packed[f"{prefix}.{part}_scales"] = exponents.astype(np.uint8)
            bias = random.standard_normal((experts, rows), dtype=np.float32)
            packed[f"{prefix}.{part}_bias"] = bias
            if part == "down_proj":
                dense |= {f"{prefix}.down_proj.weight": matrix, f"{prefix}.down_proj.bias": bias}
            else:
                for i, name in enumerate(("gate_proj", "up_proj")):
                    dense |= {f"{prefix}.{name}.weight": matrix[:, i::2], f"{prefix}.{name}.bias": bias[:, i::2]}
    folder = write_folder(tmp_path / "packed", {**values, "quantization_config": said}, packed)
    store = store_of(folder)
    for part in ("gate_proj", "up_proj", "down_proj"):
        module = f"model.layers.1.mlp.experts.{part}"
        weight = store.linear(module)
        assert isinstance(weight, QuantizedWeight) and weight.form == QuantFormat(4, 32, "mxfp4")
        assert np.array_equal(np.array(weight.dequantize().astype(mx.float32)), dense[f"{module}.weight"])
        assert weight.bias is not None and np.array_equal(np.array(weight.bias), dense[f"{module}.bias"])
    config = Config.from_json_file(folder)
    ids = mx.array([[5, 17, 60, 2, 9]])
    found = [
        np.array(ModelForCausalLM(config, store_of(folder, expand=expand), features)(ids))
        for expand in (False, True)
        for features in (ModelFeatures(), ModelFeatures.reference())
    ]
    assert max(np.abs(each - found[-1]).max() for each in found) <= 2e-5 * found[-1].std()
    assert summarize(read_contents(folder)).quantization == "mxfp4"


def test_numbers_of_eight_bits_are_all_right(tmp_path: Path) -> None:
    """All 256 codes, those that are no number too."""
    values = tiny.config(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1)
    tensors = dict(tiny.random_tensors(values))
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    tensors[f"{UP}.weight"] = codes.view(Fp8)
    tensors[f"{UP}.weight_scale"] = np.ones((1,), np.float32)
    tensors[f"{UP}.input_scale"] = np.ones((1,), np.float32)  # of activations, which are not quantised here
    folder = write_folder(tmp_path / "packed", {**values, "quantization_config": STATIC}, tensors)
    wanted = e4m3(codes)
    wanted[codes & 127 == 127] = np.nan
    assert np.array_equal(np.array(store_of(folder).dense(UP)), wanted, equal_nan=True)
    assert WeightStore.from_path(folder).dense(UP).dtype == mx.bfloat16


# ---------------------------------------------------------------- what is refused


def changed(folder: Path, name: str, change: Callable[[Tensors], None], tmp_path: Path) -> Path:
    """Write the packed checkpoint of a case, its tensors changed."""
    said, pack, _ = CASES[name]
    values = tiny.config(**SIZES, num_hidden_layers=1)
    packed: Tensors = {}
    random = np.random.default_rng(5)
    for canonical, array in tiny.random_tensors(values).items():
        if is_packed(canonical):
            module = canonical.removesuffix(".weight")
            packed |= {module + leaf: part for leaf, part in pack(random, *array.shape)[0].items()}
        else:
            packed[canonical] = array
    change(packed)
    return write_folder(tmp_path / "changed", {**values, "quantization_config": said}, packed)


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def cut(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name][..., :-1]

    return change


def retyped(name: str, dtype: Any) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = np.array(tensors[name].astype(dtype))

    return change


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("gptq-4-64", without(f"{UP}.scales"), "up_proj.*scales"),
        ("gptq-4-64", without(f"{UP}.qzeros"), "up_proj.*qzeros"),
        ("gptq-4-64", without(f"{UP}.qweight"), "up_proj"),
        ("gptq-4-64", cut(f"{UP}.scales"), "up_proj.scales"),
        ("gptq-4-64", cut(f"{UP}.qzeros"), "up_proj.qzeros"),
        ("gptq-4-64", cut(f"{UP}.qweight"), "up_proj"),
        ("gptq-4-64", cut(f"{UP}.g_idx"), "up_proj.g_idx"),
        ("gptq-4-64", retyped(f"{UP}.qzeros", np.float32), "up_proj.qzeros"),
        ("awq-32", without(f"{UP}.scales"), "up_proj.*scales"),
        ("awq-32", cut(f"{UP}.qzeros"), "up_proj.qzeros"),
        ("pack-4-32-zeros", without(f"{UP}.weight_zero_point"), "up_proj.*zero_point"),
        ("pack-4-32-plain", without(f"{UP}.weight_scale"), "up_proj.*scale"),
        ("pack-4-32-plain", cut(f"{UP}.weight_scale"), "up_proj.weight_scale"),
        ("int8-rows", without(f"{UP}.weight_scale"), "up_proj.*scale"),
        ("int8-rows", cut(f"{UP}.weight_scale"), "up_proj.weight_scale"),
        ("mxfp4", without(f"{UP}.weight_scale"), "up_proj.*scale"),
        ("mxfp4", cut(f"{UP}.weight_packed"), "up_proj"),
        ("modelopt-nvfp4", without(f"{UP}.weight_scale"), "up_proj.*weight_scale"),
        ("modelopt-nvfp4", without(f"{UP}.weight_scale_2"), "up_proj.*weight_scale_2"),
        ("modelopt-nvfp4", cut(f"{UP}.weight"), "up_proj.weight"),
        ("modelopt-nvfp4", retyped(f"{UP}.weight_scale", np.uint8), "up_proj.weight_scale"),
        ("modelopt-nvfp4", retyped(f"{UP}.weight_scale_2", np.float16), "up_proj.weight_scale_2"),
        ("fp8-blocks", without(f"{UP}.weight_scale_inv"), "up_proj.*scales"),
        ("fp8-blocks", cut(f"{UP}.weight_scale_inv"), "up_proj.weight_scale_inv"),
        ("fp8-blocks", retyped(f"{UP}.weight_scale_inv", np.int32), "up_proj.weight_scale_inv"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    name: str, change: Callable[[Tensors], None], named: str, tmp_path: Path
) -> None:
    folder = changed(tmp_path, name, change, tmp_path)
    with pytest.raises(CheckpointError, match=named) as failure:
        WeightStore.from_path(folder)
    assert "\n" not in str(failure.value)


def test_a_matrix_that_groups_do_not_divide_is_named(tmp_path: Path) -> None:
    said, pack, _ = CASES["gptq-4--1"]
    values = tiny.config(**{**SIZES, "intermediate_size": 160}, num_hidden_layers=1)
    packed, _ = write_pair(tmp_path, values, said, pack)
    with pytest.raises(TensorMismatchError, match=r"down_proj.*160 columns, which groups of 64 do not divide"):
        WeightStore.from_path(packed)


def biased(value: float) -> Callable[[Tensors], None]:
    """Give every packed matrix a bias, as AutoGPTQ did."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".scales")]:
            rows = tensors[name].shape[1]
            tensors[name.replace(".scales", ".bias")] = np.full(rows, value, np.float16)

    return change


def test_biases_of_zeros_that_a_model_has_not_are_left_out(tmp_path: Path) -> None:
    """AutoGPTQ wrote one for every matrix; where a model has biases they are kept."""
    folder = changed(tmp_path, "gptq-4-64", biased(0), tmp_path)
    store = store_of(folder)
    assert store.linear(UP).bias is None
    assert open_subject(str(folder), report=lambda line: None).problems == {}
    assert logits(folder).std() > 0.1
    values = json.loads((folder / "config.json").read_text())
    tiny.write_json(folder / "config.json", {**values, "mlp_bias": True})
    assert store_of(folder).linear(UP).bias is not None


def test_biases_that_a_model_has_not_and_that_add_something_are_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path, "gptq-4-64", biased(0.5), tmp_path)
    with pytest.raises(TensorMismatchError, match=r"down_proj.bias is not zero"):
        WeightStore.from_path(folder)


def test_scales_of_packed_caches_are_left_out(tmp_path: Path) -> None:
    """As AutoFP8 writes them; caches are not packed here unless a person asks for it."""

    def change(tensors: Tensors) -> None:
        for part in ("k_proj.kv_scale", "v_proj.output_scale", "kv_scale"):
            tensors[f"model.layers.0.self_attn.{part}"] = np.ones((1,), np.float32)

    plain = logits(changed(tmp_path, "fp8-whole", lambda tensors: None, tmp_path))
    (tmp_path / "scaled").mkdir()
    folder = changed(tmp_path, "fp8-whole", change, tmp_path / "scaled")
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"]["kv_cache_scheme"] = "static"
    tiny.write_json(folder / "config.json", values)
    assert np.array_equal(logits(folder), plain)


@pytest.mark.parametrize(("name", "leaf"), [("gptq-4-64", "g_idx"), ("pack-4-32-plain", "weight_g_idx")])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_columns_sorted_by_activation_are_refused_before_a_matrix_is_read(
    name: str, leaf: str, dtype: Any, tmp_path: Path
) -> None:
    """`desc_act` alone says nothing: it may be true of columns that were in order before."""
    group = int(name.split("-")[2])
    in_order = (np.arange(SIZES["hidden_size"]) // group).astype(dtype)

    def write(folder: str, index: Array) -> Path:
        (tmp_path / folder).mkdir()
        return changed(tmp_path, name, lambda tensors: tensors.update({f"{UP}.{leaf}": index}), tmp_path / folder)

    plain = store_of(changed(tmp_path, name, lambda tensors: None, tmp_path)).dense(UP)
    assert mx.array_equal(store_of(write("in order", in_order)).dense(UP), plain)
    swapped = in_order.copy()
    swapped[[0, -1]] = swapped[[-1, 0]]
    for what, index in (("swapped", swapped), ("sorted", np.ascontiguousarray(in_order[::-1]))):
        with pytest.raises(UnsupportedQuantizationError, match=rf"up_proj\.{leaf}.*desc_act"):
            WeightStore.from_path(write(what, index))


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("pack-4-32-plain", (256, 4), np.int8),
        ("pack-8-32-plain", (256, 4), np.int32),
        ("int8-rows", (256, 1), np.int8),
        ("int8-rows", (1,), np.int8),
    ],
)
def test_zero_points_of_symmetric_numbers_must_be_zero(
    name: str, shape: tuple[int, ...], dtype: Any, tmp_path: Path
) -> None:
    """Of others transformers makes nothing, or subtracts them."""

    def write(folder: str, at: int, value: int) -> Path:
        zeros = np.zeros(shape, dtype)
        zeros.flat[at] = value
        (tmp_path / folder).mkdir()
        add = {f"{UP}.weight_zero_point": zeros}
        return changed(tmp_path, name, lambda tensors: tensors.update(add), tmp_path / folder)

    plain = store_of(changed(tmp_path, name, lambda tensors: None, tmp_path)).dense(UP)
    assert mx.array_equal(store_of(write("zeros", 0, 0)).dense(UP), plain)
    for folder, at, value in (("first", 0, 1), ("last", -1, -1)):
        with pytest.raises(UnsupportedQuantizationError, match=r"up_proj\.weight_zero_point.*symmetric") as failure:
            WeightStore.from_path(write(folder, at, value))
        assert "\n" not in str(failure.value)


def test_packed_zero_points_of_symmetric_numbers_are_refused(tmp_path: Path) -> None:
    said, pack, _ = CASES["pack-4-32-zeros"]
    weights = {**said["config_groups"]["group_0"]["weights"], "symmetric": True}
    said = {**said, "config_groups": {"group_0": {**said["config_groups"]["group_0"], "weights": weights}}}
    packed, _ = write_pair(tmp_path, tiny.config(**SIZES, num_hidden_layers=1), said, pack)
    with pytest.raises(UnsupportedQuantizationError, match=r"weight_zero_point.*symmetric"):
        WeightStore.from_path(packed)


def unsaid(folder: Path) -> Path:
    """Take what config.json says of the form away."""
    values = json.loads((folder / "config.json").read_text())
    del values["quantization_config"]
    tiny.write_json(folder / "config.json", values)
    return folder


@pytest.mark.parametrize("name", ["fp8-whole", "fp8-fbgemm", "fp8-usual-blocks", "modelopt-fp8", "modelopt-nvfp4"])
def test_a_form_of_eight_bit_numbers_that_config_does_not_mention_is_recognised(name: str, tmp_path: Path) -> None:
    """ModelOpt describes it in hf_quant_config.json; other files are published without a word of it."""
    said = logits(changed(tmp_path, name, lambda tensors: None, tmp_path))
    folder = unsaid(tmp_path / "changed")
    assert np.array_equal(logits(folder), said)
    assert summarize(read_contents(folder)).quantization == ("nvfp4" if "nvfp4" in name else "fp8")
    assert not open_subject(str(folder), report=lambda line: None).problems


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("fp8-whole", without(f"{UP}.weight_scale_inv"), "up_proj.*8 bits.*scales are absent"),
        ("fp8-blocks", lambda tensors: None, "weight_scale_inv.*no scales"),
        ("modelopt-nvfp4", without(f"{UP}.weight_scale_2"), "up_proj.*weight_scale_2"),
    ],
)
def test_one_that_is_not_recognised_is_refused_by_name(
    name: str, change: Callable[[Tensors], None], named: str, tmp_path: Path
) -> None:
    folder = unsaid(changed(tmp_path, name, change, tmp_path))
    with pytest.raises(CheckpointError, match=named):
        WeightStore.from_path(folder)


# ---------------------------------------------------------------- what is told


@pytest.mark.parametrize(
    ("name", "label", "told", "bits"),
    [
        ("gptq-4-128", "gptq-4", "4-bit, groups of 128, of gptq-4", 4.25),
        ("awq-32", "awq-4", "4-bit, groups of 32, of awq-4", 5),
        ("pack-8-128-plain", "int8", "8-bit, groups of 128, of int8", 8.25),
        ("int8-rows", "int8", "8-bit, groups of 64, of int8", 8.5),
        ("fp8-blocks", "fp8", "bf16, of fp8", 16),
        ("modelopt-nvfp4", "nvfp4", "bf16, of nvfp4", 16),
    ],
)
def test_summary_and_anatomy_know_the_form(name: str, label: str, told: str, bits: float, tmp_path: Path) -> None:
    folder = changed(tmp_path, name, lambda tensors: None, tmp_path)
    assert summarize(read_contents(folder)).quantization == label
    subject = open_subject(str(folder), report=lambda line: None)
    assert not subject.problems and subject.table is not None
    headers = [read_safetensors_header(file) for file in folder.glob("*.safetensors")]
    assert subject.filed + subject.table.skipped == sum(map(len, headers))
    forms = {form.name: form for form in subject.formats}
    assert forms[told].bits_per_weight == pytest.approx(bits)
    assert UP + ".weight" in forms[told].matrices
    assert set(forms) == {told, "f32"}


# ---------------------------------------------------------------- halves, and whatever a header may say


def test_in_half_precision_scales_are_the_files_and_biases_the_nearest(tmp_path: Path) -> None:
    folder = changed(tmp_path, "gptq-8-32", lambda tensors: None, tmp_path)
    arrays = mx.load(str(folder / "model.safetensors"))
    assert isinstance(arrays, dict)
    weight, exact = WeightStore.from_path(folder).linear(UP), store_of(folder).linear(UP)
    assert isinstance(weight, QuantizedWeight) and isinstance(exact, QuantizedWeight)
    assert weight.scales.dtype == mx.float16 and weight.biases is not None and exact.biases is not None
    assert mx.array_equal(weight.scales, arrays[f"{UP}.scales"].T)
    assert mx.array_equal(weight.biases, exact.biases.astype(mx.float16))


def test_what_is_made_of_a_tensor_is_made_once_and_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three parts of a fused matrix, of three parts each."""
    said, pack, _ = CASES["awq-128"]
    values = tiny.config(**SIZES, model_type="phi3", pad_token_id=0, num_hidden_layers=1)
    packed, _ = write_pair(tmp_path, values, said, pack, fused=FUSED)
    names: list[str] = []

    def counted(made: MadeTensor, arrays: Any) -> mx.array:
        names.append(made.name)
        return make(made, arrays)

    monkeypatch.setattr(weights, "make", counted)
    store = WeightStore.from_path(packed)
    for part in "qkv":
        store.linear(f"model.layers.0.self_attn.{part}_proj")
    assert sorted(names) == [f"model.layers.0.self_attn.qkv_proj.{part}" for part in ("biases", "scales", "weight")]
    assert not store._made


LEAVES = {
    "gptq-4-64": ("qweight", "qzeros", "scales", "g_idx"),
    "awq-32": ("qweight", "qzeros", "scales"),
    "pack-4-32-zeros": ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
    "pack-4-32-plain": ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
    "int8-rows": ("weight", "weight_scale", "weight_zero_point"),
    "mxfp4": ("weight_packed", "weight_scale"),
    "int8-zeros": ("weight", "weight_scale", "weight_zero_point"),
    "fp8-blocks": ("weight", "weight_scale_inv", "weight_scale"),
    "modelopt-nvfp4": ("weight", "weight_scale", "weight_scale_2"),
}
SHAPES = st.lists(st.sampled_from([0, 1, 2, 8, 16, 128, 10**12]), max_size=4).map(tuple)


@pytest.mark.parametrize("name", LEAVES)
@settings(max_examples=60)
@given(data=st.data())
def test_any_shapes_and_types_are_a_table_or_faults(name: str, data: st.DataObject) -> None:
    config = Config.from_dict(tiny.config(**SIZES, num_hidden_layers=1, quantization_config=CASES[name][0]))
    kinds = st.sampled_from(sorted({*READABLE, *TYPES_OF_PARTS}))
    header = {}
    for leaf in data.draw(st.sets(st.sampled_from(LEAVES[name]))):
        shape, dtype = data.draw(SHAPES), data.draw(kinds)
        end = math.prod(shape) * BITS[dtype] // 8
        header[f"{UP}.{leaf}"] = TensorInfo(f"{UP}.{leaf}", Path("x"), dtype, shape, 0, end)
    table = gather({Path("x"): header}, config)
    assert all(str(fault).isprintable() for fault in table.faults.values())
    with pytest.raises(TensorMismatchError):
        check_tensors(table.tensors, config, Path("x"))


def test_fp8_is_seen_in_files_whose_config_says_nothing_of_it(tmp_path: Path) -> None:
    said, pack, _ = CASES["fp8-whole"]
    packed, dense = write_pair(tmp_path, tiny.config(**SIZES, num_hidden_layers=1), said, pack)
    values = json.loads((packed / "config.json").read_text(encoding="utf-8"))
    del values["quantization_config"]
    tiny.write_json(packed / "config.json", values)
    module = "model.layers.0.mlp.up_proj"
    assert mx.array_equal(store_of(packed).dense(module), store_of(dense).dense(module))
