"""A file of prompts: one JSON object a line, each with an id. No mlx."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from math import isfinite
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NoReturn

from tinyllm.engine.request import SamplingParams
from tinyllm.errors import UsageError
from tinyllm.text.given import MOST_BYTES, encodable, too_large

Id = str | int | float

SETTINGS = ("max_tokens", "stop", *(field.name for field in fields(SamplingParams) if field.name != "held_back"))
_MOST_PIPED = 1 << 30  # bytes, which are copied to the disk
KEYS = ("id", "prompt", "messages", *SETTINGS)


@dataclass(frozen=True)
class Line:
    """A line of the file. One with a `problem` is not JSON, or has no id that can be read: `id` is None then."""

    number: int
    id: Id | None
    values: Mapping[str, Any]
    problem: str | None = None

    def fingerprint(self, settings: Mapping[str, Any], *more: Any) -> str:
        """Name what is asked under these settings of the command: answers to anything else are of no use."""
        asked = json.dumps([{**settings, **self.values}, *more], sort_keys=True, default=str)
        return sha256(encodable(asked).encode()).hexdigest()[:16]

    def content(self) -> str | Sequence[Mapping[str, Any]]:
        """Return the prompt, or the messages. Raises UsageError for a line that asks nothing, or not so."""
        if self.problem is not None:
            raise UsageError(self.problem)
        unknown = [key for key in self.values if key not in KEYS]
        if unknown:
            raise UsageError(f"there is no {unknown[0]!r} among {', '.join(KEYS)}")
        prompt, messages = self.values.get("prompt"), self.values.get("messages")
        if (prompt is None) == (messages is None):
            raise UsageError("either a prompt or messages are needed")
        if isinstance(prompt, str):
            return prompt
        if prompt is not None:
            raise UsageError(f"prompt must be a text, not {prompt!r:.60}")
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise UsageError(f'messages must be a list of {{"role", "content"}}, not {messages!r:.60}')
        return messages

    def settings(self) -> dict[str, Any]:
        """Return the settings that the line has of its own. Raises UsageError for one of another form."""
        own = {name: self.values[name] for name in SETTINGS if self.values.get(name) is not None}
        stop, bias = own.get("stop", ()), own.get("logit_bias", {})
        if not isinstance(stop, str) and not (
            isinstance(stop, Sequence) and all(isinstance(each, str) for each in stop)
        ):
            raise UsageError(f"stop must be a text or a list of them, not {stop!r:.60}")
        try:
            biases = {int(token_id): value for token_id, value in bias.items()}
        except (AttributeError, ValueError):
            raise UsageError(f"logit_bias must be an object of token ids, not {bias!r:.60}") from None
        return {**own, "logit_bias": biases} if biases else own


class PromptsFile:
    """The lines of a file, or of stdin (-), but for blank ones: as many as `count`, with those `ids`.

    Every line is looked at once here, and read again as it is iterated. Raises UsageError where two have the same id,
    there is none, or the file or a line of it does not end.
    """

    def __init__(self, path: str) -> None:
        self.name = "stdin" if path == "-" else path
        self._file = _open(path, self.name)
        self.count = 0
        numbers: dict[Id, int] = {}
        for line in self:
            self.count += 1
            if line.id is None:
                continue
            first = numbers.setdefault(line.id, line.number)
            if first != line.number:
                raise UsageError(f"{self.name}: lines {first} and {line.number} have the same id, {line.id!r}")
        if not self.count:
            raise UsageError(f"{self.name}: there is no prompt in it")
        self.ids = numbers.keys()

    def __iter__(self) -> Iterator[Line]:
        self._file.seek(0)
        for number, data in enumerate(_lines(self._file, self.name), start=1):
            if data.strip():
                yield _read_line(number, data)


def _open(path: str, name: str) -> IO[bytes]:
    """Open a file for reading it twice, later; what comes through a pipe is copied."""
    if path == "-" and sys.stdin is None:
        raise UsageError("--prompts - reads stdin, and that is closed")
    source: IO[bytes] = sys.stdin.buffer if path == "-" else Path(path).open("rb")  # noqa: SIM115
    if path != "-" and stat.S_ISREG(os.fstat(source.fileno()).st_mode):
        return source
    copy, left = TemporaryFile(), _MOST_PIPED  # noqa: SIM115
    for line in _lines(source, name):
        left -= len(line)
        if left < 0:
            raise UsageError(f"{name}: more than {_MOST_PIPED >> 20} MB: write them to a file, and give its name")
        copy.write(line)
    return copy


def _lines(file: IO[bytes], name: str) -> Iterator[bytes]:
    number = 0
    while line := file.readline(MOST_BYTES + 1):
        number += 1
        if len(line) > MOST_BYTES:
            raise too_large(f"{name}: line {number}")
        yield line


def _read_line(number: int, data: bytes) -> Line:
    try:
        values = json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        return Line(number, None, {}, f"is not JSON: {error.msg} (column {error.colno})")
    except (ValueError, RecursionError) as error:
        return Line(number, None, {}, f"is not JSON: {error}")
    if not isinstance(values, dict):
        return Line(number, None, {}, "is not a JSON object")
    given = values.get("id")
    line_id = number if given is None else given
    told = isinstance(line_id, str | int) or (isinstance(line_id, float) and isfinite(line_id))
    if not told or isinstance(line_id, bool):
        return Line(number, None, {}, f"id must be a text or a number, not {given!r:.60}")
    return Line(number, line_id, values)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON's")
