"""What reaches a person: the answer on stdout, everything else on stderr, failures as one line."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import TextIO

from tinyllm.errors import TinyllmError

INTERRUPTED = 130


def run(command: Callable[[], None], *, debug: bool) -> int:
    """Run a command and return its exit code, with every failure told in one line; `debug` shows the traceback."""
    _log_to_stderr()
    try:
        command()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _abandon_stdout()
        return 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        say(_explain(error))
        return error.exit_code if isinstance(error, TinyllmError) else 1
    return 0


def say(message: str) -> None:
    """Print a line to stderr, under the program's name."""
    print(f"tinyllm: {message}", file=sys.stderr)


def write(text: str, stream: TextIO | None = None) -> None:
    """Write a piece of the answer to stdout at once; what its encoding lacks is shown as ?."""
    stream = stream or sys.stdout
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, errors="replace").decode(encoding))
    stream.flush()


def _explain(error: Exception) -> str:
    if isinstance(error, TinyllmError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    summary = " ".join(str(error).split()) or "no message"
    return f"internal error: {type(error).__name__}: {summary} (--debug shows where)"


def _abandon_stdout() -> None:
    """The reader has gone: keep the interpreter from complaining when it flushes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _log_to_stderr() -> None:
    logger = logging.getLogger("tinyllm")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("tinyllm: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
