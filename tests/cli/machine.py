"""A person's machine for real processes: a home folder of its own, and a hub that stands for the hub."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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

    def interrupt(self, *arguments: str | Path) -> tuple[int, str]:
        """Run, press Ctrl-C when the hub holds a download in its middle, and return the exit code and stderr."""
        process = subprocess.Popen(
            [sys.executable, "-m", "tinyllm", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **self.hub.environment(self.home)},
        )
        assert self.hub.held.wait(timeout=60)
        process.send_signal(signal.SIGINT)
        stderr = process.communicate(timeout=60)[1].decode()
        return process.returncode, stderr
