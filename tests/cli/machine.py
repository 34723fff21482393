"""A person's machine for real processes: a home folder of its own, and a hub that stands for the hub."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hub_server import Hub
from process import tinyllm
from terminal import tinyllm_on_a_terminal

# Runs at the start of every Python process that has its folder on PYTHONPATH.
_NO_NETWORK = """
import os, sys

def _refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        os.write(2, f"connection attempted: {arguments}".encode())
        os._exit(99)

sys.addaudithook(_refuse)
"""


@dataclass(frozen=True)
class Machine:
    """Runs `tinyllm` in `home`, where also is all that it reads and writes."""

    home: Path
    hub: Hub

    @property
    def cache(self) -> Path:
        return self.home / "hf" / "hub"

    def run(self, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
        return tinyllm(*arguments, env={**self.hub.environment(self.home), **environment}, cwd=self.home)

    def run_without_network(self, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
        """Run where the first attempt at a connection, or to look a host up, ends the process with 99."""
        folder = self.home / "no-network"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(_NO_NETWORK)
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        return self.run(*arguments, PYTHONPATH=path, **environment)

    def show(self, *arguments: str | Path) -> str:
        """Run on a terminal, and return what it shows."""
        return tinyllm_on_a_terminal(*arguments, env=self.hub.environment(self.home))

    def interrupt(self, *arguments: str | Path, least: int) -> tuple[int, str]:
        """Run, press Ctrl-C in the middle of a download that the hub holds, and return the exit code and stderr.

        The middle is where so many bytes at `least` are on disk: much of what the hub has sent may be on its way.
        """
        process = subprocess.Popen(
            [sys.executable, "-m", "tinyllm", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **self.hub.environment(self.home)},
        )
        while sum(map(_size, self.cache.glob("*/blobs/*.incomplete"))) < least:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.02)
                raise AssertionError(f"it ended: {process.communicate()}")
        process.send_signal(signal.SIGINT)
        stderr = process.communicate()[1].decode()
        return process.returncode, stderr


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # it is whole, and has another name
        return 0
