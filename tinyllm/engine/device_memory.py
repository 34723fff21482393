"""How much memory the default device has for a model, and the limits that MLX is given while engines run on it.

On a GPU MLX keeps freed buffers in a cache, which by default may grow to all of the memory. On Metal it may allocate
more than the recommended working set, and can wire memory, so that the system does not page it out. All three limits
belong to the process: they are computed from the plans of all its engines, and go back to what they were with the
last one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tinyllm import hardware
from tinyllm._mx import mx
from tinyllm.engine.plan import MemoryPlan
from tinyllm.model.load import on_cpu

__all__ = ["LIMITS", "DeviceMemory", "MemoryLimits", "cache_limit", "device_memory", "wired_limit"]

_Limit = tuple[Callable[[int], int], int]  # what sets a limit, and to how many bytes


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of the memory that a device computes in: what a model can take now, and what Metal lets a process wire.

    `wirable` is 0 on devices whose memory cannot be wired.
    """

    available: int
    wirable: int = 0

    @classmethod
    def of_gpu(cls, info: Mapping[str, object], *, active: int, cached: int, host: int) -> DeviceMemory:
        """Read what `mx.device_info` says of a GPU, where this process holds `active` bytes and can reuse `cached`.

        A Mac lends its GPU the recommended working set, whatever other programs hold: macOS makes room for it. CUDA
        tells how much of the GPU's own memory is free. `host` is taken if a device tells neither.
        """
        working_set = _bytes(info, "max_recommended_working_set_size")
        if working_set is not None:
            return cls(max(0, working_set - active), working_set)
        free = _bytes(info, "free_memory")
        return cls(host if free is None else free + cached)


def device_memory() -> DeviceMemory:
    """Return the memory of the default device now: of a CPU, what the machine or its container has available."""
    host = hardware.available_memory()
    if on_cpu():
        return DeviceMemory(host)
    active, cached = mx.get_active_memory(), mx.get_cache_memory()
    return DeviceMemory.of_gpu(mx.device_info(), active=active, cached=cached, host=host)


def cache_limit(plans: Sequence[MemoryPlan]) -> int:
    """Bytes that may stay in MLX's cache of buffers: what steps make and free again, so that they find it there."""
    return sum(plan.workspace_bytes for plan in plans)


def wired_limit(plans: Sequence[MemoryPlan], wirable: int) -> int:
    """Bytes to wire for all `plans` together: never more than is `wirable`, and 0 unless models need over half of it.

    A model needs its weights and its workspace; the KV cache, of which a plan has a ceiling, grows as it is used.
    """
    if 2 * sum(plan.weight_bytes + plan.workspace_bytes for plan in plans) <= wirable:
        return 0
    return min(wirable, sum(plan.wired_bytes for plan in plans))


class MemoryLimits:
    """MLX's limits for all engines of this process that run on a GPU; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # an engine may be collected, and so release, while its thread holds the lock
        self._cached: dict[object, MemoryPlan] = {}
        self._wired: dict[object, MemoryPlan] = {}
        self._before: list[_Limit] = []

    def take(self, plan: MemoryPlan, *, wired: bool) -> Callable[[], None]:
        """Count a model that will run by this plan on the default device; return what ends that.

        Without `wired` its memory is not wired. On a CPU, which has none of the limits, nothing is set.
        """
        key = object()
        if on_cpu():
            return lambda: None
        wirable = device_memory().wirable
        with self._lock:
            self._cached[key] = plan
            if wired and wirable:
                self._wired[key] = plan
            self._set(wirable)
        return lambda: self._release(key, wirable)

    def _release(self, key: object, wirable: int) -> None:
        with self._lock:
            self._wired.pop(key, None)
            if self._cached.pop(key, None) is not None:
                mx.synchronize()  # memory that a queued kernel uses must stay wired until it is done
                self._set(wirable)

    def _set(self, wirable: int) -> None:
        plans = list(self._cached.values())
        if not plans:
            for set_limit, limit in self._before:
                set_limit(limit)
            self._before = []
            return
        limits: list[_Limit] = [(mx.set_cache_limit, cache_limit(plans))]
        if wirable:  # beyond which MLX waits for queued work, instead of allocating more for what comes after it
            limits.append((mx.set_memory_limit, wirable))
            limits.append((mx.set_wired_limit, wired_limit(list(self._wired.values()), wirable)))
        before = [(set_limit, set_limit(limit)) for set_limit, limit in limits]
        self._before = self._before or before


LIMITS = MemoryLimits()
"""The limits of this process: MLX has one of each, so there is one account of them."""


def _bytes(info: Mapping[str, object], name: str) -> int | None:
    found = info.get(name)
    return found if isinstance(found, int) else None
