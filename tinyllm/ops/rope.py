"""Rotary position embedding (arXiv 2104.09864), and the ways to stretch it.

A position p turns the i-th pair of a head by the angle p / wavelengths[i]. Pairs are half-split, element i of the
rotated part with element i + dims / 2, or interleaved, element 2 i with 2 i + 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tinyllm._mx import mx
from tinyllm.config.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeConfig,
    YarnScaling,
)


def rope_wavelengths(rope: RopeConfig, length: int = 0) -> list[float]:
    """Return dims / 2 wavelengths over 2 pi: theta ** (2 i / dims), as the scaling stretches them.

    `length` is that of the whole sequence, which some scalings depend on.
    """
    plain = [rope.theta ** (i / rope.dims) for i in range(0, rope.dims, 2)]
    match rope.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return [w * factor for w in plain]
        case Llama3Scaling() as scaling:
            return [_llama3_wavelength(w, scaling) for w in plain]
        case YarnScaling() as scaling:
            return _yarn_wavelengths(plain, rope, scaling)
        case DynamicScaling(factor, original):
            stretch = factor * max(length, original) / original - (factor - 1)
            theta = rope.theta * stretch ** (rope.dims / (rope.dims - 2))
            return [theta ** (i / rope.dims) for i in range(0, rope.dims, 2)]
        case LongRopeScaling() as scaling:
            long = length > scaling.original_max_position_embeddings
            factors = scaling.long_factor if long else scaling.short_factor
            return [w * factor for w, factor in zip(plain, factors, strict=True)]
        case ProportionalScaling(pairs, factor):
            return [w * factor if i < pairs else math.inf for i, w in enumerate(plain)]


def rope_attention_factor(rope: RopeConfig) -> float:
    """Return what multiplies the rotated part of q and of k: 1 but for LongRoPE and YaRN (arXiv 2309.00071, 3.4)."""
    scaling = rope.scaling
    if isinstance(scaling, LongRopeScaling):
        return scaling.attention_factor
    if not isinstance(scaling, YarnScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)


def _llama3_wavelength(wavelength: float, scaling: Llama3Scaling) -> float:
    """Keep short wavelengths, stretch long ones, interpolate frequencies between (as in Llama 3.1's release)."""
    turns = scaling.original_max_position_embeddings / (2 * math.pi * wavelength)
    between = scaling.high_freq_factor - scaling.low_freq_factor  # 0 in Llama 4
    smooth = (turns - scaling.low_freq_factor) / between if between else float(turns > scaling.low_freq_factor)
    smooth = min(max(smooth, 0.0), 1.0)
    return wavelength / ((1 - smooth) / scaling.factor + smooth)


def _yarn_wavelengths(plain: Sequence[float], rope: RopeConfig, scaling: YarnScaling) -> list[float]:
    """Blend kept and stretched frequencies along a ramp over the pairs."""

    def pair_turning(turns: float) -> float:
        """Return the (fractional) index of the pair that turns so often in the original context."""
        span = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return rope.dims * math.log(span) / (2 * math.log(rope.theta))

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    if low == high:
        high += 0.001
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(len(plain))]
    return [w / (stretch / scaling.factor + (1 - stretch)) for w, stretch in zip(plain, ramp, strict=True)]


