"""Lists and ranges become tests, and what cannot be measured is refused before a model is loaded."""

from __future__ import annotations

import pytest
import tiny

from tinyllm.bench.workload import Workload, check_context, make_workloads, read_counts, read_pair
from tinyllm.config.config import Config
from tinyllm.errors import ContextLengthError, UsageError


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("512", (512,)),
        ("128,512", (128, 512)),
        ("0, 7", (0, 7)),
        ("1-4", (1, 2, 3, 4)),
        ("1-16*2", (1, 2, 4, 8, 16)),
        ("3-20*3", (3, 9)),
        ("128-512+128", (128, 256, 384, 512)),
        ("1-8*2,6-8", (1, 2, 4, 8, 6, 7)),
        ("5-5*2", (5,)),
    ],
)
def test_lists_and_ranges_are_read(text: str, counts: tuple[int, ...]) -> None:
    assert read_counts("-p", text) == counts


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1.5", "1,", "8-1", "0-8*2", "1-8*1", "1-8+0", "1-8/2", "1-5000", "9999999999999", "١"]
)
def test_bad_lists_are_refused_by_the_name_of_their_option(text: str) -> None:
    with pytest.raises(UsageError, match=r"^-p"):
        read_counts("-p", text)


def test_a_least_count_is_held() -> None:
    with pytest.raises(UsageError, match="-b must be 1 or more, not 0"):
        read_counts("-b", "0-2", least=1)


@pytest.mark.parametrize("text", ["512", "1,2,3", "0,5", "x,y", "1-2,x"])
def test_bad_pairs_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--pg"):
        read_pair(text)


def test_workloads_are_the_cross_product_with_depths_outermost() -> None:
    workloads = make_workloads([128, 512], [64], [read_pair("512,128")], [0, 2048], [1], chunk=256)
    assert [workload.label for workload in workloads] == [
        *("pp128", "pp512", "tg64", "pp512+tg128"),
        *("pp128 @ d2048", "pp512 @ d2048", "tg64 @ d2048", "pp512+tg128 @ d2048"),
    ]
    assert make_workloads([0], [0, 8], [], [0], [1, 4], chunk=256) == [Workload(0, 8), Workload(0, 8, batch=4)]


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to measure"):
        make_workloads([0], [0], [], [0], [1], chunk=256)


def test_a_prompt_behind_a_depth_that_the_clock_cannot_start_at_is_refused() -> None:
    with pytest.raises(UsageError, match=r"-d 100.*multiple of 256"):
        make_workloads([8], [8], [], [100], [1], chunk=256)
    assert make_workloads([0], [8], [], [100], [1], chunk=256)[0].label == "tg8 @ d100"


def test_a_prompt_with_its_answer_behind_a_depth_is_refused_in_a_batch() -> None:
    with pytest.raises(UsageError, match=r"--pg cannot .*\(-d 256 -b 4\)"):
        make_workloads([], [], [(8, 8)], [0, 256], [1, 4], chunk=256)
    assert len(make_workloads([8], [8], [], [256], [4], chunk=256)) == 2


def test_the_first_row_is_ahead_by_a_token_for_each_chunk_of_the_others() -> None:
    assert Workload(0, 8, batch=8).lead(chunk=256) == 7
    assert Workload(0, 8, depth=257, batch=4).lead(chunk=256) == 3 * 2


@pytest.mark.parametrize(
    ("workload", "prompt", "tokens"),
    [
        (Workload(512, 0), 512, 1),
        (Workload(512, 0, depth=256), 768, 1),
        (Workload(0, 128), 1, 129),
        (Workload(0, 128, depth=2048), 2048, 129),
        (Workload(512, 128), 512, 128),
    ],
)
def test_a_request_is_what_the_workload_times_and_no_more(workload: Workload, prompt: int, tokens: int) -> None:
    assert (workload.prompt_tokens, workload.max_tokens) == (prompt, tokens)
    assert [len(ids) for ids in workload.prompts(100, seed=0, repetition=0)] == [prompt]
    assert workload.lead(chunk=256) == 0


def test_prompts_are_random_but_repeat_with_their_seed() -> None:
    workload = Workload(64, 0, batch=2)
    draws = [workload.prompts(50, seed, repetition) for seed, repetition in ((1, 0), (2, 0), (1, 1))]
    assert draws[0] == workload.prompts(50, seed=1, repetition=0)
    assert len({ids for prompts in draws for ids in prompts}) == 6
    assert set(draws[0][0]) <= set(range(50)) and len(set(draws[0][0])) > 10


def test_a_test_beyond_the_context_is_refused_and_one_that_fills_it_is_not() -> None:
    config = Config.from_dict(tiny.config(max_position_embeddings=256))
    check_context([Workload(255, 0), Workload(0, 254), Workload(200, 56)], config, "tiny", chunk=256)
    too_long = [Workload(256, 0), Workload(0, 255), Workload(200, 57), Workload(0, 1, depth=255)]
    for workload in (*too_long, Workload(0, 248, batch=8)):  # whose first row has 7 tokens when the last has one
        with pytest.raises(ContextLengthError, match="257 positions, and the context of tiny has 256"):
            check_context([Workload(1, 0), workload], config, "tiny", chunk=256)
