"""Sequences with a state give what each gives alone, dense and eager: shared, taken back, begun again."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from golden_cases import GOLDEN
from running import ids, ids_alone, run
from step_memory import bytes_of_steps

from tinyllm._mx import mx
from tinyllm.engine.engine import Engine
from tinyllm.engine.prefix_file import Fingerprint, load_prefix, save_prefix
from tinyllm.engine.request import Request
from tinyllm.errors import PrefixFileError
from tinyllm.model.load import load_model
from tinyllm.model.transformer import ModelForCausalLM

MODELS = ("qwen3-next", "lfm2")
ENGINES: dict[str, dict[str, Any]] = {
    "paged, eager": {"compiled": False, "page_size": 16},
    "paged, compiled": {"page_size": 16, "max_rows": 3},
    "paged, small pages and chunks": {"compiled": False, "page_size": 4, "prefill_chunk": 7},
    "paged, unshared": {"compiled": False, "page_size": 16, "share": False, "prefill_chunk": 9},
    "dense": {"kv": "dense", "compiled": False, "prefill_chunk": 9},
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest) -> Path:
    return GOLDEN / str(request.param)


@pytest.fixture(scope="module")
def model(folder: Path) -> ModelForCausalLM:
    return load_model(folder, dtype=mx.float32)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(Random(seed).choices(range(96), k=length))


PROMPTS = [prompt(45), prompt(1, 1), prompt(32, 2), prompt(45)[:40], prompt(33, 2), prompt(45)]
REQUESTS = [Request(text, max_tokens=9 + 3 * i) for i, text in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def expected(model: ModelForCausalLM) -> list[list[int]]:
    return [ids_alone(model, request) for request in REQUESTS]


@pytest.mark.parametrize("name", ENGINES)
def test_each_gets_what_it_gets_alone(model: ModelForCausalLM, name: str, expected: list[list[int]]) -> None:
    """Prompts of one token and of several pages, whole or not, of which some begin alike."""
    assert list(map(ids, run(Engine(model, **ENGINES[name]), REQUESTS))) == expected


def test_a_prompt_that_goes_on_from_an_answer_finds_all_that_was_computed(model: ModelForCausalLM) -> None:
    engine = Engine(model, compiled=False, page_size=16)
    [answer] = run(engine, [Request(prompt(21), max_tokens=14)])
    turns = [(*prompt(21), *ids(answer), *prompt(3, seed)) for seed in (1, 2)]
    for turn in turns:
        request = Request(turn, max_tokens=5)
        [outputs] = run(engine, [request])
        assert ids(outputs) == ids_alone(model, request)
        assert outputs[0].cached == (34 if turn is turns[0] else 32)  # the first took the last page over


def test_who_lacks_pages_is_computed_again(model: ModelForCausalLM) -> None:
    engine = Engine(model, compiled=False, page_size=8, ceilings=(10, 10))
    requests = [Request(prompt(20, i), max_tokens=26) for i in range(4)]
    assert list(map(ids, run(engine, requests))) == [ids_alone(model, request) for request in requests]
    assert engine.preemptions > 0


@pytest.mark.parametrize("steps", range(5, 12))
def test_one_cancelled_in_the_middle_of_a_step_leaves_no_state_that_is_of_more_tokens(
    model: ModelForCausalLM, steps: int
) -> None:
    engine = Engine(model, compiled=False, page_size=4)
    request_id, given = engine.add(Request(prompt(6), max_tokens=30)), list[int]()
    for _ in range(steps):
        given += [output.token_id for output in engine.step() if output.token_id is not None]
    engine.cancel(request_id)
    request = Request((*prompt(6), *given, 5), max_tokens=4)
    assert ids(run(engine, [request])[0]) == ids_alone(model, request)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_copies_no_pool(model: ModelForCausalLM, compiled: bool) -> None:
    """Bytes of decode steps, not their time, in a pool of 12 pages and in one of 3,000."""
    engines = [Engine(model, page_size=8, compiled=compiled, max_rows=3) for _ in range(2)]
    small, large = (bytes_of_steps(engine, pages) for engine, pages in zip(engines, (12, 3000), strict=True))
    states = next(pool for pool in engines[1].pools.pools if pool.states)
    least = min(array.nbytes for array in states.flat)
    assert large - small < least / 2, f"steps need {small} bytes in a small pool, {large} in a large one"


@pytest.mark.parametrize("length", [32, 37])
def test_a_saved_prefix_has_the_state_at_its_end(
    folder: Path, model: ModelForCausalLM, tmp_path: Path, length: int
) -> None:
    fingerprint = Fingerprint.of(Engine(model, compiled=False, page_size=16), folder)
    first = Engine(model, compiled=False, page_size=16)
    run(first, [Request(prompt(length), max_tokens=1)])
    path = tmp_path / "prefix"
    assert save_prefix(first, prompt(length), path, fingerprint) == length

    second = Engine(model, compiled=False, page_size=16)
    assert load_prefix(second, path, fingerprint) == prompt(length)
    second.scheduler.check_invariants()
    request = Request((*prompt(length), 7), max_tokens=8)
    [outputs] = run(second, [request])
    assert outputs[0].cached == length
    assert ids(outputs) == ids_alone(model, request)


def test_a_saved_state_that_is_not_finite_or_has_no_room_is_refused(
    folder: Path, model: ModelForCausalLM, tmp_path: Path
) -> None:
    engine = Engine(model, compiled=False, page_size=16)
    fingerprint = Fingerprint.of(engine, folder)
    run(engine, [Request(prompt(37), max_tokens=1)])
    path = tmp_path / "prefix"
    save_prefix(engine, prompt(37), path, fingerprint)
    with pytest.raises(PrefixFileError, match="no room"):
        load_prefix(Engine(model, compiled=False, page_size=16, ceilings=(3, 3)), path, fingerprint)
    arrays, metadata = mx.load(str(path), format="safetensors", return_metadata=True)
    name = next(name for name in arrays if name.endswith("state0"))
    arrays[name] = arrays[name] * float("nan")
    mx.save_safetensors(str(path) + ".safetensors", arrays, metadata)
    with pytest.raises(PrefixFileError, match="inf or NaN"):
        load_prefix(engine, Path(str(path) + ".safetensors"), fingerprint)