class Positions:
    """Where the tokens of a forward stand: from `offset` on, which is one for all rows or an array (batch,).

    `length` is that of the whole sequence where more of it is to come; by default it ends with these tokens. Made
    once for all layers, it computes the tables of each kind of rotation once.
    """

    @classmethod
    def of(cls, offset: Offset, seq: int) -> Positions:
        """Return the positions of `seq` tokens from `offset` on, or `offset` itself if it is positions."""
        return offset if isinstance(offset, Positions) else cls(offset, seq)

    def __init__(self, offset: int | mx.array, seq: int, length: int | None = None) -> None:
        self.offset = offset
        self.seq = seq
        self.length = length
        self._tables: dict[RopeConfig, tuple[mx.array, mx.array]] = {}

    @property
    def array(self) -> mx.array:
        """The positions, (batch or 1, seq)."""
        return mx.array(self.offset).reshape(-1, 1) + mx.arange(self.seq)

    def wavelengths(self, config: RopeConfig) -> mx.array:
        """Return dims / 2 wavelengths in float32; (batch, 1, 1, dims / 2) where rows have different ones."""
        if self.length is not None or isinstance(self.offset, int):
            length = self.length or int(self.offset) + self.seq
            return mx.array(rope_wavelengths(config, length), dtype=mx.float32)
        short = mx.array(rope_wavelengths(config), dtype=mx.float32)
        if config.boundary is None:
            return short
        long = mx.array(rope_wavelengths(config, config.boundary + 1), dtype=mx.float32)
        return mx.where(self.offset.reshape(-1, 1, 1, 1) + self.seq > config.boundary, long, short)

    def table(self, config: RopeConfig) -> tuple[mx.array, mx.array]:
        """Return what `rotate` multiplies by, cosines and sines (batch or 1, 1, seq, 2, dims / 2) in float32.

        Of interleaved pairs (batch or 1, 1, seq, dims / 2, 2).
        """
        if config not in self._tables:
            self._tables[config] = self._table(config)
        return self._tables[config]

    def _table(self, config: RopeConfig) -> tuple[mx.array, mx.array]:
        angles = self.array[:, None, :, None].astype(mx.float32) / self.wavelengths(config)
        factor = rope_attention_factor(config)
        cos, sin = mx.cos(angles) * factor, mx.sin(angles) * factor
        axis = -1 if config.interleaved else -2
        return mx.stack([cos, cos], axis=axis), mx.stack([-sin, sin], axis=axis)


Offset = int | mx.array | Positions
"""Where the first token of each row stands: one number for all rows, an array (batch,), or a forward's positions."""


class Rope:
    """The rotation of one kind of layer, applied to the heads of q and k, (batch, heads, seq, head_dim)."""

    def __init__(self, config: RopeConfig, *, fused: bool = True) -> None:
        self._config = config
        self._fused = fused and not isinstance(config.scaling, LongRopeScaling | DynamicScaling)
        self._wavelengths = mx.array(rope_wavelengths(config), dtype=mx.float32)
        self._attention_factor = rope_attention_factor(config)

    def __call__(self, x: mx.array, positions: Positions) -> mx.array:
        """Rotate x (batch, heads, seq, head_dim), whose tokens stand at `positions`."""
        if not self._fused:
            return rotate(x, *positions.table(self._config), interleaved=self._config.interleaved)
        return mx.fast.rope(
            self._scaled(x),
            self._config.dims,
            traditional=self._config.interleaved,
            base=None,
            scale=1.0,
            offset=positions.offset,
            freqs=self._wavelengths,
        )

    def _scaled(self, x: mx.array) -> mx.array:
        dims = self._config.dims
        if self._attention_factor == 1.0:
            return x
        if dims == x.shape[-1]:
            return x * self._attention_factor
        return mx.concatenate([x[..., :dims] * self._attention_factor, x[..., dims:]], axis=-1)


def rotate(x: mx.array, cos: mx.array, sin: mx.array, *, interleaved: bool = False) -> mx.array:
    """Rotate the first elements of x (batch, heads, seq, head_dim) by a table of `Positions`, in plain operations.

    The pair (a, b) becomes (a cos - b sin, b cos + a sin), in float32; the minus stands in the table.
    """
    pair = cos.shape[-2:]
    turned, rest = mx.split(x, [pair[0] * pair[1]], axis=-1)
    pairs = turned.reshape(*turned.shape[:-1], *pair)
    swapped = pairs[..., ::-1] if interleaved else pairs[..., ::-1, :]
    rotated = (pairs * cos + swapped * sin).astype(x.dtype).reshape(turned.shape)
    return mx.concatenate([rotated, rest], axis=-1) if rest.size else rotated
