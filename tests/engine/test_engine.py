"""The engine against a plain loop over the same model, and what it promises of every request."""

from __future__ import annotations

import gc
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tiny

from tinyllm._mx import mx
from tinyllm.engine.engine import Engine
from tinyllm.engine.request import Output, Request, SamplingParams
from tinyllm.engine.sampling import Sampler, choose, history_of
from tinyllm.errors import UsageError
from tinyllm.model.load import load_model
from tinyllm.model.transformer import ModelForCausalLM

PROMPT = tuple(range(40, 75))


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> ModelForCausalLM:
    return load_model(tiny_checkpoint)


def run(engine: Engine, *requests: Request) -> list[list[Output]]:
    """Run requests to their ends; the outputs of each."""
    outputs: dict[int, list[Output]] = {engine.add(request): [] for request in requests}
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    return list(outputs.values())


def ids(outputs: list[Output]) -> list[int]:
    return [output.token_id for output in outputs if output.token_id is not None]


def plain_greedy(model: ModelForCausalLM, prompt: tuple[int, ...], count: int) -> list[int]:
    """Score the whole text anew for every token: no cache, no engine."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(mx.argmax(model(mx.array([text]))[0, -1]).item()))
    return text[len(prompt) :]


@pytest.mark.parametrize("settings", [{}, {"compiled": False}, {"kv": "dense"}], ids=str)
def test_nothing_but_pages_grows_with_the_number_of_prompts(
    model: ModelForCausalLM, settings: dict[str, Any]
) -> None:
    """Once the pool has all of its pages, as it does after 60 prompts: neither objects nor bytes on the device."""
    engine = Engine(model, ceilings=(61,), page_size=16, **settings)
    random = Random(1)

    def held(prompts: int) -> tuple[int, int]:
        for n in range(prompts):
            prompt = tuple(random.randrange(3, 250) for _ in range(random.randrange(3, 30)))
            sampling = SamplingParams(temperature=n % 2, top_k=5 + n % 3, seed=n)
            engine.run([Request(prompt, 3, sampling=sampling, logprobs=n % 4 or None)])
        gc.collect()
        return len(gc.get_objects()), mx.get_active_memory()

    objects, nbytes = held(100)
    objects_later, bytes_later = held(200)
    assert objects_later - objects < 100  # one for each prompt would be 200
    assert bytes_later - nbytes < 200 * 4


@pytest.mark.parametrize("chunk", [1, 7, len(PROMPT), 256])
def test_ids_equal_a_plain_loop_whatever_the_prefill_chunk(model: ModelForCausalLM, chunk: int) -> None:
    [outputs] = run(Engine(model, prefill_chunk=chunk), Request(PROMPT, max_tokens=12))
    assert ids(outputs) == plain_greedy(model, PROMPT, 12)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_fault_30_exactly_max_tokens_are_made(model: ModelForCausalLM, count: int) -> None:
    [outputs] = run(Engine(model), Request(PROMPT, max_tokens=count))
    assert len(ids(outputs)) == count
    assert [output.finish_reason for output in outputs][-1] == "length"
    assert all(output.finish_reason is None for output in outputs[:-1])


def test_an_answer_ends_where_the_context_does(model: ModelForCausalLM) -> None:
    context = model.config.max_position_embeddings
    prompt = tuple(40 + i % 90 for i in range(context - 5))
    for wanted in (None, 10**9):
        [outputs] = run(Engine(model), Request(prompt, max_tokens=wanted))
        assert len(ids(outputs)) == 5
        assert outputs[-1].finish_reason == "length"


def test_progress_in_the_prompt_is_told(model: ModelForCausalLM) -> None:
    [outputs] = run(Engine(model, prefill_chunk=10), Request(PROMPT, max_tokens=1))
    assert [output.prefilled for output in outputs] == [10, 20, 30, len(PROMPT)]


def test_a_stop_id_ends_the_answer_and_is_its_last_token(model: ModelForCausalLM) -> None:
    expected = plain_greedy(model, PROMPT, 6)
    stop = expected[4]
    [outputs] = run(Engine(model), Request(PROMPT, stop_ids=frozenset({stop})))
    assert ids(outputs) == expected[: expected.index(stop) + 1]
    assert outputs[-1].finish_reason == "stop"


def test_requests_run_in_turn_and_do_not_see_each_other(model: ModelForCausalLM) -> None:
    prompts = [PROMPT, PROMPT[5:20], (7,)]
    together = run(Engine(model), *(Request(prompt, max_tokens=6) for prompt in prompts))
    assert [ids(outputs) for outputs in together] == [plain_greedy(model, prompt, 6) for prompt in prompts]


def test_a_cancelled_request_is_forgotten_running_or_waiting(model: ModelForCausalLM) -> None:
    engine = Engine(model)
    running, waiting, third = (engine.add(Request(PROMPT, max_tokens=4)) for _ in range(3))
    engine.step()
    engine.cancel(running)
    engine.cancel(waiting)
    engine.cancel(waiting)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert {output.request_id for output in outputs} == {third}
    assert ids(outputs) == plain_greedy(model, PROMPT, 4)


def sampled(
    model: ModelForCausalLM, seed: int, prompt: tuple[int, ...] = PROMPT, temperature: float = 1.5
) -> list[int]:
    [outputs] = run(Engine(model), Request(prompt, 12, sampling=SamplingParams(temperature=temperature, seed=seed)))
    return ids(outputs)


def test_fault_29_a_seed_repeats_and_another_differs(model: ModelForCausalLM) -> None:
    assert sampled(model, seed=0) == sampled(model, seed=0)
    assert sampled(model, seed=0) != sampled(model, seed=1)
    assert sampled(model, seed=2**32 - 1) == sampled(model, seed=2**32 - 1)


def test_random_draws_follow_the_softmax_of_the_scaled_logits(model: ModelForCausalLM) -> None:
    temperature, draws = 0.7, 400
    probabilities = mx.softmax(model(mx.array([PROMPT]))[0, -1] / temperature)
    favourite = int(mx.argmax(probabilities).item())
    engine = Engine(model)
    hits = 0
    for seed in range(draws):
        [outputs] = run(engine, Request(PROMPT, 1, sampling=SamplingParams(temperature=temperature, seed=seed)))
        hits += ids(outputs) == [favourite]
    expected = float(probabilities[favourite].item())
    assert 0.02 < expected < 0.98
    assert abs(hits / draws - expected) < 4 * (expected * (1 - expected) / draws) ** 0.5


@pytest.mark.parametrize(
    ("temperature", "seed"), [(-0.1, 0), (float("nan"), 0), (float("inf"), 0), (1.0, -1), (1.0, 2**32)]
)
def test_sampling_values_out_of_range_are_refused(temperature: float, seed: int) -> None:
    with pytest.raises(UsageError):
        SamplingParams(temperature=temperature, seed=seed)


def test_a_decode_step_does_not_copy_the_cache(tmp_path: Path) -> None:
    """A step's memory is the same whether the cache is small or large: its buffers are written in place."""
    folder = tiny.write_checkpoint(tmp_path, config_overrides={"max_position_embeddings": 8192, "head_dim": 64})
    model = load_model(folder)
    grown = {}
    for length in (1000, 7000):
        engine = Engine(model, prefill_chunk=1000)
        engine.add(Request(tuple(40 + i % 90 for i in range(length)), max_tokens=8))
        while not any(output.token_id is not None for output in engine.step()):
            pass
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        for _ in range(4):
            engine.step()
        grown[length] = mx.get_peak_memory() - before
    one_buffer = 2 * 7000 * 64 * 4
    assert grown[7000] - grown[1000] < one_buffer


