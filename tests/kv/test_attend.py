"""The same attention through every cache: dense, paged, scattered over a pool, and a row among others of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import plain
import pytest
from attention_cases import ASKED as OF_HEADS
from attention_cases import DIM, HEADS, KERNELS, KV_HEADS, REACHES, Asked, close

from tinyllm._mx import mx
from tinyllm.config.reach import Reach
from tinyllm.kv.cache import LayerCache
from tinyllm.kv.full import TinyKvFullCache
from tinyllm.kv.manager import PageManager
from tinyllm.kv.paged import TinyKvPagedCache, TinyKvPagedPool
from tinyllm.kv.paged_step import Placement, TinyKvPagedStep, find_places
from tinyllm.kv.pages import PageKind
from tinyllm.ops.attention import AttentionSpec

PAGE, LENGTH, LATENT = 4, 19, 5
LENGTHS = [11, 1, LENGTH - 1, 6]  # of the rows of a step, before it
ASKED = {**OF_HEADS, "latent": Asked(latent=LATENT)}
Arrays = tuple[mx.array, mx.array, mx.array | None]

each_asked = pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED.keys())
each_reach = pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES.keys())
each_kernel = pytest.mark.parametrize("kernel", KERNELS)


@functools.cache
def arrays(asked: Asked, length: int, seed: int) -> Arrays:
    """Return q, k and v of one sequence: latent attention has one head of keys, and no values."""
    latent = asked.latent is not None
    forms = [HEADS, 1 if latent else KV_HEADS, KV_HEADS]
    keys = mx.random.split(mx.random.key(seed), 3)
    q, k, v = (mx.random.normal((1, n, length, DIM), key=key) for n, key in zip(forms, keys, strict=True))
    return q * 2, k, None if latent else v


def part(of: Arrays, start: int, end: int) -> Arrays:
    q, k, v = of
    return q[:, :, start:end], k[:, :, start:end], None if v is None else v[:, :, start:end]


@functools.cache
def expected(asked: Asked, length: int, seed: int, reach: Reach | None) -> np.ndarray:
    q, k, v = arrays(asked, length, seed)
    return asked.expected(q, k, k[..., :LATENT] if v is None else v, reach)


def pool_of(reach: Reach | None, pages: int = 24) -> TinyKvPagedPool:
    return TinyKvPagedPool(PAGE, manager=PageManager([PageKind(reach, pages)], page_size=PAGE, share=False))


def scatter(pool: TinyKvPagedPool, asked: Asked) -> list[TinyKvPagedCache]:
    """Use up every second page of a pool, with what must not be seen, as long as what is returned is kept."""
    _, k, v = arrays(asked, 1, seed=99)
    others = [TinyKvPagedCache(pool) for _ in range(pool.manager.kinds[0].ceiling - 1)]
    for other in others:
        other.attend(mx.ones((1, HEADS, 1, DIM)), k + 50, None if v is None else v + 50, asked.spec())
    return others[::2]


def dense(reach: Reach | None, asked: Asked) -> tuple[LayerCache, object]:
    return TinyKvFullCache(step=7), None


def paged(reach: Reach | None, asked: Asked) -> tuple[LayerCache, object]:
    return TinyKvPagedCache(pool_of(reach)), None


def scattered(reach: Reach | None, asked: Asked) -> tuple[LayerCache, object]:
    pool = pool_of(reach)
    kept = scatter(pool, asked)
    return TinyKvPagedCache(pool), kept


@each_kernel
@each_asked
@each_reach
@pytest.mark.parametrize("make", [dense, paged, scattered])
def test_pieces_of_any_size_give_what_the_definition_gives(
    make: Callable[[Reach | None, Asked], tuple[LayerCache, object]],
    reach: Reach | None,
    asked: Asked,
    kernel: str,
) -> None:
    spec, of = asked.spec(reach=reach, **KERNELS[kernel]), arrays(asked, LENGTH, seed=3)
    wanted = expected(asked, LENGTH, 3, reach)
    for parts in ([LENGTH], [1] * LENGTH, [6, 1, 7, 5]):
        cache, kept = make(reach, asked)
        start = 0
        for size in parts:
            q, k, v = part(of, start, start + size)
            attended = cache.attend(q, k, v, spec)
            assert close(attended, wanted[:, :, start : start + size]), (parts, start)
            start += size
        assert cache.offset == LENGTH
        del kept


@each_kernel
@each_asked
@each_reach
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[:1], LENGTHS[2:3]], ids=str)
@pytest.mark.parametrize("is_scattered", [False, True], ids=["side by side", "scattered"])
def test_rows_of_a_step_give_what_the_definition_gives(
    kernel: str, asked: Asked, reach: Reach | None, lengths: list[int], is_scattered: bool
) -> None:
    """Of sequences of unequal lengths, whose pages may be anywhere, and rows that nobody has."""
    spec, pool = asked.spec(reach=reach, **KERNELS[kernel]), pool_of(reach)
    kept = scatter(pool, asked) if is_scattered else []
    texts = [arrays(asked, length + 1, seed=i) for i, length in enumerate(lengths)]
    caches = [TinyKvPagedCache(pool) for _ in texts]
    for cache, text, length in zip(caches, texts, lengths, strict=True):
        q, k, v = part(text, 0, length)
        cache.attend(q, k, v, spec)
        cache.sequence.reserve(length, length + 1)
    pool.make_room(pool.arrays[0])
    tables = [cache.sequence.tables.by_kind[0] for cache in caches]
    for padding in (0, 2):
        places = find_places(pool, tables, lengths, rows=len(lengths) + padding, reach=reach)
        assert (places.span is None) == (len(lengths) + padding > 1 or (is_scattered and len(tables[0].live) > 1))
        attended = step_of(spec, pool, places.slots, places.first, places.pages, places.span, texts, lengths, padding)
        for row, length in enumerate(lengths):
            assert close(attended[row : row + 1], expected(asked, length + 1, row, reach)[:, :, length:])
    assert bool(kept) == is_scattered


def step_of(
    spec: AttentionSpec,
    pool: TinyKvPagedPool,
    slots: list[int],
    first: list[int],
    pages: list[list[int]] | None,
    span: tuple[int, int] | None,
    texts: list[Arrays],
    lengths: list[int],
    padding: int,
) -> mx.array:
    """Attend with the last token of each text; nothing but the pools' arrays knows of those before it."""
    placement = Placement(mx.array(slots), mx.array(first), None if pages is None else mx.array(pages), span)
    positions = mx.array(lengths + [0] * padding)
    seen = placement.mask(positions, spec.reach, PAGE)
    step = TinyKvPagedStep(pool.arrays[0], placement, positions, seen, PAGE)

    def rows(which: int) -> mx.array | None:
        last = [text[which] for text in texts]
        if last[0] is None:
            return None
        return mx.concatenate([each[:, :, -1:] for each in last if each is not None] + [last[0][:, :, :1]] * padding)

    q, k = rows(0), rows(1)
    assert q is not None and k is not None
    return step.attend(q, k, rows(2), spec)


