"""Matrices of other libraries' forms made into MLX's, bit for bit; see `forms.py` for the layouts.

A scale s and a zero z stand for s * (q - z), which is MLX's scale * q + bias with a bias of -s * z. Scales and biases
are made in float32, where both are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinyllm._mx import mx
from tinyllm.checkpoint.forms import MadeTensor
from tinyllm.config.packings import Awq, Fp8, Gptq, Int8, Mxfp4, Mxfp4Blocks, Nvfp4, PackedInts

__all__ = ["make"]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of each of eight rows, the one of its four bits in the word


def make(made: MadeTensor, arrays: Sequence[mx.array]) -> mx.array:
    """Make a tensor of its `sources`, of which `arrays` are the data; returns an array of the promised shape."""
    if made.part == "weight":
        return _weight(made, arrays).reshape(made.shape)
    if isinstance(made.stored.packing, Mxfp4Blocks | Mxfp4):
        return arrays[0]
    scales = _spread(_by_row(made, arrays[0].astype(mx.float32)), made.shape)
    if made.part == "scales":
        return scales
    return -(scales * _spread(_zeros(made, arrays[1:]), made.shape))


def _weight(made: MadeTensor, arrays: Sequence[mx.array]) -> mx.array:
    """Return the words (rows, columns * bits / 32), or the dense matrix (rows, columns)."""
    stored = arrays[0]
    match made.stored.packing:
        case Gptq():
            return mx.contiguous(stored.view(mx.uint32).T)
        case Awq():
            return _words(_awq_rows(stored).T)
        case PackedInts():
            return stored.view(mx.uint32)
        case Int8():
            return mx.bitwise_xor(stored.view(mx.uint8), 128).view(mx.uint32)
        case Mxfp4Blocks() | Mxfp4():
            return mx.contiguous(stored).view(mx.uint32)
        case Fp8(block):
            return _scaled(_e4m3(stored), arrays[1].astype(mx.float32), block)
        case Nvfp4():
            numbers = mx.array(_E2M1)[mx.stack([stored & 15, stored >> 4], axis=-1).flatten(-2)]
            return numbers * mx.repeat(_e4m3(arrays[1]), 16, axis=-1) * arrays[2].flatten()


def _zeros(made: MadeTensor, arrays: Sequence[mx.array]) -> mx.array:
    """Return the zeros (rows, groups) as the unsigned numbers that the words hold, or one for all."""
    match made.stored.packing:
        case Gptq(bits, _, offset):
            return mx.bitwise_and(_unpacked(arrays[0], bits) + offset, 2**bits - 1).T.astype(mx.float32)
        case Awq():
            return _awq_rows(arrays[0]).T.astype(mx.float32)
        case PackedInts(bits) if arrays:
            return _unpacked(arrays[0].T, bits).T[: made.shape[0]].astype(mx.float32)
        case PackedInts(bits):
            return mx.array([[2.0 ** (bits - 1)]])
        case Int8():
            return 128 + (arrays[0].astype(mx.float32).reshape(-1, 1) if arrays else mx.zeros((1, 1)))
        case packing:
            raise AssertionError(f"{packing} has no zeros")


def _by_row(made: MadeTensor, scales: mx.array) -> mx.array:
    """Return scales (rows, groups), or one for all."""
    match made.stored.packing:
        case Gptq() | Awq():
            return scales.T
        case Int8():
            return scales.reshape(-1, 1)
        case _:
            return scales


def _spread(numbers: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Repeat those of long groups for each of MLX's, and those of all rows for each row."""
    groups = shape[-1] // numbers.shape[-1]
    return mx.broadcast_to(mx.repeat(numbers, groups, axis=-1) if groups > 1 else numbers, shape)


def _unpacked(words: mx.array, bits: int) -> mx.array:
    """Take words (rows, n) apart, lowest bits first: (rows, n * 32 / bits) uint32."""
    shifted = mx.right_shift(mx.contiguous(words).view(mx.uint32)[..., None], mx.arange(0, 32, bits, dtype=mx.uint32))
    return mx.bitwise_and(shifted, 2**bits - 1).flatten(-2)


def _awq_rows(words: mx.array) -> mx.array:
    """Take words (n, rows / 8) apart and put the rows in order: (n, rows) uint8."""
    pairs = mx.contiguous(words).view(mx.uint8)
    halves = mx.stack([pairs & 15, pairs >> 4], axis=-1).reshape(words.shape[0], -1, 8)
    return halves[..., mx.array(_AWQ_PLACES)].flatten(-2)


def _words(halves: mx.array) -> mx.array:
    """Pack numbers of four bits (rows, columns) uint8, lowest first: (rows, columns / 8) uint32."""
    pairs = mx.contiguous(halves).reshape(halves.shape[0], -1, 2)
    return mx.contiguous(pairs[..., 0] | (pairs[..., 1] << 4)).view(mx.uint32)


def _e4m3(codes: mx.array) -> mx.array:
    """Decode numbers of 1 sign, 4 exponent and 3 mantissa bits (arXiv 2209.05433), without infinities: float32."""
    halves = [_e4m3_value(code) for code in range(128)]
    return mx.array([*halves, *(-value for value in halves)])[codes]


def _e4m3_value(code: int) -> float:
    exponent, mantissa = code >> 3, code & 7
    if code == 127:
        return float("nan")
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


def _scaled(weight: mx.array, scales: mx.array, block: tuple[int, int] | None) -> mx.array:
    """Multiply a matrix (..., rows, columns) by its scales, of blocks, of rows or of all."""
    rows, columns = weight.shape[-2:]
    if scales.size == 1:
        return weight * scales.flatten()
    if scales.ndim == 1:
        scales = scales[:, None]
    if block is not None and scales.shape[-2:] not in ((rows, 1), (1, 1)):
        scales = mx.repeat(scales, block[0], axis=-2)[..., :rows, :]
    if block is not None and scales.shape[-1] != 1:
        scales = mx.repeat(scales, block[1], axis=-1)[..., :columns]
    return weight * scales
