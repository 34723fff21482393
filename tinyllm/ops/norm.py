"""Root-mean-square normalisation (arXiv 1910.07467)."""

from __future__ import annotations

from tinyllm._mx import mx


def rms_norm(x: mx.array, weight: mx.array | None, eps: float, *, fused: bool = True) -> mx.array:
    """Scale each vector of `x` (..., hidden) to unit root mean square, then by `weight` (hidden,) if there is one."""
    if fused:
        return mx.fast.rms_norm(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def rms_norm_reference(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """The same in plain operations; the mean is taken in float32, as the fused kernel does."""
    wide = x.astype(mx.float32)
    mean_square = mx.mean(wide * wide, axis=-1, keepdims=True)
    normal = (wide * mx.rsqrt(mean_square + eps)).astype(x.dtype)
    return normal if weight is None else normal * weight
