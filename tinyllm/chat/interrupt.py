"""The keyboard while an answer is made: Ctrl-C is heard, and what is typed leaves no mark."""

from __future__ import annotations

import os
import signal
import sys
import termios
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


@contextmanager
def without_echo() -> Iterator[None]:
    """Have a terminal that is stdin not show what is typed: it would stand where an answer is drawn again and again.

    The ^C of a Ctrl-C alone may begin another line, and one of the answer's then stays behind. What was typed is read
    afterwards. A shell sets the terminal's modes when Ctrl-Z suspends this process, so they are set again after that.
    """
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]

    def silence(number: int, frame: object) -> None:
        if os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp():  # not in a shell's background
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, silent)

    continued = signal.signal(signal.SIGCONT, silence)
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        signal.signal(signal.SIGCONT, continued)
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
