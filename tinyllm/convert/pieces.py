"""Canonical tensors back into the tensors of a file: how `WeightStore` reads them, the other way round."""

from __future__ import annotations

from collections.abc import Sequence

from tinyllm._mx import mx
from tinyllm.checkpoint.tensor_table import StoredTensor
from tinyllm.config.fused import Piece

__all__ = ["as_filed", "fused"]


def as_filed(arrays: Sequence[mx.array], stored: Sequence[StoredTensor]) -> list[tuple[str, mx.array]]:
    """Return the tensors of the source's files, by name, that `arrays` are all pieces of."""
    first = stored[0]
    array = fused(arrays, [each.piece for each in stored], first.axis)
    if first.transposed:
        array = array.swapaxes(-1, -2)
    if first.flat or first.depthwise:
        array = array.reshape(first.parts[0].shape)
    if not first.stacked:
        return [(first.parts[0].name, array)]
    return [(part.name, array[i]) for i, part in enumerate(first.parts)]


def fused(arrays: Sequence[mx.array], pieces: Sequence[Piece | None], axis: int = 2) -> mx.array:
    """Return one array of all pieces of its axis number `axis`, counted from the end; the only one if it is whole."""
    placed = [(piece, array) for piece, array in zip(pieces, arrays, strict=True) if piece is not None]
    if not placed:
        [array] = arrays
        return array
    units = []
    for piece, array in sorted(placed, key=lambda pair: pair[0].start):
        at = array.ndim - axis
        before, after = array.shape[:at], array.shape[at + 1 :]
        units.append(array.reshape(*before, piece.groups, piece.stop - piece.start, piece.size, *after))
    return mx.concatenate(units, axis=at + 1).reshape(*before, placed[0][0].whole, *after)
