"""How other libraries than MLX store quantised matrices, as config.json says it. No mlx.

Each method is read into what the files hold (`Gptq`, `Awq`, ...) and into what is made of it: one of MLX's formats,
or nothing, where matrices are dequantised. Sources: AutoGPTQ's and GPTQModel's `QuantizeConfig`, AutoAWQ's
`AwqConfig`, `FineGrainedFP8Config`, `FbgemmFp8Config` and `Mxfp4Config` of transformers 5.24, `QuantizationConfig`
of compressed-tensors, `convert_hf_quant_config_format` of ModelOpt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from reprlib import repr as brief
from typing import Any

from tinyllm.config.reader import ConfigReader, Key
from tinyllm.errors import UnsupportedQuantizationError

WHOLE_ROW = -1  # as configs write a group that is as long as a row
_GROUPS = (128, 64, 32)  # of MLX's affine formats
_GROUP_OF_ROWS = 64  # columns of nearly all published models are multiples of it, of 128 they are not

_BLOCK = re.compile(r"[0-9]{1,6}x[0-9]{1,6}")  # rows and columns, in older files one word

_GPTQ_INERT = frozenset(
    "act_group_aware backend batch_size block_name_to_quantize cache_block_outputs damp_percent dataset desc_act"
    " disable_exllama exllama_config max_input_length meta model_file_base_name model_name_or_path model_seqlen"
    " modules_in_block_to_quantize module_name_preceding_first_block pad_token_id static_groups sym tokenizer"
    " true_sequential use_cuda_fp16 use_exllama".split()
)  # how they were made, and what is to compute with them; the order of groups is seen in the files
_AWQ_INERT = frozenset(
    "backend do_fuse exllama_config fuse_max_seq_len inplace modules_to_fuse modules_to_not_convert".split()
)
_FP8_INERT = frozenset(
    "activation_scale_ub activation_scheme dequantize ignored_layers kv_cache_scheme modules_to_convert"
    " modules_to_not_convert scale_fmt".split()
)  # which matrices are in 8 bits, and the type of scales, is seen in the files; activations and caches are not
# quantised here
_COMPRESSED_INERT = frozenset(
    "dequantize global_compression_ratio ignore kv_cache_scheme quantization_status run_compressed"
    " use_optimized_inference version".split()
)
_MODELOPT_INERT = frozenset(
    "config_groups exclude_modules group_size ignore kv_cache_quant_algo kv_cache_scheme producer"
    " quant_library".split()
)  # quant_algo implies the format, and the files show which matrices have it
_SCHEME_INERT = frozenset({"input_activations", "output_activations", "targets"})
_WEIGHTS_INERT = frozenset(
    "actorder block_structure dynamic observer observer_kwargs scale_dtype strategy zp_dtype".split()
)


@dataclass(frozen=True)
class Gptq:
    """Columns packed one below the other, a scale and a zero for `group_size` of them.

    `zero_offset` is to be added to the zeros that are stored: one in files of version 1.
    """

    bits: int
    group_size: int
    zero_offset: int


@dataclass(frozen=True)
class Awq:
    """Rows of four bits packed side by side, eight to a word, in the order 0 2 4 6 1 3 5 7."""

    group_size: int


@dataclass(frozen=True)
class Fp8:
    """Numbers of e4m3, and a scale for each `block` (rows, columns), each row, or all of them."""

    block: tuple[int, int] | None


@dataclass(frozen=True)
class PackedInts:
    """Words as MLX has them, of compressed-tensors; without zeros, where these are in the middle."""

    bits: int
    group_size: int
    symmetric: bool


@dataclass(frozen=True)
class Int8:
    """Signed bytes and a scale for each row, or for all."""

    symmetric: bool


@dataclass(frozen=True)
class Mxfp4Blocks:
    """Blocks of 32 columns of four-bit floats in 16 bytes, as gpt-oss has its experts."""


@dataclass(frozen=True)
class Mxfp4:
    """Four-bit floats, two to a byte, and a power of two for 32 columns, of compressed-tensors."""


@dataclass(frozen=True)
class Nvfp4:
    """Four-bit floats, two to a byte, an e4m3 scale for 16 columns and a scale for the matrix, of ModelOpt."""


Packing = Gptq | Awq | Fp8 | PackedInts | Int8 | Mxfp4Blocks | Mxfp4 | Nvfp4


@dataclass(frozen=True)
class Stored:
    """What files hold, what errors and summaries call it, and the MLX format (bits, group, mode) that comes of it.

    `within` is a part of the names of all modules that are packed.
    """

    packing: Packing
    label: str
    becomes: tuple[int, int, str] | None
    within: str = ""


def _gptq(reader: ConfigReader) -> Stored:
    bits = _one_of(reader, Key("bits", int), (4, 8))
    group = _group(reader, Key("group_size", int, 128))
    layout = reader.read(Key("checkpoint_format", str, "gptq", nullable=True, also=("format",))) or "gptq"
    offsets = {"gptq": 1, "gptq_v2": 0}
    if layout not in offsets:
        raise _refused(reader, f"checkpoint_format = {brief(layout)}")
    _only(reader, {"is_marlin_format": (False, None), "dynamic": ({}, None), "method": ("gptq", None)})
    _only(reader, {"pack_dtype": ("int32", None), "lm_head": (True, False, None)})
    reader.discard(_GPTQ_INERT)
    return Stored(Gptq(bits, group, offsets[layout]), f"gptq-{bits}", _affine(bits, group))


def _awq(reader: ConfigReader) -> Stored:
    bits = _one_of(reader, Key("bits", int, 4), (4,))
    group = _group(reader, Key("group_size", int, 128))
    version = reader.read(Key("version", str, "gemm", nullable=True, also=("format",))) or "gemm"
    if version.lower() != "gemm":
        raise _refused(reader, f"version = {brief(version)}")
    _only(reader, {"method": ("awq", None), "checkpoint_format": ("gemm", None)})
    _only(reader, {"zero_point": (True,), "pack_dtype": ("int32", None), "lm_head": (True, False, None)})
    reader.discard(_AWQ_INERT | _GPTQ_INERT)
    return Stored(Awq(group), f"awq-{bits}", _affine(bits, group))


def _fp8(reader: ConfigReader) -> Stored:
    block = reader.read(Key("weight_block_size", list, [128, 128], nullable=True))
    _only(reader, {"fmt": ("e4m3", "float8_e4m3fn", None), "expert_dtype": ("fp8", None)})
    reader.discard(_FP8_INERT)
    return Stored(Fp8(_block(reader, block)), "fp8", None)


def _modelopt(reader: ConfigReader) -> Stored:
    algorithm = reader.read(Key("quant_algo", str, None, nullable=True))
    reader.discard(_MODELOPT_INERT)
    match algorithm:
        case "FP8" | "FP8_PER_CHANNEL_PER_TOKEN":
            return Stored(Fp8(None), "fp8", None)
        case "NVFP4" | "W4A16_NVFP4":
            return Stored(Nvfp4(), "nvfp4", None)
    raise UnsupportedQuantizationError(
        f"{reader.source}: weights quantised by ModelOpt with quant_algo = {brief(algorithm)} are not read by tinyllm"
        " (it reads FP8 and NVFP4); look for an MLX conversion (mlx-community) or the original weights"
    )


def _mxfp4(reader: ConfigReader) -> Stored:
    reader.discard({"modules_to_not_convert", "dequantize"})
    return Stored(Mxfp4Blocks(), "mxfp4", (4, 32, "mxfp4"), within=".experts.")


def _compressed(reader: ConfigReader) -> Stored:
    layout = reader.take("format")
    scheme = _only_scheme(reader)
    own = scheme.take("format")
    layout = own if own is not None else layout
    weights = scheme.object("weights")
    if weights is None:
        raise _refused(reader, "a scheme without weights")
    sparsity = reader.take("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise _refused(reader, f"sparsity_config = {brief(sparsity)}")
    _only(reader, {"transform_config": ({}, None)})
    reader.discard(_COMPRESSED_INERT)
    scheme.discard(_SCHEME_INERT)
    scheme.finish()
    return _compressed_weights(reader, weights, layout)


def _compressed_weights(reader: ConfigReader, weights: ConfigReader, layout: Any) -> Stored:
    bits, kind = weights.read(Key("num_bits", int, 8)), weights.read(Key("type", str, "int"))
    symmetric = weights.read(Key("symmetric", bool, True))
    group = weights.read(Key("group_size", int, WHOLE_ROW, nullable=True)) or WHOLE_ROW
    said = weights.take("block_structure")
    block = _block(reader, list(map(int, said.split("x"))) if _BLOCK.fullmatch(str(said)) else said)
    weights.discard(_WEIGHTS_INERT)
    weights.finish()
    match layout, kind, bits:
        case "float-quantized" | "naive-quantized", "float", 8 if symmetric:
            return Stored(Fp8(block), "fp8", None)
        case "int-quantized" | "naive-quantized", "int", 8 if group == WHOLE_ROW:
            return Stored(Int8(symmetric), "int8", _affine(8, WHOLE_ROW))
        case "mxfp4-pack-quantized", "float", 4 if group == 32:
            return Stored(Mxfp4(), "mxfp4", (4, 32, "mxfp4"))
        case "pack-quantized", "int", 4 | 8:
            if _fitting(group) is None:
                raise _refused(reader, f"groups of {brief(group)}")
            return Stored(PackedInts(bits, group, symmetric), f"int{bits}", _affine(bits, group))
    raise _refused(reader, f"format {brief(layout)} of {bits} bits, type {brief(kind)}, groups of {group}")


def _only_scheme(reader: ConfigReader) -> ConfigReader:
    """Return the scheme of all matrices. What tells them apart by name is not read, so that all must be alike."""
    groups = reader.object("config_groups")
    names = [] if groups is None else list(groups.values)
    if groups is None or not names:
        raise _refused(reader, "no config_groups")
    schemes = [groups.object(name) for name in names]
    first = schemes[0]
    if first is None or any(
        scheme is None or scheme.values.get("weights") != first.values.get("weights") for scheme in schemes
    ):
        raise _refused(reader, "config_groups that differ in their weights")
    return first


METHODS: Mapping[str, Callable[[ConfigReader], Stored]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
}


def read_packing(reader: ConfigReader, method: str) -> Stored:
    """Read what another library's `quantization_config` says; `method` is a key of METHODS.

    Raises UnsupportedQuantizationError for a layout that is not read, UnknownKeyError and ConfigError as a Config.
    """
    stored = METHODS[method](reader)
    reader.finish()
    return stored


def _affine(bits: int, group: int) -> tuple[int, int, str] | None:
    fitting = _fitting(group)
    return None if fitting is None else (bits, fitting, "affine")


def _fitting(group: int) -> int | None:
    """Return the longest of MLX's groups that divides one."""
    if group == WHOLE_ROW:
        return _GROUP_OF_ROWS
    return next((fitting for fitting in _GROUPS if group > 0 and group % fitting == 0), None)


