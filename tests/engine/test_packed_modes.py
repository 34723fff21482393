"""Engines on packed keys and values say alike, keep their promises of bytes, and write in place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import tiny
from running import alone, ids, run
from step_memory import bytes_of_steps

from tinyllm._mx import mx
from tinyllm.checkpoint.contents import read_contents
from tinyllm.config.config import Config
from tinyllm.doctor import ids_gap
from tinyllm.engine.engine import Engine
from tinyllm.engine.load import EngineSettings, load_engine
from tinyllm.engine.plan import MemoryPlan, make_plan
from tinyllm.engine.plan_text import table
from tinyllm.engine.prefix_file import Fingerprint, load_prefix, save_prefix
from tinyllm.engine.request import Output, Request, SamplingParams
from tinyllm.errors import NonFiniteLogitsError, PrefixFileError, UnsupportedQuantizationError, UsageError
from tinyllm.model.load import load_model
from tinyllm.model.transformer import ModelForCausalLM

NEAR = 1e-3  # logits so near each other may change places
PACKABLE: dict[str, Any] = {"head_dim": 32}
MODELS: Mapping[str, dict[str, Any]] = {
    "llama": PACKABLE,
    "windows and none": {
        "model_type": "qwen2",
        "hidden_size": 128,
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    },
    "experts, windows and sinks": {
        **PACKABLE,
        "model_type": "gpt_oss",
        "sliding_window": 12,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
    "states": {
        "model_type": "lfm2",
        "hidden_size": 128,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_hidden_layers": 3,
        "rms_norm_eps": ...,
        "hidden_act": ...,
        "tie_word_embeddings": True,
    },
    "chunks": {
        **PACKABLE,
        "model_type": "llama4_text",
        "attention_chunk_size": 12,
        "floor_scale": 8,
        "no_rope_layer_interval": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
    },
}
ENGINES: Mapping[str, dict[str, Any]] = {
    "eager": {"compiled": False},
    "compiled": {},
    "small pages, compiled": {"page_size": 8, "max_rows": 5},
    "small chunks": {"compiled": False, "prefill_chunk": 5, "page_size": 4, "max_rows": 3},
    "unshared": {"compiled": False, "share": False, "page_size": 16},
    "dense": {"kv": "dense"},
}
BITS = pytest.mark.parametrize("bits", [8, 4])


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(Random(seed).choices(range(40, 130), k=length))


def make(model: ModelForCausalLM, bits: int | None, **settings: Any) -> Engine:
    return Engine(model, kv_bits=bits, **{"compiled": False, "page_size": 8, **settings})


@pytest.fixture(scope="module", params=MODELS, ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelForCausalLM:
    folder = tmp_path_factory.mktemp("model")
    return load_model(tiny.write_checkpoint(folder, config_overrides=MODELS[request.param]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("llama"), config_overrides=PACKABLE)


@pytest.fixture(scope="module")
def llama(folder: Path) -> ModelForCausalLM:
    return load_model(folder)


SHARED = prompt(21, seed=9)
PROMPTS = [prompt(1), prompt(35, 1), SHARED, (*SHARED, *prompt(6, 2)), SHARED]
REQUESTS = [Request(text, 9 + i, logprobs=2) for i, text in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def expected(model: ModelForCausalLM) -> dict[int, list[list[Output]]]:
    """What each of the requests gives alone, by bits."""
    return {bits: [alone(model, request, kv_bits=bits) for request in REQUESTS] for bits in (8, 4)}


@BITS
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())
def test_every_mode_gives_the_ids_of_the_request_alone(
    model: ModelForCausalLM, engine: dict[str, Any], bits: int, expected: dict[int, list[list[Output]]]
) -> None:
    outputs = run(Engine(model, kv_bits=bits, **engine), REQUESTS)
    for wanted, got in zip(expected[bits], outputs, strict=True):
        assert ids_gap(wanted, got) <= NEAR
        assert len(got) == len(wanted)


@BITS
def test_a_warm_answer_is_the_cold_one(model: ModelForCausalLM, bits: int) -> None:
    engine = make(model, bits)
    for length in (16, 25):
        request = Request(prompt(length, length), 8)
        [cold], [warm] = run(engine, [request]), run(engine, [request])
        assert ids(warm) == ids(cold)
        states = any(pool.states for pool in engine.pools.pools)  # which are kept at the ends of pages
        assert (cold[-1].cached, warm[-1].cached) == (0, (length - 1) // 8 * 8 if states else length - 1)


def test_states_stay_as_they_are_beside_what_is_packed(tmp_path: Path) -> None:
    model = load_model(tiny.write_checkpoint(tmp_path, config_overrides=MODELS["states"]))
    engine = make(model, 8)
    run(engine, [Request(prompt(5), 2)])
    kept = {bool(pool.states): [array.dtype for array in pool.arrays[0]] for pool in engine.pools.pools}
    assert kept == {True: [mx.float32], False: [mx.uint32, mx.float32, mx.float32] * 2}


@BITS
def test_pages_that_are_shared_hold_what_was_packed_first(llama: ModelForCausalLM, bits: int) -> None:
    engine = make(llama, bits)
    run(engine, [Request(prompt(24), 1)])
    before = [array + 0 for pool in engine.pools.pools for array in pool.flat]
    pages, length = engine.pools.manager.known(prompt(24), "")
    assert length == 24
    run(engine, [Request((*prompt(24), *prompt(9, 3)), 4)])
    for old, new in zip(before, (array for pool in engine.pools.pools for array in pool.flat), strict=True):
        for (page,) in pages:
            assert mx.array_equal(old[:, page * 8 : page * 8 + 8], new[:, page * 8 : page * 8 + 8])


@BITS
def test_two_that_do_not_fit_together_both_finish_as_alone(llama: ModelForCausalLM, bits: int) -> None:
    drawn = SamplingParams(temperature=1, seed=3)
    requests = [Request(prompt(20, 1), 30), Request(prompt(20, 2), 30, sampling=drawn)]
    engine = make(llama, bits, page_size=4, ceilings=(15,))
    outputs = run(engine, requests)
    assert engine.preemptions > 0
    assert [ids(got) for got in outputs] == [ids(run(make(llama, bits), [request])[0]) for request in requests]


@BITS
def test_a_row_of_bad_numbers_ends_and_leaves_none(tmp_path: Path, bits: int) -> None:
    """Packing passes over NaN: a prompt with one in its middle would be answered as if nothing were wrong."""
    tensors = tiny.random_tensors(tiny.config(**PACKABLE))
    tensors["model.embed_tokens.weight"][99] = np.nan
    model = load_model(tiny.write_checkpoint(tmp_path, config_overrides=PACKABLE, tensors=tensors))
    for kv in ("paged", "dense"):
        engine = make(model, bits, kv=kv, page_size=4, prefill_chunk=8)
        with pytest.raises(NonFiniteLogitsError):
            engine.run([Request((*prompt(5), 99, *prompt(20)), 3)])
        arrays = [array for pool in engine.pools.pools for array in pool.flat if array.dtype != mx.uint32]
        assert all(bool(mx.isfinite(array).all().item()) for array in arrays)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layers", [2, 30])
def test_a_step_copies_no_packed_pool(tmp_path: Path, layers: int, compiled: bool) -> None:
    """Bytes of a decode step, not its time, in a pool of 12 pages and in one of 1,500."""
    overrides = {**PACKABLE, "num_hidden_layers": layers, "intermediate_size": 32}
    model = load_model(tiny.write_checkpoint(tmp_path, config_overrides=overrides))
    small, large = (
        bytes_of_steps(make(model, 8, page_size=16, compiled=compiled, max_rows=3), pages) for pages in (12, 1500)
    )
    # The scales of one layer, of two heads: many times what a thread that frees temporaries late adds to a peak.
    smallest_array = (1500 - 12) * 16 * 2 * 4
    assert large - small < smallest_array / 2, f"a step needs {small} bytes in a small pool, {large} in a large one"


# ---------------------------------------------------------------- plans


def plan_of(bits: int | None) -> MemoryPlan:
    config = Config.from_dict(tiny.config(**PACKABLE, max_position_embeddings=2**16))
    return make_plan(
        config, weight_bytes=2**20, itemsize=4, available_bytes=2**31, kv_bits=bits, kv_budget=2**22, name="tiny"
    )


@pytest.mark.parametrize(("bits", "head"), [(None, 128), (8, 40), (4, 24)])
def test_a_plan_counts_words_scales_and_biases(bits: int | None, head: int) -> None:
    made = plan_of(bits)
    assert made.token_bytes == 2 * 2 * 2 * head
    assert made.kv_bits == bits
    assert made.kinds[0].array_page_bytes == 128 * 2 * (128 if bits is None else 32 * bits // 8)
    [row] = [note for what, _, note in table(made) if what == "KV cache"]
    assert row.endswith(f"{made.token_bytes:,} bytes a token" + ("" if bits is None else f", packed to {bits} bits"))


def test_the_same_budget_holds_more_of_what_is_packed() -> None:
    plain, eight, four = (plan_of(bits).context for bits in (None, 8, 4))
    assert plain * 3 < eight < four


@BITS
def test_pages_take_what_the_plan_says(folder: Path, bits: int) -> None:
    engine = load_engine(read_contents(folder), EngineSettings(kv_bits=bits, compiled=False, kv_budget=2**20))
    [answer] = run(engine, [Request(prompt(200), 2)])
    assert engine.plan is not None
    [pool], [kind] = engine.pools.pools, engine.plan.kinds
    assert pool.page_bytes == kind.page_bytes
    assert answer[-1].kv_bytes == 2 * kind.page_bytes
    assert pool.arrays[0][0].nbytes == pool.pages * kind.array_page_bytes


def test_fault_38_a_model_that_cannot_be_packed_is_named_before_it_is_loaded(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "odd", config_overrides={"head_dim": 80})
    with pytest.raises(UnsupportedQuantizationError, match=r"^odd: keys and values of 80 elements .* --kv-bits out$"):
        load_engine(read_contents(folder), EngineSettings(kv_bits=8))
    with pytest.raises(UsageError, match="8 or 4 bits, not 3"):
        load_engine(read_contents(folder), EngineSettings(kv_bits=3))


# ---------------------------------------------------------------- prefixes on disk


def save(engine: Engine, folder: Path, path: Path) -> None:
    save_prefix(engine, prompt(30), path, Fingerprint.of(engine, folder))


def load(engine: Engine, folder: Path, path: Path) -> tuple[int, ...]:
    return load_prefix(engine, path, Fingerprint.of(engine, folder))


@BITS
def test_a_saved_prefix_is_answered_as_a_computed_one(folder: Path, tmp_path: Path, bits: int) -> None:
    model, path = load_model(folder), tmp_path / "saved"
    engine = make(model, bits)
    [cold] = run(engine, [Request(prompt(30), 9)])
    save(engine, folder, path)
    warm = make(model, bits)
    assert load(warm, folder, path) == prompt(30)
    [answer] = run(warm, [Request(prompt(30), 9)])
    assert (ids(answer), answer[-1].cached) == (ids(cold), 29)
    again = tmp_path / "again"
    save(warm, folder, again)
    assert again.read_bytes() == path.read_bytes()
    words = 2 * 2 * 30 * 2 * 32 * bits // 8
    assert path.stat().st_size < words * (1 + 8 / bits) + 6000  # and scales, biases and a header


@pytest.mark.parametrize(("made", "asked"), [(8, 4), (None, 8), (4, None)])
def test_other_bits_are_refused_by_name(folder: Path, tmp_path: Path, made: int | None, asked: int | None) -> None:
    model, path = load_model(folder), tmp_path / "saved"
    engine = make(model, made)
    run(engine, [Request(prompt(30), 1)])
    save(engine, folder, path)

    def said(bits: int | None) -> str:
        return "TinyKvPagedCache" + ("" if bits is None else f", packed to {bits} bits")

    with pytest.raises(PrefixFileError, match=f"made with cache {said(made)}, and this is {said(asked)}: delete it"):
        load(make(model, asked), folder, path)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("name", ["layers.1.keys.scales", "layers.0.values.biases"])
def test_a_file_that_unpacks_to_what_is_not_finite_is_refused(
    folder: Path, tmp_path: Path, name: str, value: float
) -> None:
    model, path = load_model(folder), tmp_path / "saved"
    engine = make(model, 8)
    run(engine, [Request(prompt(30), 1)])
    save(engine, folder, path)
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    begin, end = json.loads(content[8:start])[name]["data_offsets"]
    array = np.frombuffer(content[start + begin : start + end], np.float32) * 0 + np.float32(value)
    content[start + begin : start + end] = array.astype(np.float32).tobytes()
    path.write_bytes(content)
    if name.endswith("biases") and np.isfinite(value):
        load(make(model, 8), folder, path)  # large, and nothing that arithmetic cannot hold
        return
    with pytest.raises(PrefixFileError, match="it holds inf or NaN"):
        load(make(model, 8), folder, path)
