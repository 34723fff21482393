"""A file of answers: one JSON object a line, which a later run of the same command goes on with. No mlx."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Container, Iterator, Mapping
from io import FileIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from tinyllm.cli.prompts_file import Id
from tinyllm.errors import UsageError

Answered = tuple[Id, str | None]  # the id of a line, and the hash of what was asked

_BEGINNING = b'{"id": '


class AnswersFile:
    """Takes answers and errors, and has handed each to the system when `write` returns. "-" is stdout.

    If the file exists, `answered` lists the answers in it, each by its id and the hash of what was asked (None in a
    file of an older tinyllm). The file stays as it is until `keep` is called. Raises UsageError for a file with
    anything but answers and errors in it, and for one that another process is writing.
    """

    def __init__(self, path: str) -> None:
        self.answered: list[Answered] = []
        self._path: Path | None = None
        self.name = "stdout" if path == "-" else path
        if path == "-":
            self._file = FileIO(sys.stdout.fileno(), "w", closefd=False)
            return
        try:
            target = Path(path).resolve()
        except (OSError, RuntimeError) as error:  # a link that leads to itself
            raise UsageError(f"{path}: leads to no file") from error
        self._file = _open_alone(target)
        if target.is_file():
            self._path = target
            self.answered = [answered for _, answered in _answers(target)]

    def keep(self, wanted: Container[Answered]) -> None:
        """Remove everything except the `wanted` answers: others, errors, and a last line that was torn."""
        if self._path is None:
            return
        kept = sum(len(line) for line, answered in _answers(self._path) if answered in wanted)
        if kept < self._path.stat().st_size:
            self._file = _with_answers_alone(self._path, wanted)

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


def _answers(path: Path) -> Iterator[tuple[bytes, Answered]]:
    """Yield the lines that are answers, and what each answers.

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
                made_of = record.get("hash")
                yield line, (record["id"], None if made_of is None else str(made_of))


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


def _with_answers_alone(path: Path, wanted: Container[Answered]) -> FileIO:
    """Replace a file by the `wanted` answers in it, and open it for appending."""
    with NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as new:
        try:
            new.writelines(line for line, answered in _answers(path) if answered in wanted)
            new.flush()
            os.fsync(new.fileno())
            shutil.copymode(path, new.name)
            Path(new.name).replace(path)
        except BaseException:
            Path(new.name).unlink()
            raise
    return _open_alone(path)
