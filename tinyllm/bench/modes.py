"""The ways to run a model that can be measured beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from tinyllm.config.quantization import CACHE_BITS
from tinyllm.engine.engine import KvMode
from tinyllm.engine.load import MODES, EngineSettings
from tinyllm.errors import UsageError

__all__ = ["KV_BITS", "KV_KINDS", "MEASURED", "Mode", "choose_modes"]

KV_KINDS: Mapping[str, KvMode] = {"paged": "paged", "dense": "dense"}
KV_BITS: Mapping[str, int | None] = {"none": None, **{str(bits): bits for bits in CACHE_BITS}}


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


def choose_modes(names: Iterable[str], kvs: Sequence[str], bits: Sequence[str] = ("none",)) -> list[Mode]:
    """Return the modes of these names in turn, with each of the caches `kvs`, or with their own where there is none.

    Caches are packed to each of `bits`, of `KV_BITS`. Raises UsageError for a mode whose name contradicts the cache.
    """
    modes, caches = [], kvs or (None,)
    for name, kv, packed in product(names, caches, bits):
        mode = MEASURED[name]
        if kv is not None and _BOUND.get(name, kv) != kv:
            raise UsageError(f"--kv {kv}: the cache of {name} is {_BOUND[name]}")
        kind = mode.settings.kv if kv is None else KV_KINDS[kv]
        modes.append(replace(mode, settings=replace(mode.settings, kv=kind, kv_bits=KV_BITS[packed])))
    return modes
