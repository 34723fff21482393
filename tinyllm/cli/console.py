"""What reaches a person: the answer on stdout, everything else on stderr, failures as one line."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable
from io import FileIO, TextIOWrapper
from typing import NoReturn

from tinyllm.errors import TinyllmError
from tinyllm.terminal.text import for_stream, tell

INTERRUPTED = 130


def run(command: Callable[[], None], *, debug: bool) -> int:
    """Run a command and return its exit code, with every failure told in one line; `debug` shows the traceback.

    An interrupt (Ctrl-C) and a stdout that nobody reads any more end the process at once: the engine's thread may
    be in a step that takes long.
    """
    _log_to_stderr()
    try:
        command()
        sys.stdout.flush()
    except KeyboardInterrupt:
        leave(INTERRUPTED)
    except BrokenPipeError:
        leave(1)
    except Exception as error:
        if debug:
            tell(traceback.format_exc().rstrip())
        say(_explain(error))
        return error.exit_code if isinstance(error, TinyllmError) else 1
    return 0


def open_standard_streams() -> None:
    """Open those of stdin, stdout and stderr that the caller closed, lest a file that is opened later become one.

    The substitutes are empty, fail, and forget what is written to them, in that order.
    """
    while (descriptor := os.open(os.devnull, os.O_RDONLY)) <= 2:
        if descriptor == 2:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.close(descriptor)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 (a descriptor, for good)
    # Unbuffered: what cannot be written is told at once, and not again at the end.
    sys.stdout = sys.stdout or TextIOWrapper(FileIO(1, "w", closefd=False), write_through=True)
    sys.stderr = sys.stderr or TextIOWrapper(FileIO(2, "w", closefd=False), write_through=True)


def say(message: str) -> None:
    """Print a line to stderr, under the program's name."""
    tell(f"tinyllm: {message}")


def write(text: str) -> None:
    """Write a piece of the answer to stdout at once; a character that its encoding lacks becomes ?."""
    encoding = sys.stdout.encoding or "utf-8"
    text = for_stream(text, sys.stdout)
    try:
        sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:  # of a type of its own where the other end is closed
        raise type(error)(error.errno, error.strerror, "stdout") from error


def on_terminal() -> bool:
    """Whether a person may be watching stderr, where progress and figures go."""
    return sys.stderr.isatty()


def columns() -> int | None:
    """How wide the terminal is that stderr is shown on; None where it is not, or does not say."""
    return os.get_terminal_size(sys.stderr.fileno()).columns or None if on_terminal() else None


def stdout_columns() -> int | None:
    """How wide the terminal is that the answer is shown on; None where it is not, or does not say."""
    return os.get_terminal_size(sys.stdout.fileno()).columns or None if sys.stdout.isatty() else None


def _explain(error: Exception) -> str:
    if isinstance(error, TinyllmError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    summary = " ".join(str(error).split()) or "no message"
    return f"internal error: {type(error).__name__}: {summary} (--debug shows where)"


def leave(code: int) -> NoReturn:
    """End the process at once, whatever its threads are doing."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it, or it is closed
            stream.flush()
    os._exit(code)


class _Said(logging.Handler):
    """Says what is logged, wherever stderr goes by then: a chat shows it above the line that is typed."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def _log_to_stderr() -> None:
    logger = logging.getLogger("tinyllm")
    if not logger.handlers:
        logger.addHandler(_Said())
        logger.setLevel(logging.INFO if on_terminal() else logging.WARNING)
        logger.propagate = False
