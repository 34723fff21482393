"""Conversations on disk: one file each, one JSON object a line, written as they are said. No mlx, no terminal.

    {"format": "tinyllm chat", "version": 1, "model": NAME, "created": TIME}       the first line
    {"system": TEXT or null}          from here on
    {"settings": {NAME: VALUE}}       from here on
    {"role": "user" or "assistant", "content": TEXT, "reasoning": TEXT}
    {"keep": N}                       of the messages so far, the first N are left: the rest was taken back
    {"drop": N}                       the first N messages are gone: the context was full

A new file appears whole, and lines are only added to it, so a process that is killed or a full disk loses nothing but
the line that was being written: the next writer cuts that off. Only their owner may read the files.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from difflib import get_close_matches
from io import FileIO
from pathlib import Path
from typing import Any

from tinyllm.chat.conversation import ASSISTANT, USER, Conversation, Message
from tinyllm.errors import ChatFileError
from tinyllm.text.given import encodable

FORMAT, VERSION = "tinyllm chat", 1
_SUFFIX = ".jsonl"
_NAME = re.compile(r"[\w][\w .,'-]{0,99}")
_MOST_BYTES = 256 << 20
_SLUG_WORDS = 5
_BLOCK = 1 << 16


@dataclass
class Saved:
    """The contents of a file: the conversation, its model and settings, and whether its last line was cut off."""

    model: str
    created: str
    conversation: Conversation = field(default_factory=Conversation)
    settings: dict[str, Any] = field(default_factory=dict)
    torn: bool = False


class Transcript:
    """The file of one conversation, which is made with its first line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """What the conversation is called."""
        return self.path.name.removesuffix(_SUFFIX)

    def begin(self, model: str, conversation: Conversation, settings: Mapping[str, Any]) -> None:
        """Write a conversation as it stands. Raises ChatFileError if it cannot be written, or is there already."""
        created = datetime.now().astimezone().isoformat(timespec="seconds")
        header = {"format": FORMAT, "version": VERSION, "model": model, "created": created}
        content = _encoded([header, *_state(conversation, settings)])
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            _write_new(self.path, content)
        except OSError as error:
            raise ChatFileError(f"{self.path}: not written: {error.strerror}") from error

    def add(self, message: Message) -> None:
        """Write a message. Raises ChatFileError, as all that writes does, and leaves no part of a line."""
        self._append([_line(message)])

    def note(self, **change: Any) -> None:
        """Write a change: `system`, `settings`, `keep` or `drop`."""
        self._append([change])

    def write_whole(self, model: str, conversation: Conversation, settings: Mapping[str, Any]) -> None:
        """Write the conversation as it stands, in place of what the file says so far."""
        if _exists(self.path):
            self._append([{"keep": 0}, *_state(conversation, settings)])
        else:
            self.begin(model, conversation, settings)

    def rename(self, name: str) -> None:
        """Give the file another name. Raises ChatFileError if there is one of that name."""
        target = self.path.with_name(_checked_name(name) + _SUFFIX)
        if _exists(target):
            raise ChatFileError(f"there is a conversation named {name!r} already: choose another name")
        try:
            self.path.rename(target)
        except OSError as error:
            raise ChatFileError(f"{self.path}: not renamed: {error.strerror}") from error
        self.path = target

    def _append(self, lines: list[Mapping[str, Any]]) -> None:
        """Add lines after the last whole one; if that fails, the file is left as it was."""
        try:
            # Unbuffered: closing a buffered file writes what is left of the buffer, after the file was cut back.
            with self.path.open("r+b", buffering=0) as file:
                end = _end_of_whole_lines(file)
                try:
                    file.truncate(end)
                    file.seek(end)
                    rest = memoryview(_encoded(lines))
                    while rest:
                        rest = rest[file.write(rest) :]
                except OSError:
                    file.truncate(end)
                    raise
        except OSError as error:
            raise ChatFileError(f"{self.path}: not written: {error.strerror}") from error


def _exists(path: Path) -> bool:
    """Return whether a file is there, and False for a folder that cannot be searched: writing there says why."""
    try:
        return path.exists()
    except OSError:
        return False


def _line(message: Message) -> Mapping[str, Any]:
    reasoning = {"reasoning": message.reasoning} if message.reasoning else {}
    return {"role": message.role, "content": message.content, **reasoning}


