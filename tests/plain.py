"""Plain numpy, in float64 and by loops where that is clearer: what attention and its parts are held against."""

from __future__ import annotations

import math

import numpy as np

from tinyllm._mx import mx
from tinyllm.config.layers import Alibi, Sandwich
from tinyllm.config.reach import Reach


def wide(array: mx.array) -> np.ndarray:
    """Return the same numbers in float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def softmax(scores: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def attend(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    reach: Reach | None = None,
    softcap: float | None = None,
    bias: Alibi | Sandwich | None = None,
    sinks: mx.array | None = None,
) -> np.ndarray:
    """Attend with the last queries q (batch, heads, seq, dim) over all k and v (batch, kv_heads, keys, dim)."""
    (batch, heads, seq, _), keys = q.shape, k.shape[2]
    group = heads // k.shape[1]
    out = np.empty((batch, heads, seq, v.shape[-1]))
    for b, h, i in np.ndindex(batch, heads, seq):
        query = keys - seq + i
        seen = [key for key in range(query + 1) if reach is None or reach.sees(query, key)]
        scores = wide(k)[b, h // group, seen] @ wide(q)[b, h, i] * scale
        if softcap is not None:
            scores = np.tanh(scores / softcap) * softcap
        if bias is not None:
            scores += [position_bias(bias, h, heads, query, key) for key in seen]
        if sinks is not None:
            scores = np.append(scores, wide(sinks)[h])
        out[b, h, i] = softmax(scores)[: len(seen)] @ wide(v)[b, h // group, seen]
    return out


def position_bias(bias: Alibi | Sandwich, head: int, heads: int, query: int, key: int) -> float:
    """What is added to one score, but for what is the same for all keys of a query."""
    if isinstance(bias, Sandwich):
        angles = [(query - key) / 10000 ** (2 * i / bias.dims) for i in range(bias.dims // 2)]
        return heads / (8 * (head + 1)) * sum(math.cos(angle) - 1 for angle in angles)
    slope = alibi_slope(bias, head, heads)
    if bias.rounded:
        return bfloat16(bfloat16(slope) * bfloat16(key)) * bias.factor
    return slope * (key - query) * bias.factor


def alibi_slope(bias: Alibi, head: int, heads: int) -> float:
    """Of arXiv 2108.12409 for powers of two, and as its released code goes on from there."""
    below = 2 ** math.floor(math.log2(heads))
    if head < below:
        return 2 ** (-bias.most * (head + 1) / below)
    return 2 ** (-bias.most * (2 * (head - below) + 1) / (2 * below))


def bfloat16(number: float) -> float:
    """Round to bfloat16."""
    return float(mx.array(number, dtype=mx.float32).astype(mx.bfloat16).astype(mx.float32).item())
