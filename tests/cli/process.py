"""Running the command line as a user does: another process, its own stdin, stdout and stderr."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def tinyllm(*arguments: str | Path, stdin: str | None = None, env: dict[str, str] | None = None, **options: object):
    """Run `tinyllm ARGUMENTS` to its end. Without `stdin` it has none (/dev/null)."""
    return subprocess.run(
        [sys.executable, "-m", "tinyllm", *map(str, arguments)],
        input=None if stdin is None else stdin.encode(),
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        env={**os.environ, **(env or {})},
        timeout=120,
        check=False,
        **options,
    )
