"""The dense cache remembers positions exactly: appended in any pieces, trimmed to any length, grown in steps."""

from __future__ import annotations

import pytest

from tinyllm._mx import mx
from tinyllm.config.reach import Window
from tinyllm.kv.full import TinyKvFullCache
from tinyllm.ops.attention import AttentionSpec, attention, causal_mask

SPECS = {
    "full": AttentionSpec(scale=0.4),
    "full, reference": AttentionSpec(scale=0.4, fused=False),
    "window 4": AttentionSpec(scale=0.4, reach=Window(4)),
    "window 4, reference": AttentionSpec(scale=0.4, reach=Window(4), fused=False),
    "window 1": AttentionSpec(scale=0.4, reach=Window(1)),
    "window 99": AttentionSpec(scale=0.4, reach=Window(99)),
}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def close(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and bool(mx.allclose(a, b, rtol=1e-4, atol=1e-5).item())


def qkv(seq: int, batch: int = 1, seed: int = 0) -> tuple[mx.array, mx.array, mx.array]:
    keys = mx.random.split(mx.random.key(seed), 3)
    shapes = ((batch, 4, seq, 8), (batch, 2, seq, 8), (batch, 2, seq, 8))
    q, k, v = (mx.random.normal(shape, key=key) for shape, key in zip(shapes, keys, strict=True))
    return q, k, v


def whole(q: mx.array, k: mx.array, v: mx.array, spec: AttentionSpec) -> mx.array:
    """All positions at once, without a cache."""
    return attention(q, k, v, AttentionSpec(spec.scale, fused=False), causal_mask(k.shape[2], k.shape[2], spec.reach))


def feed(cache: TinyKvFullCache, parts: list[int], start: int, *arrays: mx.array, spec: AttentionSpec) -> mx.array:
    """Attend over positions from `start` on, in pieces of `parts`, side by side."""
    outputs = []
    for size in parts:
        q, k, v = (array[:, :, start : start + size] for array in arrays)
        outputs.append(cache.attend(q, k, v, spec))
        start += size
    return mx.concatenate(outputs, axis=2)


@each_spec
@pytest.mark.parametrize("parts", [[12], [1] * 12, [5, 1, 6], [11, 1], [1, 11], [3, 3, 3, 3]], ids=str)
@pytest.mark.parametrize("step", [1, 5, 256])
def test_pieces_of_any_size_give_what_the_whole_gives(spec: AttentionSpec, parts: list[int], step: int) -> None:
    arrays = qkv(12, batch=2)
    cache = TinyKvFullCache(step=step)
    assert close(feed(cache, parts, 0, *arrays, spec=spec), whole(*arrays, spec))
    assert cache.offset == 12


@each_spec
@pytest.mark.parametrize("trimmed", [0, 1, 3, 7, 10])
@pytest.mark.parametrize("parts", [[6], [1] * 6, [2, 4]], ids=str)
def test_after_a_trim_the_cache_goes_on_as_if_the_rest_had_never_been(
    spec: AttentionSpec, trimmed: int, parts: list[int]
) -> None:
    cache = TinyKvFullCache(step=4)
    arrays, other = qkv(16), qkv(16, seed=1)
    feed(cache, [10], 0, *other, spec=spec)
    cache.trim(trimmed)
    kept = cache.offset
    assert kept == 10 - trimmed
    mixed = tuple(
        mx.concatenate([b[:, :, :kept], a[:, :, kept : kept + 6]], axis=2) for a, b in zip(arrays, other, strict=True)
    )
    got = feed(cache, parts, kept, *mixed, spec=spec)
    assert close(got, whole(*mixed, spec)[:, :, kept:])


@pytest.mark.parametrize("n", [-1, 6, 100])
def test_more_than_is_held_cannot_be_trimmed(n: int) -> None:
    cache = TinyKvFullCache()
    feed(cache, [5], 0, *qkv(5), spec=SPECS["full"])
    with pytest.raises(ValueError, match=f"cannot trim {n} of 5"):
        cache.trim(n)
    assert cache.offset == 5


def test_an_empty_cache_trims_nothing() -> None:
    cache = TinyKvFullCache()
    cache.trim(0)
    with pytest.raises(ValueError, match="cannot trim 1 of 0"):
        cache.trim(1)


def test_a_mask_takes_the_place_of_causality_and_window() -> None:
    q, k, v = qkv(5)
    mask = mx.random.bernoulli(0.5, (5, 5), key=mx.random.key(3)) | mx.eye(5).astype(mx.bool_)
    for spec in SPECS.values():
        got = TinyKvFullCache().attend(q, k, v, spec, mask)
        assert close(got, attention(q, k, v, AttentionSpec(spec.scale, fused=False), mask))


def test_a_mask_spans_what_is_held_too() -> None:
    q, k, v = qkv(6)
    for spec in SPECS.values():
        cache = TinyKvFullCache()
        feed(cache, [4], 0, q, k, v, spec=spec)
        mask = mx.array([[True, False, True, False, True, False], [True] * 6])
        got = cache.attend(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], spec, mask)
        assert close(got, attention(q[:, :, 4:], k, v, AttentionSpec(spec.scale, fused=False), mask))


def test_a_mask_for_one_query_spans_all_positions_of_a_windowed_layer() -> None:
    q, k, v = qkv(6)
    cache = TinyKvFullCache()
    feed(cache, [5], 0, q, k, v, spec=SPECS["window 4"])
    mask = mx.array([[True, False, True, False, True, True]])
    got = cache.attend(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], SPECS["window 4"], mask)
    assert close(got, attention(q[:, :, 5:], k, v, AttentionSpec(0.4, fused=False), mask))


def test_buffers_grow_by_whole_steps_and_their_bytes_are_counted() -> None:
    cache = TinyKvFullCache(step=8)
    assert (cache.nbytes, cache.arrays) == (0, [])
    arrays = qkv(20)
    position, one = 2 * 8 * 4, 2  # bytes of a position: two heads of eight floats; keys and values
    for size, room in ((3, 8), (5, 8), (1, 16), (11, 24)):
        feed(cache, [size], cache.offset, *arrays, spec=SPECS["full"])
        assert cache.nbytes == one * position * room
    assert [array.shape for array in cache.arrays] == [(1, 2, 24, 8)] * 2
    cache.trim(20)
    assert cache.nbytes == one * position * 24


def test_buffers_keep_the_type_of_what_they_hold() -> None:
    cache = TinyKvFullCache()
    q, k, v = (array.astype(mx.bfloat16) for array in qkv(3))
    assert cache.attend(q, k, v, SPECS["full"]).dtype == mx.bfloat16
    assert {array.dtype for array in cache.arrays} == {mx.bfloat16}
