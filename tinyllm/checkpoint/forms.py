"""What matrices in other libraries' forms become: MLX's packed parts, or a dense matrix, from headers alone. No mlx.

A form is a row of `_FORMS`: which tensors of the files are parts of a matrix, and what is made of them under the
names that MLX's own files have. All that follows (names, fused matrices, experts, checks) knows no form but MLX's;
`quantization.py` beside this does the making. Layouts:

- GPTQ (AutoGPTQ, `QuantLinear.pack`): qweight int32 (in * bits / 32, out), qzeros int32 (groups, out * bits / 32),
  scales (groups, out), g_idx int32 (in,)
- AWQ (AutoAWQ, `WQLinear_GEMM`): qweight int32 (in, out / 8), qzeros int32 (groups, out / 8), scales (groups, out)
- compressed-tensors: weight_packed int32 (out, in * bits / 32) or weight, weight_scale (out, groups), and
  weight_zero_point of that shape, its rows packed where the weights are; of mxfp4, both are bytes
- fp8: weight, and weight_scale_inv or weight_scale, which are the same: what the weight is multiplied by
- ModelOpt (`NVFP4QTensor`): weight uint8 (out, in / 2), weight_scale e4m3 (out, in / 16), weight_scale_2 float32 ()
- gpt-oss: NAME_blocks uint8 (experts, out, groups, 16), NAME_scales uint8 (experts, out, groups)
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tinyllm.checkpoint.claims import Claim
from tinyllm.checkpoint.safetensors_header import BITS, TensorInfo
from tinyllm.config.packings import Awq, Fp8, Gptq, Int8, Mxfp4, Mxfp4Blocks, Nvfp4, PackedInts, Packing, Stored
from tinyllm.errors import CheckpointError, TensorMismatchError, UnsupportedQuantizationError

__all__ = ["TYPES_OF_PARTS", "MadeTensor", "restate"]

TYPES_OF_PARTS = frozenset({"I8", "I32", "I64", "F8_E4M3"})  # beside those that canonical tensors are of
_FLOATS, _INTEGERS = ("F16", "BF16", "F32"), ("I8", "I32", "I64")
# What activations, caches and sizes are described with: nothing of it is needed to compute in floating point.
_UNUSED = re.compile(r"\.((input|output|activation|q|k|v|kv)_(scale|zero_point)|input_scale_ub|weight_shape)$")
_USUAL_BLOCK = (128, 128)  # of DeepSeek's files, and what an absent weight_block_size means


@dataclass(frozen=True)
class MadeTensor:
    """A tensor, as MLX would store it, that is made of others; `leaves` name these as the form does.

    It is what they stand for only where the `claims` hold.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    part: Literal["weight", "scales", "biases"]
    stored: Stored
    leaves: tuple[str, ...]
    sources: tuple[TensorInfo, ...]
    claims: tuple[Claim, ...] = field(default=(), compare=False)

    @property
    def stands_for(self) -> tuple[TensorInfo, ...]:
        """The tensors that it is made of, and those that say no more than that it can be."""
        return (*self.sources, *(claim.info for claim in self.claims))

    @property
    def file(self) -> Path:
        """The file of the first of its sources."""
        return self.sources[0].file

    @property
    def nbytes(self) -> int:
        """Bytes once it is made."""
        return math.prod(self.shape) * BITS[self.dtype] // 8


Parts = Mapping[str, TensorInfo]


@dataclass(frozen=True)
class _Form:
    """`split` takes a name of the files apart, into the matrix's and the leaf; `main` and its types tell the form."""

    split: re.Pattern[str]
    main: str
    types: tuple[str, ...]
    make: Callable[[str, Parts, Stored, Any], Iterator[MadeTensor]]


def restate(
    headers: Mapping[Path, Mapping[str, TensorInfo]], stored: Stored | None
) -> tuple[list[TensorInfo | MadeTensor], int, dict[str, CheckpointError]]:
    """Return the tensors of all files, those that are in a form of its own as MLX would have them.

    `stored` is the form that config.json gives; without one, fp8 and nvfp4 are recognised by what the files hold.

    Beside them, how many describe nothing but activations; and the matrices whose parts do not fit, with the reason.
    Raises CheckpointError for one that is there twice.
    """
    found = [info for header in headers.values() for info in header.values()]
    stored = stored or _recognised(found)
    if stored is None:
        return list(found), 0, {}
    form = _FORMS[type(stored.packing)]
    kept: list[TensorInfo | MadeTensor] = []
    matrices: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for info in found:
        match = form.split.search(info.name)
        if match is None:
            kept.append(info)
        elif match[0] not in matrices[info.name[: match.start()]]:
            matrices[info.name[: match.start()]][match[0]] = info
        else:
            raise CheckpointError(f"{info.file}: {info.name!r} is there twice")
    faults: dict[str, CheckpointError] = {}
    for name, parts in matrices.items():
        main = parts.get(form.main)
        if main is None or main.dtype not in form.types:
            kept.extend(parts.values())
            continue
        try:
            kept.extend(form.make(name, parts, stored, stored.packing))
        except CheckpointError as fault:
            faults[f"{name}.weight" if form.main else name] = fault
    used = [info for info in kept if not _UNUSED.search(info.name)]
    return used, len(kept) - len(used), faults


