"""Several answers of one `LLM`: in a list, from many threads, and longer than its context."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import tiny

from tinyllm.errors import UsageError
from tinyllm.llm import LLM, Answer, Chunk

ANSWER = " one two three"
TIE = 0.001  # two best logits nearer than this may change places where rows are computed together
PROMPTS = [f"{letter}{letter * i} {i}" for i, letter in enumerate("abcdefghijklmnop")]


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Path) -> Iterator[LLM]:
    with LLM(tiny_checkpoint) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """The greedy answer to each prompt, up to a tie, with nothing running beside it."""
    return [until_tie(list(llm.generate(prompt, max_tokens=24, logprobs=2))) for prompt in PROMPTS]


def until_tie(chunks: list[Chunk]) -> list[int]:
    ids: list[int] = []
    for chunk in chunks:
        for logprobs in chunk.logprobs:
            (_, best), (_, second) = logprobs.top
            if best - second < TIE:
                return ids
        ids += chunk.token_ids
    return ids


def ids_of(answer: Answer) -> list[int]:
    return [token_id for chunk in answer for token_id in chunk.token_ids]


def assert_equal_until_ties(answers: list[list[int]], alone: list[list[int]]) -> None:
    assert sum(map(len, alone)) > 200, "too many ties: this compares next to nothing"
    assert len({tuple(ids) for ids in alone}) == len(PROMPTS)
    assert [ids[: len(expected)] for ids, expected in zip(answers, alone, strict=True)] == alone


def test_fault_48_sixteen_threads_have_the_answers_that_each_prompt_has_alone(
    llm: LLM, alone: list[list[int]]
) -> None:
    together = Barrier(len(PROMPTS))

    def ask(prompt: str) -> list[int]:
        together.wait(timeout=60)
        return ids_of(llm.generate(prompt, max_tokens=24))

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert_equal_until_ties(list(pool.map(ask, PROMPTS)), alone)


def test_a_list_of_prompts_has_a_list_of_answers_in_whatever_order_they_are_read(
    llm: LLM, alone: list[list[int]]
) -> None:
    answers = llm.generate(PROMPTS, max_tokens=24)
    backwards = [ids_of(answer) for answer in reversed(answers)]
    assert_equal_until_ties(backwards[::-1], alone)
    assert llm.generate([]) == []


def test_a_list_of_conversations_has_a_list_of_answers(tmp_path: Path) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("x", "y")]
    with LLM(tiny.write_scripted_checkpoint(tmp_path, ANSWER)) as llm:
        answers = llm.chat(tuple(conversations), max_tokens=2, stop=" two")
        assert [answer.text() for answer in answers] == [" one", " one"]
        single = [llm.chat(conversation, max_tokens=0).prompt_token_ids for conversation in conversations]
        assert [answer.prompt_token_ids for answer in answers] == single


@pytest.mark.parametrize("wrong", ["x", ["x"], [[{"role": "user", "content": "x"}], ["x"]], [3]])
def test_what_is_neither_a_conversation_nor_a_list_of_them_is_refused(llm: LLM, wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"messages? .*must be .*\{\"role\""):
        llm.chat(wrong)
    with pytest.raises(UsageError, match="no message"):
        llm.chat([[]])


def test_without_a_seed_each_answer_of_a_list_draws_its_own(llm: LLM) -> None:
    def seeds(**sampling: Any) -> set[int]:
        chunks = [list(answer)[-1] for answer in llm.generate(["x"] * 4, max_tokens=1, temperature=1.0, **sampling)]
        return {chunk.statistics.sampling.seed for chunk in chunks if chunk.statistics is not None}

    assert len(seeds()) == 4
    assert seeds(seed=3) == {3}


CONTEXT = 64


@pytest.mark.parametrize("max_tokens", [5 * CONTEXT, 10**9])
def test_fault_51_more_tokens_than_the_context_are_as_many_as_it_holds(tmp_path: Path, max_tokens: int) -> None:
    overrides = {"max_position_embeddings": CONTEXT}
    with LLM(tiny.write_scripted_checkpoint(tmp_path, ANSWER, end=None, config_overrides=overrides)) as llm:
        answer = llm.generate("xyz", max_tokens=max_tokens)
        chunks = list(answer)
    assert len([i for chunk in chunks for i in chunk.token_ids]) == CONTEXT - len(answer.prompt_token_ids)
    assert chunks[-1].finish_reason == "length"


def test_fault_51_nothing_is_set_aside_for_tokens_that_are_not_there(tmp_path: Path) -> None:
    overrides = {"max_position_embeddings": 10**9}
    with LLM(tiny.write_scripted_checkpoint(tmp_path, ANSWER, config_overrides=overrides)) as llm:

        def memory(max_tokens: int) -> tuple[int, int]:
            last = list(llm.generate("xyz", max_tokens=max_tokens))[-1]
            assert last.statistics is not None and last.finish_reason == "stop"
            return last.statistics.kv_bytes, last.statistics.peak_bytes

        (few_kv, few_peak), (many_kv, many_peak) = memory(8), memory(10**9)
        assert few_kv == many_kv and many_peak - few_peak < 2**20
        penalised = list(llm.generate("xyz", max_tokens=10**9, repetition_penalty=1.1))[-1]
        assert penalised.finish_reason is not None
