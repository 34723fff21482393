"""The prompt of a command, from its argument and from stdin."""

from __future__ import annotations

import os
import stat
import sys

from tinyllm.errors import UsageError
from tinyllm.text.given import decoded, read_whole


def read_prompt(argument: str | None) -> str:
    """Return the argument, followed by what is piped or redirected into stdin after a blank line.

    A stdin that is neither a pipe nor a file is left alone unless the argument is "-": a service's would never end.
    Raises UsageError when there is neither, or only a stdin that is empty, as what was to fill it has failed; and for
    one that does not end.
    """
    piped = _read_stdin() if argument == "-" or _is_redirected() else None
    if argument is None or argument == "-":
        if piped is None:
            raise UsageError("there is no prompt: give one as an argument, or pipe one in")
        if not piped:
            raise UsageError("there is no prompt: nothing came from stdin")
        return piped
    return f"{argument}\n\n{piped}" if piped else argument


def _is_redirected() -> bool:
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or no real file
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _read_stdin() -> str:
    return decoded(read_whole(sys.stdin.buffer, "stdin"), "stdin").removesuffix("\n")
