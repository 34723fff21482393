"""One model of every family, run in every way: what it says alone, dense and eager, it says in all of them.

Ids may part where two logits were as good as equal; see `doctor.ids_gap`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import pytest
from golden_cases import FOLDERS, GOLDEN, expected

from tinyllm._mx import mx
from tinyllm.config.families.table import FAMILIES
from tinyllm.doctor import ids_gap
from tinyllm.engine.engine import Engine
from tinyllm.engine.request import Output, Request
from tinyllm.model.load import load_model
from tinyllm.model.transformer import ModelForCausalLM

NEAR = 1e-3
LENGTHS, ANSWER, PAGE = (34, 5, 21, 16), 10, 16
ENGINES: Mapping[str, Mapping[str, Any]] = {
    "paged": {"compiled": False, "page_size": PAGE},
    "dense": {"compiled": False, "kv": "dense"},
}
COMPILED = ("llama",)


def folder_of(family: str) -> str:
    """Return the golden folder that is called like a family, or else the first of it."""
    own = [name for name in FOLDERS if model_type(name) == family]
    return next((name for name in own if name.replace("-", "_") == family), own[0])


def model_type(folder: str) -> str:
    values = json.loads((GOLDEN / folder / "config.json").read_text())
    kind: str = values.get("text_config", values)["model_type"]
    return kind


@lru_cache(maxsize=1)  # tests of one family come one after another
def model_of(family: str) -> ModelForCausalLM:
    return load_model(GOLDEN / folder_of(family), dtype=mx.float32)


@lru_cache(maxsize=1)
def requests_of(family: str) -> tuple[Request, ...]:
    ids = expected(folder_of(family))[0][0].tolist()
    return tuple(Request(tuple(ids[i : i + length]), ANSWER, logprobs=2) for i, length in enumerate(LENGTHS))


@lru_cache(maxsize=1)
def alone(family: str) -> list[list[Output]]:
    engine = Engine(model_of(family), kv="dense", compiled=False, max_rows=1)
    return [engine.run([request])[0] for request in requests_of(family)]


def check(wanted: Sequence[Sequence[Output]], answers: Sequence[Sequence[Output]]) -> None:
    gaps = [ids_gap(expected, answer) for expected, answer in zip(wanted, answers, strict=True)]
    assert max(gaps) <= NEAR
    assert sum(gap == 0 for gap in gaps) > len(gaps) / 2, "few are near enough to part"


each_engine = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())
each_family = pytest.mark.parametrize("family", sorted(FAMILIES))


@each_family
@each_engine
def test_alone(family: str, engine: Mapping[str, Any]) -> None:
    one = Engine(model_of(family), max_rows=1, share=False, **engine)
    check(alone(family), [one.run([request])[0] for request in requests_of(family)])


@each_family
@each_engine
def test_in_a_batch_of_unequal_lengths(family: str, engine: Mapping[str, Any]) -> None:
    check(alone(family), Engine(model_of(family), share=False, **engine).run(requests_of(family)))


@each_family
@each_engine
def test_with_prompts_in_small_chunks(family: str, engine: Mapping[str, Any]) -> None:
    check(alone(family), Engine(model_of(family), prefill_chunk=7, **engine).run(requests_of(family)))


@each_family
def test_with_a_prefix_that_is_there_already(family: str) -> None:
    """The same prompts twice, and one that goes on where the first one's answer ended."""
    model, requests = model_of(family), requests_of(family)
    engine = Engine(model, **ENGINES["paged"])
    for _ in range(2):
        check(alone(family), engine.run(requests))
    assert engine.pools.manager.hit_tokens > 0
    ids = (*requests[0].prompt_ids, *(output.token_id for output in alone(family)[0] if output.token_id is not None))
    longer = Request(ids, ANSWER, logprobs=2)
    reference = Engine(model, kv="dense", compiled=False)
    check([reference.run([longer])[0]], engine.run([longer]))


@pytest.mark.parametrize("family", COMPILED)
def test_in_compiled_steps(family: str) -> None:
    check(alone(family), Engine(model_of(family), page_size=PAGE).run(requests_of(family)))
