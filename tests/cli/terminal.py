"""A pseudo-terminal for a real process, as a person's terminal is."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios
from pathlib import Path

from process import start


def tinyllm_on_a_terminal(
    *arguments: str | Path, stdout: int | None = None, env: dict[str, str] | None = None
) -> str:
    """Run `tinyllm ARGUMENTS` on a terminal of 80 columns, and return everything that it showed there.

    `stdout` is a file descriptor that takes the answer instead of the terminal.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = start(
        *arguments,
        streams=(slave, slave if stdout is None else stdout, slave),
        env={"TERM": "xterm-256color", "COLUMNS": "80", **(env or {})},
    )
    os.close(slave)
    shown = bytearray()
    while select.select([master], [], [], 120)[0]:
        try:
            piece = os.read(master, 65536)
        except OSError:  # Linux's way of saying that the other end is closed
            break
        if not piece:
            break
        shown += piece
    process.wait(timeout=60)
    os.close(master)
    return shown.decode()
