"""Root-mean-square normalisation (arXiv 1910.07467) and layer normalisation (arXiv 1607.06450)."""

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


def layer_norm(
    x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float, *, fused: bool = True
) -> mx.array:
    """Move each vector of `x` (..., hidden) to mean 0 and variance 1, then times `weight`, plus `bias`, (hidden,)."""
    if fused:
        return mx.fast.layer_norm(x, weight, bias, eps)
    return layer_norm_reference(x, weight, bias, eps)


def layer_norm_reference(x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float) -> mx.array:
    """The same in plain operations, in float32."""
    wide = x.astype(mx.float32)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    normal = centred * mx.rsqrt(mx.mean(centred * centred, axis=-1, keepdims=True) + eps)
    normal = normal if weight is None else normal * weight
    return (normal if bias is None else normal + bias).astype(x.dtype)
