"""Models loaded to be measured: an engine each, with the figures that do not depend on a workload."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter

from tinyllm._mx import dtype_name, mx
from tinyllm.bench.memory import kv_bytes_per_token
from tinyllm.bench.modes import MEASURED, Mode
from tinyllm.bench.result import Subject
from tinyllm.bench.scattered import load_scattered
from tinyllm.bench.workload import Workload
from tinyllm.checkpoint.contents import Contents
from tinyllm.checkpoint.summary import summarize
from tinyllm.checkpoint.weights import DenseWeight
from tinyllm.config.tensors import tensor_shapes
from tinyllm.engine.engine import PREFILL_CHUNK, Engine
from tinyllm.engine.load import load_engine

__all__ = ["load_subject"]


def load_subject(
    name: str, contents: Contents, mode: Mode = MEASURED["fused"], workloads: Sequence[Workload] = ()
) -> tuple[Subject, Engine]:
    """Load a model, under the `name` that it is reported as, to run all rows of these workloads at once."""
    rows = max((workload.batch for workload in workloads), default=1)
    longest = max((w.positions + w.lead(PREFILL_CHUNK) for w in workloads), default=None)
    started = perf_counter()
    if mode.scattered:
        engine = load_scattered(contents, mode.settings, rows=rows, tokens=longest)
    else:
        engine = load_engine(contents, replace(mode.settings, batch=rows, max_context=longest))
    load_s = perf_counter() - started
    model, config = engine.model, engine.model.config
    size = held_bytes(model)
    looked_up = 0 if config.tie_word_embeddings else held_bytes(model.embedding.table)  # one row of it is read
    subject = Subject(
        name=name,
        params=sum(math.prod(shape) for shape in tensor_shapes(config).values()),
        size_bytes=size,
        read_bytes=size - looked_up,
        kv_bytes_per_token=kv_bytes_per_token(config, model.dtype.size, mode.settings.kv_bits),
        quantization=summarize(contents).quantization,
        dtype=dtype_name(model.dtype),
        features=mode.name,
        kv=mode.settings.cache,
        load_s=load_s,
    )
    return subject, engine


def held_bytes(part: object) -> int:
    """Bytes of all arrays that a part of the network holds; what several parts of it share is counted once."""
    return sum({id(held): held.nbytes for held in _held(part)}.values())


def _held(part: object) -> Iterator[mx.array | DenseWeight]:
    if isinstance(part, (mx.array, DenseWeight)):
        yield part
    elif isinstance(part, (list, tuple)):
        for each in part:
            yield from _held(each)
    elif type(part).__module__.startswith("tinyllm."):
        yield from _held(list(vars(part).values()))
