"""The header of a GGUF file, checked against the file before anything in it is trusted. No mlx.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian: "GGUF", the version, how many
tensors and how many values; the values, each a name, a type and what is of that type; for each tensor a name, its
dimensions (the fastest first), a type and an offset; then, aligned, the data.
"""

from __future__ import annotations

import math
import mmap
import stat
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyllm.errors import CheckpointError, CorruptFileError, MissingFileError, UnsupportedQuantizationError

__all__ = ["GgmlType", "GgufHeader", "GgufTensor", "HeaderTakesMoreError", "is_gguf", "read_gguf_header"]

SUFFIX = ".gguf"
_MAGIC, _VERSIONS, _ALIGNMENT = b"GGUF", (2, 3), "general.alignment"
_MOST_DIMENSIONS, _MOST_ELEMENTS = 4, 1 << 63
_DEEPEST = 3  # arrays within arrays
_MOST_VALUES = 1 << 24  # elements of all arrays together: thirty times those of the largest vocabulary
_LONGEST_NAME = 1 << 16
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9


@dataclass(frozen=True)
class GgmlType:
    """How elements of a tensor are stored: blocks of `block` of them, `nbytes` each."""

    name: str
    number: int
    block: int
    nbytes: int


_TYPES: Mapping[int, GgmlType] = {
    number: GgmlType(name, number, block, nbytes)
    for name, number, block, nbytes in (
        ("F32", 0, 1, 4), ("F16", 1, 1, 2), ("Q4_0", 2, 32, 18), ("Q4_1", 3, 32, 20), ("Q5_0", 6, 32, 22),
        ("Q5_1", 7, 32, 24), ("Q8_0", 8, 32, 34), ("Q2_K", 10, 256, 84), ("Q3_K", 11, 256, 110),
        ("Q4_K", 12, 256, 144), ("Q5_K", 13, 256, 176), ("Q6_K", 14, 256, 210), ("IQ2_XXS", 16, 256, 66),
        ("IQ2_XS", 17, 256, 74), ("IQ3_XXS", 18, 256, 98), ("IQ1_S", 19, 256, 50), ("IQ4_NL", 20, 32, 18),
        ("IQ3_S", 21, 256, 110), ("IQ2_S", 22, 256, 82), ("IQ4_XS", 23, 256, 136), ("IQ1_M", 29, 256, 56),
        ("BF16", 30, 1, 2), ("TQ1_0", 34, 256, 54), ("TQ2_0", 35, 256, 66), ("MXFP4", 39, 32, 17),
    )
}  # fmt: skip

_UNREAD = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 31: "Q4_0_4_4",
    32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 40: "NVFP4",
}  # fmt: skip


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor stands: bytes `start` to `end` of `file`. `shape` has the fastest dimension last."""

    name: str
    file: Path
    type: GgmlType
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class GgufHeader:
    """What a file says of itself, numbers and texts and tuples of them by name; and its tensors."""

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file, as its ending says."""
    return path.suffix.lower() == SUFFIX


class HeaderTakesMoreError(CorruptFileError):
    """The beginning of a file that was given is shorter than its header."""


