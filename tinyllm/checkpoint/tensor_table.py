"""The tensors of a checkpoint's files under canonical names, from their headers alone. No mlx."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tinyllm.checkpoint.safetensors_header import TensorInfo, read_safetensors_header
from tinyllm.config.config import Config
from tinyllm.errors import CheckpointError

__all__ = ["READABLE", "TensorTable", "read_tensor_table"]

READABLE = frozenset({"U8", "U16", "U32", "F16", "BF16", "F32"})  # the types that MLX takes as they are


@dataclass(frozen=True)
class TensorTable:
    """Canonical name -> where the tensor stands; `skipped` counts those of parts other than the text model."""

    tensors: dict[str, TensorInfo]
    skipped: int


def read_tensor_table(files: Sequence[Path], config: Config) -> TensorTable:
    """Merge the headers of all files. Raises CheckpointError for a tensor that is there twice or of another type."""
    tensors: dict[str, TensorInfo] = {}
    skipped = 0
    for file in files:
        for name, info in read_safetensors_header(file).items():
            canonical = config.canonical_name(name)
            if canonical is None:
                skipped += 1
                continue
            if canonical in tensors:
                raise CheckpointError(f"{file}: {name!r} is there twice, the first time in {tensors[canonical].file}")
            if info.dtype not in READABLE:
                raise CheckpointError(f"{file}: tensor {name!r} is of type {info.dtype}, which tinyllm does not read")
            tensors[canonical] = info
    return TensorTable(tensors, skipped)