def _group(reader: ConfigReader, key: Key) -> int:
    group: int = reader.read(key)
    if _fitting(group) is None:
        raise _refused(reader, f"{key.name} = {brief(group)}")
    return group


def _block(reader: ConfigReader, said: Any) -> tuple[int, int] | None:
    if said is None:
        return None
    if (
        not isinstance(said, list)
        or len(said) != 2
        or not all(type(size) is int and 0 < size < 1 << 20 for size in said)
    ):
        raise _refused(reader, f"blocks of {brief(said)}")
    return said[0], said[1]


def _one_of(reader: ConfigReader, key: Key, known: tuple[int, ...]) -> int:
    value: int = reader.read(key)
    if value not in known:
        raise _refused(reader, f"{key.name} = {brief(value)}")
    return value


def _only(reader: ConfigReader, accepted: Mapping[str, tuple[Any, ...]]) -> None:
    for name, values in accepted.items():
        if name in reader.values and reader.take(name) not in values:
            raise _refused(reader, f"{name} = {brief(reader.values[name])}")


def _refused(reader: ConfigReader, what: str) -> UnsupportedQuantizationError:
    method = reader.values.get("quant_method")
    return UnsupportedQuantizationError(
        f"{reader.source}: weights quantised by {brief(method)} with {what} are not read by tinyllm;"
        " look for an MLX conversion (mlx-community) or the original weights"
    )
