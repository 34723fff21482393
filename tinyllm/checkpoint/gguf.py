"""The data of a GGUF file as arrays: blocks of ggml taken apart into MLX's packed elements, scales and biases.

The layout of blocks is that of ggml (ggml-common.h, and gguf.quants beside it). An element of a group is
scale * q + bias in MLX; in Q4_0 it is d * (q - 8), so that the bias is -8 d.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tinyllm._mx import mx
from tinyllm.checkpoint.gguf_header import GgufTensor
from tinyllm.checkpoint.gguf_tensors import GROUP, GgufPart, Order, packing_of

__all__ = ["load_part"]

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.floating[Any]]
_CHUNK = 1 << 22  # elements that are taken apart at once
_WORDS: Mapping[str, npt.DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def load_part(info: GgufPart) -> dict[str, mx.array]:
    """Return the part of a tensor that is asked for, by its name, and the others of a packed one with it."""
    if info.part == "dense":
        return {info.name: _dense(info)}
    arrays = _packed(info)
    return {f"{info.stored.name}:{part}": array for part, array in arrays.items()}


def _dense(info: GgufPart) -> mx.array:
    stored = info.stored
    if packing_of(stored) is None:
        raw = np.fromfile(info.file, np.uint8, count=stored.end - stored.start, offset=stored.start)
        words = raw.view(_WORDS[stored.type.name])
        array = mx.array(words).view(mx.bfloat16) if stored.type.name == "BF16" else mx.array(words)
    else:
        array = mx.concatenate([mx.array(_dequantized(blocks, stored).ravel()) for blocks in _blocks(info)])
    array = _ordered(array.reshape(stored.shape), info.order)
    if info.decay:
        array = mx.log(-array)
    return array - info.shift if info.shift else array


def _packed(info: GgufPart) -> dict[str, mx.array]:
    """Return the elements, scales and biases of a matrix, (..., columns * bits / 32) and (..., columns / 32).

    mxfp4 has no biases.
    """
    pieces = [_taken_apart(blocks, info.stored) for blocks in _blocks(info)]
    *rows, _ = info.stored.shape
    arrays = [mx.concatenate(list(same)).reshape(*rows, -1) for same in zip(*pieces, strict=True)]
    parts = ("weight", "scales", "biases")[: len(arrays)]
    return dict(zip(parts, (_ordered(a, info.order) for a in arrays), strict=True))


def _taken_apart(blocks: _Bytes, stored: GgufTensor) -> tuple[mx.array, ...]:
    name = stored.type.name
    if name == "MXFP4":
        return _mxfp4(blocks)
    take = _TAKEN_APART.get(name)
    return _packed_anew(_dequantized(blocks, stored)) if take is None else _words(*take(blocks))


def _blocks(info: GgufPart) -> Iterator[_Bytes]:
    """Read a tensor's blocks, (blocks, bytes), some at a time."""
    kind = info.stored.type
    count = math.prod(info.stored.shape) // kind.block
    step = max(1, _CHUNK // kind.block)
    with info.file.open("rb") as file:
        file.seek(info.stored.start)
        for first in range(0, count, step):
            yield np.fromfile(file, np.uint8, count=min(step, count - first) * kind.nbytes).reshape(-1, kind.nbytes)


def _ordered(array: mx.array, order: Order | None) -> mx.array:
    """Put rows (or columns) into the order that families of config.json have them in."""
    if order is not None:
        axis = array.ndim - 1 if order.columns else 0
        before, after = array.shape[:axis], array.shape[axis + 1 :]
        first, moved = mx.split(array, [order.start], axis=axis)
        units = moved.reshape(*before, order.outer, order.first, order.second, -1, *after)
        moved = units.swapaxes(axis + 1, axis + 2).reshape(moved.shape)
        array = mx.concatenate([first, moved], axis=axis) if order.start else moved
    mx.eval(array)
    return array


def _dequantized(blocks: _Bytes, stored: GgufTensor) -> npt.NDArray[np.float32]:
    from gguf import GGMLQuantizationType  # a tenth of a second, for types that are dense or packed anew
    from gguf.quants import dequantize

    found: npt.NDArray[np.float32] = dequantize(blocks, GGMLQuantizationType(stored.type.number))
    return found


def _packed_anew(values: npt.NDArray[np.float32]) -> tuple[mx.array, mx.array, mx.array]:
    """Pack numbers in 8 bits, from the least of a group to its greatest: none is off by more than half a step.

    MLX's own packing has steps that meet zero, and is off by up to a whole one.
    """
    groups = values.reshape(-1, GROUP)
    least = groups.min(axis=1, keepdims=True)
    scales = (groups.max(axis=1, keepdims=True) - least) / np.float32(255)
    steps = np.rint((groups - least) / np.where(scales == 0, np.float32(1), scales))
    return _words(np.clip(steps, 0, 255).astype(np.uint8), 8, scales, least)


def _words(elements: _Bytes, bits: int, scales: _Floats, biases: _Floats) -> tuple[mx.array, mx.array, mx.array]:
    return _joined(elements, bits), mx.array(scales.ravel()), mx.array(biases.ravel())


def _joined(elements: _Bytes, bits: int) -> mx.array:
    """Pack elements (groups, 32) one after the other, the first in the lowest bits: 8 of them fill `bits` bytes."""
    eights = elements.reshape(-1, 8).astype("<u8")
    joined = np.bitwise_or.reduce(eights << (np.arange(8, dtype="<u8") * np.uint64(bits)), axis=1)
    packed = np.ascontiguousarray(joined.view(np.uint8).reshape(-1, 8)[:, :bits])
    return mx.array(packed.reshape(-1).view("<u4"))


# ---------------------------------------------------------------- blocks: (groups, 32) elements, bits, scales, biases

_Parts = tuple[_Bytes, int, _Floats, _Floats]


def _halves(blocks: _Bytes, start: int) -> npt.NDArray[np.float16]:
    """The float16 that begins at a byte of each block, (blocks, 1)."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2")


def _nibbles(data: _Bytes) -> _Bytes:
    """The lower halves of 16 bytes, then the upper ones: (blocks, 32)."""
    return np.concatenate([data & 15, data >> 4], axis=1)


def _fifths(data: _Bytes) -> _Bytes:
    """The fifth bits of 32 elements, (blocks, 4) bytes, in their place: (blocks, 32)."""
    bits: _Bytes = np.unpackbits(data, axis=1, bitorder="little")
    bits <<= 4
    return bits


def _q4_0(blocks: _Bytes) -> _Parts:
    d = _halves(blocks, 0)
    return _nibbles(blocks[:, 2:]), 4, d, d * np.float16(-8)


def _q4_1(blocks: _Bytes) -> _Parts:
    return _nibbles(blocks[:, 4:]), 4, _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: _Bytes) -> _Parts:
    d = _halves(blocks, 0)
    return _nibbles(blocks[:, 6:]) | _fifths(blocks[:, 2:6]), 5, d, d * np.float16(-16)


def _q5_1(blocks: _Bytes) -> _Parts:
    return _nibbles(blocks[:, 8:]) | _fifths(blocks[:, 4:8]), 5, _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: _Bytes) -> _Parts:
    d = _halves(blocks, 0)
    return blocks[:, 2:] ^ np.uint8(128), 8, d, d * np.float16(-128)  # signed bytes, counted from the least


def _mxfp4(blocks: _Bytes) -> tuple[mx.array, mx.array]:
    """Elements of four bits, and the power of two that is one byte for 32 of them: MLX has the very same."""
    return _joined(_nibbles(blocks[:, 1:]), 4), mx.array(np.ascontiguousarray(blocks[:, 0]))


def _eight_scales(blocks: _Bytes) -> tuple[_Floats, _Floats]:
    """The scales and biases of the eight groups of a K-block: each has six bits, of which some stand apart."""
    low, least, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([least & 63, (rest >> 4) | (least >> 6 << 4)], axis=1)
    d, dmin = _halves(blocks, 0).astype(np.float32), _halves(blocks, 2).astype(np.float32)
    return d * scales, -(dmin * minima)


def _q4_k(blocks: _Bytes) -> _Parts:
    quarters = blocks[:, 16:].reshape(-1, 4, 1, 32)
    elements = np.concatenate([quarters & 15, quarters >> 4], axis=2)
    return elements.reshape(-1, GROUP), 4, *_eight_scales(blocks)


def _q5_k(blocks: _Bytes) -> _Parts:
    quarters = blocks[:, 48:].reshape(-1, 4, 1, 32)
    elements = np.concatenate([quarters & 15, quarters >> 4], axis=2).reshape(-1, 8, 32)
    fifths = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return (elements | fifths << 4).reshape(-1, GROUP), 5, *_eight_scales(blocks)


_TAKEN_APART: Mapping[str, Callable[[_Bytes], _Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
}