@each_reach
def test_latent_attention_leaves_one_array(reach: Reach | None) -> None:
    asked, pool = ASKED["latent"], pool_of(reach)
    q, k, v = arrays(asked, LENGTH, seed=1)
    cache, whole = TinyKvPagedCache(pool), TinyKvFullCache()
    for each in (cache, whole):
        each.attend(q, k, v, asked.spec(reach=reach))
    assert [array.shape[0] for array in pool.flat] == [1] and pool.flat[0].shape[-1] == DIM
    assert len(whole.arrays) == 1
    assert pool.page_bytes == PAGE * DIM * 4


def test_plain_is_what_it_should_be() -> None:
    """The definition itself, where it can be counted by hand: scores of 0 weigh alike, and a sink takes part."""
    q, k = mx.zeros((1, 1, 1, 2)), mx.ones((1, 1, 4, 2))
    v = mx.array([[[[1.0], [2.0], [4.0], [8.0]]]])
    assert plain.attend(q, k, v, scale=1.0).item() == pytest.approx(15 / 4)
    assert plain.attend(q, k, v, scale=1.0, sinks=mx.array([0.0])).item() == pytest.approx(3)
    assert plain.attend(q, k, v, scale=1.0, reach=REACHES["window"]).item() == pytest.approx(15 / 4)
