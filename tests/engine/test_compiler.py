"""Steps are compiled where there is a compiler and it is wanted; where there is none they run, and that is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinyllm.checkpoint.contents import read_contents
from tinyllm.engine import compiler
from tinyllm.engine.compiler import Compiler
from tinyllm.engine.load import EngineSettings, load_engine
from tinyllm.engine.request import Request
from tinyllm.kernels import KernelFolder, has_compiler


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
