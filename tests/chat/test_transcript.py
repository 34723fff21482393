"""Conversations on disk: private, complete after every turn, and refused by name where they are damaged."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tinyllm.chat.conversation import Conversation, Message
from tinyllm.chat.transcript import (
    Saved,
    Transcript,
    TranscriptStore,
    export_json,
    export_markdown,
    read_transcript,
)
from tinyllm.errors import ChatFileError


@pytest.fixture
def store(tmp_path: Path) -> TranscriptStore:
    return TranscriptStore(tmp_path / "chats")


def begun(store: TranscriptStore, words: str = "hello there") -> Transcript:
    transcript = store.new(words)
    transcript.begin("some/model", Conversation("be brief"), {"temperature": 0.5})
    return transcript


def contents(saved: Saved) -> list[str]:
    return [message.content for message in saved.conversation.messages]


def test_what_is_written_is_read(store: TranscriptStore) -> None:
    transcript = begun(store)
    transcript.add(Message("user", "ä\u2028\n 👍"))
    transcript.add(Message("assistant", "yes", reasoning="hm"))
    saved = read_transcript(transcript.path)
    assert (saved.model, saved.settings) == ("some/model", {"temperature": 0.5})
    assert saved.conversation.system == "be brief"
    assert saved.conversation.messages == [Message("user", "ä\u2028\n 👍"), Message("assistant", "yes", "hm")]
    assert not saved.torn


def test_only_the_owner_may_read_it(store: TranscriptStore) -> None:
    transcript = begun(store)
    assert stat.S_IMODE(transcript.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700


def test_changes_are_read_in_their_order(store: TranscriptStore) -> None:
    transcript = begun(store)
    for i in range(6):
        transcript.add(Message("user" if i % 2 == 0 else "assistant", str(i)))
    transcript.note(keep=4)
    transcript.note(drop=2)
    transcript.add(Message("user", "again"))
    transcript.note(system=None)
    transcript.note(settings={"seed": 1})
    saved = read_transcript(transcript.path)
    assert contents(saved) == ["2", "3", "again"]
    assert saved.conversation.system is None and saved.settings == {"seed": 1}


def test_a_line_that_was_cut_off_is_left_out(store: TranscriptStore) -> None:
    transcript = begun(store)
    transcript.add(Message("user", "whole"))
    with transcript.path.open("a") as file:
        file.write('{"role": "assistant", "con')
    saved = read_transcript(transcript.path)
    assert contents(saved) == ["whole"] and saved.torn


def _replaced(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new)


DAMAGE: dict[str, tuple[Callable[[str], str], str]] = {
    "no JSON": (_replaced('{"system"', "{system"), "line 2 is damaged"),
    "a list": (lambda text: text + "[1]\n", "line 5 is damaged"),
    "another role": (_replaced('"user"', '"tool"'), "line 4 is damaged, or of a newer"),
    "an unknown change": (lambda text: text + '{"colour": 1}\n', "line 5 is damaged, or of a newer"),
    "a key more": (_replaced('"content"', '"extra": 1, "content"'), "line 4"),
    "keeps more than there is": (lambda text: text + '{"keep": 9}\n', "line 5"),
    "content that is no text": (_replaced('"hi"', "7"), "line 4"),
    "another version": (_replaced('"version": 1', '"version": 2'), "of version 2"),
    "another format": (_replaced('"tinyllm chat"', '"elsewhere"'), "not a conversation that tinyllm saved"),
    "empty": (lambda text: "", "not a conversation that tinyllm saved"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_fault_42_a_damaged_file_is_refused_by_name(store: TranscriptStore, damage: str) -> None:
    transcript = begun(store)
    transcript.add(Message("user", "hi"))
    change, message = DAMAGE[damage]
    transcript.path.write_text(change(transcript.path.read_text()))
    with pytest.raises(ChatFileError, match=message) as refusal:
        read_transcript(transcript.path)
    assert str(transcript.path) in str(refusal.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ChatFileError, match="not a conversation"):
        read_transcript(tmp_path / "x.jsonl")


def test_names_are_found_whole_in_part_and_as_the_latest(store: TranscriptStore) -> None:
    names = []
    for number, words in enumerate(["about cats", "about dogs", "cooking"]):
        transcript = begun(store, words)
        stamp = 1_000_000 + number
        os.utime(transcript.path, (stamp, stamp))
        names.append(transcript.name)
    assert store.names() == names[::-1]
    assert store.names("ABOUT") == [names[1], names[0]]
    assert store.find().name == names[2]
    assert store.find("dogs").name == names[1]
    assert store.find(names[0]).name == names[0]
    with pytest.raises(ChatFileError, match="in the names of 2 conversations"):
        store.find("about")
    with pytest.raises(ChatFileError, match="no conversation named 'zzz'; there is: "):
        store.find("zzz")


def test_two_in_one_second_have_names_of_their_own(store: TranscriptStore) -> None:
    assert begun(store).name != begun(store).name


def test_renaming(store: TranscriptStore) -> None:
    first, second = begun(store, "a"), begun(store, "b")
    first.rename("My trip, day 1")
    first.add(Message("user", "after"))
    assert contents(read_transcript(store.find("day 1").path)) == ["after"]
    with pytest.raises(ChatFileError, match="already"):
        second.rename("My trip, day 1")
    for name in ("../out", "a/b", "", ".hidden", "x" * 200):
        with pytest.raises(ChatFileError, match="cannot be a name"):
            second.rename(name)


def test_a_name_never_leaves_the_folder(store: TranscriptStore, tmp_path: Path) -> None:
    begun(store)
    (tmp_path / "outside.jsonl").write_text("{}")
    with pytest.raises(ChatFileError, match="no conversation named"):
        store.find("../outside")


def test_no_folder_is_no_conversation(store: TranscriptStore) -> None:
    assert store.names() == []
    with pytest.raises(ChatFileError, match="no saved conversation"):
        store.find()


def test_a_full_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ChatFileError, match="not written"):
        begun(TranscriptStore(tmp_path / "file" / "chats"))


def test_exports() -> None:
    conversation = Conversation("s1\ns2", [Message("user", "q"), Message("assistant", "a", "thought")])
    assert export_markdown(conversation, "M") == "> s1\n> s2\n\n**You**\n\nq\n\n**M**\n\na\n"
    exported = json.loads(export_json(conversation, "M"))
    assert exported["model"] == "M" and [m["role"] for m in exported["messages"]] == ["system", "user", "assistant"]
