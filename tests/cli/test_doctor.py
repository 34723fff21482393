"""`tinyllm doctor`: it agrees where the machine computes right, and fails where a number is wrong."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from golden_cases import GOLDEN
from typer.testing import CliRunner, Result

from tinyllm import doctor
from tinyllm._mx import mx
from tinyllm.cli.app import app
from tinyllm.config.config import Config
from tinyllm.engine.engine import Engine
from tinyllm.engine.request import Output
from tinyllm.model.load import load_model

LOGITS = 6  # in float32 and the stored dtype: fused, reference, and paged
CHECKS = len(doctor.GOLDEN) * (LOGITS + 3)  # and the ids of three engines


@pytest.fixture(autouse=True)
def no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")  # set by the command, and undone after the test
    monkeypatch.setattr("tinyllm.hub.locate.models_folder", lambda: tmp_path / "models")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_this_machine_computes_right() -> None:
    done = run("--json")
    assert (done.exit_code, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert {"tinyllm", "mlx", "chip", "backend", "blas", "memory_bytes"} <= report["machine"].keys()
    assert report["folders"].keys() == {"models folder", "hub cache"}
    assert "tokenizers" in report["packages"]
    checks = report["checks"]
    assert len(checks) == CHECKS and all(check["agrees"] for check in checks)
    assert {(check["dtype"], check["way"]) for check in checks} >= {
        *(("float32", way) for way in ("fused", "reference", "fused, paged")),
        *(("bfloat16", way) for way in ("fused", "reference", "fused, paged")),
        *(("float32", way) for way in ("eager steps", "compiled steps", "steps of a batch")),
    }


def break_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    shutil.copytree(doctor.DATA, data)
    monkeypatch.setattr(doctor, "DATA", data)
    weights = mx.load(str(data / "qwen3" / "model.safetensors"))
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.5
    mx.save_safetensors(str(data / "qwen3" / "model.safetensors"), weights)


def test_a_wrong_number_is_shown_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_one(tmp_path, monkeypatch)
    done = run()
    assert done.exit_code == 1
    assert done.stderr == f"tinyllm: {LOGITS} of {CHECKS} checks disagree on this machine: please report it\n"
    rows = [line for line in done.stdout.splitlines() if line.startswith("| WRONG")]
    assert len(rows) == LOGITS and all("qwen3" in row for row in rows)


def test_what_a_kernel_raises_is_part_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("no kernel named rope_half")

    monkeypatch.setattr(doctor, "load_model", broken)
    done = run()
    assert done.exit_code == 1
    assert done.stdout.count("RuntimeError: no kernel named rope_half") == CHECKS


def test_a_fault_in_the_steps_after_a_prompt_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class WrongSteps:
        def __init__(self, *arguments: object, **options: object) -> None:
            self._model = load_model(*arguments, **options)
            self.create_kv_cache = self._model.create_kv_cache

        def __call__(self, ids: mx.array, *arguments: object) -> mx.array:
            logits = self._model(ids, *arguments)
            return logits + 1 if ids.shape[1] == 1 else logits

    monkeypatch.setattr(doctor, "load_model", WrongSteps)
    checks = [check for check in doctor.check_golden("mistral") if "steps" not in check.way]
    assert len(checks) == LOGITS and not any(check.agrees for check in checks)


def wrong_tokens(monkeypatch: pytest.MonkeyPatch, *, compiled: bool, gap: float) -> None:
    """Have steps that are compiled, or not, choose another token, where the two best logits are `gap` apart."""

    class Wrong(Engine):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._wrong = options.get("compiled", True) == compiled and options.get("kv") != "dense"

        def step(self) -> list[Output]:
            return [self._changed(output) for output in super().step()]

        def _changed(self, output: Output) -> Output:
            assert output.logprobs is not None and output.token_id is not None
            (best, value), (second, _) = output.logprobs.top
            near = replace(output.logprobs, top=((best, value), (second, value - gap)))
            return replace(output, token_id=output.token_id + self._wrong, logprobs=near)

    monkeypatch.setattr(doctor, "Engine", Wrong)


@pytest.mark.parametrize("compiled", [False, True])
def test_other_ids_of_one_way_to_run_are_wrong(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    wrong_tokens(monkeypatch, compiled=compiled, gap=0.5)
    wrong = [check.way for check in doctor.check_golden("qwen3") if not check.agrees]
    assert wrong == (["compiled steps", "steps of a batch"] if compiled else ["eager steps"])


def test_other_ids_where_two_logits_are_as_good_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_tokens(monkeypatch, compiled=False, gap=0.0009)
    checks = {check.way: check for check in doctor.check_golden("qwen3")}
    assert checks["eager steps"].agrees and checks["eager steps"].difference == pytest.approx(0.0009)


def test_another_model_s_answers_are_wrong(tiny_checkpoint: Path) -> None:
    check = doctor.check_model(tiny_checkpoint)
    assert not check.agrees
    assert check.error is not None and check.error.startswith("TokenizerError")


@pytest.mark.real_model
def test_the_embedded_model_answers_as_recorded(real_model: Path) -> None:
    assert doctor.check_model(real_model) == doctor.Check(real_model.name, "float32", "answers", 0, 0)


@pytest.mark.real_model
def test_one_other_id_would_show(real_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.loads((doctor.DATA / "real_model.json").read_text())
    answer = min(record["answers"], key=lambda answer: len(answer["prompt_ids"]) + len(answer["ids"]))
    answer["ids"][-1] += 1
    (tmp_path / "real_model.json").write_text(json.dumps({"answers": [answer]}))
    monkeypatch.setattr(doctor, "DATA", tmp_path)
    assert doctor.check_model(real_model).difference == 1


def test_nan_is_no_agreement() -> None:
    assert not doctor.Check("x", "float32", "fused", float("nan"), 1.0).agrees
    assert doctor.Check("x", "float32", "fused", 1.0, 1.0).agrees


def test_packaged_checkpoints_are_the_golden_ones_and_small() -> None:
    files = [path for path in doctor.DATA.rglob("*") if path.is_file()]
    for path in files:
        assert path.read_bytes() == (GOLDEN / path.relative_to(doctor.DATA)).read_bytes(), path
    assert sum(path.stat().st_size for path in files) < 400_000
    assert {Config.from_json_file(doctor.DATA / name).model_type for name in doctor.GOLDEN} == {
        *("llama", "mistral", "qwen2", "qwen3")
    }