def read_gguf_header(path: Path, size: int | None = None) -> GgufHeader:
    """Read and check the header of `path`, which may be the beginning of a file of `size` bytes.

    Raises CorruptFileError, naming the file and what is wrong in it, for counts and lengths that pass the end of the
    file, names that are there twice, dimensions that overflow, and tensors that overlap or lie outside of the file;
    UnsupportedQuantizationError for a type of tensor that is unknown; HeaderTakesMoreError for too short a beginning.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CorruptFileError(f"{path}: not a file")
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise CorruptFileError(f"{path}: not a GGUF file: it does not begin with GGUF; download it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Reader(path, content, len(content) if size is None else size).header()
    except FileNotFoundError:
        raise MissingFileError(f"{path}: there is no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: not readable: {error}") from error


class _Reader:
    """Goes through a header once; nothing is read that the file cannot hold."""

    def __init__(self, path: Path, content: mmap.mmap, size: int) -> None:
        self._path = path
        self._content = content
        self._size = size
        self._at = len(_MAGIC)
        self._values_left = _MOST_VALUES

    def header(self) -> GgufHeader:
        version = self._scalar("<I", "its version")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = "big-endian" if swapped in _VERSIONS else f"of version {version}"
            raise self._fail(f"a GGUF file that is {what}: tinyllm reads little-endian ones of version 2 and 3")
        tensors = self._count("tensors", least=24)
        values = self._count("values", least=13)
        metadata: dict[str, Any] = {}
        for _ in range(values):
            name = self._name("the name of a value")
            if name in metadata:
                raise self._fail(f"the value {name!r} is there twice")
            metadata[name] = self._value(name)
        infos = [self._tensor_info() for _ in range(tensors)]
        alignment = metadata.get(_ALIGNMENT, 32)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._fail(f"{_ALIGNMENT} is {alignment!r:.40}, which is no power of two from 8 on")
        start = -(-self._at // alignment) * alignment
        placed = [self._place(start, alignment, *info) for info in infos]
        by_name = {tensor.name: tensor for tensor in placed}
        if len(by_name) < len(placed):
            [(name, _)] = Counter(tensor.name for tensor in placed).most_common(1)
            raise self._fail(f"the tensor {name!r} is there twice")
        self._check_overlaps(placed)
        return GgufHeader(self._path, metadata, by_name)

    def _fail(self, what: str) -> CorruptFileError:
        return CorruptFileError(f"{self._path}: {what}")

    def _take(self, length: int, what: str) -> int:
        """Step over so many bytes; return where they begin."""
        start = self._at
        if not 0 <= length <= self._size - start:
            raise self._fail(
                f"{what} would take {length:,} bytes from byte {start:,} on, but the file has {self._size:,}: it is"
                " cut off, or damaged; download it again"
            )
        self._at += length
        if self._at > len(self._content):
            raise HeaderTakesMoreError(f"{self._path}: {what} is not within the first {len(self._content):,} bytes")
        return start

    def _scalar(self, form: str, what: str) -> Any:
        return struct.unpack_from(form, self._content, self._take(struct.calcsize(form), what))[0]

    def _count(self, what: str, *, least: int) -> int:
        """Read how many `what` there are, each of `least` bytes or more."""
        count: int = self._scalar("<Q", f"the number of {what}")
        if count > (self._size - self._at) // least:
            raise self._fail(f"it claims {count:,} {what}, which a file of {self._size:,} bytes cannot hold")
        return count

    def _text(self, what: str, longest: int | None = None) -> bytes:
        length = self._scalar("<Q", what)
        if longest is not None and length > longest:
            raise self._fail(f"{what} is {length:,} bytes long, which no name is")
        start = self._take(length, what)
        return self._content[start : self._at]

    def _name(self, what: str) -> str:
        try:
            return self._text(what, _LONGEST_NAME).decode()
        except UnicodeDecodeError:
            raise self._fail(f"{what} is not UTF-8") from None

    def _value(self, name: str, depth: int = 0) -> Any:
        return self._value_of(self._scalar("<I", f"the type of {name!r}"), name, depth)

    def _value_of(self, kind: int, name: str, depth: int) -> Any:
        if kind == _STRING:
            return self._text(f"{name!r}").decode(errors="backslashreplace")
        if kind == _ARRAY:
            return self._array(name, depth + 1)
        if kind not in _SCALARS:
            raise self._fail(f"{name!r} is of type {kind}, which GGUF does not have")
        if kind == _BOOL:
            return bool(self._scalar("<B", f"{name!r}"))
        value = self._scalar(_SCALARS[kind], f"{name!r}")
        return shortest(value) if kind == _FLOAT32 else value

    def _array(self, name: str, depth: int) -> tuple[Any, ...]:
        if depth > _DEEPEST:
            raise self._fail(f"{name!r} has arrays within arrays more than {_DEEPEST} deep")
        kind = self._scalar("<I", f"the type of {name!r}")
        form = _SCALARS.get(kind)
        least = struct.calcsize(form) if form else {_STRING: 8, _ARRAY: 12}.get(kind, 1)
        count = self._count(f"elements of {name!r}", least=least)
        self._values_left -= count
        if self._values_left < 0:
            raise self._fail(f"{name!r} has {count:,} elements: more than tinyllm reads")
        if form is None:
            return tuple(self._value_of(kind, name, depth) for _ in range(count))
        start = self._take(count * least, f"{name!r}")
        form = "<B" if kind == _BOOL else form
        return struct.unpack_from(f"<{count}{form[1]}", self._content, start)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._name("the name of a tensor")
        dimensions = self._scalar("<I", f"the dimensions of {name!r}")
        if dimensions > _MOST_DIMENSIONS:
            raise self._fail(f"the tensor {name!r} claims {dimensions:,} dimensions, of at most {_MOST_DIMENSIONS}")
        shape = tuple(self._scalar("<Q", f"the dimensions of {name!r}") for _ in range(dimensions))
        return (
            name,
            shape[::-1],
            self._scalar("<I", f"the type of {name!r}"),
            self._scalar("<Q", f"where {name!r} is"),
        )

    def _place(
        self, data_start: int, alignment: int, name: str, shape: tuple[int, ...], number: int, offset: int
    ) -> GgufTensor:
        kind = _TYPES.get(number)
        if kind is None:
            unread = _UNREAD.get(number, number)
            raise UnsupportedQuantizationError(
                f"{self._path}: the tensor {name!r} is of type {unread}, which tinyllm does not read"
                f" ({', '.join(kind.name for kind in _TYPES.values())})"
            )
        elements = math.prod(shape)
        if not 0 < elements < _MOST_ELEMENTS:
            raise self._fail(f"the tensor {name!r} claims dimensions {list(shape)}, which are no sizes")
        if kind.block > 1 and (not shape or shape[-1] % kind.block):
            raise self._fail(
                f"the tensor {name!r} of {list(shape)} has rows that blocks of {kind.block} do not divide"
            )
        if offset % alignment:
            raise self._fail(f"the tensor {name!r} is at byte {offset:,} of the data, which is not aligned")
        start = data_start + offset
        end = start + elements // kind.block * kind.nbytes
        if end > self._size:
            raise self._fail(
                f"the tensor {name!r} of {list(shape)} in {kind.name} ends at byte {end:,}, but the file has"
                f" {self._size:,}: it is cut off; download it again"
            )
        return GgufTensor(name, self._path, kind, shape, start, end)

    def _check_overlaps(self, tensors: list[GgufTensor]) -> None:
        position = 0
        for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.end)):
            if tensor.start < position:
                raise self._fail(f"the tensor {tensor.name!r} overlaps the one before it")
            position = tensor.end


def shortest(value: float) -> float:
    """Return the decimal number that was rounded to this float32: 1e-05, not 9.999999747378752e-06."""
    if not math.isfinite(value):
        return value
    stored = struct.pack("<f", value)
    for digits in range(1, 9):
        found = float(f"{value:.{digits}g}")
        try:
            if struct.pack("<f", found) == stored:
                return found
        except OverflowError:  # rounded up past the largest float32
            continue
    return value
