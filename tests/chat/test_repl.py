"""Turns, and what the footer says after each; a model that is not there yet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from talk import FakeAnswer, FakeLLM, Typed, chat, chat_model

from tinyllm.chat.repl import Repl
from tinyllm.errors import DoesNotFitError, NonFiniteLogitsError
from tinyllm.llm import Chunk

WIDTH = 200


def footers(*lines: str) -> tuple[list[str], FakeLLM]:
    """Return how many tokens the footer says are used, before each line and after the last one."""
    llm = FakeLLM()
    seen: list[str] = []
    model = chat_model(lambda: llm)
    assert model.llm is llm  # from here on it is loaded
    typed = Typed(lines, before=lambda: seen.append(typed.footer(WIDTH).split(" · ")[1].split(" of ")[0]))
    repl, _, complaints = chat(typed, model)
    typed.footer = repl.footer
    repl.run()
    assert complaints == []
    return seen, llm


@pytest.mark.parametrize(
    ("lines", "used"),
    [
        (("one",), "0 10"),
        (("one", "three"), "0 10 24"),
        (("one", "three", "/undo"), "0 10 24 10"),
        (("one", "/undo"), "0 10 0"),
        (("one", "/retry"), "0 10 10"),
        (("one", "three", "/retry", "/undo", "/undo"), "0 10 24 24 10 0"),
        (("one", "/edit three"), "0 10 14"),
        (("one", "/system be"), "0 10 14"),
        (("one", "/clear"), "0 10 0"),
    ],
)
def test_the_footer_counts_the_conversation_as_it_stands(lines: tuple[str, ...], used: str) -> None:
    assert footers(*lines)[0] == used.split()


def interrupt() -> None:
    raise KeyboardInterrupt


def test_ctrl_c_that_comes_when_the_answer_is_over_does_not_end_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, typed = FakeLLM(), Typed(["one", "two"])
    model = chat_model(lambda: llm)
    assert model.llm is llm
    repl, _, _ = chat(typed, model)
    monkeypatch.setattr(repl, "_say_how_it_ended", lambda reason: interrupt())
    repl.run()
    assert [message.content for message in repl.session.conversation.messages] == ["one", "ONE", "two", "TWO"]


def test_ctrl_c_before_a_message_is_asked_gives_it_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm, typed = FakeLLM(), Typed(["one", "//two", "/retry", "/exit"])
    model = chat_model(lambda: llm)
    assert model.llm is llm
    repl, written, _ = chat(typed, model)
    answer = llm.answer
    monkeypatch.setattr(llm, "answer", lambda ids, **_: answer(ids) if not llm.asked else interrupt())
    repl.run()
    assert typed.drafts == ["", "", "//two", "edit one"]
    assert (written, capsys.readouterr().err) == (["ONE", "\n"], "(stopped)\n(stopped)\n")
    assert [message.content for message in repl.session.conversation.messages] == ["one", "ONE"]


def loaded(*lines: str) -> tuple[Repl, FakeLLM, Typed, list[str]]:
    """Return a chat whose model is there, the model, the lines and what is complained of."""
    llm, typed = FakeLLM(), Typed(lines)
    model = chat_model(lambda: llm)
    assert model.llm is llm
    repl, _, complaints = chat(typed, model)
    return repl, llm, typed, complaints


def answer_with(*chunks: Chunk) -> Callable[..., FakeAnswer]:
    def answer(ids: object, **settings: object) -> FakeAnswer:
        made = FakeAnswer("")
        made._chunks = iter(chunks)
        return made

    return answer


def test_a_message_that_gets_no_answer_is_given_back_with_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether it is cancelled, fails, or the model says nothing."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").write_text(f"file {name}")
    reads = [f"/read {tmp_path / name / 'notes'}" for name in ("a", "b")]
    repl, llm, typed, complaints = loaded(*reads, "one", "one", "/hlep", "one", "one")
    asked = llm.answer

    def fail(ids: object, **settings: object) -> FakeAnswer:
        raise NonFiniteLogitsError("inf")

    answers = iter([answer_with(Chunk(finish_reason="cancelled")), answer_with(Chunk(finish_reason="stop")), fail])
    monkeypatch.setattr(llm, "answer", lambda ids, **settings: next(answers, asked)(ids, **settings))
    monkeypatch.setattr(llm.tokenizer, "encode", list, raising=False)
    repl.run()
    pending = "[notes] [notes] "
    assert typed.drafts == ["", "[notes] ", pending, f"{pending}one", f"{pending}one", pending, f"{pending}one", ""]
    assert repl.session.conversation.messages[0].content == "notes:\n\nfile a\n\nnotes:\n\nfile b\n\none"
    assert "inf" in complaints and "(stopped)" in capsys.readouterr().err
    assert repl.session.statistics is None


def test_a_pending_file_waits_for_the_next_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An answer that is made again takes nothing with it."""
    (tmp_path / "notes").write_text("text")
    repl, llm, typed, _ = loaded("one", f"/read {tmp_path / 'notes'}", "/retry", "/edit two", "/edit", "three", " ")
    monkeypatch.setattr(llm.tokenizer, "encode", list, raising=False)
    repl.run()
    assert typed.drafts == ["", "", "[notes] ", "[notes] ", "[notes] ", "edit [notes] two", "", ""]
    assert repl.session.conversation.messages[0].content == "notes:\n\ntext\n\nthree"


