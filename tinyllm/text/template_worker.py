"""The process that renders chat templates: started when it is needed, watched, and killed at its limits.

Chat templates come from strangers. Whatever a template does, it ends within `Limits`, in one plain error, and the
program that asked lives on. The operating system enforces the limits, so nothing in a template can evade them:

* time: this side's clock kills the process. If this side is killed first, a limit on processor time does.
* memory: on Linux the process has a limited address space. Everywhere, macOS included, where the kernel ignores that
  limit, this side looks at the process's resident memory 20 times a second and kills it if there is too much.
* sizes: of requests and replies, which this side has to hold.

What a template may call is limited by Jinja's sandbox, in the process (`sandbox.py`).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tinyllm.errors import ChatTemplateError
from tinyllm.hub.sizes import memory_size

__all__ = ["Limits", "TemplateWorker"]

_PROGRAM = """
import sys
sys.path += sys.argv[4:]
from tinyllm.text.sandbox import main
main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True")
"""
_PAUSE = 0.05  # seconds between two looks at a process that renders
_LIMITS_ADDRESS_SPACE = sys.platform == "linux"


@dataclass(frozen=True)
class Limits:
    """What one rendering may take: seconds, bytes of memory, and bytes of the messages and of the prompt."""

    seconds: float = 10.0
    memory: int = 2**30
    size: int = 64 * 2**20


class TemplateWorker:
    """One worker process, which is started with the first request and again after a limit has ended it.

    Threads may share a `TemplateWorker`; their requests take turns. A fork of this process gets a worker of its own.
    """

    def __init__(self, limits: Limits | None = None):
        self._limits = limits or Limits()
        self._locks: dict[int, threading.Lock] = {}  # by id of the process that asks
        self._running: dict[int, tuple[subprocess.Popen[bytes], Callable[[], object]]] = {}

    def start(self) -> None:
        """Start the process in the background, if it is not running; an error is raised by the first request."""
        with self._lock, contextlib.suppress(ChatTemplateError):
            self._process()

    def close(self) -> None:
        """End the process; a further request starts it again."""
        with self._lock:
            self._stop()

    def render(self, source: str, values: dict[str, Any]) -> str:
        """Return what a template makes of `values`. Raises ChatTemplateError, also if it exceeds the limits."""
        return self._ask("render", source, values)

    def variables(self, source: str) -> frozenset[str]:
        """Return the names that a template reads but does not define. Raises ChatTemplateError if it is broken."""
        return frozenset(self._ask("variables", source).split())

    @property
    def _lock(self) -> threading.Lock:
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def _ask(self, *request: Any) -> str:
        data = pickle.dumps(request)
        if len(data) > self._limits.size:
            raise ChatTemplateError(f"the messages take more than {memory_size(self._limits.size)}")
        with self._lock:
            try:
                kind, text = self._exchange(self._process(), data)
            except BaseException:  # an interrupt too: the process is in the middle of an answer
                self._stop()
                raise
        if kind == b"=":
            return text
        raise ChatTemplateError(text)

    def _exchange(self, process: subprocess.Popen[bytes], data: bytes) -> tuple[bytes, str]:
        assert process.stdin is not None and process.stdout is not None
        watch = _Watch(process, self._limits)
        try:
            process.stdin.write(len(data).to_bytes(8, "little") + data)
            process.stdin.flush()
            length = int.from_bytes(process.stdout.read(8), "little")
            reply = process.stdout.read(length) if length <= self._limits.size else b""
        except BrokenPipeError:
            length, reply = 0, b""
        finally:
            watch.end()
        if watch.exceeded:
            raise ChatTemplateError(f"the chat template took more than {watch.exceeded}")
        if length > self._limits.size:
            raise ChatTemplateError(f"the chat template made more than {memory_size(self._limits.size)} of text")
        if reply[:1] == b"M":
            raise ChatTemplateError(f"the chat template took more than {memory_size(self._limits.memory)} of memory")
        if len(reply) < max(length, 1):
            raise ChatTemplateError(self._end_of(process.wait()))
        return reply[:1], reply[1:].decode(errors="surrogatepass")

    def _end_of(self, status: int) -> str:
        if status == -signal.SIGXCPU:
            return f"the chat template took more than {self._limits.seconds:g} seconds"
        return f"the process that renders chat templates ended (status {status})"

    def _process(self) -> subprocess.Popen[bytes]:
        running = self._running.get(os.getpid())
        if running is not None and running[0].poll() is None:
            return running[0]
        self._stop()
        process = _start(self._limits)
        self._running[os.getpid()] = (process, weakref.finalize(self, _end, process, os.getpid()))
        return process

    def _stop(self) -> None:
        if running := self._running.pop(os.getpid(), None):
            running[1]()


class _Watch:
    """Kills a process that renders for too long or with too much memory, from a thread."""

    def __init__(self, process: subprocess.Popen[bytes], limits: Limits):
        self.exceeded = ""
        self._process = process
        self._limits = limits
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop watching; from here on `exceeded` is final, and empty if the process was not killed."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        deadline = time.monotonic() + self._limits.seconds
        while not self._ended.wait(min(_PAUSE, self._limits.seconds)):
            if time.monotonic() > deadline:
                self.exceeded = f"{self._limits.seconds:g} seconds"
            elif _resident_bytes(self._process.pid) > self._limits.memory:
                self.exceeded = f"{memory_size(self._limits.memory)} of memory"
            if self.exceeded:
                self._process.kill()
                return


def _start(limits: Limits) -> subprocess.Popen[bytes]:
    """Start Python without its site packages, which takes less time, and with the folders of what is imported.

    In a session of its own the process gets no Ctrl-C of the terminal; it ends when its stdin does.
    """
    folders = {str(Path(__file__).parents[2])}
    for library in ("jinja2", "markupsafe"):
        spec = find_spec(library)
        if spec is None or spec.origin is None:
            raise ChatTemplateError(f"chat templates need {library}, which is not installed: pip install {library}")
        folders.add(str(Path(spec.origin).parents[1]))
    arguments = [str(limits.seconds), str(limits.memory), str(_LIMITS_ADDRESS_SPACE), *sorted(folders)]
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise ChatTemplateError(f"the process that renders chat templates cannot be started: {error}") from error


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # after a fork: the process belongs to the parent
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # what is left of a request
            pipe.close()  # type: ignore[union-attr]


def _resident_bytes(pid: int) -> int:
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:  # it has ended
        return 0
