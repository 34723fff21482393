"""Facts of this machine. No mlx."""

from __future__ import annotations

import platform
import sys


def available_memory() -> int:
    """Bytes of memory that can be taken now without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)


def total_memory() -> int:
    """Bytes of memory that this machine has."""
    import psutil

    return int(psutil.virtual_memory().total)


def has_gpu_backend() -> bool:
    """Whether MLX computes on a GPU here: Metal on a Mac, CUDA where its package is installed."""
    if sys.platform == "darwin":
        return platform.machine() == "arm64"
    from importlib.metadata import distributions

    return any((found.name or "").startswith("mlx-cuda") for found in distributions(path=sys.path))


def cores() -> int:
    """How many processor cores this process may use."""
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
