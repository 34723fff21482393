"""A process that has imported what commands import, and forks one that goes on as `python -m tinyllm` for each asked.

None of these modules reads the environment when it is imported, opens anything or starts a thread. What does (the
hub's library reads its variables) is left to the fork, which has an environment of its own.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import termios
from pathlib import Path
from typing import Any

IMPORTED = (
    *("numpy", "tokenizers", "jinja2", "psutil", "gguf", "rich.markdown", "rich.progress", "prompt_toolkit"),
    *("tinyllm.cli.app", "tinyllm.llm", "tinyllm.chat.repl", "tinyllm.bench.measure", "tinyllm.anatomy.subject"),
)


def become_session_of(terminal: int = 0) -> None:
    """Make this process the first of a session whose terminal that is."""
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def fork_what_is_asked_for(control: socket.socket) -> None:
    """Return in each process that is asked for, as that; in this one never, until nobody can ask."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that watch need no burial
    while True:
        message, files, _, _ = socket.recv_fds(control, 2**20, 4)
        if not message:
            sys.exit()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            *streams, report = files
            _fork_and_watch(streams, report)
            _become(json.loads(message), streams)
            return
        for file in files:
            os.close(file)


def _fork_and_watch(streams: list[int], report: int) -> None:
    """Return in a fork; here, tell its number and its exit code."""
    forked = os.fork()
    if forked == 0:
        os.close(report)
        return
    for stream in streams:
        os.close(stream)
    os.write(report, str(forked).encode())
    status = os.waitpid(forked, 0)[1]
    os.write(report, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(asked: dict[str, Any], streams: list[int]) -> None:
    """Take over what a process of its own would have begun with."""
    if asked["on_terminal"]:
        become_session_of(streams[0])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.path[0] = asked["cwd"]
    sys.argv = ["tinyllm", *asked["arguments"]]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (as Python opens them)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


if __name__ == "__main__":
    sys.path[0] = str(Path.cwd())
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()
    fork_what_is_asked_for(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module("tinyllm", run_name="__main__", alter_sys=True)
