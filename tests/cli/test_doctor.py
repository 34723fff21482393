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
from tinyllm.engine.request import Output, Request
from tinyllm.model.load import load_model
from tinyllm.ops.attention import attention_reference
from tinyllm.ops.features import ModelFeatures

LONG_KEYS = ("1,100", "9,000")
LOGITS = 6  # in float32 and the stored dtype: fused, reference, and paged
LONG = len(doctor.LONG) * 9 + 2  # attention in three dtypes, in three ways; and the ids of two engines
CHECKS = len(doctor.GOLDEN) * (LOGITS + 3) + LONG  # and the ids of three engines


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
    assert report["verdict"] == (
        f"All right: {CHECKS} of {CHECKS} checks agree, so this machine computes the right numbers."
    )
    assert {"tinyllm", "mlx", "chip", "backend", "blas", "memory_bytes"} <= report["machine"].keys()
    assert report["folders"].keys() == {"models folder", "hub cache"}
    assert "tokenizers" in report["packages"]
    checks = report["checks"]
    assert len(checks) == CHECKS and all(check["agrees"] for check in checks)
    assert {(check["dtype"], check["way"]) for check in checks} >= {
        *(("float32", way) for way in ("fused", "reference", "fused, paged")),
        *(("bfloat16", way) for way in ("fused", "reference", "fused, paged")),
        *(("float32", way) for way in ("eager steps", "compiled steps", "steps of a batch")),
        *((dtype, f"1 query, {keys} keys") for dtype in ("float32", "float16", "bfloat16") for keys in LONG_KEYS),
        ("float32", "compiled steps, 1,100 keys"),
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
    assert done.stdout.splitlines()[0] == (
        f"Wrong: {LOGITS} of {CHECKS} checks disagree (fused in float32; reference in float32; fused, paged in"
        " float32; and 3 more). Please report it with the text below."
    )
    rows = [line for line in done.stdout.splitlines() if line.startswith("| WRONG")]
    assert len(rows) == LOGITS and all("qwen3" in row for row in rows)


def test_what_a_kernel_raises_is_part_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("no kernel named rope_half")

    for name in ("load_model", "open_model", "attention"):
        monkeypatch.setattr(doctor, name, broken)
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
    assert doctor.check_model(real_model) == doctor.Check(real_model.name, "float32", "answers", 0, 1e-3)


@pytest.mark.real_model
def test_one_other_id_would_show(real_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.loads((doctor.DATA / "real_model.json").read_text())
    answer = min(record["answers"], key=lambda answer: len(answer["prompt_ids"]) + len(answer["ids"]))
    answer["ids"][-1] += 1
    (tmp_path / "real_model.json").write_text(json.dumps({"answers": [answer]}))
    monkeypatch.setattr(doctor, "DATA", tmp_path)
    check = doctor.check_model(real_model)
    assert not check.agrees and check.difference > 1e-3


def answers_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, *, gap: float) -> doctor.Check:
    """Record an answer of which one token is the second best, `gap` below the best."""
    engine = Engine(load_model(folder, dtype=mx.float32))
    request = Request((5, 6, 7), 4, logprobs=2)
    ids = [output.token_id for output in engine.run([request])[0]]

    class Near(Engine):
        def step(self) -> list[Output]:
            return [self._changed(output) for output in super().step()]

        def _changed(self, output: Output) -> Output:
            assert output.logprobs is not None and output.token_id is not None
            top = ((output.token_id, -1.0), (output.token_id + 1, -1.0 - gap))
            return replace(output, logprobs=replace(output.logprobs, top=top))

    record = {"prompt_ids": [5, 6, 7], "ids": [*ids[:2], ids[2] + 1, 0]}  # after it, all may differ
    (tmp_path / "real_model.json").write_text(json.dumps({"answers": [record]}))
    monkeypatch.setattr(doctor, "DATA", tmp_path)
    monkeypatch.setattr(doctor, "Engine", Near)
    return doctor.check_model(folder)


@pytest.mark.parametrize(("gap", "agrees"), [(0.0009, True), (0.0011, False)])
def test_a_recorded_answer_may_differ_where_two_logits_are_as_good(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gap: float, agrees: bool
) -> None:
    check = answers_of(tmp_path, monkeypatch, tiny_checkpoint, gap=gap)
    assert check.difference == pytest.approx(gap)
    assert check.agrees is agrees


def on_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "on_cpu", lambda: False)


def test_tolerances_grow_with_the_type_the_depth_the_positions_and_fast_trigonometry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fused, plain = ModelFeatures(), ModelFeatures.reference()
    eps = 2**-23
    assert doctor.tolerance(mx.float32, 1, 0, fused) == 6 * eps
    assert doctor.tolerance(mx.bfloat16, 3, 0, fused) == 3 * 6 * 2**-7
    assert doctor.tolerance(mx.float32, 2, 9_000, fused) == 2 * (6 + 9_000) * eps
    on_metal(monkeypatch)
    assert doctor.tolerance(mx.float32, 2, 64, fused) == 2 * ((6 + 64) * eps + 2**-13)
    assert doctor.tolerance(mx.float32, 2, 64, plain) == 2 * (6 + 64) * eps


def test_angles_as_rough_as_metal_s_pass_there_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A right Mac is not said to be wrong: its sines and cosines may be off by 2**-13."""
    rope = mx.fast.rope

    def rough(x: mx.array, dims: int, **options: Any) -> mx.array:
        return rope(x, dims, **options) * (1 + 2**-14)

    monkeypatch.setattr(mx.fast, "rope", rough)
    monkeypatch.setattr(ModelFeatures, "settled", lambda features, **device: settled(features))
    fused = [check for check in doctor.check_golden("qwen2") if (check.dtype, check.way) == ("float32", "fused")]
    assert not fused[0].agrees
    on_metal(monkeypatch)
    fused = [check for check in doctor.check_golden("qwen2") if (check.dtype, check.way) == ("float32", "fused")]
    assert fused[0].agrees


def settled(features: ModelFeatures) -> ModelFeatures:
    """As on a GPU."""
    return replace(
        features,
        fused_activation=False,
        rope_tables=False,
        polynomial_exp=False,
        paged_products=False,
        packed_attention=0,
    )


def test_wrong_attention_over_many_keys_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a kernel that forgets one of the parts that it divides long contexts into."""

    def forgetful(q: mx.array, k: mx.array, v: mx.array, spec: Any, mask: Any) -> mx.array:
        seen = mask if isinstance(mask, mx.array) else None
        kept = slice(None) if k.shape[2] < 4096 else slice(32, None)
        return attention_reference(q, k[:, :, kept], v[:, :, kept], spec, None if seen is None else seen[..., kept])

    monkeypatch.setattr(doctor, "attention", forgetful)
    wrong = [check for check in doctor.check_attention(9_000) if not check.agrees]
    assert wrong and all("9,000 keys" in check.way for check in wrong)
    short = [check for check in doctor.check_attention(1_100) if "1 query" in check.way]
    assert all(check.agrees for check in short)


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
