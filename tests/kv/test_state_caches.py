"""What the caches of one sequence do with states."""

from __future__ import annotations

import pytest
from golden_cases import GOLDEN, expected

from tinyllm._mx import mx
from tinyllm.model.load import load_model
from tinyllm.model.transformer import ModelForCausalLM

PAGE = 16


@pytest.fixture(scope="module", params=["qwen3-next", "lfm2"])
def model(request: pytest.FixtureRequest) -> ModelForCausalLM:
    return load_model(GOLDEN / str(request.param), dtype=mx.float32)


@pytest.fixture(scope="module")
def ids() -> mx.array:
    return expected("qwen3-next")[0][:, :50]


def same(found: mx.array, wanted: mx.array) -> bool:
    return bool(mx.allclose(found, wanted, atol=1e-4 * mx.std(wanted).item()).item())


@pytest.mark.parametrize("features", ["dense", "paged"])
def test_pieces_are_cut_where_pages_end(model: ModelForCausalLM, features: str) -> None:
    cache = (model.create_kv_cache() if features == "dense" else model.create_kv_cache("paged", PAGE))[0]
    assert cache.read_state() is None
    assert list(cache.pieces(20)) == ([20] if features == "dense" else [16, 4])
    assert list(cache.pieces(16)) == [16]


def test_a_dense_cache_takes_a_token_back_and_no_more(model: ModelForCausalLM, ids: mx.array) -> None:
    caches = model.create_kv_cache()
    wanted = model(ids)[0]
    model(ids[:, :20], 0, caches)
    model(ids[:, 30:31], 20, caches)
    for cache in caches:
        cache.trim(1)
    assert same(model(ids[:, 20:50], 20, caches)[0], wanted[20:50])
    with pytest.raises(
        ValueError, match="cannot trim 31 of 50 positions: a state goes back to 0 or 20 or 50 of them"
    ):
        caches[0].trim(31)
    for cache in caches:
        cache.trim(50)
    assert same(model(ids, 0, caches)[0], wanted)


def test_a_batch_of_sequences_goes_through_one_dense_cache(model: ModelForCausalLM, ids: mx.array) -> None:
    both = mx.concatenate([ids, ids[:, ::-1]])
    caches = model.create_kv_cache()
    parts = [model(both[:, start : start + 10], start, caches) for start in range(0, 50, 10)]
    found = mx.concatenate(parts, axis=1)
    assert same(found[0], model(both[:1])[0]) and same(found[1], model(both[1:])[0])


def test_a_paged_cache_takes_no_batch(model: ModelForCausalLM, ids: mx.array) -> None:
    with pytest.raises(ValueError, match="not a batch of 2"):
        model(mx.concatenate([ids, ids]), 0, model.create_kv_cache("paged", PAGE))


def test_a_fork_goes_its_own_way(model: ModelForCausalLM, ids: mx.array) -> None:
    caches = model.create_kv_cache("paged", PAGE)
    model(ids[:, :20], 0, caches)
    fork = caches.fork()
    other = mx.concatenate([ids[:, :20], ids[:, :20]], axis=1)
    assert same(model(ids[:, :20], 20, fork)[0], model(other)[0][20:])
    assert same(model(ids[:, 20:], 20, caches)[0], model(ids)[0][20:])


def test_a_trim_that_no_page_has_the_state_of_is_an_error(model: ModelForCausalLM, ids: mx.array) -> None:
    caches = model.create_kv_cache("paged", PAGE)
    model(ids[:, :20], 0, caches)
    caches.trim(0)
    with pytest.raises(ValueError, match="a state is kept of whole pages alone; 16 are left"):
        caches.trim(1)
    assert same(model(ids[:, 16:], 16, caches)[0], model(ids)[0][16:])


def test_a_state_takes_no_mask(model: ModelForCausalLM) -> None:
    x = mx.zeros((1, 4, model.config.hidden_size))
    with pytest.raises(ValueError, match="takes no mask"):
        model.layers[0](x, 0, None, mx.ones((4, 4), dtype=mx.bool_))
