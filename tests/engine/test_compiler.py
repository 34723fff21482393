"""Steps are compiled where there is a compiler and it is wanted; where there is none they run, and that is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.running import run
from tinyllm.checkpoint.contents import read_contents
from tinyllm.engine import compiler, step
from tinyllm.engine.compiler import Compiler
from tinyllm.engine.load import EngineSettings, load_engine
from tinyllm.engine.request import Request, SamplingParams
from tinyllm.engine.step import Layout, paged_step
from tinyllm.kernels import KernelFolder, has_compiler
from tinyllm.model.transformer import ModelForCausalLM


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "on_cpu", lambda: True)
    monkeypatch.setattr(compiler, "has_compiler", lambda: False)


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_an_engine_answers_and_says_so_once(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = load_engine(read_contents(tiny_checkpoint))
    engine.add(Request((40, 41, 42), 5))
    tokens = 0
    while engine.has_work:
        tokens += sum(output.token_id is not None for output in engine.step())
    assert tokens == 5
    assert caplog.text.count("there is no C++ compiler") == 1
    assert not engine.compiler.available


@pytest.mark.usefixtures("without_compiler")
def test_nothing_is_said_where_nothing_is_to_be_compiled(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert not load_engine(read_contents(tiny_checkpoint), EngineSettings(compiled=False)).compiler.available
    assert caplog.text == ""


def test_a_gpu_brings_its_own_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "on_cpu", lambda: False)
    monkeypatch.setattr(compiler, "has_compiler", lambda: False)
    made = Compiler()
    assert made.available and not made.is_cold("llama")
    with made.in_use():
        pass


@pytest.mark.skipif(not has_compiler(), reason="needs g++")
def test_a_kind_of_model_is_warmed_up_once(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known: set[str] = set()  # the kernels themselves may be there
    monkeypatch.setattr(KernelFolder, "knows", lambda self, name: name in known)
    monkeypatch.setattr(KernelFolder, "remember", lambda self, name: known.add(name))
    caplog.set_level("INFO", logger="tinyllm")
    for _ in range(2):
        engine = load_engine(read_contents(tiny_checkpoint))
        assert not engine.has_work
        assert engine.pools.manager.hit_tokens == 0
        engine.scheduler.check_invariants()
    assert len(known) == caplog.text.count("compiling kernels") == 1


@pytest.mark.skipif(not has_compiler(), reason="needs g++")
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, seed=1),
        SamplingParams(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1),
        SamplingParams(repetition_penalty=1.1, repetition_window=4),
    ],
    ids=["greedy", "drawn", "penalised", "penalised within a window"],
)
def test_the_steps_of_an_answer_are_compiled_once(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams
) -> None:
    """The first takes in what the host knows, the others what the device chose: the same to a compiler."""
    engine, traced = load_engine(read_contents(tiny_checkpoint)), list[Layout]()

    def spy(model: ModelForCausalLM, layout: Layout, inputs: step.Tree) -> step.Tree:
        traced.append(layout)
        return paged_step(model, layout, inputs)

    monkeypatch.setattr(step, "paged_step", spy)
    [outputs] = run(engine, [Request((3, 4, 5), 6, sampling=sampling)])
    assert len(outputs) == 6
    assert len(traced) == 1
