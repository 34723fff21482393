"""Workloads through the engine, one repetition at a time, timed by the times that the engine's outputs carry."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tinyllm._mx import mx
from tinyllm.bench.memory import kv_bytes_read
from tinyllm.bench.result import Result, Sample, Subject
from tinyllm.bench.workload import Workload
from tinyllm.engine.engine import Engine
from tinyllm.engine.request import Output, Request

__all__ = ["Schedule", "measure", "run_once"]

_WARM_UP_TOKENS = 4  # the first steps of an answer compile and allocate


@dataclass(frozen=True)
class Schedule:
    """How often a workload is repeated, with `delay_s` before each repetition, and after a warm-up or not."""

    repetitions: int
    warmup: bool = True
    delay_s: float = 0.0
    seed: int = 0


def measure(
    subjects: Sequence[tuple[Subject, Engine]],
    workloads: Sequence[Workload],
    schedule: Schedule,
    *,
    bandwidth: float,
    report: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> list[Result]:
    """Run each workload on every subject in turn, A B A B, so that what changes over time befalls all alike.

    `report` is told what runs next, warm-ups included.
    """
    results = []
    for workload in workloads:
        samples: list[list[Sample]] = [[] for _ in subjects]
        for repetition in range(-1 if schedule.warmup else 0, schedule.repetitions):
            for (subject, engine), taken in zip(subjects, samples, strict=True):
                report(f"{subject.name} {workload.label}")
                prompt = workload.prompt_ids(engine.model.config.vocab_size, schedule.seed, repetition)
                if repetition < 0:
                    run_once(engine, _warm_up(workload, room=engine.context - len(prompt)), prompt)
                    continue
                sleep(schedule.delay_s)
                taken.append(run_once(engine, workload, prompt))
        for (subject, engine), taken in zip(subjects, samples, strict=True):
            read = _mean_kv_bytes_read(engine, workload, len(taken[0].gaps_s))
            results.append(Result.of(subject, workload, taken, kv_bytes_read=read, bandwidth=bandwidth))
    return results


def run_once(
    engine: Engine, workload: Workload, prompt: Sequence[int], clock: Callable[[], float] = time.perf_counter
) -> Sample:
    """Run one workload alone, on the clock that the engine's outputs are timed by. No token ends it early.

    Raises what the engine's request ends with.
    """
    mx.reset_peak_memory()
    request = Request(tuple(prompt), max_tokens=workload.max_tokens)
    begun = clock()
    engine.add(request)
    prefilled = begun
    tokens: list[Output] = []
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            if output.token_id is not None:
                tokens.append(output)
                continue
            prefilled = output.at
            if output.prefilled == workload.depth:
                begun = output.at
    if len(tokens) != workload.max_tokens:
        raise RuntimeError(f"{workload.label} made {len(tokens)} tokens, not {workload.max_tokens}")
    return _sample(workload, begun, prefilled, tokens)


def _sample(workload: Workload, begun: float, prefilled: float, tokens: Sequence[Output]) -> Sample:
    first, last = tokens[0].at, tokens[-1].at
    timed = prefilled - begun if not workload.generate else last - (begun if workload.prompt else first)
    return Sample(
        timed_s=timed,
        prefill_s=prefilled - begun if workload.prompt else None,
        ttft_s=first - begun if workload.prompt else None,
        gaps_s=tuple(after.at - before.at for before, after in pairwise(tokens)),
        peak_bytes=mx.get_peak_memory(),
        kv_bytes=tokens[-1].kv_bytes,
    )


def _warm_up(workload: Workload, room: int) -> Workload:
    """The same with a few tokens of an answer, also where only a prompt is timed."""
    return replace(workload, generate=min(workload.generate or room, _WARM_UP_TOKENS))


def _mean_kv_bytes_read(engine: Engine, workload: Workload, steps: int) -> float | None:
    if not steps:
        return None
    config, itemsize = engine.model.config, engine.model.dtype.size
    first = workload.prompt_tokens + 1  # a token attends to itself too
    return sum(kv_bytes_read(config, itemsize, first + i) for i in range(steps)) / steps
