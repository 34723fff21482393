"""Bytes that a test takes and reads, from the config alone. No mlx."""

from __future__ import annotations

from collections.abc import Sequence

from tinyllm import hardware
from tinyllm.bench.workload import Workload
from tinyllm.config.config import AttentionConfig, Config
from tinyllm.errors import DoesNotFitError
from tinyllm.hub.sizes import memory_size

__all__ = ["check_memory", "kv_bytes_per_token", "kv_bytes_read"]


def kv_bytes_per_token(config: Config, itemsize: int) -> int:
    """Bytes of keys and values that one token leaves in the caches of all layers, `itemsize` an element."""
    return sum(_kv_bytes(layer.attention, itemsize) for layer in config.layers)


def kv_bytes_read(config: Config, itemsize: int, positions: int) -> int:
    """Bytes of keys and values that a token reads which sees `positions` tokens, or as many as a window holds."""
    return sum(
        _kv_bytes(layer.attention, itemsize) * min(positions, layer.attention.window or positions)
        for layer in config.layers
    )


def check_memory(
    workloads: Sequence[Workload], config: Config, name: str, *, weight_bytes: int, itemsize: int
) -> None:
    """Raise DoesNotFitError if the weights and the longest test's cache are more than this machine has free."""
    longest = max(workloads, key=lambda workload: workload.positions * workload.batch)
    needed = weight_bytes + longest.batch * longest.positions * kv_bytes_per_token(config, itemsize)
    available = hardware.available_memory()
    if needed > available:
        raise DoesNotFitError(
            f"{longest.label} on {name} needs {memory_size(needed)} of memory, and {memory_size(available)} are free"
        )


def _kv_bytes(attention: AttentionConfig, itemsize: int) -> int:
    return 2 * attention.num_kv_heads * attention.head_dim * itemsize
