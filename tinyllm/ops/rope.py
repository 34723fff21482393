"""Rotary position embedding (arXiv 2104.09864), and the ways to stretch it.

A position p turns the i-th pair of a head by the angle p / wavelengths[i]. Pairs are half-split: element i of the
rotated part goes with element i + dims / 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tinyllm._mx import mx
from tinyllm.config.rope import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling


def rope_wavelengths(rope: RopeConfig) -> list[float]:
    """Return dims / 2 wavelengths over 2 pi: theta ** (2 i / dims), as the scaling stretches them."""
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


def rope_attention_factor(rope: RopeConfig) -> float:
    """Return what multiplies the rotated part of q and of k: 1 but for YaRN (arXiv 2309.00071, section 3.4)."""
    scaling = rope.scaling
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
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
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


class Rope:
    """The rotation of one kind of layer, applied to q or k of shape (batch, heads, seq, head_dim)."""

    def __init__(self, config: RopeConfig, *, fused: bool = True) -> None:
        self.dims = config.dims
        self.fused = fused
        self.wavelengths = mx.array(rope_wavelengths(config), dtype=mx.float32)
        self.attention_factor = rope_attention_factor(config)

    def __call__(self, x: mx.array, offset: int | mx.array) -> mx.array:
        """Rotate `x`, whose first position is `offset`: one for all rows, or an array (batch,)."""
        x = self._scaled(x)
        if self.fused:
            return mx.fast.rope(
                x, self.dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=self.wavelengths
            )
        return rotate_reference(x, self.dims, self.wavelengths, offset)

    def _scaled(self, x: mx.array) -> mx.array:
        if self.attention_factor == 1.0:
            return x
        if self.dims == x.shape[-1]:
            return x * self.attention_factor
        return mx.concatenate([x[..., : self.dims] * self.attention_factor, x[..., self.dims :]], axis=-1)


def rotate_reference(x: mx.array, dims: int, wavelengths: mx.array, offset: int | mx.array) -> mx.array:
    """Rotate the first `dims` elements of x (batch, heads, seq, head_dim) in plain operations, in float32."""
    first = mx.array(offset).reshape(-1, 1, 1, 1)
    positions = first + mx.arange(x.shape[2]).reshape(1, 1, -1, 1)
    angles = positions.astype(mx.float32) / wavelengths
    cos, sin = mx.cos(angles), mx.sin(angles)
    half = dims // 2
    a = x[..., :half].astype(mx.float32)
    b = x[..., half:dims].astype(mx.float32)
    rotated = mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return rotated if dims == x.shape[-1] else mx.concatenate([rotated, x[..., dims:]], axis=-1)
