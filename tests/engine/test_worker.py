"""The thread that owns the engine, used from others."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

import pytest
import tiny

from tinyllm.engine.engine import Engine
from tinyllm.engine.request import Output, Request
from tinyllm.engine.worker import EngineWorker
from tinyllm.errors import ContextLengthError
from tinyllm.model.load import load_model


def tokens(outputs: list[Output]) -> list[int]:
    return [output.token_id for output in outputs if output.token_id is not None]


@pytest.fixture(scope="module")
def worker(tiny_checkpoint: Path) -> EngineWorker:
    return EngineWorker(lambda: Engine(load_model(tiny_checkpoint)))


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose context is far longer than a test waits: without max_tokens an answer has no end."""
    overrides = {"max_position_embeddings": 10**6}
    return tiny.write_checkpoint(tmp_path_factory.mktemp("worker") / "endless", config_overrides=overrides)


def test_what_loading_raises_is_raised_in_the_caller() -> None:
    def fails() -> Engine:
        raise ContextLengthError("no room")

    with pytest.raises(ContextLengthError, match="no room"):
        EngineWorker(fails)


def test_requests_of_several_threads_each_get_their_own_answer(worker: EngineWorker) -> None:
    prompts = [tuple(range(start, start + 9)) for start in range(40, 48)]
    alone = [tokens(list(worker.submit(Request(prompt, 6)))) for prompt in prompts]
    together: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        together[i] = tokens(list(worker.submit(Request(prompts[i], 6))))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[i] for i in range(len(prompts))] == alone


def test_an_impossible_request_fails_alone(worker: EngineWorker) -> None:
    bad, good = worker.submit(Request((40,) * 1000, 4)), worker.submit(Request((40, 41), 4))
    with pytest.raises(ContextLengthError):
        list(bad)
    assert len(tokens(list(good))) == 4


def test_a_cancelled_request_ends_and_the_next_one_is_served(endless: Path) -> None:
    worker = EngineWorker(lambda: Engine(load_model(endless)))
    ticket = worker.submit(Request((40, 41)))
    outputs = iter(ticket)
    next(outputs)
    ticket.cancel()
    assert list(outputs)[-1].finish_reason == "cancelled"
    assert len(tokens(list(worker.submit(Request((40, 41), 3))))) == 3
    worker.close()


def test_a_fault_in_a_step_reaches_every_request_and_the_engine_lives_on(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = EngineWorker(lambda: Engine(load_model(tiny_checkpoint)))
    step = Engine.step
    broken = threading.Event()
    broken.set()

    def step_or_fail(engine: Engine) -> list[Output]:
        if broken.is_set():
            raise MemoryError("injected")
        return step(engine)

    monkeypatch.setattr(Engine, "step", step_or_fail)
    tickets = [worker.submit(Request((40, 41), 3)) for _ in range(2)]
    for ticket in tickets:
        with pytest.raises(MemoryError, match="injected"):
            list(ticket)
    broken.clear()
    assert len(tokens(list(worker.submit(Request((40, 41), 3))))) == 3
    worker.close()


def test_a_request_that_makes_no_sense_fails_alone_whatever_it_raises(worker: EngineWorker) -> None:
    with pytest.raises(TypeError):
        list(worker.submit(Request((40, "41"), 3)))  # type: ignore[arg-type]
    assert len(tokens(list(worker.submit(Request((40, 41), 3))))) == 3


def test_closing_ends_the_requests_that_run_and_wait(endless: Path) -> None:
    worker = EngineWorker(lambda: Engine(load_model(endless)))
    running, waiting = (iter(worker.submit(Request((40, 41)))) for _ in range(2))
    next(running)
    ends = []
    readers = [
        threading.Thread(target=lambda outputs=outputs: ends.append(list(outputs)[-1].finish_reason), daemon=True)
        for outputs in (running, waiting)
    ]
    for reader in readers:
        reader.start()
    worker.close()
    for reader in readers:
        reader.join(timeout=20)
    assert ends == ["cancelled", "cancelled"]


def test_a_caught_error_keeps_no_variables_of_the_engine_alive(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(engine: Engine) -> list[Output]:
        marker = Marker()
        made.append(weakref.ref(marker))
        raise MemoryError("injected")

    made: list[weakref.ref[Marker]] = []
    monkeypatch.setattr(Engine, "step", fails)
    worker = EngineWorker(lambda: Engine(load_model(tiny_checkpoint)))
    with pytest.raises(MemoryError, match="injected"):
        list(worker.submit(Request((40, 41), 3)))
    worker.close()
    assert [reference() for reference in made] == [None]


class Marker:
    """Something that can be referred to weakly."""


def test_a_worker_that_the_engine_thread_collects_ends_without_a_word(
    tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    workers = [EngineWorker(lambda: Engine(load_model(tiny_checkpoint)))]
    thread = workers[0]._thread
    workers[0]._commands.put(lambda loop: workers.clear())
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert capfd.readouterr().err == ""


def test_closing_twice_is_no_error_and_a_closed_worker_takes_nothing(tiny_checkpoint: Path) -> None:
    worker = EngineWorker(lambda: Engine(load_model(tiny_checkpoint)))
    worker.close()
    worker.close()
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(Request((40,), 1))
