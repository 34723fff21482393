"""Ctrl-C while an answer is made."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinyllm.llm import Answer


@contextmanager
def cancelling(answer: Answer) -> Iterator[list[int]]:
    """Let the first Ctrl-C cancel an answer (it is then in the list); a second one interrupts as ever."""
    interrupted: list[int] = []

    def cancel(number: int, frame: object) -> None:
        interrupted.append(number)
        signal.signal(signal.SIGINT, before)
        answer.cancel()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
