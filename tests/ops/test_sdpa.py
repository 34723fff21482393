"""Scaled dot-product attention: the fused kernel equals its reference, and masks hide what they should."""

from __future__ import annotations

import numpy as np
import pytest

from tinyllm._mx import mx
from tinyllm.config.reach import Window
from tinyllm.ops.attention import AttentionSpec, attention, causal_mask


def close(a: mx.array, b: mx.array, tolerance: float = 1e-4) -> bool:
    return a.shape == b.shape and bool(mx.allclose(a, b, rtol=tolerance, atol=tolerance).item())


def qkv(
    heads: int = 4, kv_heads: int = 2, seq: int = 3, keys: int = 7, batch: int = 2, head_dim: int = 8
) -> tuple[mx.array, mx.array, mx.array]:
    key = mx.random.split(mx.random.key(seq * 100 + keys), 3)
    return (
        mx.random.normal((batch, heads, seq, head_dim), key=key[0]),
        mx.random.normal((batch, kv_heads, keys, head_dim), key=key[1]),
        mx.random.normal((batch, kv_heads, keys, head_dim), key=key[2]),
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (6, 3)])
@pytest.mark.parametrize(("seq", "keys"), [(1, 1), (1, 9), (5, 5), (3, 9)])
@pytest.mark.parametrize("kind", ["none", "causal", "boolean", "additive", "windowed", "for each head"])
def test_the_fused_kernel_equals_its_reference(heads: int, kv_heads: int, seq: int, keys: int, kind: str) -> None:
    q, k, v = qkv(heads, kv_heads, seq, keys)
    mask = {
        "none": None,
        "causal": "causal",
        "boolean": causal_mask(seq, keys),
        "additive": mx.random.normal((seq, keys), key=mx.random.key(5)),
        "windowed": causal_mask(seq, keys, Window(2)),
        "for each head": mx.random.normal((1, heads, seq, keys), key=mx.random.key(6)),
    }[kind]
    fused = attention(q, k, v, AttentionSpec(0.3), mask)
    assert fused.shape == q.shape
    assert close(fused, attention(q, k, v, AttentionSpec(0.3, fused=False), mask))


@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float16, 5e-3), (mx.bfloat16, 5e-2)], ids=str)
def test_half_precision_stays_half_precision(dtype: mx.Dtype, tolerance: float) -> None:
    q, k, v = (array.astype(dtype) for array in qkv())
    fused = attention(q, k, v, AttentionSpec(0.3), "causal")
    reference = attention(q, k, v, AttentionSpec(0.3, fused=False), "causal")
    assert fused.dtype == reference.dtype == dtype
    assert close(fused, reference, tolerance)


@pytest.mark.parametrize("fused", [True, False])
def test_heads_share_keys_and_values_in_groups(fused: bool) -> None:
    q, k, v = qkv(heads=4, kv_heads=2)
    shared = attention(q, k, v, AttentionSpec(0.3, fused=fused), "causal")
    repeated = attention(
        q, mx.repeat(k, 2, axis=1), mx.repeat(v, 2, axis=1), AttentionSpec(0.3, fused=fused), "causal"
    )
    assert close(shared, repeated)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("hidden", [mx.array(False), mx.array(-1e30)], ids=["boolean", "additive"])
def test_a_row_that_sees_nothing_is_finite(fused: bool, hidden: mx.array) -> None:
    q, k, v = qkv()
    attended = attention(q, k, v, AttentionSpec(0.3, fused=fused), mx.broadcast_to(hidden, (3, 7)))
    assert mx.all(mx.isfinite(attended)).item()


@pytest.mark.parametrize("fused", [True, False])
def test_the_last_query_sees_the_last_key_and_no_query_sees_a_later_one(fused: bool) -> None:
    q, k, v = qkv(seq=3, keys=7)
    before = attention(q, k, v, AttentionSpec(0.3, fused=fused), "causal")
    changed = mx.concatenate([v[:, :, :6], v[:, :, 6:] + 100], axis=2)
    after = attention(q, k, changed, AttentionSpec(0.3, fused=fused), "causal")
    assert close(before[:, :, :2], after[:, :, :2])
    assert not close(before[:, :, 2], after[:, :, 2])


@pytest.mark.parametrize(("seq", "keys", "window"), [(1, 1, 1), (4, 4, 2), (3, 8, 3), (5, 5, 99), (2, 6, 1)])
def test_a_window_counts_the_query_itself(seq: int, keys: int, window: int) -> None:
    mask = np.array(causal_mask(seq, keys, Window(window)))
    for row in range(seq):
        position = keys - seq + row
        seen = set(np.flatnonzero(mask[row]).tolist())
        assert seen == set(range(max(0, position - window + 1), position + 1))


def test_without_window_a_query_sees_all_before_it() -> None:
    assert np.array_equal(np.array(causal_mask(4, 6)), np.tri(4, 6, 2, dtype=bool))
