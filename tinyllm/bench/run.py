"""A whole benchmark: models found and checked first, then loaded and measured one after another."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from tinyllm import hardware
from tinyllm._mx import mx
from tinyllm.bench.machine import describe_machine, measure_bandwidth
from tinyllm.bench.measure import Schedule, measure
from tinyllm.bench.memory import check_memory
from tinyllm.bench.modes import Mode
from tinyllm.bench.report import Report
from tinyllm.bench.result import Result
from tinyllm.bench.subject import load_subject
from tinyllm.bench.workload import Workload, check_context
from tinyllm.checkpoint.contents import Contents
from tinyllm.checkpoint.summary import summarize
from tinyllm.engine.engine import PREFILL_CHUNK

__all__ = ["Plan", "run"]


@dataclass(frozen=True)
class Plan:
    """What to measure: each workload on each of `models` (name, contents), in each of `modes`."""

    models: Sequence[tuple[str, Contents]]
    workloads: Sequence[Workload]
    modes: Sequence[Mode]
    schedule: Schedule

    @property
    def runs(self) -> int:
        """How many times something is run."""
        each = self.schedule.repetitions + self.schedule.warmup
        return each * len(self.workloads) * len(self.models) * len(self.modes)


def run(plan: Plan, report: Callable[[str], None]) -> Report:
    """Measure everything; `report` is told what runs next, `plan.runs` times.

    Raises, before anything is loaded, ContextLengthError and DoesNotFitError for sizes that are impossible, and what
    a model's config or files are refused for.
    """
    for name, contents in plan.models:
        config, summary = contents.config, summarize(contents)
        itemsize = 2 if hardware.has_gpu_backend() and config.dtype != "float32" else 4
        check_context(plan.workloads, config, name, chunk=PREFILL_CHUNK)
        weights = summary.memory_bytes * len(plan.modes)
        for kv_bits in dict.fromkeys(mode.settings.kv_bits for mode in plan.modes):
            check_memory(
                plan.workloads,
                config,
                name,
                weight_bytes=weights,
                itemsize=itemsize,
                chunk=PREFILL_CHUNK,
                kv_bits=kv_bits,
            )
    machine, bandwidth = describe_machine(), measure_bandwidth()
    results: list[Result] = []
    for name, contents in plan.models:
        mx.clear_cache()
        subjects = [load_subject(name, contents, mode, plan.workloads) for mode in plan.modes]
        results += measure(subjects, plan.workloads, plan.schedule, bandwidth=bandwidth, report=report)
        for _, engine in reversed(subjects):
            engine.close()
        del subjects, engine
        gc.collect()
    return Report(asdict(machine), str(machine), bandwidth, asdict(plan.schedule), results)
