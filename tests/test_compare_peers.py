"""scripts/compare_peers.py: counts are held, what cannot run is said, and mlx-lm gets a theta that it reads."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import tiny

from tinyllm.engine.request import Output, TokenLogprobs

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module("compare_peers")


@pytest.fixture(scope="module")
def worker(script: ModuleType) -> ModuleType:
    return importlib.import_module("peer_worker")


def test_an_engine_that_stops_early_is_no_measurement(worker: ModuleType) -> None:
    first, rest = worker.timed(iter(range(9)), 8)
    assert first >= 0 and rest >= 0
    with pytest.raises(RuntimeError, match="7 tokens came, not 8"):
        worker.timed(iter(range(8)), 8)


def test_what_agrees_is_the_same_or_near(worker: ModuleType) -> None:
    def tokens(*ids: int, gap: float = 0.5) -> list[Output]:
        return [Output(1, i, 0.0, logprobs=TokenLogprobs(-1.0, ((i, -1.0), (9, -1.0 - gap)))) for i in ids]

    assert worker.agree(tokens(1, 2), tokens(1, 2))
    assert not worker.agree(tokens(1, 2), tokens(1, 3))
    assert worker.agree(tokens(1, 2, gap=0.0009), tokens(1, 3))


def test_a_second_turn_finds_the_first_and_a_crowd_finishes_as_alone(
    worker: ModuleType, tiny_checkpoint: Path
) -> None:
    turns = {"history": 140, "answer": 4, "message": 6, "repetitions": 2}
    found = worker.measure_turns(str(tiny_checkpoint), turns)
    assert (found["tokens"], found["cached"]) == (150, 143)  # the last token of an answer is never computed
    assert len(found["warm_s"]) == len(found["cold_s"]) == 2
    crowd = {"requests": 8, "prefix": 130, "own": 20, "answer": 3, "share": 0.5}
    found = worker.measure_crowd(str(tiny_checkpoint), crowd)
    assert found["finished"] == found["agree"] == 8
    assert found["pages"] == found["dense_pages"] // 2


def test_a_whole_run_with_one_peer_writes_what_it_measured(
    script: ModuleType, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "REST_S", 0)
    monkeypatch.setattr(script, "BATCHES", (1, 2))
    monkeypatch.setattr(script, "PAGES", ((["-p", "0", "-n", "2", "-d", "8", "-b", "2"], "scattered,dense"),))
    monkeypatch.setattr(script, "TURNS", {"history": 140, "answer": 4, "message": 6})
    monkeypatch.setattr(script, "CROWD", {"requests": 4, "prefix": 130, "own": 9, "answer": 2, "share": 0.7})
    installed = script.Peer("tinyllm", "tinyllm")
    tuned = script.Peer("tinyllm, OpenBLAS", "tinyllm", {"dtype": "float32"}, batches=(1, 2), tuned=True)
    runners = [script.Runner(peer, sys.executable, tiny_checkpoint) for peer in (installed, tuned)]
    arguments = argparse.Namespace(prompt=8, generate=4, start_prompt=12, repetitions=1, model=tiny_checkpoint)
    script.measure(runners, arguments)
    counts = {name: len(values) for name, values in runners[1].values.items()}
    names = ("prefill x 1", "decode x 1", "prefill x 2", "decode x 2")
    assert counts == dict.fromkeys(("start", "import", "peak", *names), 1)
    commands = script.measure_commands(runners, arguments)
    pages = importlib.import_module("peer_page")
    peers = pages.peers_part(runners, {"mlx-lm": "no wheel for this machine"}, commands, arguments)
    assert "- mlx-lm could not be run: no wheel for this machine." in peers
    assert "prefill 8 tokens, t/s" in peers and "decode 4 tokens after them, t/s" in peers
    assert pages.figure(runners[1].values["decode x 2"]) in peers and pages.figure(commands["tinyllm"]) in peers
    alone = script.Alone(sys.executable, tiny_checkpoint, 1)
    assert "| tg2 @ d8 |     2 | scattered |" in alone.pages()
    assert "4 finished, 4 of them with the ids that they have alone" in alone.reuse()
    assert "| cache write " in alone.step()


def test_a_part_that_is_measured_again_leaves_the_others(script: ModuleType, tmp_path: Path) -> None:
    module = importlib.import_module("benchmark_page")
    page = tmp_path / "page.md"
    module.write_parts(page, {"step": "a step", "pages": "pages \\1"})
    assert page.read_text().startswith("# Benchmarks\n")
    module.write_parts(page, {"step": "another step"})
    text = page.read_text()
    assert "a step" not in text and text.index("pages \\1") < text.index("another step")
    module.write_parts(page, {})
    assert page.read_text() == text
    assert "load average 1.5" in module.measured_on(1.5) and "MKL" in module.measured_on(0, "MKL")


def test_a_peer_that_dies_says_why(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="there is no such file"):
        script.Runner(script.Peer("tinyllm", "tinyllm"), sys.executable, tmp_path / "nothing").measure_start([0])


def test_an_environment_that_cannot_be_made_says_why(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama.cpp").write_text("a file in its place")
    with pytest.raises(RuntimeError, match=r"llama\.cpp"):
        script.python_of("llama.cpp", "llama.cpp", tmp_path)
    assert script.python_of("tinyllm", "tinyllm", tmp_path) == sys.executable


def test_what_is_the_same_for_all_is_said_in_their_settings(script: ModuleType) -> None:
    mkl = {peer.title: peer for peer in script.peers(100, "mkl", "/lib/libmkl_rt.so.3")}
    assert mkl["tinyllm, MKL"].env == "tinyllm-mkl"
    assert mkl["mlx-lm, MKL"].settings == {"dtype": "float32", "blas": "/lib/libmkl_rt.so.3"}
    assert mkl["tinyllm, MKL"].batches == mkl["mlx-lm, MKL"].batches == (1, 4, 8)
    openblas = {peer.title: peer for peer in script.peers(100, "openblas", None)}
    assert openblas["tinyllm, OpenBLAS"].env == "tinyllm"
    assert openblas["mlx-lm, OpenBLAS"].settings["blas"] == "openblas"
    on_a_mac = {peer.title: peer for peer in script.peers(100, None, None)}
    assert on_a_mac["tinyllm"].batches == on_a_mac["mlx-lm"].batches == (1, 4, 8)
    assert not any(peer.tuned for peer in on_a_mac.values())


def test_mlx_lm_is_given_a_top_level_theta(script: ModuleType, tmp_path: Path) -> None:
    rope = {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    model = tiny.write_checkpoint(tmp_path / "model", config_overrides=rope)
    copy = script.checkpoint_of("mlx-lm", model, None, tmp_path)
    assert json.loads((copy / "config.json").read_text())["rope_theta"] == 7.0
    assert (copy / "model.safetensors").resolve() == model / "model.safetensors"
    plain = tiny.write_checkpoint(tmp_path / "plain")
    assert script.checkpoint_of("mlx-lm", plain, None, tmp_path) == plain
    assert script.checkpoint_of("transformers", model, None, tmp_path) == model
    with pytest.raises(RuntimeError, match="--gguf"):
        script.checkpoint_of("llama.cpp", model, None, tmp_path)
