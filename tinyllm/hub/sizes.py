"""Bytes as people read them."""

from __future__ import annotations

__all__ = ["disk_size", "memory_size"]

_DECIMAL = ("bytes", "kB", "MB", "GB", "TB", "PB")


def disk_size(count: int) -> str:
    """Write bytes as the hub and file managers count them: 2.3 GB, 270 MB."""
    size, unit = float(count), 0
    while size >= 999.5 and unit < len(_DECIMAL) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {_DECIMAL[unit]}" if unit and size < 9.95 else f"{size:.0f} {_DECIMAL[unit]}"


def memory_size(count: int) -> str:
    """Write bytes as memory is sold, in powers of two: 16.0 GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.1f} MiB"
