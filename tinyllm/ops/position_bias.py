"""What is added to scores by the distance between a query and a key."""

from __future__ import annotations

import math

from tinyllm._mx import mx
from tinyllm.config.layers import Alibi, Sandwich


def alibi_slopes(heads: int, most: float = 8.0) -> list[float]:
    """Return a slope for each head: 2 ** (-most i / n) for a power of two n (arXiv 2108.12409).

    For another number the first n, the largest power of two below, are followed by every second one of 2 n.
    """
    n = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-most * (i + 1) / n) for i in range(n)]
    finer = [2 ** (-most * (i + 1) / (2 * n)) for i in range(2 * n)]
    return slopes + finer[0::2][: heads - n]


def alibi_slopes_of_mpt(heads: int, most: float = 8.0) -> list[float]:
    """The same of MPT, which takes the slopes of the next power of two, every second one first."""
    n = 1 << (heads - 1).bit_length()
    slopes = [2 ** (-most * (i + 1) / n) for i in range(n)]
    return slopes if n == heads else (slopes[1::2] + slopes[::2])[:heads]


class PositionBias:
    """The bias of one kind of layer with so many heads."""

    def __init__(self, config: Alibi | Sandwich, heads: int) -> None:
        self._config = config
        self._heads = heads
        if isinstance(config, Alibi):
            slopes = (alibi_slopes_of_mpt if config.interleaved else alibi_slopes)(heads, config.most)
            self._slopes = mx.array(slopes, dtype=mx.float32)[:, None, None]
        else:
            self._slopes = mx.array([heads / (8 * (h + 1)) for h in range(heads)], dtype=mx.float32)[:, None, None]

    def __call__(self, query: mx.array, key: mx.array) -> mx.array:
        """Return (..., heads, seq, keys) in float32, of positions (..., 1, seq, 1) and (..., 1, 1, keys)."""
        if isinstance(self._config, Sandwich):
            return self._slopes * _inner_products(query - key, self._config.dims)
        if self._config.rounded:  # keys alone: the same for all keys of a query
            products = self._slopes.astype(mx.bfloat16) * key.astype(mx.bfloat16)
            return products.astype(mx.float32) * self._config.factor
        return self._slopes * (key - query).astype(mx.float32) * self._config.factor


def _inner_products(distance: mx.array, dims: int) -> mx.array:
    """Return the inner product of the sinusoidal positions at a distance, less that at 0: sum of cos(d w_i) - 1."""
    total = mx.zeros(distance.shape, dtype=mx.float32)
    for i in range(dims // 2):
        total = total + mx.cos(distance.astype(mx.float32) * math.pow(10000.0, -2 * i / dims)) - 1
    return total
