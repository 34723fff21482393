"""What Python callers give to `LLM` and should not: errors that name the argument and show no internals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

from tinyllm.errors import UsageError
from tinyllm.llm import LLM

ANSWER = " one two three"
HI = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_scripted_checkpoint(tmp_path_factory.mktemp("arguments") / "scripted", ANSWER)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    """Any: a type checker would refuse most of what is given here."""
    with LLM(folder, compiled=False) as llm:
        yield llm


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(None), "prompt must be a text or a list of texts, not None"),
        (lambda llm: llm.generate(b"hi"), "prompt must be a text or a list of texts, not bytes"),
        (lambda llm: llm.generate(["hi", 5]), "prompt must be a text or a list of texts, not int"),
        (lambda llm: llm.chat("hi"), "messages must be a list of .*, not str"),
        (lambda llm: llm.chat(HI), "messages must be a list of .*, not dict"),
        (lambda llm: llm.chat(None), "messages must be a list of .*, not None"),
        (lambda llm: llm.chat([]), "there is no message to answer"),
        (lambda llm: llm.chat([[HI], []]), "there is no message to answer"),
        (lambda llm: llm.chat([HI, "hi"]), "message 2 must be .*, not str"),
        (lambda llm: llm.chat([{"content": "hi"}]), 'message 1 needs a "role"'),
        (lambda llm: llm.chat([{"role": "user", "content": 5}]), '"content" of message 1 must be a text, not int'),
        (lambda llm: llm.chat([HI], template_args=[1]), "template_args must be a dict"),
        (lambda llm: llm.chat([HI], template_args={1: 2}), "template_args must be a dict"),
        (lambda llm: llm.chat([HI], template_args={"messages": 2}), "template_args: messages is always there"),
        (lambda llm: llm.generate("hi", temprature=1), "no setting 'temprature': did you mean temperature\\?"),
        (lambda llm: llm.generate("hi", foo=None), "no setting 'foo': there are "),
        (lambda llm: llm.generate("hi", stop=5), "stop must be a text or a list of texts, not 5"),
        (lambda llm: llm.generate("hi", stop=["a", 1]), "and 1 is not a text"),
        (lambda llm: llm.generate("hi", stop=["a", ""]), "a stop string must not be empty"),
        (lambda llm: llm.generate("hi", logit_bias=3), "logit_bias must map token ids to numbers, not 3"),
        (lambda llm: llm.answer("hi"), "prompt_ids must be a list of token ids"),
        (lambda llm: llm.answer([1.5]), "prompt_ids must be a list of token ids"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(llm: Any, call: Callable[[Any], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(llm)


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch", "a"), ("max_context", "x"), ("max_context", 1.5), ("kv_bits", "8"), ("kv_budget", "1GB")],
)
def test_a_limit_that_is_not_a_number_is_refused_by_name(folder: Path, name: str, value: object) -> None:
    arguments: dict[str, Any] = {name: value}
    with pytest.raises(UsageError, match=f"{name} must be .*, not {value!r}"):
        LLM(folder, compiled=False, **arguments)


def test_what_iterates_is_taken_as_a_list(llm: Any) -> None:
    assert [answer.text() for answer in llm.generate(each for each in ("a", "b"))] == [ANSWER] * 2
    assert llm.generate("hi", stop=(each for each in ("two",))).text() == " one "
    assert llm.chat(({"role": "user", "content": None},)).text() == ANSWER