def _recognised(found: Sequence[TensorInfo]) -> Stored | None:
    """Return the form of 8-bit floats: ModelOpt describes it in a file of its own, other tools nowhere."""
    eights = {info.name for info in found if info.dtype == "F8_E4M3"}
    if not eights:
        return None
    if any(info.name.endswith(".weight_scale_2") and info.name.removesuffix("_2") in eights for info in found):
        return Stored(Nvfp4(), "nvfp4", None)
    return Stored(Fp8(_USUAL_BLOCK), "fp8", None)


# ---------------------------------------------------------------- one form each


def _gptq(name: str, parts: Parts, stored: Stored, packing: Gptq) -> Iterator[MadeTensor]:
    words, out = _matrix(parts[".qweight"], stored)
    each = 32 // packing.bits
    columns = words * each
    groups = _groups(columns, packing.group_size, parts[".qweight"], stored)
    _need(parts, ".scales", (groups, out), _FLOATS, stored)
    _need(parts, ".qzeros", (groups, out // each), ("I32",), stored)
    claims = _in_order(parts, ".g_idx", columns, groups, stored)
    leaves = (".scales", ".qzeros")
    yield from _packed(name, parts, stored, (out, columns), (".qweight",), leaves[:1], leaves, claims)


def _awq(name: str, parts: Parts, stored: Stored, packing: Awq) -> Iterator[MadeTensor]:
    columns, words = _matrix(parts[".qweight"], stored)
    groups = _groups(columns, packing.group_size, parts[".qweight"], stored)
    _need(parts, ".scales", (groups, words * 8), _FLOATS, stored)
    _need(parts, ".qzeros", (groups, words), ("I32",), stored)
    shape = (words * 8, columns)
    yield from _packed(name, parts, stored, shape, (".qweight",), (".scales",), (".scales", ".qzeros"))


def _packed_ints(name: str, parts: Parts, stored: Stored, packing: PackedInts) -> Iterator[MadeTensor]:
    rows, words = _matrix(parts[".weight_packed"], stored)
    each = 32 // packing.bits
    columns = words * each
    groups = _groups(columns, packing.group_size, parts[".weight_packed"], stored)
    _need(parts, ".weight_scale", (rows, groups), _FLOATS, stored)
    claims = _in_order(parts, ".weight_g_idx", columns, groups, stored)
    leaves = (".weight_scale", ".weight_zero_point")
    if packing.symmetric:
        claims += _no_zeros(parts, ((rows, groups),), stored)
    else:
        _need(parts, ".weight_zero_point", (-(-rows // each), groups), ("I32",), stored)
    biases = leaves[:1] if packing.symmetric else leaves
    yield from _packed(name, parts, stored, (rows, columns), (".weight_packed",), leaves[:1], biases, claims)


def _int8(name: str, parts: Parts, stored: Stored, packing: Int8) -> Iterator[MadeTensor]:
    rows, columns = _matrix(parts[".weight"], stored)
    _groups(columns, -1, parts[".weight"], stored)
    _need_rows(parts, ".weight_scale", rows, _FLOATS, stored)
    claims: tuple[Claim, ...] = ()
    leaves = (".weight_scale", ".weight_zero_point")
    if packing.symmetric:
        claims = _no_zeros(parts, _shapes_by_row(rows), stored)
    else:
        _need_rows(parts, ".weight_zero_point", rows, ("I8",), stored)
    biases = leaves[:1] if packing.symmetric else leaves
    yield from _packed(name, parts, stored, (rows, columns), (".weight",), leaves[:1], biases, claims)


def _mxfp4(name: str, parts: Parts, stored: Stored, packing: Mxfp4Blocks) -> Iterator[MadeTensor]:
    blocks = parts["_blocks"]
    if len(blocks.shape) < 3 or blocks.shape[-1] != 16:
        raise TensorMismatchError(f"{blocks.file}: {blocks.name} is {list(blocks.shape)}, and no blocks of 16 bytes")
    *rows, groups, _ = blocks.shape
    _need(parts, "_scales", (*rows, groups), ("U8",), stored)
    shape = (*rows, 32 * groups)
    yield from _packed(name, parts, stored, shape, ("_blocks",), ("_scales",), None)


def _mxfp4_rows(name: str, parts: Parts, stored: Stored, packing: Mxfp4) -> Iterator[MadeTensor]:
    rows, pairs = _matrix(parts[".weight_packed"], stored)
    groups = _groups(2 * pairs, 32, parts[".weight_packed"], stored)
    _need(parts, ".weight_scale", (rows, groups), ("U8",), stored)
    yield from _packed(name, parts, stored, (rows, 2 * pairs), (".weight_packed",), (".weight_scale",), None)


def _fp8(name: str, parts: Parts, stored: Stored, packing: Fp8) -> Iterator[MadeTensor]:
    weight = parts[""]
    leaf = next((leaf for leaf in ("_scale_inv", "_scale") if leaf in parts), None)
    if leaf is None:
        raise TensorMismatchError(f"{weight.file}: {weight.name} is in 8 bits, and its scales are absent")
    if len(weight.shape) < 2:
        raise TensorMismatchError(f"{weight.file}: {weight.name} is {list(weight.shape)}, and no matrix of 8 bits")
    *lead, rows, columns = weight.shape
    accepted = {(), (1,), (rows,), (rows, 1), (*lead, 1, 1), (*lead, rows, 1)}
    if packing.block is not None:
        accepted.add((*lead, -(-rows // packing.block[0]), -(-columns // packing.block[1])))
    scale = parts[leaf]
    if scale.shape not in accepted or scale.dtype not in _FLOATS:
        raise TensorMismatchError(
            f"{scale.file}: {scale.name} is {list(scale.shape)} of type {scale.dtype}, which are no scales of"
            f" {list(weight.shape)}" + (f" in blocks of {list(packing.block)}" if packing.block else "")
        )
    yield MadeTensor(name, "BF16", weight.shape, "weight", stored, ("", "_scale"), (weight, scale))


def _nvfp4(name: str, parts: Parts, stored: Stored, packing: Nvfp4) -> Iterator[MadeTensor]:
    rows, pairs = _matrix(parts[".weight"], stored)
    if pairs == 0 or pairs % 8:
        raise TensorMismatchError(
            f"{parts['.weight'].file}: {name}.weight ({stored.label}) has {2 * pairs} columns, which groups of 16 do"
            " not divide"
        )
    _need(parts, ".weight_scale", (rows, pairs // 8), ("F8_E4M3",), stored)
    whole = _present(parts, ".weight_scale_2", stored)
    _need(parts, ".weight_scale_2", (1,) if whole.shape == (1,) else (), ("F32",), stored)
    leaves = (".weight", ".weight_scale", ".weight_scale_2")
    yield _made(name, parts, stored, "weight", leaves, "BF16", (rows, 2 * pairs))


_FORMS: Mapping[type[Packing], _Form] = {
    Gptq: _Form(re.compile(r"\.(qweight|qzeros|scales|g_idx)$"), ".qweight", ("I32",), _gptq),
    Awq: _Form(re.compile(r"\.(qweight|qzeros|scales)$"), ".qweight", ("I32",), _awq),
    PackedInts: _Form(
        re.compile(r"\.weight_(packed|scale|zero_point|g_idx)$"), ".weight_packed", ("I32",), _packed_ints
    ),
    Int8: _Form(re.compile(r"\.weight(_scale|_zero_point)?$"), ".weight", ("I8",), _int8),
    Mxfp4Blocks: _Form(re.compile(r"_(blocks|scales)$"), "_blocks", ("U8",), _mxfp4),
    Mxfp4: _Form(re.compile(r"\.weight_(packed|scale)$"), ".weight_packed", ("U8",), _mxfp4_rows),
    Nvfp4: _Form(re.compile(r"\.weight(_scale_2|_scale)?$"), ".weight", ("U8",), _nvfp4),
    Fp8: _Form(re.compile(r"(_scale_inv|_scale|)$"), "", ("F8_E4M3",), _fp8),
}


def _packed(
    name: str,
    parts: Parts,
    stored: Stored,
    shape: tuple[int, ...],
    weight: tuple[str, ...],
    scales: tuple[str, ...],
    biases: tuple[str, ...] | None,
    claims: tuple[Claim, ...] = (),
) -> Iterator[MadeTensor]:
    """Yield what MLX has of a matrix; each part is made of leaves."""
    assert stored.becomes is not None
    bits, group, _ = stored.becomes
    *rows, columns = shape
    numbers = (*rows, columns // group)
    kind = parts[scales[0]].dtype
    yield _made(name, parts, stored, "weight", weight, "U32", (*rows, columns * bits // 32), claims)
    yield _made(name, parts, stored, "scales", scales, kind, numbers)
    if biases is not None:
        yield _made(name, parts, stored, "biases", biases, kind, numbers)


def _made(
    name: str,
    parts: Parts,
    stored: Stored,
    part: Literal["weight", "scales", "biases"],
    leaves: tuple[str, ...],
    dtype: str,
    shape: tuple[int, ...],
    claims: tuple[Claim, ...] = (),
) -> MadeTensor:
    sources = tuple(parts[leaf] for leaf in leaves)
    return MadeTensor(f"{name}.{part}", dtype, shape, part, stored, leaves, sources, claims)


def _matrix(info: TensorInfo, stored: Stored) -> tuple[int, int]:
    if len(info.shape) != 2:
        raise TensorMismatchError(f"{info.file}: {info.name} ({stored.label}) is {list(info.shape)}, and no matrix")
    return info.shape[0], info.shape[1]


def _groups(columns: int, group_size: int, info: TensorInfo, stored: Stored) -> int:
    """Return how many groups a row has; all are divided by MLX's."""
    assert stored.becomes is not None
    group = columns if group_size == -1 else group_size
    fitting = stored.becomes[1]
    if columns == 0 or columns % group or group % fitting:
        raise TensorMismatchError(
            f"{info.file}: {info.name} ({stored.label}) stands for {columns} columns, which groups of"
            f" {fitting if group_size == -1 else group} do not divide"
        )
    return columns // group


def _in_order(parts: Parts, leaf: str, columns: int, groups: int, stored: Stored) -> tuple[Claim, ...]:
    """Which group each column is of, where that is said, must be the one that it stands in."""
    if leaf not in parts:
        return ()
    _need(parts, leaf, (columns,), ("I32", "I64"), stored)
    refusal = (
        f"({stored.label}) says that columns are sorted by activation (desc_act), which tinyllm does not read; look"
        " for a version without"
    )
    return (Claim(parts[leaf], columns // groups, refusal),)


def _no_zeros(parts: Parts, shapes: Container[tuple[int, ...]], stored: Stored) -> tuple[Claim, ...]:
    """Symmetric numbers have no zero points; where they are stored, they must be zeros.

    Of others transformers makes nothing when it runs a checkpoint, and subtracts them when it unpacks one.
    """
    info = parts.get(".weight_zero_point")
    if info is None:
        return ()
    refusal = (
        f"({stored.label}) holds zero points, but config.json says that there are none (symmetric); look for a"
        " version that does not contradict itself"
    )
    if info.shape not in shapes or info.dtype not in _INTEGERS:
        raise UnsupportedQuantizationError(f"{info.file}: {info.name} {refusal}")
    return (Claim(info, max(1, math.prod(info.shape)), refusal),)


def _need(parts: Parts, leaf: str, shape: tuple[int, ...], types: tuple[str, ...], stored: Stored) -> None:
    info = _present(parts, leaf, stored)
    if info.shape != shape or info.dtype not in types:
        raise TensorMismatchError(
            f"{info.file}: {info.name} ({stored.label}) is {list(info.shape)} of type {info.dtype}, not {list(shape)}"
            f" of type {' or '.join(types)}"
        )


def _need_rows(parts: Parts, leaf: str, rows: int, types: tuple[str, ...], stored: Stored) -> None:
    """Demand a number for each row, or for all."""
    info = _present(parts, leaf, stored)
    _need(parts, leaf, info.shape if info.shape in _shapes_by_row(rows) else (rows, 1), types, stored)


def _shapes_by_row(rows: int) -> tuple[tuple[int, ...], ...]:
    return (), (1,), (rows,), (1, 1), (rows, 1)


def _present(parts: Parts, leaf: str, stored: Stored) -> TensorInfo:
    if leaf not in parts:
        first = next(iter(parts.values()))
        raise TensorMismatchError(f"{first.file}: {first.name} ({stored.label}) stands there without its {leaf[1:]}")
    return parts[leaf]
