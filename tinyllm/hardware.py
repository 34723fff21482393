"""Facts of this machine. No mlx."""

from __future__ import annotations


def available_memory() -> int:
    """Bytes of memory that can be taken now without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)
