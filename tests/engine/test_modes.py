"""Every way to run a request gives what it gives alone, dense and eager: the ids, and what comes with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import tiny
from running import ids, ids_alone, run
from step_memory import bytes_of_steps

from tinyllm._mx import mx
from tinyllm.engine.engine import Engine
from tinyllm.engine.request import Output, Request, SamplingParams
from tinyllm.errors import ContextLengthError, NonFiniteLogitsError
from tinyllm.model.load import load_model
from tinyllm.model.transformer import ModelForCausalLM
from tinyllm.ops.features import FEATURES

MODELS: Mapping[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "windows and none": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    },
    "experts, windows and sinks": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "sliding_window": 12,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
    "experts, chunks and scaled queries": {
        "model_type": "llama4_text",
        "head_dim": 16,
        "attention_chunk_size": 12,
        "floor_scale": 8,
        "no_rope_layer_interval": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
    },
}
ENGINES: Mapping[str, dict[str, Any]] = {
    "paged, eager": {"compiled": False},
    "paged, compiled": {},
    "paged, small pages": {"compiled": False, "page_size": 4},
    "paged, small pages, compiled": {"page_size": 8, "max_rows": 5},
    "paged, unshared": {"compiled": False, "share": False, "page_size": 16},
    "paged, small chunks": {"compiled": False, "prefill_chunk": 5, "page_size": 8, "max_rows": 3},
    "dense": {"kv": "dense"},
    "dense, alone": {"kv": "dense", "max_rows": 1, "prefill_chunk": 9},
}


@pytest.fixture(scope="module", params=MODELS, ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelForCausalLM:
    folder = tmp_path_factory.mktemp("model")
    return load_model(tiny.write_checkpoint(folder, config_overrides=MODELS[request.param]))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelForCausalLM:
    return load_model(tiny.write_checkpoint(tmp_path_factory.mktemp("llama")))


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(Random(seed).choices(range(40, 130), k=length))


def mixed_requests() -> list[Request]:
    """Greedy and random rows, penalties, biases, log-probabilities, lengths from 1 on, shared beginnings."""
    shared = prompt(21, seed=9)
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.2, seed=4),
        SamplingParams(temperature=0.8, top_k=7, top_p=0.9, seed=0),
        SamplingParams(repetition_penalty=1.6, repetition_window=9),
        SamplingParams(presence_penalty=0.7, frequency_penalty=0.4, temperature=1.0, min_p=0.02, seed=11),
        SamplingParams(repetition_penalty=1.3, logit_bias={70: 2.0, 80: -3.0}),
        SamplingParams(),
    ]
    prompts = [prompt(1), prompt(35, 1), shared, (*shared, *prompt(6, 2)), (*shared, *prompt(11, 3)), prompt(8, 5)]
    prompts.append(shared)
    lengths = [9, 14, 6, 11, 3, 1, 17]
    return [
        Request(text, count, sampling=sampling, logprobs=3 if i % 3 == 0 else None)
        for i, (text, count, sampling) in enumerate(zip(prompts, lengths, params, strict=True))
    ]


@pytest.fixture(scope="module")
def expected(model: ModelForCausalLM) -> list[list[int]]:
    """What each of the mixed requests gives alone."""
    return [ids_alone(model, request) for request in mixed_requests()]


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())
def test_fault_32_every_mode_gives_the_ids_of_the_request_alone(
    model: ModelForCausalLM, engine: dict[str, Any], expected: list[list[int]]
) -> None:
    requests = mixed_requests()
    outputs = run(Engine(model, **engine), requests)
    assert [ids(got) for got in outputs] == expected
    for request, got in zip(requests, outputs, strict=True):
        assert got[-1].finish_reason == "length"
        assert got[-1].kv_bytes > 0
        told = [output.logprobs for output in got]
        assert all((one is not None and len(one.top) == 3) == (request.logprobs is not None) for one in told)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("features", FEATURES)
def test_fused_and_reference_kernels_give_the_same_ids_in_a_batch(
    tmp_path: Path, features: str, compiled: bool
) -> None:
    folder = tiny.write_checkpoint(tmp_path)
    requests = mixed_requests()
    outputs = run(Engine(load_model(folder, FEATURES[features]), page_size=8, compiled=compiled), requests)
    expected = load_model(folder)
    assert [ids(got) for got in outputs] == [ids_alone(expected, request) for request in requests]


def test_fault_32_logits_of_a_batch_are_those_of_each_row_alone(llama: ModelForCausalLM) -> None:
    requests = [Request(prompt(n, n), 8, logprobs=100) for n in (10, 4, 33)]
    together = run(Engine(llama, page_size=8, compiled=False), requests)
    for request, got in zip(requests, together, strict=True):
        [expected] = run(Engine(llama, kv="dense"), [request])
        for a, b in zip(got, expected, strict=True):
            assert a.logprobs is not None and b.logprobs is not None
            assert [i for i, _ in a.logprobs.top[:5]] == [i for i, _ in b.logprobs.top[:5]]
            assert np.allclose([v for _, v in a.logprobs.top], [v for _, v in b.logprobs.top], atol=2e-4)


def test_fault_37_an_exact_repeat_computes_its_last_token_alone(model: ModelForCausalLM) -> None:
    engine = Engine(model, page_size=8, compiled=False)
    for length in (16, 24, 25):  # whole pages, and not
        request = Request(prompt(length, length), 5)
        [cold], [warm] = run(engine, [request]), run(engine, [request])
        assert ids(warm) == ids(cold) == ids_alone(model, request)
        assert cold[-1].cached < length - 8 and warm[-1].cached == length - 1


def test_fault_28_penalties_see_a_cached_prompt_as_a_cold_one(llama: ModelForCausalLM) -> None:
    engine = Engine(llama, page_size=8, compiled=False)
    sampling = SamplingParams(repetition_penalty=2.0, repetition_window=64, presence_penalty=0.4)
    request = Request(prompt(40), 20, sampling=sampling)
    [cold], [warm] = run(engine, [request]), run(engine, [request])
    assert warm[-1].cached == 39
    assert ids(warm) == ids(cold) == ids_alone(llama, request)


def test_a_second_turn_prefills_what_is_new_alone(model: ModelForCausalLM) -> None:
    engine = Engine(model, page_size=8, compiled=False)
    [first] = run(engine, [Request(prompt(30), 13)])
    turn = (*prompt(30), *ids(first), *prompt(5, 8))
    [second] = run(engine, [Request(turn, 6)])
    assert second[-1].cached == 30 + 13 - 1  # the last token of an answer is never computed
    assert ids(second) == ids_alone(model, Request(turn, 6))


@pytest.mark.parametrize("kv", ["paged", "dense"])
def test_a_row_joins_the_others_as_soon_as_its_prompt_is_computed(llama: ModelForCausalLM, kv: Any) -> None:
    engine = Engine(llama, kv=kv, page_size=8, compiled=False)
    for i in range(3):
        engine.add(Request(prompt(9, i), 30))
    steps = []
    while engine.has_work:
        steps.append(sum(output.token_id is not None for output in engine.step()))
    assert len(steps) <= 3 + 30
    assert steps.count(3) >= 26


def test_requests_that_arrive_together_share_what_the_first_has_computed(llama: ModelForCausalLM) -> None:
    shared = prompt(40)
    requests = [Request((*shared, 130 + i, *prompt(3, i)), 4) for i in range(6)]
    outputs = run(Engine(llama, page_size=8, compiled=False), requests)
    assert [got[-1].cached for got in outputs] == [0, *[40] * 5]
    assert [ids(got) for got in outputs] == [ids_alone(llama, request) for request in requests]


@pytest.mark.parametrize("kv", ["paged", "dense"])
def test_fault_39_two_that_do_not_fit_together_both_finish_as_alone(llama: ModelForCausalLM, kv: Any) -> None:
    requests = [
        Request(prompt(20, 1), 30),
        Request(prompt(20, 2), 30, sampling=SamplingParams(temperature=1, seed=3)),
    ]
    engine = Engine(llama, kv=kv, page_size=4, ceilings=(15,), compiled=False)  # 13 pages each, and a padding page
    outputs = run(engine, requests)
    assert [ids(got) for got in outputs] == [ids_alone(llama, request) for request in requests]
    assert engine.preemptions > 0


def test_fault_39_what_needs_more_than_the_pool_has_is_refused_at_once(llama: ModelForCausalLM) -> None:
    engine = Engine(llama, page_size=4, ceilings=(11,), compiled=False)
    assert engine.context == 41
    with pytest.raises(ContextLengthError, match=r"42 tokens.*41"):
        engine.add(Request(prompt(42), 1))
    [outputs] = run(engine, [Request(prompt(30), 10**9)])
    assert len(ids(outputs)) == 11


def test_fault_40_cancelled_requests_leave_nothing_behind(llama: ModelForCausalLM) -> None:
    engine = Engine(llama, page_size=4, ceilings=(60,), compiled=False, share=False, prefill_chunk=8)
    free = engine.pools.manager.available
    for i in range(50):
        request = engine.add(Request(prompt(30, i), 20))
        for _ in range(i % 7):
            engine.step()
        engine.cancel(request)
        engine.scheduler.check_invariants()
    while engine.has_work:
        engine.step()
    assert engine.pools.manager.available == free
    request = Request(prompt(30), 5)
    assert ids(run(engine, [request])[0]) == ids_alone(llama, request)


def test_fault_40_a_cancelled_row_does_not_disturb_those_beside_it(llama: ModelForCausalLM) -> None:
    for step in range(3, 9):
        engine = Engine(llama, page_size=4, compiled=False)
        requests = [Request(prompt(9, i), 12) for i in range(3)]
        outputs: dict[int, list[Output]] = {engine.add(request): [] for request in requests}
        done, late = 0, Request(prompt(12, 7), 6)
        while engine.has_work:
            if done == step:
                engine.cancel(2)
                outputs[engine.add(late)] = []
            for output in engine.step():
                outputs[output.request_id].append(output)
            engine.scheduler.check_invariants()
            done += 1
        for request_id, request in ((1, requests[0]), (3, requests[2]), (4, late)):
            assert ids(outputs[request_id]) == ids_alone(llama, request)


def test_numbers_that_are_not_finite_in_a_prompt_end_the_request_before_it_is_read(tmp_path: Path) -> None:
    tensors = tiny.random_tensors(tiny.config())
    tensors["model.embed_tokens.weight"][99] = np.nan
    engine = Engine(load_model(tiny.write_checkpoint(tmp_path, tensors=tensors)), page_size=4, prefill_chunk=8)
    [outputs] = run(engine, [Request((*prompt(5), 99, *prompt(40)), 3)], may_fail=True)
    assert isinstance(outputs[-1].error, NonFiniteLogitsError)
    assert "in the prompt" in str(outputs[-1].error)
    assert all(bool(mx.isfinite(array).all().item()) for pool in engine.pools.pools for array in pool.flat)


def test_an_engine_goes_on_after_a_step_that_failed(llama: ModelForCausalLM) -> None:
    engine = Engine(llama, page_size=4, compiled=False)
    for i in range(3):
        engine.add(Request(prompt(9, i), 12))
    for _ in range(5):
        engine.step()
    engine.cancel(2)
    engine.reset()
    assert not engine.has_work
    engine.scheduler.check_invariants()
    request = Request(prompt(30), 5)
    assert ids(run(engine, [request])[0]) == ids_alone(llama, request)


def test_a_row_that_is_not_finite_ends_alone_and_its_pages_are_cleared(tmp_path: Path) -> None:
    values = tiny.config()
    tensors = tiny.random_tensors(values)
    tensors["model.embed_tokens.weight"][99] = np.nan
    model = load_model(tiny.write_checkpoint(tmp_path, tensors=tensors))
    engine = Engine(model, page_size=4, compiled=False)
    never = SamplingParams(logit_bias={99: -1000.0})

    def request(ids: tuple[int, ...]) -> Request:
        return Request(tuple(i if i != 99 else 50 for i in ids), 8, sampling=never)

    spoilt = replace(request(prompt(8, 2)), prompt_ids=(*prompt(6, 2), 99, 50))
    requests, later = [request(prompt(9, 1)), spoilt, request(prompt(10, 3))], request(prompt(30, 5))
    outputs = run(engine, requests, may_fail=True)
    assert isinstance(outputs[1][-1].error, NonFiniteLogitsError)
    outputs += run(engine, [later])
    for got, asked in zip((outputs[0], outputs[2], outputs[3]), (requests[0], requests[2], later), strict=True):
        assert ids(got) == ids_alone(model, asked)
    assert all(bool(mx.isfinite(array).all().item()) for pool in engine.pools.pools for array in pool.flat)


def test_tokens_are_drawn_alike_after_a_preemption(llama: ModelForCausalLM) -> None:
    sampling = SamplingParams(temperature=1.5, seed=2, repetition_penalty=1.2)
    requests = [Request(prompt(18, i), 26, sampling=replace(sampling, seed=i)) for i in range(4)]
    engine = Engine(llama, page_size=4, ceilings=(25,), compiled=False)
    outputs = run(engine, requests)
    assert engine.preemptions > 0
    assert [ids(got) for got in outputs] == [ids_alone(llama, request) for request in requests]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layers", [2, 30])
def test_a_step_copies_no_pool_with_the_next_one_built_ahead(tmp_path: Path, layers: int, compiled: bool) -> None:
    """Bytes of a decode step, not its time, in a pool of 12 pages and in one of 300."""
    overrides = {"num_hidden_layers": layers, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
    model = load_model(tiny.write_checkpoint(tmp_path, config_overrides=overrides))
    small, large = (
        bytes_of_steps(Engine(model, page_size=16, compiled=compiled, max_rows=3), pages) for pages in (12, 300)
    )
    one_pool = (300 - 12) * 16 * model.config.layers[0].attention.num_kv_heads * 16 * 4
    assert large - small < one_pool / 2, f"a step needs {small} bytes in a small pool, {large} in a large one"


def test_a_long_run_grows_nothing_but_its_pages(tmp_path: Path) -> None:
    """1,000 tokens twice: after the first time there is room for them, and no step needs more than the one before."""
    model = load_model(tiny.write_checkpoint(tmp_path, config_overrides={"max_position_embeddings": 4096}))
    engine = Engine(model, share=False)
    held = []
    for seed in range(2):
        engine.add(Request(prompt(20, seed), 1000, sampling=SamplingParams(temperature=1, seed=seed)))
        tokens = 0
        while engine.has_work:
            tokens += sum(output.token_id is not None for output in engine.step())
            if tokens % 250 == 0:
                mx.clear_cache()
                held.append(mx.get_active_memory())
        assert tokens == 1000
    second = held[len(held) // 2 :]
    assert max(second) - min(second) < 2**16, held
    assert len(engine._memory._step._functions) <= 32  # type: ignore[union-attr]
