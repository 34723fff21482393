"""Workloads through the engine, one repetition at a time, timed by the times that the engine's outputs carry."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from tinyllm._mx import mx
from tinyllm.bench.memory import kv_bytes_read
from tinyllm.bench.result import Result, Sample, Subject
from tinyllm.bench.workload import Workload
from tinyllm.engine.engine import PREFILL_CHUNK, Engine
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
                prompts = workload.prompts(engine.model.config.vocab_size, schedule.seed, repetition)
                if repetition < 0:
                    run_once(engine, _warm_up(workload, room=engine.context - workload.prompt_tokens), prompts)
                    continue
                sleep(schedule.delay_s)
                taken.append(run_once(engine, workload, prompts))
        for (subject, engine), taken in zip(subjects, samples, strict=True):
            read = _mean_kv_bytes_read(engine, workload, len(taken[0].gaps_s))
            results.append(Result.of(subject, workload, taken, kv_bytes_read=read, bandwidth=bandwidth))
    return results


def run_once(
    engine: Engine,
    workload: Workload,
    prompts: Sequence[Sequence[int]],
    clock: Callable[[], float] = time.perf_counter,
) -> Sample:
    """Run one workload alone, on the clock that the engine's outputs are timed by. No token ends it early.

    Raises what the engine's request ends with.
    """
    mx.reset_peak_memory()
    preemptions, most = engine.preemptions, workload.max_tokens + workload.lead(PREFILL_CHUNK)
    course = _Course(workload, clock())
    for prompt in prompts:
        course.tokens[engine.add(Request(tuple(prompt), max_tokens=most))] = 0
    while engine.has_work and not course.over:
        course.take(engine.step())
    for request_id in course.tokens:
        engine.cancel(request_id)
    engine.step()  # waits for what still runs
    made = min(course.tokens.values())
    if made < workload.max_tokens:
        raise RuntimeError(f"{workload.label} made {made} tokens, not {workload.max_tokens}")
    if engine.preemptions > preemptions or not (workload.prompt or course.over):
        raise RuntimeError(f"{workload.label}: the {workload.batch} rows did not all run at once")
    return course.sample()


@dataclass
class _Course:
    """A workload on its way: how many `tokens` each request has, and the times that will make a sample.

    `ends` are those of the steps that gave a token to every row, after the time at which the first of them began.
    """

    workload: Workload
    begun: float
    tokens: dict[int, int] = field(default_factory=dict)
    ends: list[float] = field(default_factory=list)
    ttft_s: float = 0.0
    kv_bytes: int = 0
    _prompt_begun: float = field(init=False)
    _last: float = field(init=False)

    def __post_init__(self) -> None:
        self._prompt_begun = self._last = self.begun

    @property
    def over(self) -> bool:
        """Whether all that is timed has been seen."""
        return not self.workload.prompt and len(self.ends) > self.workload.generate

    def take(self, news: Sequence[Output]) -> None:
        """Take what one step of the engine brought."""
        all_decode, before, made = all(self.tokens.values()), self._last, 0
        for output in news:
            if output.error is not None:
                raise output.error
            if output.token_id is not None:
                self._take_token(output)
                made += 1
            elif output.prefilled == self.workload.depth:
                self.begun = self._prompt_begun = output.at
        if all_decode and made == self.workload.batch:
            self.ends = [*(self.ends or [before]), self._last]

    def sample(self) -> Sample:
        """Return what was measured."""
        prompt, generate = self.workload.prompt, self.workload.generate
        gaps = tuple(after - before for before, after in pairwise(self.ends))
        answered = self._last - self.begun if prompt else self.ends[-1] - self.ends[0]
        return Sample(
            timed_s=answered if generate else self.ttft_s,
            ttft_s=self.ttft_s if prompt else None,
            gaps_s=gaps,
            peak_bytes=mx.get_peak_memory(),
            kv_bytes=self.kv_bytes,
        )

    def _take_token(self, output: Output) -> None:
        if not self.tokens[output.request_id]:  # it comes with the end of the prompt
            self.ttft_s += output.at - self._prompt_begun
            self._prompt_begun = output.at
        self.tokens[output.request_id] += 1
        self._last, self.kv_bytes = output.at, output.kv_bytes


def _warm_up(workload: Workload, room: int) -> Workload:
    """The same with a few tokens of an answer, also where only a prompt is timed."""
    return replace(workload, generate=min(workload.generate or room, _WARM_UP_TOKENS))


def _mean_kv_bytes_read(engine: Engine, workload: Workload, steps: int) -> float | None:
    if not steps:
        return None
    config, itemsize = engine.model.config, engine.model.dtype.size
    first = workload.prompt_tokens + 1  # a token attends to itself too
    kv_bits = engine.pools.kv_bits
    return sum(kv_bytes_read(config, itemsize, first + i, kv_bits) for i in range(steps)) / steps
