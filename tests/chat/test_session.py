"""What a chat records, and when: nothing before an answer begins, all of it later, whatever the disk does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from talk import FakeLLM, Typed, chat, chat_model

from tinyllm.chat.repl import Repl
from tinyllm.chat.session import Session, read_settings
from tinyllm.chat.transcript import Transcript, TranscriptStore, read_transcript
from tinyllm.errors import ChatFileError, ContextLengthError
from tinyllm.llm import Chunk


def talk(store: TranscriptStore | None, *lines: str, llm: FakeLLM | None = None) -> tuple[Repl, Typed, list[str]]:
    """Return a chat in which these lines are to be typed, and what it will complain of."""
    llm = llm or FakeLLM()
    model = chat_model(lambda: llm)
    assert model.llm is llm
    typed = Typed(lines)
    repl, _, complaints = chat(typed, model)
    repl.session.store = store
    return repl, typed, complaints


def said(session: Session) -> list[str]:
    return [message.content for message in session.conversation.messages]


class Silent(FakeLLM):
    """An answer that is cancelled before its first word."""

    def answer(self, prompt_ids: Any, **settings: Any) -> Any:
        self.asked.append(list(prompt_ids))
        answer = super().answer(prompt_ids)
        answer._chunks = iter([Chunk(prefilled=3), Chunk(finish_reason="cancelled")])
        return answer


def test_ctrl_c_before_the_first_word_gives_the_message_back_and_writes_nothing(tmp_path: Path) -> None:
    store = TranscriptStore(tmp_path / "chats")
    (tmp_path / "notes.txt").write_text("n")
    repl, typed, _ = talk(store, "hello", "again", llm=Silent())
    repl.attached = {tmp_path / "notes.txt": "notes"}
    repl.run()
    assert typed.drafts == ["[notes.txt] ", "[notes.txt] hello", "[notes.txt] again"]
    assert (said(repl.session), store.names(), repl.session.statistics) == ([], [], None)


def test_a_cancelled_edit_changes_nothing(tmp_path: Path) -> None:
    store = TranscriptStore(tmp_path)
    repl, typed, _ = talk(store, "one", "/edit", "", "two")
    repl.run()
    assert typed.drafts == ["", "", "edit one", "", ""]
    assert said(repl.session) == ["one", "ONE", "two", "TWO"]
    repl, typed, _ = talk(store, "one", "/edit", "three")
    repl.run()
    assert said(repl.session) == ["three", "THREE"]
    assert [m.content for m in read_transcript(store.find().path).conversation.messages] == ["three", "THREE"]


def test_a_disk_that_was_full_is_warned_of_once_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = TranscriptStore(tmp_path)
    repl, _, complaints = talk(store, "one", "two", "three")
    add, failing = Transcript.add, iter([False, False, True])

    def sometimes(self: Transcript, message: Any) -> None:
        if next(failing, False):
            raise ChatFileError("no space")
        add(self, message)

    monkeypatch.setattr(Transcript, "add", sometimes)
    repl.run()
    assert complaints == []
    saved = read_transcript(store.find().path)
    assert [m.content for m in saved.conversation.messages] == ["one", "ONE", "two", "TWO", "three", "THREE"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_folder_that_cannot_be_written_is_one_warning_and_the_chat_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    repl, _, complaints = talk(TranscriptStore(tmp_path / "file" / "chats"), "one", "two")
    repl.run()
    assert (said(repl.session), complaints) == (["one", "ONE", "two", "TWO"], [])
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("saved", "read", "problems"),
    [
        ({"logit_bias": {"5": 2.0}, "seed": 3}, {"logit_bias": {5: 2.0}, "seed": 3}, 0),
        ({"stop": ["a"], "max_tokens": 4}, {"stop": ("a",), "max_tokens": 4}, 0),
        ({"stop": 5, "seed": 3}, {"seed": 3}, 1),
        ({"temperature": "hot", "top_k": 1.5, "max_tokens": True, "unknown": 1}, {}, 4),
        ({"logit_bias": {"x": 1}, "top_p": None}, {}, 2),
        ({"logit_bias": [1]}, {}, 1),
    ],
)
def test_settings_of_a_file_are_checked(saved: dict[str, Any], read: dict[str, Any], problems: int) -> None:
    settings, told = read_settings(saved)
    assert (settings, len(told)) == (read, problems)


def test_a_bias_survives_a_resume(tmp_path: Path) -> None:
    store = TranscriptStore(tmp_path)
    repl, _, _ = talk(store, "one")
    repl.session.settings = {"logit_bias": {5: 2.0}, "seed": 1}
    repl.run()
    again, _, _ = talk(store)
    transcript = store.find()
    saved = read_transcript(transcript.path)
    saved.settings["strange"] = 5
    complaints: list[str] = []
    again.screen.complain = complaints.append  # type: ignore[method-assign]
    again.resume(transcript, saved)
    assert again.session.settings == {"logit_bias": {5: 2.0}, "seed": 1}
    [told] = complaints
    assert "strange" in told


def test_save_writes_a_copy_and_rename_moves_the_file(tmp_path: Path) -> None:
    store = TranscriptStore(tmp_path)
    repl, _, _ = talk(store, "one", "/save copy", "two", "/rename mine")
    repl.run()
    assert sorted(store.names()) == ["copy", "mine"]
    kept = {name: read_transcript(store.find(name).path).conversation.messages for name in store.names()}
    assert [m.content for m in kept["copy"]] == ["one", "ONE"]
    assert [m.content for m in kept["mine"]] == ["one", "ONE", "two", "TWO"]


def test_a_first_message_that_fills_the_context_says_what_to_do() -> None:
    repl, _, _ = talk(None)
    repl.session.overflow = "shift"
    with pytest.raises(ContextLengthError, match=r"the message takes .* shorten it") as failure:
        repl.session.ask("x" * 2000)
    assert "--overflow" not in str(failure.value)
