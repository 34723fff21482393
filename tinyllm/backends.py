"""Which MLX is installed, and what a person is told when it is none, the wrong one, or two. No mlx."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable
from pathlib import Path

from tinyllm.errors import BackendError

_BACKENDS = ("mlx_cpu", "mlx_cuda_12", "mlx_cuda_13")


def explain_absence(error: ImportError, system: str = sys.platform, machine: str = platform.machine()) -> str:
    """Say in one line why `import mlx.core` failed, and what to install."""
    cause = (str(error) or type(error).__name__).splitlines()[0]
    if system == "darwin" and machine != "arm64":
        return f"MLX needs Apple Silicon and a Python built for arm64, and this one is for {machine} ({cause})"
    if system == "darwin":
        return f"MLX cannot be loaded ({cause}): install it with pip install mlx, on macOS 14 or later"
    return (
        f"MLX has no backend here ({cause}): install one of the extras, pip install -e '.[cpu]' (or cuda12, cuda13)"
    )


def refuse_several(folders: Iterable[str]) -> None:
    """Raise BackendError if `folders` hold several of Linux's backends: they overwrite each other's files."""
    found = {
        name
        for folder in map(Path, folders)
        for name in _BACKENDS
        if folder.is_dir() and any(folder.glob(f"{name}-*.dist-info"))
    }
    if len(found) > 1:
        names = " and ".join(sorted(name.replace("_", "-") for name in found))
        raise BackendError(
            f"{names} are installed together and overwrite each other: uninstall both, then install one"
        )
