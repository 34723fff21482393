"""Matrices into MLX's packed forms, so that what was unpacked before is packed as it was."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyllm._mx import mx
from tinyllm.config.quantization import QuantFormat

__all__ = ["Packed", "pack"]

Packed = tuple[mx.array, mx.array, "mx.array | None"]

_SUSPICIOUS = 1 / 16  # of all groups: as many are reproduced exactly only where the matrix was packed before
_STEPS = (0, -1, 1, -2, 2)  # tried around the number of steps that a group's range suggests


def pack(dense: mx.array, form: QuantFormat) -> Packed:
    """Pack a matrix (..., out, in), as `mx.quantize` does: packed words, scales and (affine alone) biases.

    `mx.quantize` derives the step between values from a group's range, of which a matrix that was unpacked may not
    use all: packed again, its values would move. Such a matrix is known by the groups that do stay, and of the others
    steps nearby are tried until the very same values come out. Raises ValueError where the groups do not divide the
    columns.
    """
    how: dict[str, Any] = {"group_size": form.group_size, "bits": form.bits, "mode": form.mode}
    groups = dense.reshape(-1, form.group_size)
    packed, scales, *others = mx.quantize(groups, **how)
    if others:
        packed, scales, biases = _corrected(groups, packed, scales, others[0], form)
    else:
        biases = None
    *rows, columns = dense.shape
    count = columns // form.group_size
    parts = (
        packed.reshape(*rows, -1),
        scales.reshape(*rows, count),
        None if biases is None else biases.reshape(*rows, count),
    )
    mx.eval([part for part in parts if part is not None])
    return parts


def _corrected(
    groups: mx.array, packed: mx.array, scales: mx.array, biases: mx.array, form: QuantFormat
) -> tuple[mx.array, mx.array, mx.array]:
    """Return the parts, those of groups (a row each) that are not exact replaced where steps nearby make them so."""
    same = np.array(_is_exact(groups, packed, scales, biases, form))
    if same.all() or same.mean() < _SUSPICIOUS:
        return packed, scales, biases
    open_rows = np.flatnonzero(~same)
    for top in (False, True):
        for step in _STEPS:
            if not open_rows.size:
                return packed, scales, biases
            rows = mx.array(open_rows)
            some = groups[rows]
            parts = _packed_by(some, top, step, form)
            found = np.array(_is_exact(some, *parts, form))
            hits = mx.array(open_rows[found])
            if hits.size:
                taken = mx.array(np.flatnonzero(found))
                packed[hits], scales[hits], biases[hits] = (part[taken] for part in parts)
            open_rows = open_rows[~found]
    return packed, scales, biases


def _is_exact(groups: mx.array, packed: mx.array, scales: mx.array, biases: mx.array, form: QuantFormat) -> mx.array:
    unpacked = mx.dequantize(packed, scales, biases, group_size=form.group_size, bits=form.bits)
    return mx.all(unpacked == groups, axis=-1)


def _packed_by(groups: mx.array, top: bool, step: int, form: QuantFormat) -> tuple[mx.array, mx.array, mx.array]:
    """Pack groups so that their greatest (`top`) or least value is the bias, and a whole number of steps from zero.

    That number is what MLX would choose, and `step` more.
    """
    levels = 2**form.bits - 1
    wide = groups.astype(mx.float32)
    least, greatest = wide.min(axis=-1, keepdims=True), wide.max(axis=-1, keepdims=True)
    edge = greatest if top else least
    count = mx.round(levels * mx.abs(edge) / mx.maximum(greatest - least, 1e-30)) + step
    length = mx.abs(edge) / mx.maximum(count, 1)
    scales = (-length if top else length).astype(groups.dtype)
    biases = edge.astype(groups.dtype)
    divisor = scales.astype(mx.float32)
    numbers = mx.round((wide - edge) / mx.where(divisor == 0, 1, divisor))
    for off in (1, -1):  # half precision rounds a product and a sum, which may reach over half a step
        others = numbers + off
        better = (scales * others.astype(groups.dtype) + biases == groups) & (
            scales * numbers.astype(groups.dtype) + biases != groups
        )
        numbers = mx.where(better, others, numbers)
    return _words(mx.clip(numbers, 0, levels), form.bits), scales, biases


def _words(numbers: mx.array, bits: int) -> mx.array:
    """Write rows of numbers as MLX does: one stream of bits, the least first, in words of 32."""
    each = np.array(numbers.astype(mx.uint8))
    stream = (each[:, :, None] >> np.arange(bits, dtype=np.uint8)) & 1
    packed = np.packbits(stream.reshape(len(each), -1), axis=-1, bitorder="little")
    return mx.array(packed.view(np.uint32))
