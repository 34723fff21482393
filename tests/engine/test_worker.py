"""The thread that owns the engine, used from others."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

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


def test_a_cancelled_request_ends_and_the_next_one_is_served(worker: EngineWorker) -> None:
    ticket = worker.submit(Request((40, 41)))
    outputs = iter(ticket)
    next(outputs)
    ticket.cancel()
    assert list(outputs)[-1].finish_reason == "cancelled"
    assert len(tokens(list(worker.submit(Request((40, 41), 3))))) == 3


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


def test_closing_twice_is_no_error_and_a_closed_worker_takes_nothing(tiny_checkpoint: Path) -> None:
    worker = EngineWorker(lambda: Engine(load_model(tiny_checkpoint)))
    worker.close()
    worker.close()
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(Request((40,), 1))
