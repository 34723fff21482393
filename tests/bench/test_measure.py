"""Counts and times are exact on a clock that is known, and nothing ends a test early."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import tiny
from fake_engine import CHUNK_S, FIRST_S, KV_BYTES, TOKEN_S, FakeEngine

from tinyllm._mx import mx
from tinyllm.bench.measure import Schedule, measure, run_once
from tinyllm.bench.modes import MEASURED
from tinyllm.bench.result import Sample, Subject
from tinyllm.bench.subject import load_subject
from tinyllm.bench.workload import Workload
from tinyllm.checkpoint.contents import read_contents
from tinyllm.engine.request import Output
from tinyllm.kv.paged import PAGE_SIZE


def run(workload: Workload) -> Sample:
    engine = FakeEngine()
    return run_once(engine, workload, workload.prompts(9, 0, 0), clock=engine.clock)


def test_a_prompt_is_timed_to_the_first_token() -> None:
    sample = run(Workload(10, 0))
    assert (sample.timed_s, sample.ttft_s) == (3 * CHUNK_S + FIRST_S, 3 * CHUNK_S + FIRST_S)
    assert (sample.gaps_s, sample.kv_bytes) == ((), KV_BYTES)


def test_exactly_n_tokens_are_timed_after_the_one_that_comes_with_the_prompt() -> None:
    sample = run(Workload(0, 5))
    assert sample.gaps_s == tuple(n * TOKEN_S for n in (1, 2, 3, 4, 5))
    assert (sample.timed_s, sample.ttft_s) == (15 * TOKEN_S, None)


def test_the_depth_is_computed_before_the_clock_starts() -> None:
    deep = run(Workload(8, 0, depth=12))
    assert deep.timed_s == deep.ttft_s == 2 * CHUNK_S + FIRST_S
    assert run(Workload(0, 5, depth=9)).timed_s == 15 * TOKEN_S


def test_a_prompt_and_its_answer_are_timed_together() -> None:
    sample = run(Workload(8, 3))
    assert sample.timed_s == 2 * CHUNK_S + FIRST_S + 3 * TOKEN_S
    assert sample.ttft_s == 2 * CHUNK_S + FIRST_S
    assert sample.gaps_s == (TOKEN_S, 2 * TOKEN_S)
    assert run(Workload(8, 3, depth=4)).timed_s == sample.timed_s


def test_prompts_of_a_batch_are_timed_to_the_first_token_of_the_last_without_their_depths() -> None:
    each = 2 * CHUNK_S + FIRST_S
    for depth in (0, 12):
        sample = run(Workload(8, 0, depth=depth, batch=3))
        assert (sample.timed_s, sample.ttft_s, sample.gaps_s) == (3 * each, 3 * each, ())


def test_steps_of_a_batch_are_timed_while_all_rows_decode() -> None:
    """Not the step of the first row alone that the last prompt was read beside."""
    engine = FakeEngine()
    workload = Workload(0, 3, batch=2)
    sample = run_once(engine, workload, workload.prompts(9, 0, 0), clock=engine.clock)
    assert sample.gaps_s == tuple(n * TOKEN_S for n in (1, 2, 3))
    assert (sample.timed_s, sample.ttft_s) == (6 * TOKEN_S, None)
    assert sample.kv_bytes == 2 * KV_BYTES
    first, second = engine.requests
    assert first.max_tokens == second.max_tokens == 1 + 3 + workload.lead(256)
    assert not engine.has_work


def test_a_batch_of_prompts_and_answers_is_timed_from_end_to_end() -> None:
    sample = run(Workload(4, 3, batch=2))
    prompts = 2 * (CHUNK_S + FIRST_S)
    assert sample.ttft_s == prompts
    assert sample.gaps_s == (TOKEN_S,)  # then the first row has all of its tokens
    assert sample.timed_s == prompts + TOKEN_S + TOKEN_S + 2 * TOKEN_S


def test_an_answer_that_ends_early_is_no_measurement() -> None:
    engine = FakeEngine(ends_early=True)
    with pytest.raises(RuntimeError, match="tg5 made 1 tokens, not 6"):
        run_once(engine, Workload(0, 5), [(1,)], clock=engine.clock)


def test_a_row_that_had_to_give_way_is_no_measurement() -> None:
    engine = FakeEngine(preempts=True)
    with pytest.raises(RuntimeError, match="tg5: the 1 rows did not all run at once"):
        run_once(engine, Workload(0, 5), [(1,)], clock=engine.clock)


def subject(features: str) -> Subject:
    return Subject("tiny", 1, 1000, 800, 256, "f32", "float32", features, "paged", 0.5)


def test_subjects_take_turns_and_both_phases_are_warmed_up() -> None:
    engines = {"fused": FakeEngine(), "reference": FakeEngine()}
    told: list[str] = []
    slept: list[float] = []
    subjects = [(subject(name), engine) for name, engine in engines.items()]
    workloads = [Workload(8, 0), Workload(0, 6)]
    results = measure(
        subjects, workloads, Schedule(2, delay_s=1.5), bandwidth=1e9, report=told.append, sleep=slept.append
    )
    assert [(r.model.features, r.workload.label) for r in results] == [
        *(("fused", "pp8"), ("reference", "pp8"), ("fused", "tg6"), ("reference", "tg6"))
    ]
    assert told == ["tiny pp8"] * 6 + ["tiny tg6"] * 6
    assert slept == [1.5] * 8
    for engine in engines.values():
        sizes = [(len(request.prompt_ids), request.max_tokens) for request in engine.requests]
        assert sizes == [(8, 4), (8, 1), (8, 1), (1, 5), (1, 7), (1, 7)]
        assert all(not request.stop_ids and request.sampling.greedy for request in engine.requests)
    first, second = engines["fused"].requests[:2]
    assert first.prompt_ids != second.prompt_ids
    assert engines["fused"].requests == engines["reference"].requests


def test_without_a_warm_up_only_what_counts_is_run() -> None:
    engine = FakeEngine()
    schedule = Schedule(1, warmup=False)
    [result] = measure([(subject("fused"), engine)], [Workload(0, 6)], schedule, bandwidth=1e9, report=lambda _: None)
    assert [request.max_tokens for request in engine.requests] == [7]
    assert len(result.samples) == 1


def test_a_warm_up_stays_within_the_context() -> None:
    engine = FakeEngine()
    engine.context = 10
    measure([(subject("fused"), engine)], [Workload(8, 0)], Schedule(1), bandwidth=1e9, report=lambda _: None)
    assert [request.max_tokens for request in engine.requests] == [2, 1]


def test_fault_46_a_model_that_says_its_end_at_once_still_makes_exactly_128(tmp_path: Path) -> None:
    folder = tiny.write_scripted_checkpoint(tmp_path, [tiny.EOS], end=tiny.EOS)
    loaded, engine = load_subject("biased", read_contents(folder))
    ids: list[int | None] = []
    step = engine.step

    def listening():
        outputs = step()
        ids.extend(output.token_id for output in outputs if output.token_id is not None)
        return outputs

    engine.step = listening
    [result] = measure([(loaded, engine)], [Workload(0, 128)], Schedule(2), bandwidth=1e9, report=lambda _: None)
    assert set(ids) == {tiny.EOS}
    assert len(ids) == 5 + 2 * 129  # the warm-up's, then each repetition's, with the token that ends the prompt
    assert [len(sample.gaps_s) for sample in result.samples] == [128, 128]
    assert all(gap > 0 for sample in result.samples for gap in sample.gaps_s)


def test_peak_memory_is_of_the_run_and_the_cache_as_held(tiny_checkpoint: Path) -> None:
    loaded, engine = load_subject("tiny", read_contents(tiny_checkpoint))
    big = mx.zeros((1 << 22,))
    mx.eval(big)
    del big
    held = mx.get_active_memory()  # by this test and by others
    sample = run_once(engine, Workload(40, 0), [range(40)])
    assert loaded.size_bytes < sample.peak_bytes < held + (1 << 24)
    assert sample.kv_bytes == PAGE_SIZE * loaded.kv_bytes_per_token


@pytest.mark.parametrize("features", MEASURED)
def test_rows_of_every_mode_compute_all_of_their_prompts(tiny_checkpoint: Path, features: str) -> None:
    workload = Workload(0, 4, depth=40, batch=3)
    loaded, engine = load_subject("tiny", read_contents(tiny_checkpoint), MEASURED[features], [workload])
    seen: list[Output] = []
    step = engine.step

    def listening() -> list[Output]:
        outputs = step()
        seen.extend(outputs)
        return outputs

    engine.step = listening
    prompts = [tuple(range(40, 80))] * 3
    sample = run_once(engine, workload, prompts)
    assert len(sample.gaps_s) == 4 and sample.kv_bytes > 0
    assert len({output.request_id for output in seen}) == 3
    assert all(output.cached == 0 for output in seen)
    assert loaded.kv == ("dense" if features == "dense" else "paged")


def test_scattered_pages_never_lie_side_by_side(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path, config_overrides={"max_position_embeddings": 4096})
    workload = Workload(0, 2, depth=1000, batch=2)
    _, engine = load_subject("tiny", read_contents(folder), MEASURED["scattered"], [workload])
    manager = engine.pools.manager
    for _ in range(3):  # also when pages have been given back
        rows = [manager.open(()) for _ in range(2)]
        assert all(manager.reserve(tables, workload.positions) for tables in rows)
        for tables in rows:
            pages = tables.by_kind[0].pages
            assert len(pages) == 8 and all(after - before != 1 for before, after in pairwise(pages))
        for tables in rows:
            manager.release(tables)
