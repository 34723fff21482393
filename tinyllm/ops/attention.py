"""Scaled dot-product attention, with keys and values shared by groups of heads (arXiv 2305.13245)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tinyllm._mx import mx
from tinyllm.config.reach import Reach
from tinyllm.ops.exp import exp
from tinyllm.ops.packed_kv import PackedHeads, packed_heads
from tinyllm.ops.position_bias import PositionBias

_BLOCK = 128  # causal queries of one product on a CPU

Mask = mx.array | Literal["causal"] | None


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """What a layer asks of `cache.attend`: scores times `scale`, of the positions within `reach`.

    Then come, in this order, `softcap` tanh(scores / softcap), the `bias` by distance, what is hidden, and for the
    softmax one more score a head, of no value: its `sinks` (heads,). With `latent` no values are stored: they are the
    first so many elements of the keys, or keys and values are what `expand` makes of these. The rest chooses the
    kernels, as `ModelFeatures` has them: up to `packed_rows` queries that share keys are multiplied by packed ones.
    """

    scale: float
    reach: Reach | None = None
    softcap: float | None = None
    bias: PositionBias | None = None
    sinks: mx.array | None = None
    latent: int | None = None
    expand: Callable[[mx.array], tuple[mx.array, mx.array]] | None = None
    fused: bool = True
    polynomial_exp: bool = False
    fused_exp: bool = False
    paged_products: bool = False
    packed_rows: int = 0


def attention_over(
    q: mx.array, stored: Sequence[mx.array], spec: AttentionSpec, mask: Mask, bits: int | None
) -> mx.array:
    """Attend with q (batch, heads, seq, head_dim) over what a cache holds, packed to so many `bits` or as it is.

    Otherwise as `attention`.
    """
    if bits is None:
        return attention(q, *keys_and_values(stored, spec), spec, mask)
    packed = packed_heads(stored, bits)
    rows = q.shape[1] // packed[0].words.shape[1] * q.shape[2]
    if len(packed) == 2 and rows <= spec.packed_rows:
        keys, values = packed
        return attention_packed(q, keys, values, spec, mask)
    return attention(q, *keys_and_values([heads.unpacked() for heads in packed], spec), spec, mask)


def keys_and_values(stored: Sequence[mx.array], spec: AttentionSpec) -> tuple[mx.array, mx.array]:
    """Return what is attended over, of what a cache holds: keys and values, or latents alone."""
    keys, *values = stored
    if values:
        return keys, values[0]
    return (keys, keys[..., : spec.latent]) if spec.expand is None else spec.expand(keys)


def attention(q: mx.array, k: mx.array, v: mx.array, spec: AttentionSpec, mask: Mask) -> mx.array:
    """Attend with q (batch, heads, seq, head_dim) over k and v (batch, kv_heads, keys, head_dim).

    `mask` is boolean (True is seen) or additive, and broadcasts to (batch, heads, seq, keys); with "causal" the last
    query sees the last key. It has reach and bias in it. The softmax is taken in float32. Returns (batch, heads, seq,
    head_dim of v).
    """
    if spec.polynomial_exp:
        return attention_polynomial(q, k, v, spec, mask)
    if spec.fused and spec.softcap is None:
        sinks = None if spec.sinks is None else spec.sinks.astype(q.dtype)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=spec.scale, mask=mask, sinks=sinks)
    return attention_reference(q, k, v, spec, mask)


def attention_polynomial(q: mx.array, k: mx.array, v: mx.array, spec: AttentionSpec, mask: Mask) -> mx.array:
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
            blocks.append(attention_polynomial(q[:, :, start:end], k[:, :, :seen], v[:, :, :seen], spec, mask))
        return mx.concatenate(blocks, axis=2)
    rows = (batch, kv_heads, heads // kv_heads * seq)
    if seq > 1:  # one query has few scores, which a compiled step scales and masks at once
        q = q * spec.scale
    scores = q.reshape(*rows, head_dim) @ k.swapaxes(-1, -2)
    by_head = seq > 1 or spec.sinks is not None or not _is_of_all_heads(mask)
    if by_head:
        scores = scores.reshape(batch, heads, seq, keys)
    weights, total = _weights(scores if seq > 1 else scores * spec.scale, spec, mask)
    if by_head:
        weights, total = weights.reshape(*rows, keys), total.reshape(*rows, 1)
    return (weights @ v / total).reshape(*q.shape[:-1], v.shape[-1])


def attention_over_pages(
    q: mx.array, k: mx.array, v: mx.array, pages: mx.array, page_size: int, spec: AttentionSpec, mask: Mask
) -> mx.array:
    """The same of one query a row, over keys and values that are multiplied where they lie instead of gathered.

    q is (rows, heads, 1, head_dim); k and v are a pool's (1, kv_heads, pages * page_size, head_dim), of which each
    row has its `pages` (rows, n). A head's queries by a page is one product of many, which a CPU takes one by one.
    """
    rows, heads, _, head_dim = q.shape
    kv_heads, n = k.shape[1], pages.shape[1]
    by_page = (rows, kv_heads, n)
    index = pages_by_head(pages, kv_heads, k.shape[2] // page_size)
    queries = mx.broadcast_to(mx.arange(rows * kv_heads).reshape(rows, kv_heads, 1), by_page)
    keys, values = (array.reshape(-1, page_size, array.shape[-1]) for array in (k, v))
    scores = mx.gather_mm(q.reshape(rows * kv_heads, -1, head_dim), keys.swapaxes(-1, -2), queries, index)
    scores = scores.swapaxes(2, 3).reshape(rows, heads, 1, n * page_size)
    weights, total = _weights(scores * spec.scale, spec, mask)
    parts = (
        weights.reshape(rows, kv_heads, -1, n, page_size).swapaxes(2, 3).reshape(rows * kv_heads * n, -1, page_size)
    )
    attended = mx.gather_mm(parts, values, mx.arange(rows * kv_heads * n).reshape(by_page), index).sum(axis=2)
    return attended.reshape(rows, heads, 1, -1) / total


def pages_by_head(pages: mx.array, heads: int, count: int) -> mx.array:
    """Return (rows, heads, n): where `pages` (rows, n) of each head are, if the heads' `count` pages lie in turn."""
    return pages[:, None] + mx.arange(heads)[None, :, None] * count


