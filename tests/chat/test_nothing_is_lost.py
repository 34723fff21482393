"""What people said survives full disks, folders that cannot be used, and a kill in the middle of an answer."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest
from talk import FakeLLM, Typed, chat, chat_model

from tinyllm.chat.conversation import Conversation, Message
from tinyllm.chat.session import read_settings
from tinyllm.chat.transcript import Saved, Transcript, TranscriptStore, read_transcript
from tinyllm.errors import ChatFileError

TOO_LONG = "x" * 300  # for the name of a folder, whoever runs this: root may do what permissions forbid


class NearlyFull(io.FileIO):
    """A file on a disk that takes `room` more bytes, fails once, and has room again, as cutting a file back frees."""

    room = 0

    def write(self, data: Any) -> int:
        if NearlyFull.room < 0:
            return super().write(data)
        taken = min(NearlyFull.room, len(data))
        NearlyFull.room -= taken or 1
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(bytes(data)[:taken])


def test_a_disk_that_is_full_at_any_byte_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transcript = TranscriptStore(tmp_path).new("words")
    transcript.begin("model", Conversation(), {})
    transcript.add(Message("user", "one 👍"))
    before = transcript.path.read_bytes()
    transcript.add(Message("assistant", "ONE 日本"))
    after = transcript.path.read_bytes()

    real = Path.open

    def opened(path: Path, mode: str = "r", buffering: int = -1, **options: Any) -> Any:
        if "+" not in mode:
            return real(path, mode, buffering, **options)
        file = NearlyFull(str(path), mode.replace("b", ""))
        return file if buffering == 0 else io.BufferedRandom(file)

    monkeypatch.setattr(Path, "open", opened)
    for room in range(len(after) - len(before)):
        transcript.path.write_bytes(before)
        NearlyFull.room = room
        with pytest.raises(ChatFileError, match="No space left"):
            transcript.add(Message("assistant", "ONE 日本"))
        assert transcript.path.read_bytes() == before, room
        transcript.add(Message("assistant", "ONE 日本"))
        assert transcript.path.read_bytes() == after, room


@pytest.mark.parametrize("folder", [TOO_LONG, "file/under"])
def test_a_folder_that_cannot_be_used_is_warned_of_and_the_chat_answers(
    tmp_path: Path, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    llm = FakeLLM()
    model = chat_model(lambda: llm)
    assert model.llm is llm
    repl, written, complaints = chat(Typed(["one", "two"]), model)
    repl.session.store = TranscriptStore(tmp_path / folder)
    repl.run()
    assert ("".join(written), complaints) == ("ONE\nTWO\n", [])
    [warning] = caplog.records
    assert "not written" in warning.getMessage()


def test_a_folder_that_cannot_be_searched_is_an_error_of_the_chat(tmp_path: Path) -> None:
    store = TranscriptStore(tmp_path / TOO_LONG)
    for ask in (store.names, store.find):
        with pytest.raises(ChatFileError, match="not read: "):
            ask()
    with pytest.raises(ChatFileError, match="not written: "):
        store.named("name").begin("model", Conversation(), {})


def roles(conversation: Conversation, *more: Message) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in conversation.prompt(*more)]


def test_a_message_that_was_never_answered_is_part_of_the_users_next_turn() -> None:
    conversation = Conversation("s", [Message("user", "a"), Message("assistant", "A"), Message("user", "b")])
    answered = [("system", "s"), ("user", "a"), ("assistant", "A")]
    assert roles(conversation, Message("user", "c")) == [*answered, ("user", "b\n\nc")]
    assert [message.content for message in conversation.messages] == ["a", "A", "b"]
    assert roles(conversation.without_last(), Message("user", "b")) == [*answered, ("user", "b")]  # /retry


def test_resuming_says_that_the_last_message_has_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repl, _, _ = chat(Typed([]), chat_model(FakeLLM))
    question, answer = Message("user", "a"), Message("assistant", "A")
    for messages, told in (([question], True), ([question, answer], False)):
        repl.resume(Transcript(tmp_path / "talk.jsonl"), Saved("fake", "", Conversation(None, messages)))
        assert ("/retry has it answered" in capsys.readouterr().err) == told


@pytest.mark.parametrize(
    "saved",
    [{"logit_bias": {"9" * 5000: 1}}, {"logit_bias": {"²": 1}}, {"temperature": "h" * 100_000}, {"n" * 100_000: 1}],
    ids=["digits", "superscript", "value", "name"],
)
def test_a_setting_of_any_length_is_left_out_with_one_short_reason(saved: dict[str, Any]) -> None:
    settings, [problem] = read_settings({"seed": 3, **saved})
    assert settings == {"seed": 3}
    assert len(problem) <= 200


def test_a_resumed_file_that_ends_in_a_message_can_be_read_again(tmp_path: Path) -> None:
    transcript = TranscriptStore(tmp_path).new("words")
    transcript.begin("model", Conversation(None, [Message("user", "a")]), {})
    with transcript.path.open("ab") as file:
        file.write(b'{"role": "assis')  # the kill
    llm = FakeLLM()
    model = chat_model(lambda: llm)
    assert model.llm is llm
    repl, written, complaints = chat(Typed(["b"]), model)
    repl.resume(transcript, read_transcript(transcript.path))
    repl.run()
    assert complaints == []
    saved = read_transcript(transcript.path)
    assert [message.content for message in saved.conversation.messages] == ["a", "b", "".join(written).rstrip("\n")]
    assert not saved.torn
