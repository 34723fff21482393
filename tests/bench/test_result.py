"""Figures are made from samples exactly."""

from __future__ import annotations

import pytest

from tinyllm.bench.result import Gaps, Result, Sample, Spread, Subject
from tinyllm.bench.workload import Workload

MODEL = Subject("tiny", 10, 1000, 800, 64, "f32", "float32", "fused", "paged", 0.5)


def test_a_spread_is_that_of_a_sample() -> None:
    spread = Spread.of([2.0, 4.0, 4.0, 10.0])
    assert (spread.n, spread.median, spread.mean, spread.min, spread.max) == (4, 4.0, 5.0, 2.0, 10.0)
    assert spread.sd == pytest.approx((36 / 3) ** 0.5)
    assert spread.relative == pytest.approx(spread.sd / 5)


def test_one_value_has_no_deviation() -> None:
    assert Spread.of([3.0]) == Spread(1, 3.0, 3.0, 0.0, 3.0, 3.0)


def test_percentiles_are_values_that_occurred() -> None:
    assert Gaps.of([float(n) for n in range(100, 0, -1)]) == Gaps(50.0, 95.0, 100.0)
    assert Gaps.of([1.0, 2.0, 3.0]) == Gaps(2.0, 3.0, 3.0)
    assert Gaps.of([5.0]) == Gaps(5.0, 5.0, 5.0)


def test_a_prompt_has_no_figures_of_an_answer() -> None:
    samples = [Sample(2.0, 2.0, (), 900, 6400), Sample(4.0, 4.0, (), 950, 6400)]
    result = Result.of(MODEL, Workload(100, 0), samples, kv_bytes_read=None, bandwidth=1e4)
    assert result.tps == result.prefill_tps == Spread.of([50.0, 25.0])
    assert result.ttft_s == Spread.of([2.0, 4.0])
    assert (result.decode_tps, result.gaps, result.read_bytes, result.bandwidth_share) == (None, None, None, None)
    assert (result.peak_bytes, result.kv_bytes_held) == (950, 64.0)


def test_an_answer_is_held_against_the_bandwidth() -> None:
    samples = [Sample(1.0, None, (0.25, 0.75), 900, 512), Sample(0.5, None, (0.25, 0.25), 900, 512)]
    result = Result.of(MODEL, Workload(0, 2), samples, kv_bytes_read=200.0, bandwidth=1e4)
    assert result.tps == result.decode_tps == Spread.of([2.0, 4.0])
    assert result.gaps == Gaps(0.25, 0.75, 0.75)
    assert (result.prefill_tps, result.ttft_s) == (None, None)
    assert result.read_bytes == 1000.0
    assert result.bandwidth_share == pytest.approx(1000 * 3.0 / 1e4)
    assert result.kv_bytes_held == 512 / 3  # the token that begins the context, and two after it, are in the cache


def test_prompt_and_answer_count_together_and_a_batch_as_a_whole() -> None:
    sample = Sample(2.0, 1.0, (0.25, 0.25, 0.25), 900, 512)
    result = Result.of(MODEL, Workload(12, 4, batch=2), [sample], kv_bytes_read=100.0, bandwidth=1e4)
    assert result.tps.median == (12 + 4) * 2 / 2.0
    assert result.prefill_tps == Spread.of([2 * 12 / 1.0])
    assert result.decode_tps == Spread.of([8.0])
    assert result.read_bytes == 800 / 2 + 100  # both rows are multiplied by weights that are read once
    assert result.bandwidth_share == pytest.approx(500 * 8.0 / 1e4)
