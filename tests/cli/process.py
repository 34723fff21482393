"""Running the command line as a user does: another process, its own stdin, stdout and stderr.

Most of what such a process would spend is imports. So on Linux's CPU backend it is a fork of one that has imported
them, `nursery.py`. Elsewhere (neither Metal nor CUDA outlives a fork), and where the environment is one that Python
itself reads, it is begun from nothing; so are those of the tests that use `subprocess`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from nursery import become_session_of

CAN_FORK = sys.platform == "linux" and any(distributions(name="mlx-cpu"))
PATIENCE_S = 120


def tinyllm(
    *arguments: str | Path,
    stdin: str | bytes | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run `tinyllm ARGUMENTS` to its end. Without `stdin` it has none (/dev/null)."""
    given = (
        os.open(os.devnull, os.O_RDONLY)
        if stdin is None
        else _pipe_with(stdin.encode() if isinstance(stdin, str) else stdin)
    )
    with open(given, "rb") as source, TemporaryFile() as out, TemporaryFile() as err:  # noqa: PTH123 (a descriptor)
        process = start(*arguments, streams=(source, out, err), env=env, cwd=cwd)
        try:
            code = process.wait(timeout=PATIENCE_S)
        finally:
            if process.poll() is None:
                process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), err.read())


def start(
    *arguments: str | Path,
    streams: tuple[int | IO[Any], int | IO[Any], int | IO[Any]],
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    on_terminal: bool = False,
) -> subprocess.Popen[bytes] | Forked:
    """Start `tinyllm ARGUMENTS` with these as stdin, stdout and stderr; `env` is added to this process's.

    With `on_terminal` stdin is the terminal of a session of its own, so that Ctrl-C is heard.
    """
    words = [str(argument) for argument in arguments]
    added = dict(env or {})
    for_python = any(name.startswith("PYTHON") and os.environ.get(name) != added[name] for name in added)
    if CAN_FORK and not for_python:
        return Forked(words, streams, {**os.environ, **added}, cwd or Path.cwd(), on_terminal)
    stdin, stdout, stderr = streams
    return subprocess.Popen(
        [sys.executable, "-m", "tinyllm", *words],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, **added},
        cwd=cwd,
        preexec_fn=become_session_of if on_terminal else None,
    )


class Forked:
    """A process that the nursery has forked, with what tests use of `subprocess.Popen`."""

    def __init__(
        self,
        arguments: list[str],
        streams: tuple[int | IO[Any], int | IO[Any], int | IO[Any]],
        env: Mapping[str, str],
        cwd: Path,
        on_terminal: bool,
    ) -> None:
        self.args = arguments
        self.returncode: int | None = None
        numbers = [stream if isinstance(stream, int) else stream.fileno() for stream in streams]
        self._report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        asked = {"arguments": arguments, "env": dict(env), "cwd": str(cwd), "on_terminal": on_terminal}
        with theirs:
            socket.send_fds(_nursery(), [json.dumps(asked).encode()], [*numbers, theirs.fileno()])
        self.pid = int(self._report.recv(32))

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code, or the negative number of the signal that was the end."""
        if self.returncode is None:
            if not select.select([self._report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._report.recv(32))
            self._report.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return what `wait` does if it would not wait."""
        if self.returncode is None and not select.select([self._report], [], [], 0)[0]:
            return None
        return self.wait()

    def kill(self) -> None:
        """End the process, unless it is over and the nursery has yet to say so."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


@cache
def _nursery() -> socket.socket:
    """Return the way to the process that forks. It ends with this one, when the other end is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            [sys.executable, Path(__file__).with_name("nursery.py"), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return ours


def _pipe_with(content: bytes) -> int:
    """Return the end of a pipe that has this in it, as much as a pipe holds at most."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with open(writing, "wb", buffering=0) as file:  # noqa: PTH123 (a descriptor)
        assert file.write(content) == len(content)
    return reading
