"""Activations of feed-forward networks."""

from __future__ import annotations

from tinyllm._mx import mx
from tinyllm.ops.exp import LEAST_SIZE, polynomial_exp


def silu(x: mx.array, *, polynomial: bool = False) -> mx.array:
    """x * sigmoid(x), element by element (arXiv 1702.03118); `polynomial` is for many elements of float32."""
    if polynomial and x.size >= LEAST_SIZE:
        return x / (1 + polynomial_exp(-x))
    return x * mx.sigmoid(x)
