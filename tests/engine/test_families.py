"""One model of every family, run in every way: what it says alone, dense and eager, it says in all of them.

Ids may part where two logits were as good as equal; see `doctor.ids_gap`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
LENGTHS, ANSWER, PAGE = (34, 5, 21, 16), 5, 16
ENGINES: Mapping[str, Mapping[str, Any]] = {
    "paged": {"compiled": False, "page_size": PAGE},
    "dense": {"compiled": False, "kv": "dense"},
}
COMPILED = ("llama", "mistral", "gpt_oss")


def folder_of(family: str) -> str:
    """Return the golden folder that is called like a family, or else the first of it."""
    own = [name for name in FOLDERS if model_type(name) == family]
    return next((name for name in own if name.replace("-", "_") == family), own[0])


def model_type(folder: str) -> str:
    values = json.loads((GOLDEN / folder / "config.json").read_text())
    kind: str = values.get("text_config", values)["model_type"]
    return kind


@dataclass(frozen=True)
class Case:
    """A model, what it is asked, and what it says to each request alone."""

    model: ModelForCausalLM
    requests: tuple[Request, ...]
    alone: list[list[Output]]

    @classmethod
    def of(cls, folder: str) -> Case:
        model, ids = load_model(GOLDEN / folder, dtype=mx.float32), expected(folder)[0][0].tolist()
        requests = tuple(
            Request(tuple(ids[start : start + length]), ANSWER, logprobs=2) for start, length in enumerate(LENGTHS)
        )
        engine = Engine(model, kv="dense", compiled=False, max_rows=1)
        return cls(model, requests, [engine.run([request])[0] for request in requests])

    def check(self, answers: Sequence[Sequence[Output]]) -> None:
        gaps = [ids_gap(wanted, answer) for wanted, answer in zip(self.alone, answers, strict=True)]
        assert max(gaps) <= NEAR
        assert 2 * sum(gap > 0 for gap in gaps) < len(gaps), "so many cannot all be near enough to part"


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def case(request: pytest.FixtureRequest) -> Case:
    return Case.of(folder_of(request.param))


def test_alone_in_pages(case: Case) -> None:
    one = Engine(case.model, max_rows=1, share=False, **ENGINES["paged"])
    case.check([one.run([request])[0] for request in case.requests])


def test_in_a_batch_of_unequal_lengths(case: Case) -> None:
    case.check(Engine(case.model, share=False, **ENGINES["paged"]).run(case.requests))


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())
def test_with_prompts_in_small_chunks(case: Case, engine: Mapping[str, Any]) -> None:
    case.check(Engine(case.model, prefill_chunk=7, **engine).run(case.requests))


def test_with_prefixes_that_are_there_already(case: Case) -> None:
    """The same prompts twice, and one that goes on after the first one's answer."""
    engine = Engine(case.model, **ENGINES["paged"])
    for _ in range(2):
        case.check(engine.run(case.requests))
    assert engine.pools.manager.hit_tokens > 0
    said = [output.token_id for output in case.alone[0] if output.token_id is not None]
    longer = Request((*case.requests[0].prompt_ids, *said), ANSWER, logprobs=2)
    [wanted] = Engine(case.model, kv="dense", compiled=False).run([longer])
    assert ids_gap(wanted, engine.run([longer])[0]) <= NEAR


@pytest.mark.parametrize("family", COMPILED)
def test_in_compiled_steps(family: str) -> None:
    """Of few, for each waits for a compiler."""
    case = Case.of(folder_of(family))
    case.check(Engine(case.model, page_size=PAGE).run(case.requests))
