"""The line editor, woken from another thread while it waits for keys."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from tinyllm.chat.lines import EditedLines
from tinyllm.errors import DoesNotFitError


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        yield pipe


def test_an_error_ends_the_reading_that_waits(keys: PipeInput, tmp_path: Path) -> None:
    lines = EditedLines(tmp_path / "history", lambda kind: ())
    failure = DoesNotFitError("too large")
    drawn = threading.Event()
    lines.footer = lambda width: (drawn.set(), "")[1]

    def fail() -> None:
        drawn.wait()
        lines.wake(failure)

    thread = threading.Thread(target=fail)
    thread.start()
    with pytest.raises(DoesNotFitError) as raised:
        lines.read("half a li")
    thread.join()
    assert raised.value is failure


def test_an_error_from_before_ends_the_next_reading(keys: PipeInput) -> None:
    lines = EditedLines(None, lambda kind: ())
    lines.wake(DoesNotFitError("too large"))
    with pytest.raises(DoesNotFitError):
        lines.read("")


def test_a_footer_is_drawn_anew_and_reading_goes_on(keys: PipeInput) -> None:
    lines = EditedLines(None, lambda kind: ())
    states, drawn = iter(["loading", "ready"]), [threading.Event(), threading.Event()]
    state = [next(states)]

    def footer(width: int) -> str:
        drawn[state[0] == "ready"].set()
        return state[0]

    def become_ready() -> None:
        drawn[0].wait()
        state[0] = next(states)
        lines.wake(None)
        drawn[1].wait()
        keys.send_text("hello\r")

    lines.footer = footer
    thread = threading.Thread(target=become_ready)
    thread.start()
    assert lines.read("") == "hello"
    thread.join()
