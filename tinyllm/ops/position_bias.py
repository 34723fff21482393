"""What is added to scores by the distance between a query and a key."""

from __future__ import annotations

import math

from tinyllm._mx import mx
from tinyllm.config.layers import Alibi, Sandwich


def alibi_slopes(heads: int, most: float = 8.0) -> list[float]:
    """Return a slope for each head: 2 ** (-most i / n), i from 1 on, for a power of two n (arXiv 2108.12409).

    For another number those of the largest power of two below are followed by every second one of twice that power.
    """
    n = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-most * i / n) for i in range(1, n + 1)]
    finer = [2 ** (-most * i / (2 * n)) for i in range(1, 2 * n, 2)]
    return slopes + finer[: heads - n]


class PositionBias:
    """The bias of one kind of layer with so many heads."""

    def __init__(self, config: Alibi | Sandwich, heads: int) -> None:
        self._config = config
        self._heads = heads
        if isinstance(config, Alibi):
            self._slopes = mx.array(alibi_slopes(heads, config.most), dtype=mx.float32)[:, None, None]
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
