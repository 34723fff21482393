"""A terminal that a test types on and reads: a real process behind a pseudo-terminal, what it shows kept by pyte."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path

import pyte
from nursery import become_session_of
from process import Forked, start

PATIENCE_S = 60


class _Screen(pyte.HistoryScreen):
    """A screen that answers when it is asked where its cursor is."""

    master: int

    def write_process_input(self, data: str) -> None:
        os.write(self.master, data.encode())


class Terminal:
    """`tinyllm ARGUMENTS` on a terminal of so many rows and columns. A context manager, which ends the process.

    `program` is started in place of `tinyllm`.
    """

    def __init__(
        self,
        *arguments: str | Path,
        rows: int = 30,
        columns: int = 80,
        env: dict[str, str] | None = None,
        program: Sequence[str] = (),
    ) -> None:
        self._master, slave = pty.openpty()
        self._size(rows, columns)
        self._screen = _Screen(columns, rows, history=2000)
        self._screen.master = self._master
        self._stream = pyte.ByteStream(self._screen)
        self.raw = bytearray()
        self._ended = False
        self._process: subprocess.Popen[bytes] | Forked
        added = {"TERM": "xterm-256color", **(env or {})}
        if program:
            streams = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
            self._process = subprocess.Popen(
                program, **streams, env={**os.environ, **added}, preexec_fn=become_session_of
            )
        else:
            self._process = start(*arguments, streams=(slave, slave, slave), env=added, on_terminal=True)
        os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._master)

    def type(self, keys: str) -> None:
        """Press keys, as the bytes that a terminal sends for them."""
        os.write(self._master, keys.encode())

    def enter(self, line: str) -> None:
        """Type a line and press Enter."""
        self.type(line + "\r")

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until a text is shown, or was and has scrolled away, so many times."""
        self._until(lambda: self.shown.count(text) >= times, f"{text!r} x {times}")

    def wait_for_screen(self, text: str, *, gone: bool = False) -> None:
        """Wait until a text is on the screen now, or no longer."""
        self._until(lambda: (text in self.screen) is not gone, f"{text!r}, {'gone' if gone else 'there'}")

    def wait_for_prompt(self) -> None:
        """Wait until the cursor stands behind an empty prompt. Keys that are pressed earlier are not the editor's."""

        def is_there() -> bool:
            cursor = self._screen.cursor
            return bool(cursor.x == 2 and self._screen.display[cursor.y].rstrip() == ">")

        self._until(is_there, "a prompt")

    def wait_for_no_echo(self) -> None:
        """Wait until the terminal does not show what is typed."""
        self._until(lambda: not termios.tcgetattr(self._master)[3] & termios.ECHO, "a terminal that shows no keys")

    def wait_to_end(self) -> int:
        """Wait for the process to end, and read all that it has shown; return its exit code."""
        self._until(lambda: self._ended, "the end")
        return self._process.wait()

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of the window."""
        self._size(rows, columns)
        self._screen.resize(rows, columns)
        os.kill(self._process.pid, signal.SIGWINCH)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def screen(self) -> str:
        """What is on the screen now."""
        return "\n".join(line.rstrip() for line in self._screen.display)

    @property
    def shown(self) -> str:
        """What has scrolled away, and the screen."""
        above = ["".join(line[x].data for x in sorted(line)) for line in self._screen.history.top]
        return "\n".join([*(line.rstrip() for line in above), self.screen])

    def _size(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _until(self, holds: object, what: str) -> None:
        assert callable(holds)
        patience = time.monotonic() + PATIENCE_S
        while not holds():
            if time.monotonic() > patience:
                raise AssertionError(f"waited for {what}; there is:\n{self.shown}")
            if not self._read() and not holds():
                raise AssertionError(f"the process is over; waited for {what}; there is:\n{self.shown}")

    def _read(self) -> bool:
        if not select.select([self._master], [], [], 0.05)[0]:
            return True
        try:
            piece = os.read(self._master, 65536)
        except OSError:  # Linux's way of saying that the other end is closed
            piece = b""
        if not piece:
            self._process.wait(timeout=PATIENCE_S)
            self._ended = True
            return False
        self.raw += piece
        self._stream.feed(piece)
        return True