def _state(conversation: Conversation, settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [{"system": conversation.system}, {"settings": dict(settings)}, *map(_line, conversation.messages)]


def _encoded(lines: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(encodable(json.dumps(line, ensure_ascii=False)) + "\n" for line in lines).encode()


def _write_new(path: Path, content: bytes) -> None:
    """Make a file that only its owner may read, with all of its content or not at all."""
    number, name = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
        Path(name).rename(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _end_of_whole_lines(file: FileIO) -> int:
    """Return how many bytes of a file are whole lines."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _BLOCK)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


class TranscriptStore:
    """All conversations in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_user(cls) -> TranscriptStore:
        """Return those of the person who runs this, in the platform's data folder."""
        from platformdirs import user_data_path

        return cls(user_data_path("tinyllm") / "chats")

    def new(self, first_words: str) -> Transcript:
        """Name a conversation after the time and its first words."""
        words = re.findall(r"\w+", first_words.lower())[:_SLUG_WORDS]
        stem = "-".join([datetime.now().strftime("%Y-%m-%d-%H%M%S"), *words])[:90]
        path = self.folder / f"{stem}{_SUFFIX}"
        number = 1
        while _exists(path):
            number += 1
            path = self.folder / f"{stem}-{number}{_SUFFIX}"
        return Transcript(path)

    def names(self, containing: str = "") -> list[str]:
        """Return the names that contain a text, those of the latest conversations first."""
        files = sorted(self._files(), key=lambda file: file.stat().st_mtime, reverse=True)
        names = [file.name.removesuffix(_SUFFIX) for file in files]
        return [name for name in names if containing.lower() in name.lower()]

    def named(self, name: str) -> Transcript:
        """Return the file of a new conversation. Raises ChatFileError for a name that is taken, or is none."""
        transcript = Transcript(self.folder / f"{_checked_name(name)}{_SUFFIX}")
        if _exists(transcript.path):
            raise ChatFileError(f"there is a conversation named {name!r} already: choose another name")
        return transcript

    def find(self, name: str | None = None) -> Transcript:
        """Return the conversation of that name, the only one whose name contains it, or without a name the latest.

        Raises ChatFileError, with the nearest names, where there is none, or more than one.
        """
        names = self.names()
        if not names:
            raise ChatFileError("there is no saved conversation")
        if name is None:
            return Transcript(self.folder / f"{names[0]}{_SUFFIX}")
        if name not in names:
            found = [each for each in names if name.lower() in each.lower()]
            if len(found) > 1:
                raise ChatFileError(f"{name!r} is in the names of {len(found)} conversations: {_some(found)}")
            if not found:
                near = get_close_matches(name, names, n=3, cutoff=0.4) or names[:3]
                raise ChatFileError(f"there is no conversation named {name!r}; there is: {_some(near)}")
            name = found[0]
        return Transcript(self.folder / f"{name}{_SUFFIX}")

    def _files(self) -> list[Path]:
        try:
            found = self.folder.glob(f"*{_SUFFIX}") if self.folder.is_dir() else ()
            return [file for file in found if file.is_file()]
        except OSError as error:
            raise ChatFileError(f"{self.folder}: not read: {error.strerror}") from error


def read_transcript(path: Path) -> Saved:
    """Read a conversation. Raises ChatFileError, naming file and line, for what is none, or is damaged.

    A last line that was cut off is left out.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ChatFileError(f"{path}: larger than {_MOST_BYTES >> 20} MB, which no conversation is")
        content = path.read_bytes()
    except OSError as error:
        raise ChatFileError(f"{path}: not read: {error.strerror}") from error
    *whole, rest = content.split(b"\n")
    lines = _lines(path, whole)
    header = next(lines, (0, {}))[1]
    if header.get("format") != FORMAT:
        raise ChatFileError(f"{path}: not a conversation that tinyllm saved")
    if header.get("version") != VERSION:
        raise ChatFileError(f"{path}: of version {header.get('version')!r}, and this tinyllm reads {VERSION}")
    saved = Saved(str(header.get("model", "")), str(header.get("created", "")), torn=bool(rest))
    for number, line in lines:
        if not _apply(saved, line):
            raise ChatFileError(f"{path}: line {number} is damaged, or of a newer tinyllm: {str(line)[:60]}")
    return saved


def _lines(path: Path, lines: list[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line.decode(errors="replace"))
        except (ValueError, RecursionError) as error:
            raise ChatFileError(f"{path}: line {number} is damaged: it is not JSON") from error
        if not isinstance(value, dict):
            raise ChatFileError(f"{path}: line {number} is damaged: it is not a JSON object")
        yield number, value


def _apply(saved: Saved, line: Mapping[str, Any]) -> bool:
    """Take one line in; False for one that says nothing known."""
    conversation = saved.conversation
    match line:
        case {"role": ("user" | "assistant") as role, "content": str(content), **rest} if rest.keys() <= {
            "reasoning"
        }:
            reasoning = rest.get("reasoning", "")
            if not isinstance(reasoning, str):
                return False
            conversation.messages.append(Message(role, content, reasoning))
        case {"system": (str() | None) as system, **rest} if not rest:
            conversation.system = system
        case {"settings": dict(settings), **rest} if not rest:
            saved.settings = settings
        case {"keep": int(count), **rest} if not rest and 0 <= count <= len(conversation.messages):
            del conversation.messages[count:]
        case {"drop": int(count), **rest} if not rest and 0 <= count <= len(conversation.messages):
            del conversation.messages[:count]
        case _:
            return False
    return True


def export_markdown(conversation: Conversation, model: str) -> str:
    """Write a conversation for people to read."""
    names = {USER: "You", ASSISTANT: model}
    system = [] if conversation.system is None else [f"> {line}" for line in conversation.system.splitlines()]
    parts = ["\n".join(system)] if system else []
    parts += [f"**{names[message.role]}**\n\n{message.content.strip()}" for message in conversation.messages]
    return "\n\n".join(parts) + "\n"


def export_json(conversation: Conversation, model: str) -> str:
    """Write a conversation as {"model", "messages"}, which other programs read."""
    return json.dumps({"model": model, "messages": conversation.prompt()}, ensure_ascii=False, indent=2) + "\n"


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ChatFileError(f"{name!r} cannot be a name: letters, digits, spaces and - . , ' only, at most 100")
    return name


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