def test_a_flat_distribution_that_few_candidates_do_not_cover_is_drawn_from_exactly(tmp_path: Path) -> None:
    """top_p over 3,000 tokens of much the same probability: the step is chosen again among all of them."""
    overrides = {"vocab_size": 3000}
    tensors = tiny.random_tensors(tiny.config(**overrides))
    tensors["lm_head.weight"] *= 0.1
    model = load_model(tiny.write_checkpoint(tmp_path, config_overrides=overrides, tensors=tensors))
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=3)
    text = list(PROMPT)
    for index in range(6):
        logits = model(mx.array([text]))[:, -1]
        text.append(int(choose(logits, Sampler.of([params], 3000, 3000), {}, mx.array([index])).tokens.item()))
    [outputs] = run(Engine(model), Request(PROMPT, 6, sampling=params))
    assert ids(outputs) == text[len(PROMPT) :]


def test_penalties_see_the_prompt_and_what_was_generated(model: ModelForCausalLM) -> None:
    params = SamplingParams(repetition_penalty=1.7, presence_penalty=0.6, frequency_penalty=0.3)
    text, vocab = list(PROMPT), model.config.vocab_size
    for index in range(15):
        history = history_of(params, text, len(PROMPT), vocab, longest=200)
        logits = model(mx.array([text]))[:, -1]
        text.append(int(choose(logits, Sampler.of([params], vocab), history, mx.array([index])).tokens.item()))
    [outputs] = run(Engine(model), Request(PROMPT, 15, sampling=params))
    assert ids(outputs) == text[len(PROMPT) :] != plain_greedy(model, PROMPT, 15)


def test_a_bias_of_a_token_that_the_model_lacks_is_refused(model: ModelForCausalLM) -> None:
    with pytest.raises(UsageError, match=r"logit_bias.*288"):
        Engine(model).add(Request(PROMPT, 1, sampling=SamplingParams(logit_bias={288: 1.0})))


def test_logprobs_are_of_the_raw_logits_whatever_the_temperature(model: ModelForCausalLM) -> None:
    expected = mx.logsumexp(model(mx.array([PROMPT]))[0, -1])
    logits = model(mx.array([PROMPT]))[0, -1] - expected
    for temperature in (0.0, 0.5, 2.0):
        sampling = SamplingParams(temperature=temperature, seed=1)
        [[output]] = run(Engine(model), Request(PROMPT, 1, sampling=sampling, logprobs=3))
        assert output.token_id is not None and output.logprobs is not None
        assert output.logprobs.chosen == pytest.approx(logits[output.token_id].item(), abs=1e-4)
        assert [i for i, _ in output.logprobs.top] == mx.argsort(-logits)[:3].tolist()
        assert output.logprobs.top[0][1] <= 0
