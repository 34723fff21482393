"""Bytes that a test takes and reads, from the config alone."""

from __future__ import annotations

from collections.abc import Sequence

from tinyllm.bench.workload import Workload
from tinyllm.config.config import Config
from tinyllm.engine.device_memory import device_memory
from tinyllm.engine.plan import make_plan
from tinyllm.kv.kinds import layer_kinds
from tinyllm.model.load import on_cpu

__all__ = ["check_memory", "kv_bytes_per_token", "kv_bytes_read"]


def kv_bytes_per_token(config: Config, itemsize: int, kv_bits: int | None = None) -> int:
    """Bytes of keys and values that one token leaves in the caches of all layers.

    They are packed to `kv_bits`, or take `itemsize` an element.
    """
    return sum(kind.token_bytes(itemsize) for kind in layer_kinds(config, kv_bits)[0])


def kv_bytes_read(config: Config, itemsize: int, positions: int, kv_bits: int | None = None) -> int:
    """Bytes of keys and values that a token reads which sees `positions` tokens, or as many as are within reach.

    Of recurrent layers, those of a state.
    """
    total = 0
    for kind in layer_kinds(config, kv_bits)[0]:
        first = 0 if kind.reach is None else kind.reach.first(positions - 1)
        total += kind.page_bytes(1, itemsize) * (1 if kind.states else positions - first)
    return total


def check_memory(
    workloads: Sequence[Workload],
    config: Config,
    name: str,
    *,
    weight_bytes: int,
    itemsize: int,
    chunk: int,
    kv_bits: int | None = None,
) -> None:
    """Raise DoesNotFitError, naming the test and what would fit, if one needs more than the device has free.

    `chunk` is how many tokens of a prompt the engine reads in one step. Raises ContextLengthError for more positions
    than the model has.
    """
    available = device_memory().available
    for workload in workloads:
        make_plan(
            config,
            weight_bytes=weight_bytes,
            itemsize=itemsize,
            available_bytes=available,
            max_context=workload.positions + workload.lead(chunk),
            kv_bits=kv_bits,
            batch=workload.batch,
            prefill_chunk=chunk,
            on_gpu=not on_cpu(),
            name=f"{workload.label} on {name}",
        )
