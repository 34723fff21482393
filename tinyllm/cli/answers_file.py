"""A file of answers: one JSON object a line, which a later run of the same command goes on with. No mlx."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Set
from io import FileIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import MappingProxyType
from typing import Any

from tinyllm.cli.prompts_file import Id
from tinyllm.errors import UsageError

_BEGINNING = b'{"id": '


class AnswersFile:
    """Takes answers and errors, and has handed each to the system when `write` returns. "-" is stdout.

    Where the file is there already, `done` are the ids that it answers; its errors are taken out, a last line that
    was torn when a process ended, and answers to something else than is asked now: `fingerprints` has what is asked,
    by id. Answers of an older tinyllm have no fingerprint, and count. `stale` are the ids of those that are taken out
    for that reason. Raises UsageError for a file with anything else in it, and for one that
    another process is writing.
    """

    def __init__(self, path: str, fingerprints: Mapping[Id, str] = MappingProxyType({})) -> None:
        self.done: set[Id] = set()
        self.stale: set[Id] = set()
        self.name = "stdout" if path == "-" else path
        if path == "-":
            self._file = FileIO(sys.stdout.fileno(), "w", closefd=False)
            return
        target = Path(path).resolve()
        self._file = _open_alone(target)
        if target.is_file():
            kept = 0
            for line, line_id, made_of in _answers(target):
                if made_of in (None, fingerprints.get(line_id, made_of)):
                    self.done.add(line_id)
                    kept += len(line)
                else:
                    self.stale.add(line_id)
            if kept < target.stat().st_size:
                self._file = _with_answers_alone(target, self.stale - self.done)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line. An OSError names the file."""
        line = json.dumps(record, ensure_ascii=False) + "\n"
        # Half of a surrogate pair, which JSON may hold, becomes its escape: the same in Python and in JSON.
        rest = memoryview(line.encode(errors="backslashreplace"))
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise type(error)(error.errno, error.strerror, self.name) from error


def _open_alone(path: Path) -> FileIO:
    """Open a file for appending; the lock ends with the process. Raises UsageError where another has it."""
    file = FileIO(path, "a")
    if path.is_file():
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{path}: another process is writing it") from None
    return file


def _answers(path: Path) -> Iterator[tuple[bytes, Id, str | None]]:
    """Yield the lines that are answers, their ids, and what they answer.

    Raises UsageError at a line that no run can have written.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            record = _read(line) if line.endswith(b"\n") else None
            torn = record is None and not line.endswith(b"\n") and line[: len(_BEGINNING)] == _BEGINNING[: len(line)]
            if record is None and not torn:
                raise UsageError(
                    f"{path}: line {number} is no answer: give a file of answers to go on with, or a new one"
                )
            if record is not None and "text" in record:
                yield line, record["id"], record.get("hash")


def _read(line: bytes) -> Mapping[str, Any] | None:
    """Return what a line says, or None for one that is neither an answer nor an error."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or ("text" in record) == ("error" in record):
        return None
    line_id = record.get("id", ...)
    return record if isinstance(line_id, Id) or (line_id is None and "error" in record) else None


def _with_answers_alone(path: Path, stale: Set[Id]) -> FileIO:
    """Replace a file by its answers, without those to `stale` ids, and open it for appending."""
    with NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as new:
        try:
            new.writelines(line for line, line_id, _ in _answers(path) if line_id not in stale)
            new.flush()
            os.fsync(new.fileno())
            shutil.copymode(path, new.name)
            Path(new.name).replace(path)
        except BaseException:
            Path(new.name).unlink()
            raise
    return _open_alone(path)
