"""Facts of this machine. No mlx."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MemoryLimit:
    """A Linux control group's memory in bytes: the most that it may hold, and how much of that can be taken now."""

    limit: int
    available: int


@dataclass(frozen=True)
class _Controller:
    """Where a version of control groups has its files, and what it calls the page cache, which is given back."""

    folder: str
    limit: str
    usage: str
    cache: tuple[str, str]


_V1 = _Controller(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
_V2 = _Controller("sys/fs/cgroup", "memory.max", "memory.current", ("active_file", "inactive_file"))


def available_memory() -> int:
    """Bytes of memory that can be taken now without swapping; in a container, what its limit leaves."""
    import psutil

    return min([int(psutil.virtual_memory().available), *(limit.available for limit in memory_limits())])


def total_memory() -> int:
    """Bytes of memory that this machine has; in a container, what its limit allows."""
    import psutil

    return min([int(psutil.virtual_memory().total), *(limit.limit for limit in memory_limits())])


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Return the limits that this process stands under, of both versions of control groups; none but on Linux.

    A group is bound by those above it too. A container may see its own group as the topmost one, while
    /proc/self/cgroup still names it by the path that it has outside: so every folder on the way is asked that is
    there. `root` is where the file system begins.
    """
    limits: list[MemoryLimit] = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            limits += _limits_on_the_way(root, _V2, path)
        elif "memory" in controllers.split(","):
            limits += _limits_on_the_way(root, _V1, path)
    return limits


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


def _limits_on_the_way(root: Path, controller: _Controller, path: str) -> Iterator[MemoryLimit]:
    top = root / controller.folder
    group = top / path.lstrip("/")
    for folder in (group, *group.parents):
        limit, usage = _read(folder / controller.limit), _read(folder / controller.usage)
        if limit is not None and usage is not None and limit.strip() != "max":
            used = int(usage) - _cache_bytes(folder / "memory.stat", controller.cache)
            yield MemoryLimit(int(limit), max(0, int(limit) - used))
        if folder == top:
            return


def _cache_bytes(file: Path, names: tuple[str, str]) -> int:
    counts = dict(line.split() for line in (_read(file) or "").splitlines())
    return sum(int(counts.get(name, 0)) for name in names)


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
