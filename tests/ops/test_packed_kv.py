"""Keys and values packed in groups: what comes back, and attention over them as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tinyllm._mx import mx
from tinyllm.config.layers import Alibi
from tinyllm.ops.attention import AttentionSpec, attention_over, attention_reference, causal_mask
from tinyllm.ops.packed_kv import packed_heads, stored_form
from tinyllm.ops.position_bias import PositionBias

HEADS, KV_HEADS, KEYS, DIM = 6, 2, 40, 64
SPECS = {
    "plain": AttentionSpec(scale=0.1),
    "softcap": AttentionSpec(scale=0.1, softcap=0.7),
    "sinks": AttentionSpec(scale=0.1, sinks=mx.array([0.5, -1.0, 3.0, 0.0, 2.0, -4.0])),
}


def qkv(seq: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array, mx.array]:
    """Of two sequences."""
    keys = mx.random.split(mx.random.key(1), 3)
    shapes = ((2, HEADS, seq, DIM), (2, KV_HEADS, KEYS, DIM), (2, KV_HEADS, KEYS, DIM))
    q, k, v = (mx.random.normal(shape, key=key).astype(dtype) for shape, key in zip(shapes, keys, strict=True))
    return q, k, v


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 576])
def test_what_is_packed_comes_back_within_half_a_step_of_its_group(dim: int, bits: int) -> None:
    x = mx.random.normal((2, 3, 5, dim), key=mx.random.key(0))
    [heads] = packed_heads(stored_form([x], bits), bits)
    group = heads.form.group_size
    assert group == max(size for size in (32, 64, 128) if dim % size == 0)
    groups = x.reshape(2, 3, 5, -1, group)
    step = (groups.max(axis=-1) - groups.min(axis=-1)) / (2**bits - 1)
    off = mx.abs(heads.unpacked() - x).reshape(groups.shape).max(axis=-1)
    assert (off <= 1.1 * step).all().item()  # MLX widens a step so that zero is met
    assert (off.mean() <= 0.7 * step.mean()).item()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 17, 31])
def test_what_is_not_finite_does_not_come_back_finite(value: float, at: int) -> None:
    x = mx.ones((1, 1, 2, 64))
    x[0, 0, 1, at] = value
    [heads] = packed_heads(stored_form([x], 8), 8)
    finite = mx.isfinite(heads.unpacked())
    assert finite[0, 0, 0].all().item()
    assert not finite[0, 0, 1].all().item()


def test_without_bits_nothing_is_packed() -> None:
    _, k, v = qkv(1)
    stored = stored_form([k, v], None)
    assert stored[0] is k and stored[1] is v


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("seq", [1, 3])
@pytest.mark.parametrize("exponential", ["mlx", "polynomial"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_products_with_packed_arrays_are_those_with_unpacked_ones(
    spec: AttentionSpec, exponential: str, seq: int, bits: int
) -> None:
    q, k, v = qkv(seq)
    stored = stored_form([k, v], bits)
    plain = [heads.unpacked() for heads in packed_heads(stored, bits)]
    mask = causal_mask(seq, KEYS)
    expected = attention_reference(q, *plain, spec, mask)
    as_packed = replace(spec, packed_rows=9, polynomial_exp=exponential == "polynomial")
    for seen in (mask, "causal", mx.where(mask, 0.0, -1e9)):
        assert mx.allclose(attention_over(q, stored, as_packed, seen, bits), expected, rtol=1e-4, atol=1e-5).item()
    unpacked_first = replace(spec, packed_rows=0)
    assert mx.allclose(attention_over(q, stored, unpacked_first, mask, bits), expected, rtol=1e-4, atol=1e-5).item()


@pytest.mark.parametrize(("rows", "products"), [(2, False), (3, True)])
def test_few_queries_that_share_keys_are_multiplied_by_packed_ones(
    monkeypatch: pytest.MonkeyPatch, rows: int, products: bool
) -> None:
    q, k, v = qkv(1)  # three heads share keys
    calls = []
    product = mx.quantized_matmul
    monkeypatch.setattr(mx, "quantized_matmul", lambda *args, **how: calls.append(how) or product(*args, **how))
    attention_over(q, stored_form([k, v], 8), AttentionSpec(0.1, packed_rows=rows), None, 8)
    assert [how["transpose"] for how in calls] == [True, False] * products


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_stays_half_and_scores_are_summed_in_float32(dtype: mx.Dtype) -> None:
    q, k, v = qkv(1, dtype)
    stored, spec = stored_form([k, v], 8), AttentionSpec(0.1, packed_rows=9)
    assert [array.dtype for array in stored] == [mx.uint32, dtype, dtype] * 2
    got = attention_over(q, stored, spec, None, 8)
    plain = [heads.unpacked().astype(mx.float32) for heads in packed_heads(stored, 8)]
    expected = attention_reference(q.astype(mx.float32), *plain, spec, None)
    assert got.dtype == dtype
    assert mx.allclose(got.astype(mx.float32), expected, atol=0.03).item()


def test_a_bias_by_distance_is_added_to_packed_scores() -> None:
    q, k, v = qkv(1)
    stored = stored_form([k, v], 8)
    bias = PositionBias(Alibi(), HEADS)
    mask = bias(mx.array([[[KEYS - 1]]]), mx.arange(KEYS)[None])
    plain = [heads.unpacked() for heads in packed_heads(stored, 8)]
    got = attention_over(q, stored, AttentionSpec(0.1, packed_rows=9), mask, 8)
    assert mx.allclose(got, attention_reference(q, *plain, AttentionSpec(0.1), mask), atol=1e-5).item()
    assert not mx.allclose(got, attention_reference(q, *plain, AttentionSpec(0.1), None), atol=1e-2).item()
