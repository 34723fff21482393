"""The header of a .safetensors file, checked against the file before anything in it is trusted. No mlx.

Layout (https://github.com/huggingface/safetensors): 8 bytes, little-endian, the length of the header; the header, a
JSON object name -> {dtype, shape, data_offsets}; then the data.

Headers are read here because the safetensors library (0.8) does not return where data begins, takes the last of two
entries of one name, does not name the tensor whose shape does not fit, and refuses headers above 100 MB and metadata
that is not text, both of which exist. They are written here because the library needs all data of a file in memory.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from tinyllm.config.reader import parse_json
from tinyllm.errors import CheckpointError, CorruptFileError, MissingFileError

_LONGEST = 1 << 29  # bytes of a header: five times the longest that was seen
_MOST_DIMENSIONS, _MOST_ELEMENTS = 16, 1 << 63
_ALIGNMENT = 8  # bytes, of where the data begins
_METADATA = "__metadata__"
BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class TensorInfo(NamedTuple):  # a fifth of a dataclass's time to make, and checkpoints have tens of thousands
    """Where a tensor stands: bytes `start` to `end` of `file`, holding `shape` elements of `dtype` (as written)."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.start


def read_safetensors_header(path: Path) -> dict[str, TensorInfo]:
    """Read and check the header of `path`: name -> where its data stands.

    Raises CorruptFileError, naming the file and the tensor, for a length that passes the end of the file, a header
    that is not JSON, offsets that disagree with the shape, overlap, leave gaps, or do not end where the file does.
    """
    content, size = _read_header(path)
    try:
        header = parse_json(content)
    except ValueError as error:
        raise CorruptFileError(f"{path}: its header is not JSON ({error}); download it again") from error
    assert isinstance(header, dict)  # it begins with a brace
    header.pop(_METADATA, None)
    data_start = 8 + len(content)
    tensors = {name: _tensor_info(path, name, entry, data_start) for name, entry in header.items()}
    _check_layout(path, tensors, data_start, size)
    return tensors


def write_safetensors_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the bytes before a file's data, of tensors (name, dtype, shape) in the order of the data."""
    entries: dict[str, object] = {_METADATA: dict(metadata)}
    position = 0
    for name, dtype, shape in tensors:
        end = position + math.prod(shape) * BITS[dtype] // 8
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    content = json.dumps(entries, separators=(",", ":")).encode()
    content += b" " * (-len(content) % _ALIGNMENT)
    return len(content).to_bytes(8, "little") + content


def _read_header(path: Path) -> tuple[bytes, int]:
    """Return the header, unparsed, and the size of the file; nothing is read that the file cannot hold."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CorruptFileError(f"{path}: not a file")
        with path.open("rb") as file:
            length, first = int.from_bytes(file.read(8), "little"), file.read(1)
            if not 2 <= length <= min(status.st_size - 8, _LONGEST):
                raise CorruptFileError(
                    f"{path}: its header would take {length:,} bytes, but the file has {status.st_size:,}: it is cut"
                    " off, or no safetensors file; download it again"
                )
            if first != b"{":
                raise CorruptFileError(f"{path}: its header is no JSON object; download it again")
            return first + file.read(length - 1), status.st_size
    except FileNotFoundError:
        raise MissingFileError(f"{path}: there is no such file; download it again") from None
    except OSError as error:
        raise CheckpointError(f"{path}: not readable: {error}") from error


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        counts = [*shape, start, end]
    except (TypeError, KeyError, ValueError):
        raise CorruptFileError(f"{path}: the header's entry for {name!r} is malformed") from None
    sizes = set(map(type, counts)) == {int} and min(counts) >= 0 and max(counts) < _MOST_ELEMENTS
    if not sizes or len(shape) > _MOST_DIMENSIONS or not isinstance(dtype, str):
        raise CorruptFileError(f"{path}: the header's entry for {name!r} holds values that are no sizes")
    if dtype not in BITS:
        raise CorruptFileError(f"{path}: tensor {name!r} is of unknown type {dtype!r}")
    bits = math.prod(shape) * BITS[dtype]
    needed = -(-bits // 8)
    if bits % 8 or end - start != needed:
        raise CorruptFileError(
            f"{path}: tensor {name!r} of shape {list(shape)} and type {dtype} needs {needed:,} bytes,"
            f" but its offsets span {end - start:,}"
        )
    return TensorInfo(name, path, dtype, shape, data_start + start, data_start + end)


def _check_layout(path: Path, tensors: dict[str, TensorInfo], data_start: int, size: int) -> None:
    """Every byte of the data belongs to exactly one tensor."""
    position = data_start
    for info in sorted(tensors.values(), key=attrgetter("start", "end")):
        if info.end > size:
            raise CorruptFileError(
                f"{path}: tensor {info.name!r} ends at byte {info.end:,}, but the file has {size:,}: it is cut off;"
                " download it again"
            )
        if info.start != position:
            kind = "overlaps the one before it" if info.start < position else "leaves a gap before it"
            raise CorruptFileError(f"{path}: tensor {info.name!r} {kind} (byte {info.start:,}, not {position:,})")
        position = info.end
    if position != size:
        raise CorruptFileError(f"{path}: {size - position:,} bytes at its end belong to no tensor")
