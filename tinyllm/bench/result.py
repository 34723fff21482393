"""What was measured: samples as they were taken, and the figures made from them. No mlx."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from tinyllm.bench.workload import Workload

__all__ = ["NOISY", "Gaps", "Result", "Sample", "Spread", "Subject"]

NOISY = 0.1  # of the mean: a greater deviation is remarked on


@dataclass(frozen=True)
class Sample:
    """One repetition. Times are in seconds, on one clock.

    `timed_s` is what the workload's tokens took; `ttft_s` the prompts of all rows, from where each counts (behind the
    depth) to the first token of its answer. `gaps_s` are the times between the answers' tokens, in steps that gave
    one to every row. `kv_bytes` is the last row's cache at the end.
    """

    timed_s: float
    ttft_s: float | None
    gaps_s: tuple[float, ...]
    peak_bytes: int
    kv_bytes: int


@dataclass(frozen=True)
class Spread:
    """Repetitions of one figure; `sd` is the sample standard deviation, 0 for a single one."""

    n: int
    median: float
    mean: float
    sd: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise one value or more."""
        deviation = stdev(values) if len(values) > 1 else 0.0
        return cls(len(values), median(values), fmean(values), deviation, min(values), max(values))

    @property
    def relative(self) -> float:
        """The deviation as a share of the mean."""
        return self.sd / self.mean if self.mean else 0.0


@dataclass(frozen=True)
class Gaps:
    """Seconds between the tokens of all repetitions: half took at most `p50_s`, 95 % at most `p95_s`."""

    p50_s: float
    p95_s: float
    max_s: float

    @classmethod
    def of(cls, gaps: Sequence[float]) -> Gaps:
        """Rank one gap or more: a percentile is the least value that so many do not exceed."""
        ranked = sorted(gaps)
        return cls(*(ranked[math.ceil(share * len(ranked)) - 1] for share in (0.5, 0.95, 1)))


@dataclass(frozen=True)
class Subject:
    """A loaded model, in figures. `size_bytes` are its weights as held, `read_bytes` those that a step needs.

    `features` names the mode that it runs in, `kv` its cache.
    """

    name: str
    params: int
    size_bytes: int
    read_bytes: int
    kv_bytes_per_token: int
    quantization: str
    dtype: str
    features: str
    kv: str
    load_s: float


@dataclass(frozen=True)
class Result:
    """A workload on a subject. A figure is None where the workload has none of it.

    Tokens a second (`tps`, `prefill_tps`, `decode_tps`) are over the whole batch. `kv_bytes_held` is the cache with
    its unused room, for each token that is in it. `read_bytes` is the least that a token of the answer must read: its
    part of the weights, which a step reads once for all rows, and what attention sees of the cache; `bandwidth_share`
    relates that to the machine's measured bandwidth.
    """

    model: Subject
    workload: Workload
    tps: Spread
    prefill_tps: Spread | None
    ttft_s: Spread | None
    decode_tps: Spread | None
    gaps: Gaps | None
    peak_bytes: int
    kv_bytes_held: float
    read_bytes: float | None
    bandwidth_share: float | None
    samples: tuple[Sample, ...]

    @classmethod
    def of(
        cls,
        model: Subject,
        workload: Workload,
        samples: Sequence[Sample],
        *,
        kv_bytes_read: float | None,
        bandwidth: float,
    ) -> Result:
        """Make the figures of one repetition or more; `bandwidth` is in bytes a second."""
        batch, tokens = workload.batch, (workload.prompt + workload.generate) * workload.batch
        gaps = [gap for sample in samples for gap in sample.gaps_s]
        ttfts = [sample.ttft_s for sample in samples if sample.ttft_s is not None]
        decodes = [batch * len(s.gaps_s) / sum(s.gaps_s) for s in samples if s.gaps_s]
        decode_tps = Spread.of(decodes) if decodes else None
        read = None if kv_bytes_read is None else model.read_bytes / batch + kv_bytes_read
        return cls(
            model=model,
            workload=workload,
            tps=Spread.of([tokens / s.timed_s for s in samples]),
            prefill_tps=Spread.of([workload.prompt * batch / ttft for ttft in ttfts]) if ttfts else None,
            ttft_s=Spread.of(ttfts) if ttfts else None,
            decode_tps=decode_tps,
            gaps=Gaps.of(gaps) if gaps else None,
            peak_bytes=max(s.peak_bytes for s in samples),
            kv_bytes_held=samples[-1].kv_bytes / (workload.positions - 1),  # the last token is not fed again
            read_bytes=read,
            bandwidth_share=read * decode_tps.median / bandwidth if read and decode_tps else None,
            samples=tuple(samples),
        )
