"""Positions that are no rotation, ALiBi and learned ones: every engine says what one pass says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from golden_cases import GOLDEN

from tinyllm._mx import mx
from tinyllm.engine.engine import Engine
from tinyllm.engine.request import Request
from tinyllm.errors import ContextLengthError
from tinyllm.model.load import load_model
from tinyllm.model.transformer import ModelForCausalLM

SMALL_PAGES: Mapping[str, Any] = {"compiled": False, "page_size": 4, "prefill_chunk": 7, "max_rows": 3}
DENSE: Mapping[str, Any] = {"kv": "dense", "max_rows": 1, "prefill_chunk": 9}
COMPILED: Mapping[str, Any] = {}


def load(name: str) -> ModelForCausalLM:
    return load_model(GOLDEN / name, dtype=mx.float32)


def ids_of(model: ModelForCausalLM, length: int) -> tuple[int, ...]:
    return tuple((7 * i * i + 3 * i + length) % model.config.vocab_size for i in range(length))


def greedy(model: ModelForCausalLM, prompt: tuple[int, ...], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(mx.argmax(model(mx.array([ids]), logits_to_keep=1)[0, 0]).item()))
    return ids[len(prompt) :]


def run(engine: Engine, requests: list[Request]) -> list[list[int]]:
    answers: dict[int, list[int]] = {engine.add(request): [] for request in requests}
    while engine.has_work:
        for output in engine.step():
            if output.token_id is not None:
                answers[output.request_id].append(output.token_id)
    return list(answers.values())


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt2", SMALL_PAGES),
        ("gpt-neo", SMALL_PAGES),
        ("opt-post-norm", SMALL_PAGES),
        ("bloom-twelve-heads", SMALL_PAGES),
        ("falcon-alibi", SMALL_PAGES),
        ("gpt2", DENSE),
        ("mpt-clipped", DENSE),
        ("gpt-neo", COMPILED),
        ("falcon-alibi", COMPILED),
    ],
)
def test_engines_say_what_one_pass_says(name: str, settings: Mapping[str, Any]) -> None:
    model = load(name)
    prompts = [ids_of(model, length) for length in (1, 9, 30)]
    answers = run(Engine(model, **settings), [Request(prompt, max_tokens=6) for prompt in prompts])
    assert answers == [greedy(model, prompt, 6) for prompt in prompts]


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_no_position_is_past_the_last(name: str) -> None:
    """The answer ends where the table does, and a longer prompt is refused."""
    model = load(name)
    last = model.config.max_position_embeddings
    engine = Engine(model, compiled=False)
    prompt = ids_of(model, last - 3)
    assert run(engine, [Request(prompt, max_tokens=8)]) == [greedy(model, prompt, 3)]
    with pytest.raises(ContextLengthError, match=f"{last:,}"):
        engine.add(Request(ids_of(model, last + 1), max_tokens=8))
