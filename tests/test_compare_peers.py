"""scripts/compare_peers.py: counts are held, what cannot run is said, and mlx-lm gets a theta that it reads."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import tiny

SCRIPT = Path(__file__).parent.parent / "scripts" / "compare_peers.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_peers", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare_peers"] = module
    spec.loader.exec_module(module)
    return module


def test_an_engine_that_stops_early_is_no_measurement(script: ModuleType) -> None:
    first, rest = script.timed(iter(range(9)), 8)
    assert first >= 0 and rest >= 0
    with pytest.raises(RuntimeError, match="7 tokens came, not 8"):
        script.timed(iter(range(8)), 8)


def test_a_whole_run_with_one_peer_writes_what_it_measured(script: ModuleType, tiny_checkpoint: Path) -> None:
    runner = script.Runner(script.Peer("tinyllm", "tinyllm"), sys.executable, tiny_checkpoint)
    arguments = argparse.Namespace(prompt=[8, 40], generate=4, repetitions=2, model=tiny_checkpoint)
    script.REST_S = 0
    script.measure([runner], arguments)
    counts = {name: len(values) for name, values in runner.values.items()}
    assert counts == {"start": 2, "import": 2, "prefill 8": 2, "prefill 40": 2, "decode": 2, "peak": 1}
    page = script.write_page([runner], {"mlx-lm, as installed": "no wheel for this machine"}, arguments, load=1.5)
    assert "- mlx-lm, as installed could not be run: no wheel for this machine." in page
    assert "decode 4 tokens after 8, t/s" in page and "load average was 1.5" in page
    assert script.figure(runner.values["decode"]) in page


def test_a_peer_that_dies_says_why(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="there is no such file"):
        script.Runner(script.Peer("tinyllm", "tinyllm"), sys.executable, tmp_path / "nothing").measure_start([0])


def test_an_environment_that_cannot_be_made_says_why(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama.cpp").write_text("a file in its place")
    with pytest.raises(RuntimeError, match=r"llama\.cpp"):
        script.python_of("llama.cpp", tmp_path)
    assert script.python_of("tinyllm", tmp_path) == sys.executable


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
