"""How glibc's malloc treats large arrays, which MLX's CPU backend allocates with it. No mlx.

By default glibc maps every large block and unmaps it when it is freed, so the system clears each page of each array
of every layer again: most of the time of a long prompt. Without glibc, nothing here does anything.
"""

from __future__ import annotations

import ctypes
import platform
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # malloc.h
_NEVER = 2**31 - 1  # bytes: mallopt takes an int, and the sign bit would turn trimming back on


def keep_freed_memory() -> None:
    """Have malloc reuse what is freed instead of returning it to the system; call it before arrays are made.

    Blocks come from one heap, because those of threads are too small for arrays and are unmapped when they are empty.
    """
    if is_glibc():
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def return_freed_memory() -> None:
    """Return what is free to the system."""
    if is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def is_glibc() -> bool:
    """Whether this process has glibc's malloc; musl, for one, has another."""
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
