"""Each sampler against a plain numpy one on the same logits, alone and in a mixed batch."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm._mx import mx
from tinyllm.engine.request import SamplingParams
from tinyllm.engine.sampling import (
    CANDIDATES,
    Choice,
    Sampler,
    choose,
    history_of,
    least_logit,
    log_probabilities,
    penalise,
    remember,
    ring_size,
    stack_histories,
)
from tinyllm.errors import UsageError

VOCAB = 40

logit_rows = st.lists(
    st.integers(-60, 60).map(lambda tenths: tenths / 10), min_size=VOCAB, max_size=VOCAB
)  # tenths, so that there are ties
truncations = st.fixed_dictionaries(
    {
        "top_k": st.integers(0, VOCAB + 2),
        "top_p": st.integers(1, 100).map(lambda percent: percent / 100),
        "min_p": st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
        "temperature": st.sampled_from([0.2, 1.0, 3.0]),
    }
)


def plain_kept(
    logits: np.ndarray, top_k: int, top_p: float, min_p: float, temperature: float
) -> tuple[set[int], bool]:
    """The tokens that may be drawn, by definition and in float64; and whether top_p decides by less than rounding."""
    scaled = logits.astype(np.float64) / temperature
    kept = set(range(len(scaled)))
    if 0 < top_k < len(scaled):
        kept = {i for i in kept if sum(scaled > scaled[i]) < top_k}
    close = False
    if top_p < 1:
        weight = {i: math.exp(scaled[i] - scaled.max()) for i in kept}
        total = sum(weight.values())
        above = {i: sum(weight[j] for j in kept if scaled[j] > scaled[i]) / total for i in kept}
        close = any(abs(mass - top_p) < 1e-5 for mass in above.values())
        kept = {i for i in kept if above[i] < top_p}
    floor = scaled.max() + (math.log(min_p) if min_p else -math.inf)
    close = close or any(abs(scaled[i] - floor) < 1e-5 and scaled[i] != scaled.max() for i in kept)
    return {i for i in kept if scaled[i] >= floor - 1e-9}, close


@given(logits=logit_rows, values=truncations)
@settings(max_examples=200)
def test_what_may_be_drawn_is_what_the_definitions_say(logits: list[float], values: dict[str, Any]) -> None:
    expected, close = plain_kept(np.array(logits), **values)
    params = SamplingParams(**values)
    scaled = mx.array([logits]) / values["temperature"]
    least, exact = cut(scaled, [params])
    assert exact.item()
    kept = set(np.flatnonzero(np.array(scaled[0] >= least[0])).tolist())
    assert kept, "one token survives, whatever the values"
    assert kept == expected or close


@given(rows=st.lists(st.tuples(logit_rows, truncations), min_size=2, max_size=4))
@settings(max_examples=60)
def test_fault_27_a_row_is_cut_alike_alone_and_in_a_mixed_batch(
    rows: list[tuple[list[float], dict[str, Any]]],
) -> None:
    params = [SamplingParams(**values) for _, values in rows]
    scaled = mx.array([logits for logits, _ in rows])
    together, _ = cut(scaled, params)
    alone = [cut(scaled[i : i + 1], params[i : i + 1])[0] for i in range(len(rows))]
    assert np.allclose(np.array(together), np.array(mx.concatenate(alone)), atol=1e-5)


@pytest.mark.parametrize("top_k", [0, VOCAB, VOCAB + 1])
def test_fault_27_top_k_of_none_all_or_more_than_all_has_no_effect(top_k: int) -> None:
    logits = mx.random.normal((1, VOCAB), key=mx.array([0, 1], dtype=mx.uint32))
    plain = SamplingParams(temperature=1.0, seed=5)
    narrow = SamplingParams(temperature=1.0, seed=5, top_k=top_k)
    for index in range(20):
        assert token(drawn(logits, [narrow], index)) == token(drawn(logits, [plain], index))


@pytest.mark.parametrize(
    "values",
    [
        {"top_k": 1, "top_p": 0.5, "temperature": 0.01},
        {"top_p": 0.0, "temperature": 1.0},
        {"top_k": 1, "temperature": 9.0},
    ],
)
def test_fault_26_the_narrowest_values_are_greedy_and_never_mask_everything(values: dict[str, Any]) -> None:
    logits = mx.random.normal((1, VOCAB), key=mx.array([0, 2], dtype=mx.uint32))
    for seed in range(10):
        chosen = drawn(logits, [SamplingParams(**values, seed=seed)])
        assert token(chosen) == int(mx.argmax(logits).item())


@pytest.mark.parametrize("temperature", [1e-6, 1e-37, 1e-39, 1e-320])
@pytest.mark.parametrize("values", [{}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}])
def test_the_lower_the_temperature_the_nearer_to_greedy(temperature: float, values: dict[str, Any]) -> None:
    params = [SamplingParams(temperature=temperature, seed=seed, **values) for seed in range(8)]
    for logits in ([35.0, 40.0, 41.0, 3.0], [-5.0, -40.0, -3.0, -41.0]):
        rows = mx.broadcast_to(mx.array([logits]), (len(params), 4))
        assert drawn(rows, params).tokens.tolist() == [2] * len(params)


def token(choice: Choice) -> int:
    return int(choice.tokens[0].item())


def drawn(logits: mx.array, params: list[SamplingParams], index: int = 0, candidates: int = CANDIDATES) -> Choice:
    rows, vocab = logits.shape
    return choose(logits, Sampler.of(params, vocab, candidates), {}, mx.full((rows,), index, dtype=mx.uint32))


def cut(logits: mx.array, params: list[SamplingParams]) -> tuple[mx.array, mx.array]:
    """The least logits: of a batch in which somebody truncates, so that rows that do not are seen too."""
    values = Sampler.of([*params, SamplingParams(temperature=1.0, top_k=2)], VOCAB).values
    return least_logit(logits, {name: value[: len(params)] for name, value in values.items()}, VOCAB)


def test_few_candidates_say_that_they_do_not_do_and_all_of_them_do() -> None:
    flat = mx.zeros((1, VOCAB)) + mx.arange(VOCAB) * 1e-3
    params = [SamplingParams(temperature=1.0, top_p=0.9)]
    narrow = drawn(flat, params, candidates=8)
    whole = drawn(flat, params, candidates=VOCAB)
    assert narrow.exact is not None and not narrow.exact.item()
    assert whole.exact is not None and whole.exact.item()
    steep = mx.zeros((1, VOCAB)) + mx.arange(VOCAB) * 2.0
    few = drawn(steep, params, candidates=8)
    assert few.exact is not None and few.exact.item()
    assert token(few) == token(drawn(steep, params, candidates=VOCAB))


def test_draws_follow_the_truncated_softmax() -> None:
    logits = mx.array([[2.0, 1.0, 0.0, -1.0, -9.0]])
    params = [SamplingParams(temperature=0.8, top_k=3, seed=seed) for seed in range(3000)]
    choice = drawn(mx.broadcast_to(logits, (len(params), 5)), params)
    counts = Counter(choice.tokens.tolist())
    weights = np.exp(np.array([2.0, 1.0, 0.0]) / 0.8)
    for i, probability in enumerate(weights / weights.sum()):
        assert abs(counts[i] / 3000 - probability) < 4 * math.sqrt(probability * (1 - probability) / 3000)
    assert set(counts) == {0, 1, 2}


def test_a_row_draws_the_same_token_whoever_shares_its_batch() -> None:
    logits = mx.random.normal((6, VOCAB), key=mx.array([0, 3], dtype=mx.uint32))
    params = [SamplingParams(temperature=1.0 + row / 3, top_k=row * 2, seed=row % 2) for row in range(6)]
    together = drawn(logits, params, 4).tokens.tolist()
    alone = [token(drawn(logits[i : i + 1], params[i : i + 1], 4)) for i in range(6)]
    assert together == alone


def plain_penalised(logits: np.ndarray, params: SamplingParams, prompt: list[int], answer: list[int]) -> np.ndarray:
    out = logits.astype(np.float64).copy()
    text = prompt + answer
    window = params.repetition_window or len(text)
    for i in set(text[max(0, len(text) - window) :]):
        out[i] = out[i] / params.repetition_penalty if out[i] > 0 else out[i] * params.repetition_penalty
    for i, count in Counter(answer).items():
        out[i] -= params.presence_penalty + params.frequency_penalty * count
    for i, bias in params.logit_bias.items():
        out[i] += bias
    return out


ids = st.lists(st.integers(0, VOCAB - 1), max_size=30)


@given(
    logits=logit_rows,
    prompt=ids.filter(bool),
    answer=ids,
    values=st.fixed_dictionaries(
        {
            "repetition_penalty": st.sampled_from([1.0, 0.7, 1.3, 2.0]),
            "repetition_window": st.integers(0, 40),
            "presence_penalty": st.sampled_from([0.0, 0.5, -1.0]),
            "frequency_penalty": st.sampled_from([0.0, 0.25, -0.5]),
            "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-5.0, 3.0]), max_size=3),
        }
    ),
)
@settings(max_examples=150)
def test_penalties_and_biases_equal_the_plain_ones_as_the_answer_grows(
    logits: list[float], prompt: list[int], answer: list[int], values: dict[str, Any]
) -> None:
    params = SamplingParams(**values)
    longest = len(prompt) + len(answer)
    history = history_of(params, prompt, len(prompt), VOCAB, longest)
    for i, chosen in enumerate(answer):
        ring_index = (len(prompt) + i) % (ring_size(params, longest) or 1)
        history = remember(history, mx.array([chosen]), mx.array([ring_index]))
    wanted = plain_penalised(np.array(logits), params, prompt, answer)
    assert np.allclose(np.array(penalised([logits], [params], history)[0]), wanted, atol=1e-4)
    # As after a preemption, and beside a row that remembers nothing.
    again = history_of(params, prompt + answer, len(prompt), VOCAB, longest)
    plain = history_of(SamplingParams(), prompt, len(prompt), VOCAB, longest)
    both = penalised([logits, logits], [SamplingParams(), params], stack_histories([plain, again], VOCAB))
    assert np.allclose(np.array(both), [logits, wanted], atol=1e-4)


def penalised(logits: list[list[float]], params: list[SamplingParams], history: Any) -> mx.array:
    return penalise(mx.array(logits), Sampler.of(params, VOCAB).values, history)


@pytest.mark.parametrize("distance", [30, 60])
def test_fault_28_a_repeat_is_seen_as_far_back_as_the_window_reaches(distance: int) -> None:
    prompt = [7] + [1] * distance
    logits = mx.zeros((1, VOCAB)) + 1.0

    def seen(window: int) -> bool:
        params = SamplingParams(repetition_penalty=2.0, repetition_window=window)
        history = history_of(params, prompt, len(prompt), VOCAB, longest=100)
        return penalise(logits, Sampler.of([params], VOCAB).values, history)[0, 7].item() == 0.5

    assert seen(0) and seen(distance + 1) and not seen(distance)


@pytest.mark.parametrize("top", [0, 1, 5, VOCAB, VOCAB + 9])
def test_fault_34_logprobs_are_the_raw_log_softmax_best_first(top: int) -> None:
    logits = mx.random.normal((1, VOCAB), key=mx.array([0, 4], dtype=mx.uint32)) * 3
    expected = np.array(logits[0], dtype=np.float64)
    expected -= np.log(np.exp(expected).sum())
    chosen, best, values = log_probabilities(logits, mx.array([11]), top)
    order = np.argsort(-expected)[:top]
    assert np.isclose(chosen.item(), expected[11], atol=1e-5)
    assert best[0].tolist() == order.tolist()
    assert np.allclose(np.array(values[0]), expected[order], atol=1e-5)
    assert (expected <= 0).all()


@pytest.mark.parametrize(
    "values",
    [
        {"top_k": -1},
        {"top_p": -0.1},
        {"top_p": 1.1},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.nan},
        {"repetition_window": -1},
        {"presence_penalty": math.inf},
        {"frequency_penalty": -101.0},
        {"temperature": math.nan},
        {"logit_bias": {3: math.inf}},
    ],
)
def test_a_value_out_of_range_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(values))):
        SamplingParams(**values)
