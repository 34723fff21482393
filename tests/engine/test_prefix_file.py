"""A prompt from a file is answered as one that was computed; a file of anything else is refused by name."""

from __future__ import annotations

import json
import os
import random
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from safetensors import safe_open

from tinyllm._mx import mx
from tinyllm.engine.engine import Engine
from tinyllm.engine.prefix_file import Fingerprint, load_prefix, save_prefix
from tinyllm.engine.request import Output, Request, SamplingParams
from tinyllm.errors import PrefixFileError, UsageError
from tinyllm.model.load import load_model

SIZE = 8
WINDOWS = {
    "model_type": "qwen2",
    "use_sliding_window": True,
    "sliding_window": 12,
    "max_window_layers": 1,
    "num_hidden_layers": 3,
}
ONLY_WINDOWS = {"model_type": "mistral", "sliding_window": 12}
MODELS: Mapping[str, dict[str, Any]] = {"llama": {}, "windows and none": WINDOWS, "only windows": ONLY_WINDOWS}
SAMPLED = SamplingParams(temperature=1.2, top_k=40, seed=5, repetition_penalty=1.3)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(40, 130), k=length))


def make(folder: Path, *, dtype: mx.Dtype = mx.float32, **settings: Any) -> Engine:
    return Engine(load_model(folder, dtype=dtype), **{"page_size": SIZE, "compiled": False, **settings})


def answer(engine: Engine, request: Request) -> tuple[list[int], int]:
    """Run a request alone: its ids, and how many tokens of its prompt were there already."""
    engine.add(request)
    outputs: list[Output] = []
    while engine.has_work:
        outputs += engine.step()
        engine.scheduler.check_invariants()
    return [output.token_id for output in outputs if output.token_id is not None], outputs[-1].cached


def save(engine: Engine, folder: Path, path: Path, text: tuple[int, ...]) -> int:
    return save_prefix(engine, text, path, Fingerprint.of(engine, folder))


