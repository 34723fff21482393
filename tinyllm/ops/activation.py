"""Activations of feed-forward networks."""

from __future__ import annotations

from tinyllm._mx import mx


def silu(x: mx.array) -> mx.array:
    """x * sigmoid(x), element by element (arXiv 1702.03118)."""
    return x * mx.sigmoid(x)
