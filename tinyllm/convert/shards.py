"""Safetensors files that are written a tensor at a time: what will be in them is known before the first. No mlx.

The safetensors library writes a file from tensors that are all in memory, here up to 5 GB more than one tensor takes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from tinyllm.checkpoint.files import INDEX, SINGLE
from tinyllm.checkpoint.safetensors_header import BITS, write_safetensors_header

__all__ = ["SHARD_BYTES", "Planned", "ShardWriter"]

SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Planned:
    """A tensor that will be written; `dtype` as safetensors has it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * BITS[self.dtype] // 8


class ShardWriter:
    """Writes `tensors` into `folder`, in their order, at most `shard_bytes` a file, where no tensor is larger.

    Several files have an index. A context manager: at its end everything is on the disk.
    """

    def __init__(
        self, folder: Path, tensors: Sequence[Planned], metadata: Mapping[str, str], shard_bytes: int = SHARD_BYTES
    ) -> None:
        self._folder = folder
        self._metadata = dict(metadata)
        self._shards = _shared_out(tensors, shard_bytes)
        self._names = (
            [SINGLE] if len(self._shards) == 1 else [_name(i, len(self._shards)) for i in _numbers(self._shards)]
        )
        self._left = [(i, tensor) for i, shard in enumerate(self._shards) for tensor in shard][::-1]
        self._file: IO[bytes] | None = None
        self._open = -1

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        if kind is not None:
            return
        if self._left:
            raise ValueError(f"{self._left[-1][1].name} was to be written, and was not")
        if len(self._shards) > 1:
            (self._folder / INDEX).write_text(json.dumps(self._index(), indent=2) + "\n", encoding="utf-8")

    def write(self, name: str, data: memoryview) -> None:
        """Write the next tensor.

        Raises ValueError where another one is next, or one of other size, and OSError, naming the file, for a full
        disk.
        """
        shard, tensor = self._left.pop()
        if (tensor.name, tensor.nbytes) != (name, data.nbytes):
            raise ValueError(f"{tensor.name} of {tensor.nbytes} bytes is next, not {name} of {data.nbytes}")
        if shard != self._open:
            self._close()
            self._file = (self._folder / self._names[shard]).open("wb")
            self._open = shard
            planned = ((each.name, each.dtype, each.shape) for each in self._shards[shard])
            self._put(write_safetensors_header(planned, self._metadata))
        self._put(data)

    def _put(self, data: bytes | memoryview) -> None:
        assert self._file is not None
        with _named(self._file.name):
            self._file.write(data)

    def _close(self) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        with _named(file.name), file:
            file.flush()
            os.fsync(file.fileno())

    def _index(self) -> dict[str, object]:
        total = sum(tensor.nbytes for shard in self._shards for tensor in shard)
        files = zip(self._names, self._shards, strict=True)
        return {
            "metadata": {"total_size": total},
            "weight_map": {tensor.name: file for file, shard in files for tensor in shard},
        }


@contextmanager
def _named(file: str) -> Iterator[None]:
    """Have an OSError say which file it is of: those of writing do not."""
    try:
        yield
    except OSError as error:
        raise type(error)(error.errno, error.strerror, error.filename or file) from error


def _shared_out(tensors: Sequence[Planned], limit: int) -> list[list[Planned]]:
    shards: list[list[Planned]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _numbers(shards: Sequence[object]) -> range:
    return range(1, len(shards) + 1)


def _name(number: int, count: int) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors"
