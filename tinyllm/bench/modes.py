"""The ways to run a model that can be measured beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random

from tinyllm.bench.workload import Workload
from tinyllm.engine.engine import PREFILL_CHUNK, Engine
from tinyllm.engine.load import MODES, EngineSettings
from tinyllm.errors import DoesNotFitError, UsageError

__all__ = ["KV_KINDS", "MEASURED", "Mode", "choose_modes", "scatter"]

KV_KINDS = ("paged", "dense")


@dataclass(frozen=True)
class Mode:
    """A way to run a model, under the `name` that it is reported by.

    No prefix is shared, so that every prompt is computed. `scattered` gives the engine pages that never lie side by
    side, as a cache that has served many requests comes to hand them out.
    """

    name: str
    settings: EngineSettings
    scattered: bool = False


MEASURED: Mapping[str, Mode] = {
    **{name: Mode(name, replace(settings, share=False)) for name, settings in MODES.items()},
    "scattered": Mode("scattered", EngineSettings(share=False), scattered=True),
}
_BOUND = {"paged": "paged", "dense": "dense", "scattered": "paged"}  # modes that say which cache they have


def choose_modes(names: Iterable[str], kvs: Sequence[str]) -> list[Mode]:
    """Return the modes of these names in turn, with each of the caches `kvs`, or with their own where there is none.

    Raises UsageError for a mode whose name contradicts the cache.
    """
    if not kvs:
        return [MEASURED[name] for name in names]
    modes = []
    for name, kv in product(names, kvs):
        if _BOUND.get(name, kv) != kv:
            raise UsageError(f"--kv {kv}: the cache of {name} is {_BOUND[name]}")
        mode = MEASURED[name]
        modes.append(replace(mode, settings=replace(mode.settings, kv="dense" if kv == "dense" else "paged")))
    return modes


def scatter(engine: Engine, workloads: Iterable[Workload]) -> None:
    """Leave an engine only pages whose neighbours are taken, in a random order, enough for any of these workloads.

    Raises DoesNotFitError where there are not twice as many as they need.
    """
    manager = engine.pools.manager
    size = manager.page_size
    needed = max(w.batch * -(-(w.positions + w.lead(PREFILL_CHUNK)) // size) for w in workloads)
    singles = [manager.open(()) for _ in range(2 * needed)]
    if not all(manager.reserve(tables, size) for tables in singles):
        raise DoesNotFitError(f"scattered pages take twice the KV cache, {2 * needed} pages, which do not fit")
    spare = singles[::2]
    Random(0).shuffle(spare)
    for tables in spare:
        manager.release(tables)
