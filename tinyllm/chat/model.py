"""The model that a chat is held with, from the moment that it is found: it is loaded while a person types."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from tinyllm.hub.locate import model_name

if TYPE_CHECKING:
    from tinyllm.llm import LLM


class ChatModel:
    """A model that `load` makes of `path`, in a thread of its own; `name` is what finds it again.

    Who asks for the `llm` before it is there waits within `waiting`, which may show that.
    """

    def __init__(
        self, name: str, path: Path, load: Callable[[], LLM], *, waiting: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self.name = name
        self.title = model_name(path)
        self._waiting = waiting
        self._loading: Future[LLM] = Future()
        threading.Thread(target=_run, args=(load, self._loading), name="tinyllm-loading", daemon=True).start()

    @property
    def llm(self) -> LLM:
        """The loaded model. Raises, each time, what loading has raised."""
        if self._loading.done():
            return self._loading.result()
        with self._waiting():
            return self._loading.result()

    @property
    def is_loaded(self) -> bool:
        """Whether the model is there: nobody waits for it."""
        return self._loading.done() and self.failure is None

    @property
    def failure(self) -> BaseException | None:
        """What loading has raised, so far."""
        return self._loading.exception() if self._loading.done() else None

    def when_over(self, call: Callable[[], object]) -> None:
        """Call a function when loading is over, well or not, in whatever thread that is."""
        self._loading.add_done_callback(lambda loading: call())

    def close(self) -> None:
        """Give the model's memory back, now or as soon as it is loaded; waits for nothing."""
        self.when_over(lambda: self.llm.close() if self.is_loaded else None)


def _run(load: Callable[[], LLM], loading: Future[LLM]) -> None:
    try:
        loading.set_result(load())
    except BaseException as error:  # delivered to whoever asks for the model
        loading.set_exception(error)
