"""The paged cache against the dense one and against plain attention; its arrays are written in place."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

from tinyllm._mx import mx
from tinyllm.config.config import Config
from tinyllm.config.reach import Chunk, Reach, Strided, Window
from tinyllm.errors import ContextLengthError
from tinyllm.kv.full import TinyKvFullCache
from tinyllm.kv.manager import PageManager
from tinyllm.kv.paged import TinyKvPagedCache, TinyKvPagedPool, gather, gather_reference
from tinyllm.kv.paged_step import Placement, TinyKvPagedStep, find_places, rounded_up
from tinyllm.kv.pages import PageKind
from tinyllm.kv.pools import KvPools
from tinyllm.model.load import load_model
from tinyllm.model.transformer import ModelForCausalLM
from tinyllm.ops.attention import AttentionSpec, attention_over_pages, attention_reference

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def close(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and bool(mx.allclose(a, b, rtol=1e-4, atol=1e-5).item())


def qkv(seq: int, seed: int = 0) -> tuple[mx.array, mx.array, mx.array]:
    keys = mx.random.split(mx.random.key(seed), 3)
    return tuple(
        mx.random.normal((1, heads, seq, HEAD_DIM), key=key)
        for heads, key in zip((HEADS, KV_HEADS, KV_HEADS), keys, strict=True)
    )  # type: ignore[return-value]


def bounded_pool() -> TinyKvPagedPool:
    return TinyKvPagedPool(4, manager=PageManager([PageKind(None, 25)], page_size=4, share=False))


def scatter_pages(pool: TinyKvPagedPool) -> list[TinyKvPagedCache]:
    """Use all pages of a `bounded_pool` up but some that do not lie side by side, while what is returned is kept."""
    holes = [TinyKvPagedCache(pool) for _ in range(24)]
    for hole in holes:
        hole.attend(*qkv(1), AttentionSpec(scale=1.0))
    return holes[::2]


@pytest.mark.parametrize("reach", [None, Window(1), Window(4), Window(99), Chunk(5), Strided(2, 3)])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("parts", [[13], [1] * 13, [5, 1, 7], [1, 12]], ids=str)
@pytest.mark.parametrize("scattered", [False, True])
def test_a_paged_cache_gives_what_a_dense_one_gives(
    reach: Reach | None, fused: bool, parts: list[int], scattered: bool
) -> None:
    spec = AttentionSpec(scale=0.4, reach=reach, fused=fused)
    pool = bounded_pool() if scattered else TinyKvPagedPool(page_size=4)
    kept = scatter_pages(pool) if scattered else []
    arrays, paged, dense = qkv(13, seed=3), TinyKvPagedCache(pool=pool), TinyKvFullCache()
    start = 0
    for size in parts:
        q, k, v = (array[:, :, start : start + size] for array in arrays)
        assert close(paged.attend(q, k, v, spec), dense.attend(q, k, v, spec))
        start += size
        assert paged.offset == dense.offset == start
    pages = paged.sequence.tables.by_kind[0].pages
    assert (pages != list(range(pages[0], pages[0] + len(pages)))) == scattered == bool(kept)


def test_a_mask_takes_the_place_of_causality() -> None:
    pool, spec = TinyKvPagedPool(page_size=4), AttentionSpec(scale=0.3, reach=Window(3))
    q, k, v = qkv(6)
    mask = mx.random.bernoulli(0.5, (6, 6), key=mx.random.key(1)) | mx.eye(6).astype(mx.bool_)
    attended = TinyKvPagedCache(pool).attend(q, k, v, spec, mask)
    assert close(attended, attention_reference(q, k, v, spec, mask))


def test_a_batch_is_refused() -> None:
    q, k, v = (mx.concatenate([array, array]) for array in qkv(3))
    with pytest.raises(ValueError, match="one sequence"):
        TinyKvPagedCache(TinyKvPagedPool()).attend(q, k, v, AttentionSpec(scale=1.0))


def test_a_pool_that_is_full_says_so() -> None:
    manager = PageManager([PageKind(None, 3)], page_size=4, share=False)
    cache = TinyKvPagedCache(TinyKvPagedPool(4, manager=manager))
    cache.attend(*qkv(8), AttentionSpec(scale=1.0))
    with pytest.raises(ContextLengthError, match="no pages left for 9 positions"):
        cache.attend(*qkv(1), AttentionSpec(scale=1.0))


def test_gathering_equals_gathering_page_by_page() -> None:
    array = mx.random.normal((1, 3, 7 * 4, 5), key=mx.random.key(2))
    pages = [[6, 0, 2], [1, 1, 5]]
    assert mx.array_equal(gather(array, mx.array(pages), 4), gather_reference(array, pages, 4))


@pytest.mark.parametrize("pages", [[[6, 0, 2]], [[6, 0, 2], [1, 1, 5]]], ids=["one row", "two rows"])
@pytest.mark.parametrize("by_head", [False, True], ids=["a mask of all heads", "a mask of each head"])
@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(scale=0.4),
        AttentionSpec(scale=0.4, softcap=2.0, polynomial_exp=True),
        AttentionSpec(scale=0.4, sinks=mx.array([0.5, -1.0, 2.0, 0.0]), polynomial_exp=True),
    ],
    ids=["plain", "capped", "sinks"],
)
def test_products_with_pages_where_they_lie_equal_those_with_gathered_ones(
    spec: AttentionSpec, by_head: bool, pages: list[list[int]]
) -> None:
    rows, width = len(pages), 3 * 4
    k, v, q, mask = (
        mx.random.normal(shape, key=mx.random.key(seed))
        for seed, shape in enumerate(
            [(1, KV_HEADS, 28, HEAD_DIM), (1, KV_HEADS, 28, 5), (rows, HEADS, 1, HEAD_DIM), (rows, HEADS, 1, width)]
        )
    )
    mask = mask > -0.5 if by_head else (mask > -0.5)[:, :1]
    mask[..., 0] = True
    index = mx.array(pages)
    gathered = (gather(array, index, 4) for array in (k, v))
    attended = attention_over_pages(q, k, v, index, 4, spec, mask)
    assert close(attended, attention_reference(q, *gathered, spec, mask))


@pytest.mark.parametrize("n", range(1, 200))
def test_numbers_are_rounded_up_by_a_quarter_at_most(n: int) -> None:
    assert n <= rounded_up(n) <= n * 1.25
    assert rounded_up(rounded_up(n)) == rounded_up(n)


def test_few_numbers_are_left_after_rounding() -> None:
    assert len({rounded_up(n) for n in range(1, 1025)}) < 40


@pytest.mark.parametrize("reach", [None, Window(3), Window(6), Chunk(3), Strided(2, 3)])
@pytest.mark.parametrize("lengths", [[5], [1], [9, 2, 4], [4, 8]], ids=str)
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("scattered", [False, True])
def test_rows_of_a_step_see_their_own_sequence_and_nothing_else(
    reach: Reach | None, lengths: list[int], padding: int, scattered: bool
) -> None:
    """Each row equals the same token fed to a cache of its own, whatever else the pool holds."""
    spec = AttentionSpec(scale=0.4, reach=reach)
    pool = bounded_pool() if scattered else TinyKvPagedPool(page_size=4)
    kept = scatter_pages(pool) if scattered else []
    caches, alone, news, expected = [], [], [], []
    for i, length in enumerate(lengths):
        caches.append(TinyKvPagedCache(pool))
        alone.append(TinyKvFullCache())
        before, new = qkv(length, seed=i), qkv(1, seed=100 + i)
        caches[-1].attend(*before, spec)
        alone[-1].attend(*before, spec)
        caches[-1].sequence.reserve(length, length + 1)
        news.append(new)
        expected.append(alone[-1].attend(*new, spec))
    pool.make_room(pool.arrays[0])
    rows = len(lengths) + padding
    tables = [cache.sequence.tables.by_kind[0] for cache in caches]
    places = find_places(pool, tables, lengths, rows=rows, reach=reach)
    assert (places.span is not None) == (rows == 1 and tables[0].start is not None)
    assert bool(kept) == scattered
    placement = Placement(
        mx.array(places.slots),
        mx.array(places.first),
        None if places.pages is None else mx.array(places.pages),
        places.span,
    )
    positions = mx.array(lengths + [0] * padding)
    seen = placement.mask(positions, reach, 4)
    step = TinyKvPagedStep(pool.arrays[0], placement, positions, seen, 4)
    q, k, v = (mx.concatenate([new[i] for new in news] + [mx.ones_like(news[0][i])] * padding) for i in range(3))
    before = list(pool.arrays[0])
    assert close(step.attend(q, k, v, spec)[: len(lengths)], mx.concatenate(expected))
    for held, was, written in zip(pool.arrays[0], before, step.arrays, strict=True):
        assert held is was and not mx.array_equal(written, was)


def mixed_config(tmp_path: Path) -> Path:
    """Layers with a window and layers without one, by turns."""
    return tiny.write_checkpoint(
        tmp_path,
        config_overrides={
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
    )


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> ModelForCausalLM:
    return load_model(mixed_config(tmp_path_factory.mktemp("mixed")))


def logits(model: ModelForCausalLM, ids: list[int], caches: object, start: int = 0) -> mx.array:
    out = model(mx.array([ids]), start, caches)  # type: ignore[arg-type]
    mx.eval(out)
    return out


def test_pools_are_made_once_and_shared_by_kind(mixed: ModelForCausalLM) -> None:
    first, second = mixed.create_kv_cache("paged", page_size=4), mixed.create_kv_cache("paged", page_size=4)
    pools = {id(cache._pool) for cache in (*first, *second)}
    assert len(pools) == 2
    assert len(first) == mixed.config.num_hidden_layers


def test_fault_35_windowed_layers_give_back_what_falls_behind_and_stay_exact(mixed: ModelForCausalLM) -> None:
    ids = [40 + i * 7 % 90 for i in range(40)]
    paged, dense = mixed.create_kv_cache("paged", page_size=4), mixed.create_kv_cache()
    start = 0
    for size in (17, 1, 1, 5, *[1] * 16):
        part = ids[start : start + size]
        assert close(logits(mixed, part, paged, start), logits(mixed, part, dense, start))
        start += size
    windowed = [kind for kind, w in enumerate(mixed_reaches(mixed)) if w]
    tables = paged[0].sequence.tables
    assert len(tables.by_kind[windowed[0]].live) <= 4
    assert len(tables.by_kind[1 - windowed[0]].live) == 10


def mixed_reaches(model: ModelForCausalLM) -> list[Reach | None]:
    return [kind.reach for kind in KvPools(model.config, 4).manager.kinds]


def test_fault_36_all_layers_trim_alike_or_none(mixed: ModelForCausalLM) -> None:
    ids = [40 + i * 7 % 90 for i in range(30)]
    paged, dense = mixed.create_kv_cache("paged", page_size=4), mixed.create_kv_cache()
    logits(mixed, ids[:20], paged), logits(mixed, ids[:20], dense)
    paged.trim(2)
    for layer in dense:
        layer.trim(2)
    other = [99, 98, 97]
    assert close(logits(mixed, other, paged, 18), logits(mixed, other, dense, 18))
    for i in range(9):  # the window moves on: what a long trim would need is gone
        logits(mixed, [50 + i], paged, 21 + i)
    with pytest.raises(ValueError, match="a window has passed"):
        paged.trim(25)
    left = paged[0].offset
    assert all(layer.offset == left for layer in paged)
    dense = mixed.create_kv_cache()
    text = [*ids[:18], *other][:left]
    if left:
        logits(mixed, text, dense)
    assert close(logits(mixed, [77], paged, left), logits(mixed, [77], dense, left))


def test_a_fork_goes_its_own_way_from_the_middle_of_a_page(mixed: ModelForCausalLM) -> None:
    ids = [40 + i * 7 % 90 for i in range(10)]
    first = mixed.create_kv_cache("paged", page_size=4)
    logits(mixed, ids, first)
    second = first.fork()
    mine, yours = logits(mixed, [41, 42], first, 10), logits(mixed, [51, 52], second, 10)
    for tail, got in (([41, 42], mine), ([51, 52], yours)):
        dense = mixed.create_kv_cache()
        logits(mixed, ids, dense)
        assert close(got, logits(mixed, tail, dense, 10))
    manager = first[0].sequence.manager
    manager.check_integrity([cache[0].sequence.tables for cache in (first, second)])
    first.release()
    second.release()
    manager.check_integrity([])


@pytest.mark.parametrize("layers", [2, 30])
def test_a_write_copies_nothing_however_large_the_pool(layers: int) -> None:
    """Bytes, not times: growing the pool leaves what a write needs at its peak as it is."""
    spec, peaks = AttentionSpec(scale=1.0), []
    for pages in (8, 1600):
        manager = PageManager([PageKind(None, pages + 1)], page_size=16, share=False)
        pool = TinyKvPagedPool(16, layers=layers, manager=manager)
        whole = TinyKvPagedCache(pool)
        whole.sequence.reserve(0, pages * 16)
        pool.make_room(qkv(1)[1:])
        manager.release(whole.sequence.tables)
        cache = TinyKvPagedCache(pool)
        caches = [TinyKvPagedCache(pool, layer, cache.sequence) for layer in range(layers)]
        peaks.append(0)
        for size in (40, 1, 1, 24):
            mx.clear_cache()
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            mx.eval([one.attend(*qkv(size), spec) for one in caches], pool.flat)
            peaks[-1] = max(peaks[-1], mx.get_peak_memory() - before)
    # The thread that computes frees sooner or later; a copy of any array is far more than that.
    one_array = pool.nbytes / len(pool.flat)
    assert peaks[1] < peaks[0] + one_array / 2, f"a write needs {peaks} bytes in a small and a large pool"


def test_kinds_of_the_config_become_pools(mixed: ModelForCausalLM) -> None:
    config: Config = mixed.config
    pools = KvPools(config, 4)
    assert set(pools.reaches) == {Window(6), None}
    assert len(pools.layers) == config.num_hidden_layers
