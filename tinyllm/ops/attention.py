"""Scaled dot-product attention, with keys and values shared by groups of heads (arXiv 2305.13245)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tinyllm._mx import mx
from tinyllm.ops.exp import exp

_BLOCK = 128  # causal queries of one product on a CPU

Mask = mx.array | Literal["causal"] | None


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer asks of `cache.attend`: scores times `scale`; a query sees itself and `window` - 1 keys before.

    The rest chooses the kernels, as `ModelFeatures` has them.
    """

    scale: float
    window: int | None = None
    fused: bool = True
    polynomial_exp: bool = False
    fused_exp: bool = False


def attention(q: mx.array, k: mx.array, v: mx.array, spec: AttentionSpec, mask: Mask) -> mx.array:
    """Attend with q (batch, heads, seq, head_dim) over k and v (batch, kv_heads, keys, head_dim).

    `mask` is boolean (True is seen) or additive, and broadcasts to (batch, heads, seq, keys); with "causal" the last
    query sees the last key. It has the window in it. The softmax is taken in float32. Returns (batch, heads, seq,
    head_dim).
    """
    if spec.polynomial_exp:
        return attention_polynomial(q, k, v, scale=spec.scale, mask=mask, fused_exp=spec.fused_exp)
    if spec.fused:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=spec.scale, mask=mask)
    return attention_reference(q, k, v, scale=spec.scale, mask=mask)


def attention_polynomial(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Mask, fused_exp: bool = False
) -> mx.array:
    """The same in plain operations with `ops.exp`, for float32 on a CPU; a group of heads is one product.

    Causal queries are taken a block at a time, with the keys that the block sees: scores of keys after it are not
    computed, and those of a block stay in the processor's cache.
    """
    batch, heads, seq, head_dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    if isinstance(mask, str) and seq > _BLOCK:
        blocks = []
        for start in range(0, seq, _BLOCK):
            end = min(start + _BLOCK, seq)
            seen = keys - seq + end
            block = (q[:, :, start:end], k[:, :, :seen], v[:, :, :seen])
            blocks.append(attention_polynomial(*block, scale=scale, mask=mask, fused_exp=fused_exp))
        return mx.concatenate(blocks, axis=2)
    rows = (batch, kv_heads, heads // kv_heads * seq)
    if seq > 1:  # one query has few scores, which a compiled step scales and masks at once
        q = q * scale
    scores = (q.reshape(*rows, head_dim) @ k.swapaxes(-1, -2)).reshape(batch, heads, seq, keys)
    scores = _masked(scores if seq > 1 else scores * scale, mask)
    weights = exp(scores - scores.max(axis=-1, keepdims=True), fused=fused_exp).reshape(*rows, keys)
    return ((weights @ v) / weights.sum(axis=-1, keepdims=True)).reshape(q.shape)


def attention_reference(q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Mask) -> mx.array:
    """The same in plain operations."""
    batch, heads, seq, head_dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, seq, head_dim)
    scores = (grouped @ k[:, :, None].swapaxes(-1, -2)).astype(mx.float32) * scale
    scores = scores.reshape(batch, heads, seq, keys)
    scores = _masked(scores, mask)
    weights = mx.softmax(scores, axis=-1).astype(v.dtype)
    return (weights.reshape(batch, kv_heads, -1, seq, keys) @ v[:, :, None]).reshape(q.shape)


def _masked(scores: mx.array, mask: Mask) -> mx.array:
    """Take from scores (batch, heads, seq, keys) what `mask` hides."""
    if isinstance(mask, str):
        mask = causal_mask(*scores.shape[2:])
    if mask is None:
        return scores
    return mx.where(mask, scores, mx.finfo(mx.float32).min) if mask.dtype == mx.bool_ else scores + mask


def causal_mask(seq: int, keys: int, window: int | None = None) -> mx.array:
    """Return (seq, keys), True where a query sees a key: none after its own, and none further back than `window`."""
    key = mx.arange(keys)
    query = mx.arange(keys - seq, keys)[:, None]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)
