"""Conversations on disk: private, complete after every turn, and refused by name where they are damaged."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tinyllm.chat import transcript as transcript_module
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


# Nothing that was said is lost: not to a kill, nor to a full disk, at whatever byte.

TURNS = [Message("user", "wie heißt du? 👍"), Message("assistant", "ich heiße\n日本", "hm"), Message("user", "zwei")]


def test_a_kill_at_any_byte_loses_at_most_the_line_that_was_written(store: TranscriptStore) -> None:
    transcript = begun(store)
    ends = [transcript.path.stat().st_size]
    for message in TURNS:
        transcript.add(message)
        ends.append(transcript.path.stat().st_size)
    whole = transcript.path.read_bytes()
    for size in range(ends[0], len(whole) + 1):
        transcript.path.write_bytes(whole[:size])
        kept = TURNS[: sum(end <= size for end in ends[1:])]
        saved = read_transcript(transcript.path)
        assert saved.conversation.messages == kept
        assert saved.torn == (size not in ends)
        Transcript(transcript.path).add(Message("assistant", "after"))
        again = read_transcript(transcript.path)
        assert (again.conversation.messages, again.torn) == ([*kept, Message("assistant", "after")], False)


@pytest.mark.parametrize("room", [0, 1, 17, 40])
def test_a_full_disk_leaves_the_file_as_it_was_and_the_next_line_is_whole(
    store: TranscriptStore, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    transcript = begun(store)
    transcript.add(TURNS[0])
    before = transcript.path.read_bytes()
    encoded = transcript_module._encoded

    def full(lines: object) -> bytes:
        with transcript.path.open("ab") as file:
            file.write(encoded(lines)[:room])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(transcript_module, "_encoded", full)
    with pytest.raises(ChatFileError, match="No space left"):
        transcript.add(TURNS[1])
    assert transcript.path.read_bytes() == before
    monkeypatch.setattr(transcript_module, "_encoded", encoded)
    transcript.add(TURNS[1])
    assert read_transcript(transcript.path).conversation.messages == TURNS[:2]


def test_a_new_file_is_there_whole_or_not_at_all(store: TranscriptStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(ChatFileError, match="No space left"):
        begun(store)
    assert list(store.folder.iterdir()) == []


def test_a_killed_process_leaves_what_it_has_written(store: TranscriptStore) -> None:
    code = f"""
import sys
from pathlib import Path
from tinyllm.chat.conversation import Conversation, Message
from tinyllm.chat.transcript import TranscriptStore
transcript = TranscriptStore(Path({str(store.folder)!r})).new("a b")
transcript.begin("model", Conversation(), {{}})
for i in range(1_000_000):
    transcript.add(Message("user", f"{{i}} " + "ä" * 5000))
    print(i, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line == "20\n":
            break
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    transcript = store.find()
    count = len(contents(read_transcript(transcript.path)))
    assert count >= 21
    transcript.add(Message("assistant", "after"))
    assert contents(read_transcript(transcript.path))[-1] == "after"


@pytest.mark.parametrize("text", ["half a pair \ud83d here", "\udcff", "\ud83d\ude00", "\x00\x1b[2J"], ids=ascii)
def test_what_is_written_can_be_read_back(store: TranscriptStore, text: str) -> None:
    transcript = begun(store)
    transcript.add(Message("user", text, text))
    [message] = read_transcript(transcript.path).conversation.messages
    shown = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert (message.content, message.reasoning) == (shown, shown)
    assert "�" in shown or text not in ("half a pair \ud83d here", "\udcff")


def test_a_file_with_a_byte_that_is_no_text_is_read(store: TranscriptStore) -> None:
    transcript = begun(store)
    transcript.add(Message("user", "caf\u00e9"))
    transcript.path.write_bytes(transcript.path.read_bytes().replace("é".encode(), b"\xe9"))
    assert contents(read_transcript(transcript.path)) == ["caf\ufffd"]


def test_the_whole_can_be_written_in_place_of_what_the_file_says(store: TranscriptStore) -> None:
    transcript = begun(store)
    transcript.add(Message("user", "old"))
    transcript.write_whole("some/model", Conversation("new", TURNS), {"seed": 3})
    saved = read_transcript(transcript.path)
    assert (saved.conversation.system, saved.conversation.messages, saved.settings) == ("new", TURNS, {"seed": 3})
    transcript.path.unlink()
    transcript.write_whole("some/model", Conversation(None, TURNS), {})
    assert read_transcript(transcript.path).conversation.messages == TURNS
