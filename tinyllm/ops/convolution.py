"""The short causal convolution of layers that keep a state: each channel by itself, over its last few positions."""

from __future__ import annotations

from tinyllm._mx import mx


def causal_convolution(
    x: mx.array, before: mx.array, weight: mx.array, bias: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Convolve x (batch, seq, channels), which comes after `before` (batch, kernel - 1, channels).

    `weight` is (channels, kernel), its last column for the position itself. Returns the same shape as x, and what
    stands before the position after the last.
    """
    seq, kernel = x.shape[1], weight.shape[1]
    whole = mx.concatenate([before.astype(x.dtype), x], axis=1)
    y = whole[:, :seq] * weight[:, 0]
    for k in range(1, kernel):
        y = y + whole[:, k : k + seq] * weight[:, k]
    return y if bias is None else y + bias, whole[:, seq:]
