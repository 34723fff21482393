"""A chat without a model: what is typed is listed before, and an answer is the question in capitals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tinyllm.chat.model import ChatModel
from tinyllm.chat.repl import Repl
from tinyllm.chat.screen import PlainScreen
from tinyllm.chat.session import Session
from tinyllm.llm import LLM, Chunk


class FakeLLM:
    """Counts how often it encodes; a token is a character, and a turn of a conversation takes two more."""

    context = 1000

    def __init__(self) -> None:
        self.sampling: dict[str, Any] = {}
        self.encoded = 0
        self.asked: list[list[int]] = []
        self.closed = False
        self.tokenizer = SimpleNamespace(encode_chat=self._encode)

    def answer(self, prompt_ids: Sequence[int], **settings: Any) -> FakeAnswer:
        """Answer in capitals what came last."""
        self.asked.append(list(prompt_ids))
        return FakeAnswer("".join(map(chr, prompt_ids)).rsplit(">", 1)[-1].upper())

    def close(self) -> None:
        """Remember it."""
        self.closed = True

    def _encode(self, messages: Sequence[dict[str, str]], **variables: Any) -> list[int]:
        self.encoded += 1
        return [ord(letter) for message in messages for letter in f"<>{message['content']}"]


class FakeAnswer:
    """One chunk."""

    def __init__(self, text: str) -> None:
        self._chunks = iter([Chunk(text=text, finish_reason="stop")])
        self.prompt_token_ids = tuple(range(len(text)))

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks

    def cancel(self) -> None:
        """It is over by then."""


class Typed:
    """Lines from a list; the drafts that they would have begun with are kept."""

    edits = True

    def __init__(self, lines: Iterable[str], before: Callable[[], None] = lambda: None) -> None:
        self.footer: Callable[[int], str] = lambda width: ""
        self.drafts: list[str] = []
        self._lines = iter(lines)
        self._before = before

    def read(self, draft: str, label: str = "") -> str | None:
        """Do what is to be done before, and return the next line."""
        self._before()
        self.drafts.append(label + draft)
        return next(self._lines, None)

    def wake(self, error: BaseException | None) -> None:
        """Nobody sleeps here."""


def chat_model(load: Callable[[], FakeLLM], name: str = "fake") -> ChatModel:
    """Begin to load a model that is none."""
    return ChatModel(name, Path(name), cast(Callable[[], LLM], load), waiting=nullcontext)


def chat(lines: Typed, model: ChatModel) -> tuple[Repl, list[str], list[str]]:
    """Return a chat that is not begun, what is written in it, and what is complained of."""
    written: list[str] = []
    complaints: list[str] = []

    def load(name: str) -> ChatModel:
        raise AssertionError(name)

    screen = PlainScreen(written.append)
    screen.complain = complaints.append  # type: ignore[method-assign]
    repl = Repl(Session(model), lines, screen, load=load)
    return repl, written, complaints