def attention_packed(q: mx.array, k: PackedHeads, v: PackedHeads, spec: AttentionSpec, mask: Mask) -> mx.array:
    """The same over packed keys and values, which are multiplied by as they are; a group of heads is one product."""
    batch, heads, seq, head_dim = q.shape
    kv_heads, keys = k.words.shape[1], k.words.shape[2]
    rows = (batch, kv_heads, heads // kv_heads * seq)
    scores = k.scores(q.reshape(*rows, head_dim)).reshape(batch, heads, seq, keys)
    weights, total = _weights(scores.astype(mx.float32) * spec.scale, spec, mask)
    attended = v.weighed((weights / total).astype(q.dtype).reshape(*rows, keys))
    return attended.reshape(*q.shape[:-1], -1)


def _weights(scores: mx.array, spec: AttentionSpec, mask: Mask) -> tuple[mx.array, mx.array]:
    """Return exponentials of scores (batch, heads, seq, keys) in float32, and their sums (batch, heads, seq, 1).

    Where there is one query and nothing is said of single heads, also of (batch, kv_heads, queries of each, keys).
    """
    scores = _masked(_capped(scores, spec), mask, adding=spec.polynomial_exp)
    most = scores.max(axis=-1, keepdims=True)
    sinks = None if spec.sinks is None else spec.sinks.astype(mx.float32)[:, None, None]
    if sinks is not None:
        most = mx.maximum(most, sinks)
    shifted = scores - most
    weights = exp(shifted, fused=spec.fused_exp) if spec.polynomial_exp else mx.exp(shifted)
    total = weights.sum(axis=-1, keepdims=True)
    return weights, total if sinks is None else total + mx.exp(sinks - most)


def attention_reference(q: mx.array, k: mx.array, v: mx.array, spec: AttentionSpec, mask: Mask) -> mx.array:
    """The same in plain operations."""
    batch, heads, seq, head_dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, seq, head_dim)
    scores = (grouped @ k[:, :, None].swapaxes(-1, -2)).astype(mx.float32) * spec.scale
    scores = _masked(_capped(scores.reshape(batch, heads, seq, keys), spec), mask)
    if spec.sinks is not None:
        sinks = mx.broadcast_to(spec.sinks.astype(mx.float32)[:, None, None], (batch, heads, seq, 1))
        scores = mx.concatenate([scores, sinks], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., :keys].astype(v.dtype)
    attended = weights.reshape(batch, kv_heads, -1, seq, keys) @ v[:, :, None]
    return attended.reshape(*q.shape[:-1], v.shape[-1])


