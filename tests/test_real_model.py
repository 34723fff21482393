"""The embedded model answers as transformers does, in float32 on the same folder.

golden/real_model.json holds greedy answers of transformers, at most 10 tokens each, with the least margin between the
two best logits of any step: a prompt that was ever closer than 0.01 is not in it, since it would prove nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from golden_cases import FEATURES, GOLDEN

from tinyllm._mx import mx
from tinyllm.engine.engine import Engine
from tinyllm.engine.request import Request
from tinyllm.model.load import load_model
from tinyllm.model.transformer import ModelForCausalLM
from tinyllm.text.tokenizer import Tokenizer

pytestmark = pytest.mark.real_model

ANSWERS: list[dict[str, Any]] = json.loads((GOLDEN / "real_model.json").read_text())["answers"]
IDS = [f"{answer['kind']}: {answer['text'][:24]!r}" for answer in ANSWERS]
END, MOST_TOKENS = 2, 10


@pytest.fixture(scope="module")
def model(real_model: Path) -> ModelForCausalLM:
    return load_model(real_model, dtype=mx.float32)


def greedy(model: ModelForCausalLM, prompt: list[int], count: int) -> list[int]:
    """The plainest loop there is: the best token, `count` times."""
    caches = model.create_kv_cache()
    feed, ids = prompt, []
    while len(ids) < count:
        logits = model(mx.array([feed]), caches[0].offset, caches, logits_to_keep=1)
        feed = [int(mx.argmax(logits[0, -1]).item())]
        ids += feed
    return ids


def test_record_is_worth_comparing_with() -> None:
    assert len(ANSWERS) >= 6
    assert min(answer["margin"] for answer in ANSWERS) >= 0.01
    assert {answer["kind"] for answer in ANSWERS} == {"chat", "raw"}
    assert any(answer["ids"][-1] == END for answer in ANSWERS)


@pytest.mark.parametrize("answer", ANSWERS, ids=IDS)
def test_prompt_ids_are_those_of_transformers(answer: dict[str, Any], real_model: Path) -> None:
    tokenizer, text = Tokenizer.from_folder(real_model), answer["text"]
    is_chat = answer["kind"] == "chat"
    ids = tokenizer.encode_chat([{"role": "user", "content": text}]) if is_chat else tokenizer.encode(text)
    assert ids == answer["prompt_ids"]


@pytest.mark.parametrize("answer", ANSWERS, ids=IDS)
def test_network_answers_as_transformers_does(answer: dict[str, Any], model: ModelForCausalLM) -> None:
    assert greedy(model, answer["prompt_ids"], len(answer["ids"])) == answer["ids"]


@pytest.mark.parametrize("answer", ANSWERS[::3], ids=IDS[::3])
def test_engine_answers_as_transformers_does(answer: dict[str, Any], model: ModelForCausalLM) -> None:
    """Prefilled in chunks, one step ahead, and stopping where transformers stops."""
    engine = Engine(model, prefill_chunk=16)
    engine.add(Request(tuple(answer["prompt_ids"]), max_tokens=MOST_TOKENS, stop_ids=frozenset({END})))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [output.token_id for output in outputs if output.token_id is not None] == answer["ids"]
    assert outputs[-1].finish_reason == ("stop" if answer["ids"][-1] == END else "length")


def test_plain_operations_answer_as_transformers_does(real_model: Path) -> None:
    answer = min(ANSWERS, key=lambda answer: len(answer["prompt_ids"]) + len(answer["ids"]))
    reference = load_model(real_model, FEATURES["reference"], dtype=mx.float32)
    assert greedy(reference, answer["prompt_ids"], len(answer["ids"])) == answer["ids"]