@pytest.mark.parametrize("line", ["//read me", '"""/one\ntwo"""', '"""\n"""quoted"""\n"""', "plain"])
def test_what_is_edited_is_read_as_the_same_message(line: str) -> None:
    repl, _, typed, complaints = loaded(line, "/edit")
    repl.run()
    said = repl.session.conversation.last_question
    typed._lines = iter([typed.drafts[-1].removeprefix("edit ")])
    repl.run()
    assert repl.session.conversation.last_question == said and complaints == []
    assert len(repl.session.conversation.messages) == 2


def test_a_line_that_cannot_be_edited_is_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next line is another message, and not in the place of the last one."""
    repl, llm, typed, _ = loaded("one", "/retry", "two")
    typed.edits = False
    answers = iter([llm.answer, answer_with(Chunk(finish_reason="cancelled")), llm.answer])
    monkeypatch.setattr(llm, "answer", lambda ids, **settings: next(answers)(ids, **settings))
    repl.run()
    assert [message.content for message in repl.session.conversation.messages] == ["one", "ONE", "two", "TWO"]


def test_nothing_is_forgotten_for_an_answer_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    repl, llm, _, _ = loaded("one", "x" * 700, "y" * 500, "/retry")
    repl.session.overflow = "shift"
    answers = iter([llm.answer, llm.answer, answer_with(Chunk(finish_reason="cancelled")), llm.answer])
    monkeypatch.setattr(llm, "answer", lambda ids, **settings: next(answers)(ids, **settings))
    monkeypatch.setattr(llm, "context", 1600)
    repl.run()
    assert [message.content[:3] for message in repl.session.conversation.messages] == ["one", "ONE", "xxx", "XXX"]
    assert repl.session.dropped == 0


def test_a_second_ctrl_c_in_an_answer_ends_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, typed = FakeLLM(), Typed(["one", "two"])
    model = chat_model(lambda: llm)
    assert model.llm is llm
    repl, _, _ = chat(typed, model)
    monkeypatch.setattr(
        repl.screen, "reply", lambda tokens: SimpleNamespace(think=lambda text: interrupt(), finish=lambda: 0)
    )
    with pytest.raises(KeyboardInterrupt):
        repl.run()
    assert len(llm.asked) == 1


def test_a_narrow_footer_says_how_full_the_context_is() -> None:
    repl, _, _ = chat(Typed([]), chat_model(FakeLLM, name="a-long-name-of-a-model"))
    assert repl.session.llm
    assert repl.footer(80) == "a-long-name-of-a-model · 0 of 1,000 tokens, 1,000 left"
    assert repl.footer(40) == "a-long-… · 0 of 1,000 tokens, 1,000 left"
    assert repl.footer(39) == "0 of 1,000 tokens, 1,000 left"
    assert repl.footer(20) == "0 of 1,000 tokens, 1"


def test_help_on_a_narrow_screen_is_indented(capsys: pytest.CaptureFixture[str]) -> None:
    repl, _, _ = chat(Typed([]), chat_model(FakeLLM))
    repl.screen.width = 30  # type: ignore[misc]
    repl.take("/help")
    said = capsys.readouterr().err.splitlines()
    start = said.index("/set [NAME [VALUE]]")
    assert said[start : start + 4] == [
        "/set [NAME [VALUE]]",
        "    Show or change a setting;",
        "    no value: as the model",
        "    says.",
    ]


def test_a_turn_is_encoded_once_to_be_asked_and_once_to_be_counted() -> None:
    _, llm = footers("one", "two", "three")
    assert len(llm.asked) == 3 and llm.encoded == 6


def test_what_needs_no_model_does_not_wait_for_it() -> None:
    release = threading.Event()

    def load() -> FakeLLM:
        release.wait()
        return FakeLLM()

    said: list[str] = []
    typed = Typed(["/help exit", "/exit"], before=lambda: said.append(typed.footer(WIDTH)))
    repl, _, _ = chat(typed, chat_model(load))
    typed.footer = repl.footer
    repl.run()
    assert said == ["loading fake · what you type waits for it"] * 2
    release.set()


def test_a_message_waits_for_the_model() -> None:
    llm, asked = FakeLLM(), threading.Event()

    def load() -> FakeLLM:
        asked.wait()
        return llm

    repl, written, _ = chat(Typed(["hello"], before=asked.set), chat_model(load))
    repl.run()
    assert "".join(written) == "HELLO\n"


def test_a_model_that_cannot_be_loaded_ends_the_chat_and_no_turn_is_said() -> None:
    failure = DoesNotFitError("too large")

    def load() -> FakeLLM:
        raise failure

    repl, written, complaints = chat(Typed(["hello", "again"]), chat_model(load))
    with pytest.raises(DoesNotFitError) as raised:
        repl.run()
    assert raised.value is failure and (written, complaints) == ([], [])
    assert repl.session.conversation.messages == []


def test_an_interrupt_while_a_message_waits_gives_it_back() -> None:
    release, waits = threading.Event(), iter([True, False])

    class Interrupted:
        def __enter__(self) -> None:
            if next(waits):
                raise KeyboardInterrupt
            release.set()

        def __exit__(self, *exception: object) -> None: ...

    def load() -> FakeLLM:
        release.wait()
        return FakeLLM()

    model = chat_model(load)
    model._waiting = Interrupted
    typed = Typed(["hello", "hello"])
    repl, written, _ = chat(typed, model)
    repl.run()
    assert typed.drafts == ["", "hello", ""] and "".join(written) == "HELLO\n"


def test_a_model_that_is_given_up_before_it_is_there_is_closed_when_it_is() -> None:
    llm, release, closed = FakeLLM(), threading.Event(), threading.Event()

    def load() -> FakeLLM:
        release.wait()
        return llm

    model = chat_model(load)
    model.close()
    model.when_over(closed.set)
    assert not llm.closed
    release.set()
    closed.wait()
    assert llm.closed