def _capped(scores: mx.array, spec: AttentionSpec) -> mx.array:
    return scores if spec.softcap is None else mx.tanh(scores / spec.softcap) * spec.softcap


def _masked(scores: mx.array, mask: Mask, *, adding: bool = False) -> mx.array:
    """Take from scores (batch, heads, seq, keys) what `mask` hides.

    `adding` adds to all of them, which a CPU does in a tenth of the time that it takes to choose among them.
    """
    if isinstance(mask, str):
        mask = causal_mask(scores.shape[2], scores.shape[3])
    if mask is None:
        return scores
    if mask.dtype == mx.bool_ and not adding:
        return mx.where(mask, scores, mx.finfo(mx.float32).min)
    return scores + (added_for(mask) if mask.dtype == mx.bool_ else mask)


def added_for(mask: mx.array) -> mx.array:
    """Return what hides the same as a boolean mask (True is seen) when it is added to scores, in float32."""
    return mx.where(mask, 0.0, mx.finfo(mx.float32).min)


def _is_of_all_heads(mask: Mask) -> bool:
    """Whether a mask is the same for each head, and so for heads and queries together where there is one query."""
    return mask is None or not (isinstance(mask, str) or (mask.ndim > 2 and mask.shape[-3] > 1))


def causal_mask(seq: int, keys: int, reach: Reach | None = None) -> mx.array:
    """Return (seq, keys), True where a query sees a key; the last query's own is the last key."""
    return seen_by(mx.arange(keys - seq, keys)[:, None], mx.arange(keys), reach)


def seen_by(query: mx.array, key: mx.array, reach: Reach | None) -> mx.array:
    """Return where queries at positions see keys at positions: none after its own, and none out of reach."""
    seen = key <= query
    return seen if reach is None else seen & reach.sees(query, key)


def mask_of(spec: AttentionSpec, start: int, seq: int, first: int, *, own: mx.array | None, dtype: mx.Dtype) -> Mask:
    """Return what `seq` queries from position `start` on see of keys from position `first` on, up to their own.

    The caller's `own` (seq, keys), True where seen or added to scores, takes the place of causality and reach.
    """
    keys = start + seq - first
    if own is None and spec.bias is None:
        if seq == 1 and not _hides(spec.reach, start, first):
            return None
        if spec.reach is None or not _hides(spec.reach, start + seq - 1, first):
            return "causal"
    query, key = mx.arange(start, start + seq)[:, None], mx.arange(first, first + keys)
    seen = seen_by(query, key, spec.reach) if own is None else own
    if seen.dtype != mx.bool_:  # kernels take a mask in the type of the queries alone
        seen = mx.maximum(seen, mx.finfo(dtype).min).astype(dtype)
    return seen if spec.bias is None else with_bias(spec.bias, query, key, seen, dtype)


def _hides(reach: Reach | None, query: int, first: int) -> bool:
    """Whether a query may not see all keys from `first` on to its own."""
    return reach is not None and (reach.first(query) > first or reach.held(1) is None)


def with_bias(bias: PositionBias, query: mx.array, key: mx.array, seen: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return what is added to scores (..., heads, seq, keys): the bias where a key is seen.

    `query` (..., seq, 1) and `key` (..., 1, keys) or (keys,) are positions, `seen` broadcasts to (..., seq, keys), or
    is what is added already, of no head.
    """
    added = bias(query[..., None, :, :], key[..., None, :, :] if key.ndim > 1 else key)
    if seen.dtype != mx.bool_:
        return mx.maximum(added + seen, mx.finfo(dtype).min).astype(dtype)
    return mx.where(seen, added.astype(dtype), mx.finfo(dtype).min)