def load(engine: Engine, folder: Path, path: Path) -> tuple[int, ...]:
    return load_prefix(engine, path, Fingerprint.of(engine, folder))


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, np.ndarray]], object]) -> None:
    """Write a file again with a changed header or data, its offsets made right."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    metadata, types = header.pop("__metadata__"), {"I32": np.int32, "F32": np.float32}
    tensors = {}
    for name, entry in header.items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(content[begin:end], types[entry["dtype"]]).reshape(entry["shape"]).copy()
    change(metadata, tensors)
    header, position, blobs = {"__metadata__": metadata}, 0, []
    for name, array in tensors.items():
        end = position + array.nbytes
        kind = "I32" if array.dtype == np.int32 else "F32"
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [position, end]}
        position = end
        blobs.append(array.tobytes())
    tiny.write_raw_safetensors(path, json.dumps(header).encode(), blobs)


@pytest.fixture(scope="module", params=MODELS, ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model"), config_overrides=MODELS[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def saved(llama: Path, tmp_path: Path) -> Path:
    """The first 30 tokens of prompts, by the llama."""
    engine, path = make(llama), tmp_path / "saved"
    answer(engine, Request(prompt(30), 1))
    assert save(engine, llama, path, prompt(30)) == 30
    return path


@pytest.mark.parametrize("length", [1, 5, 8, 30, 64])
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_warm_ids_equal_cold_ones(folder: Path, tmp_path: Path, length: int, sampling: SamplingParams) -> None:
    engine, path, text = make(folder), tmp_path / "saved", prompt(length)
    again, further = Request(text, 12, sampling=sampling), Request((*text, *prompt(9, 1)), 12, sampling=sampling)
    cold, _ = answer(engine, again)
    assert save(engine, folder, path, text) == length
    for request, hit in ((again, length - 1), (further, length)):
        warm = make(folder)
        assert load(warm, folder, path) == text
        warm.scheduler.check_invariants()
        ids, cached = answer(warm, request)
        assert cached == hit
        assert ids == (cold if request is again else answer(make(folder), request)[0])


def test_a_prompt_goes_on_from_where_it_parts_in_the_middle_of_a_page(folder: Path, tmp_path: Path) -> None:
    engine, path = make(folder), tmp_path / "saved"
    answer(engine, Request(prompt(30), 3))
    save(engine, folder, path, prompt(30))
    request = Request((*prompt(30)[:27], *prompt(6, 4)), 10)
    warm = make(folder)
    load(warm, folder, path)
    ids, cached = answer(warm, request)
    assert cached == 27
    assert ids == answer(make(folder), request)[0]


def test_a_prompt_is_saved_while_its_answer_is_made(folder: Path, tmp_path: Path) -> None:
    engine, path, request = make(folder), tmp_path / "saved", Request(prompt(29), 20)
    engine.add(request)
    outputs = engine.step()
    assert outputs[-1].token_id is not None and engine.has_work
    assert save(engine, folder, path, request.prompt_ids) == 29
    while engine.has_work:
        outputs += engine.step()
    warm = make(folder)
    load(warm, folder, path)
    assert answer(warm, request) == ([output.token_id for output in outputs], 28)


@pytest.mark.parametrize("overrides", [WINDOWS, ONLY_WINDOWS], ids=["windows and none", "only windows"])
def test_pages_that_a_window_has_passed_and_that_were_evicted_are_left_out(
    overrides: dict[str, Any], tmp_path: Path
) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model", config_overrides=overrides)
    kinds = 1 if overrides is ONLY_WINDOWS else 2
    engine, path = make(folder, prefill_chunk=8, ceilings=(30, 6)[-kinds:]), tmp_path / "saved"
    request = Request(prompt(100), 5)
    cold, _ = answer(engine, request)
    save(engine, folder, path, prompt(100))
    with safe_open(path, "np") as file:
        held = {file.get_slice(f"layers.{n}.keys").get_shape()[1] for n in range(2)}
    assert min(held) < 50 and (kinds == 1 or max(held) == 100)
    for settings in ({}, {"prefill_chunk": 8, "ceilings": (30, 6)[-kinds:]}):
        warm = make(folder, **settings)
        assert load(warm, folder, path) == prompt(100)
        warm.scheduler.check_invariants()
        assert answer(warm, request) == (cold, 99)
        early = Request(prompt(100)[:40], 5)  # sees pages that are not in the file
        assert answer(warm, early) == (answer(make(folder), early)[0], 0)


def test_half_precision_is_kept_bit_by_bit(tmp_path: Path, llama: Path) -> None:
    for dtype in (mx.bfloat16, mx.float16):
        engine, path = make(llama, dtype=dtype), tmp_path / str(dtype)
        cold = answer(engine, Request(prompt(20), 3))[0]
        save(engine, llama, path, prompt(20))
        warm = make(llama, dtype=dtype)
        load(warm, llama, path)
        assert answer(warm, Request(prompt(20), 3)) == (cold, 19)
        pools = [e.pools.pools[0] for e in (engine, warm)]
        pages = [e.pools.manager.known(prompt(20))[0] for e in (engine, warm)]
        for layer in range(2):
            (ours, _), (theirs, _) = (
                pool.read(layer, [page for (page,) in held], 0, 19) for pool, held in zip(pools, pages, strict=True)
            )
            assert mx.array_equal(ours.view(mx.uint16), theirs.view(mx.uint16))


def test_a_file_is_loaded_beside_requests_that_run(llama: Path, saved: Path) -> None:
    engine, request = make(llama), Request(prompt(21, 7), 15)
    alone = answer(make(llama), request)[0]
    engine.add(request)
    outputs = engine.step()
    assert load(engine, llama, saved) == prompt(30)
    while engine.has_work:
        outputs += engine.step()
        engine.scheduler.check_invariants()
    assert [output.token_id for output in outputs] == alone
    assert answer(engine, Request(prompt(30), 4)) == (answer(make(llama), Request(prompt(30), 4))[0], 29)


def test_copies_that_wait_are_done_before_their_pages_can_be_taken(llama: Path, saved: Path) -> None:
    engine, text = make(llama), prompt(12, 7)
    answer(engine, Request(text, 1))
    manager = engine.pools.manager
    going_on = manager.open((*text[:10], 50, 51))
    assert going_on.length == 10 and manager.reserve(going_on, 12)
    [_, page], [source, *_] = going_on.by_kind[0].pages, manager.known(text)[0][1]
    assert page != source
    load(engine, llama, saved)
    assert manager.take_copies() == []
    (ours, _), (theirs, _) = (engine.pools.pools[0].read(1, [one], 0, 2) for one in (page, source))
    assert mx.array_equal(ours, theirs) and mx.any(ours != 0)


def test_what_the_cache_has_room_for_is_loaded(llama: Path, saved: Path) -> None:
    engine = make(llama, ceilings=(4,))  # three pages, and one for padding
    assert load(engine, llama, saved) == prompt(30)[:24]
    request = Request(prompt(20), 4)
    assert answer(engine, request) == (answer(make(llama), request)[0], 19)


def test_no_room_at_all_is_refused(llama: Path, saved: Path) -> None:
    engine = make(llama, ceilings=(4,))
    engine.add(Request(prompt(23, 1), 2))
    engine.step()
    with pytest.raises(PrefixFileError, match="no room for its 30 tokens"):
        load(engine, llama, saved)


def test_a_file_is_its_owners_alone_and_safetensors_reads_it(llama: Path, saved: Path) -> None:
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    assert list(saved.parent.iterdir()) == [saved]
    with safe_open(saved, "np") as file:
        assert tuple(file.get_tensor("tokens").tolist()) == prompt(30)
        assert file.get_tensor("layers.1.values").shape == (2, 30, 8)
        assert file.metadata()["format"] == "tinyllm prefix"


def test_what_cannot_be_written_leaves_nothing(llama: Path, tmp_path: Path) -> None:
    engine, path = make(llama), tmp_path / "taken"
    path.mkdir()
    with pytest.raises(PrefixFileError, match="nothing of the prompt is computed"):
        save(engine, llama, path, prompt(30))
    answer(engine, Request(prompt(30), 1))
    with pytest.raises(PrefixFileError, match=r"taken: not written: .*directory"):
        save(engine, llama, path, prompt(30))
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(PrefixFileError, match="not written: No such file"):
        save(engine, llama, tmp_path / "nowhere" / "saved", prompt(30))


@pytest.mark.parametrize("settings", [{"kv": "dense"}, {"share": False}])
def test_an_engine_that_shares_nothing_refuses(llama: Path, saved: Path, settings: dict[str, Any]) -> None:
    engine = make(llama, **settings)
    answer(engine, Request(prompt(30), 1))
    for do in (lambda: save(engine, llama, saved, prompt(30)), lambda: load(engine, llama, saved)):
        with pytest.raises(UsageError, match="only where prefixes are shared"):
            do()


OTHERS: Mapping[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "dtype": ({}, {"dtype": mx.bfloat16}, "made with dtype float32, and this is bfloat16"),
    "page size": ({}, {"page_size": 16}, "made with page size 8, and this is 16"),
    "theta": (
        {"config_overrides": {"rope_theta": 20000.0}},
        {},
        r"made with rope RopeConfig\(dims=8, theta=10000.0, .* and this is RopeConfig\(dims=8, theta=20000.0",
    ),
    "config": ({"config_overrides": {"rms_norm_eps": 1e-6}}, {}, "made with config .* and this is"),
    "weights": ({"seed": 1}, {}, "made with weights .* and this is"),
}


@pytest.mark.parametrize("checkpoint, settings, told", OTHERS.values(), ids=OTHERS.keys())
def test_fault_42_what_was_made_with_something_else_is_refused_by_name(
    checkpoint: dict[str, Any], settings: dict[str, Any], told: str, saved: Path, tmp_path: Path
) -> None:
    folder = tiny.write_checkpoint(tmp_path / "other", **checkpoint)
    engine = make(folder, **settings)
    with pytest.raises(PrefixFileError, match=told):
        load(engine, folder, saved)
    assert engine.pools.manager.known(prompt(30)) == ([], 0)


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"version": "2"}, "made with version 2, and this is 1"),
        ({"cache": "os.system"}, "made with cache os.system, and this is TinyKvPagedCache"),
        ({"cache": {"a": []}}, "damaged, or not a prefix that tinyllm saved"),
        ({"dtype": "x" * 9999}, r"made with dtype x{200}\.\.\., and"),
        ({"format": "mlx"}, "not a prefix that tinyllm saved"),
        ({"zoom": "2"}, "made with zoom, which is unknown"),
    ],
)
def test_fault_42_metadata_that_is_not_known_is_refused_by_name(
    llama: Path, saved: Path, metadata: dict[str, Any], told: str
) -> None:
    rewrite(saved, lambda known, tensors: known.update(metadata))
    with pytest.raises(PrefixFileError, match=told):
        load(make(llama), llama, saved)


def damages() -> Iterator[tuple[str, Callable[[dict[str, np.ndarray]], object], str]]:
    def put(name: str, at: tuple[int, ...], value: float) -> Callable[[dict[str, np.ndarray]], object]:
        return lambda tensors: tensors[name].__setitem__(at, value)

    yield "NaN", put("layers.1.keys", (1, 29, 3), np.nan), "inf or NaN"
    yield "inf", put("layers.0.values", (0, 0, 0), np.inf), "inf or NaN"
    yield "a large token", put("tokens", (4,), 288), "not of the model's 288"
    yield "a negative token", put("tokens", (4,), -1), "not of the model's 288"
    yield "no tokens", lambda t: t.update(tokens=t["tokens"][:0]), "no tokens"
    yield "no list of tokens", lambda t: t.update(tokens=t["tokens"].reshape(2, 15)), "damaged"
    yield "a layer less", lambda t: t.pop("layers.1.keys"), "layers.1.keys"
    yield "a layer more", lambda t: t.update({"layers.2.keys": t["layers.1.keys"]}), "layers.2.keys"
    yield "fewer heads", lambda t: t.update({"layers.1.keys": t["layers.1.keys"][:1]}), "layers.1.keys"
    yield "another type", lambda t: t.update({"layers.1.keys": t["layers.1.keys"].astype(np.int32)}), "layers.1.keys"
    yield "fewer in a layer", lambda t: t.update({"layers.1.keys": t["layers.1.keys"][:, 8:]}), "layers.1.keys"
    yield (
        "fewer in all layers",
        lambda t: t.update({name: array[:, 8:] for name, array in t.items() if name != "tokens"}),
        "lacks keys and values",
    )


@pytest.mark.parametrize(("damage", "told"), [pytest.param(do, told, id=what) for what, do, told in damages()])
def test_a_damaged_file_is_refused_and_leaves_nothing(
    llama: Path, saved: Path, damage: Callable[[dict[str, np.ndarray]], object], told: str
) -> None:
    rewrite(saved, lambda metadata, tensors: None)
    assert load(make(llama), llama, saved) == prompt(30)
    rewrite(saved, lambda metadata, tensors: damage(tensors))
    engine = make(llama)
    with pytest.raises(PrefixFileError, match=told) as caught:
        load(engine, llama, saved)
    assert str(caught.value).startswith(f"{saved}: damaged, ")
    engine.scheduler.check_invariants()
    assert engine.pools.manager.known(prompt(30)) == ([], 0)
    assert answer(engine, Request(prompt(30), 4)) == answer(make(llama), Request(prompt(30), 4))


@pytest.mark.parametrize("first", [-8, 4, 16, 24])
def test_a_window_must_have_what_it_sees(first: int, tmp_path: Path) -> None:
    """At 30 positions, a window of 12 begins in the page from 16 on."""
    folder = tiny.write_checkpoint(tmp_path / "model", config_overrides=ONLY_WINDOWS)
    engine, path = make(folder), tmp_path / "saved"
    request = Request(prompt(30), 6)
    cold, _ = answer(engine, request)
    save(engine, folder, path, prompt(30))

    def cut(metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        for name in set(tensors) - {"tokens"}:
            tensors[name] = np.pad(tensors[name], ((0, 0), (max(0, -first), 0), (0, 0)))[:, max(0, first) :]

    rewrite(path, cut)
    warm = make(folder)
    if first == 16:
        assert load(warm, folder, path) == prompt(30)
        assert answer(warm, request) == (cold, 29)
        return
    with pytest.raises(PrefixFileError, match="lacks keys and values"):
        load(warm, folder, path)


def test_a_cut_file_is_refused_wherever_it_is_cut(llama: Path, saved: Path) -> None:
    content, engine = saved.read_bytes(), make(llama)
    fingerprint = Fingerprint.of(engine, llama)
    draw = random.Random(0)
    for length in [*range(12), *(draw.randrange(len(content)) for _ in range(150)), len(content) - 1]:
        saved.write_bytes(content[:length])
        with pytest.raises(PrefixFileError, match="damaged, or not a prefix"):
            load_prefix(engine, saved, fingerprint)
    engine.scheduler.check_invariants()


def test_a_flipped_byte_of_the_header_is_refused_or_changes_nothing(llama: Path, saved: Path) -> None:
    content, engine = saved.read_bytes(), make(llama)
    fingerprint = Fingerprint.of(engine, llama)
    header = 8 + int.from_bytes(content[:8], "little")
    draw = random.Random(1)
    refused = 0
    for _ in range(200):
        place = draw.randrange(header)
        changed = bytes([content[place] ^ (1 << draw.randrange(8))])
        saved.write_bytes(content[:place] + changed + content[place + 1 :])
        try:
            assert load_prefix(engine, saved, fingerprint) == prompt(30)
        except PrefixFileError:
            refused += 1
    assert refused > 150


@pytest.mark.parametrize("kind", ["absent", "a folder", "a pipe", "unreadable"])
def test_what_is_no_file_is_refused(llama: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "thing"
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "unreadable":
        path.write_bytes(b"x" * 99)
        path.chmod(0)
    with pytest.raises(PrefixFileError, match=str(path)):
        load(make(llama), llama, path)


def test_the_digest_of_weights_sees_every_tensor_and_no_shards(llama: Path, tmp_path: Path) -> None:
    tensors = tiny.random_tensors(tiny.config())
    engine = make(llama)
    digest = Fingerprint.of(engine, llama)
    sharded = tiny.write_checkpoint(tmp_path / "sharded", tensors=tensors, shards=3)
    assert Fingerprint.of(engine, sharded) == digest
    for name in tensors:
        for place in (0, -1):
            changed = tensors[name].copy()
            changed.flat[place] += 1
            other = tiny.write_checkpoint(tmp_path / "other", tensors={**tensors, name: changed})
            assert replace(Fingerprint.of(engine, other), weights=digest.weights) == digest
            assert Fingerprint.of(engine, other) != digest
