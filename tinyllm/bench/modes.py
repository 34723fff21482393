"""The ways to run a model that can be measured beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from tinyllm.engine.engine import KvMode
from tinyllm.engine.load import MODES, EngineSettings
from tinyllm.errors import UsageError

__all__ = ["KV_KINDS", "MEASURED", "Mode", "choose_modes"]

KV_KINDS: Mapping[str, KvMode] = {"paged": "paged", "dense": "dense"}


@dataclass(frozen=True)
class Mode:
    """A way to run a model, under the `name` that it is reported by.

    No prefix is shared, so that every prompt is computed. `scattered` gives sequences pages that never lie side by
    side: the worst that a cache can come to.
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
        modes.append(replace(mode, settings=replace(mode.settings, kv=KV_KINDS[kv])))
    return modes
