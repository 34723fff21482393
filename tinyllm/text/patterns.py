"""How long the regular expressions of a tokenizer.json can take, told from their shape.

The `tokenizers` library matches with Oniguruma, which backtracks when something that must match does not. A repeat
within a repeat before it, `(a+)+$`, takes time exponential in the text; Oniguruma gives up after ten million steps,
with a Rust panic. Two plain repeats, `a*a*b`, take cubic time. The patterns that models use have no such shape.
"""

from __future__ import annotations

import enum
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["Risk", "patterns_in", "risk_of", "within"]

_T = TypeVar("_T")


class Risk(enum.IntEnum):
    """What a pattern may cost."""

    NONE = 0  # at most quadratic in the text, in practice linear
    SLOW = 1  # no promise: it runs under a time limit
    NESTED = 2  # exponential: refused


def patterns_in(spec: Any) -> Iterator[str]:
    """The regular expressions in a part of tokenizer.json (normalizer, pre_tokenizer, decoder)."""
    if isinstance(spec, dict):
        if isinstance(spec.get("Regex"), str):
            yield spec["Regex"]
        spec = list(spec.values())
    for part in spec if isinstance(spec, list) else ():
        yield from patterns_in(part)


def risk_of(pattern: str) -> Risk:
    """The risk of a pattern in Oniguruma's syntax; SLOW where the pattern is not understood."""
    reader = _Reader(pattern)
    try:
        reader.alternatives()
    except (IndexError, RecursionError):
        reader.risk = max(reader.risk, Risk.SLOW)
    return reader.risk


def within(seconds: float, call: Callable[[], _T]) -> _T:
    """The result of a call that leaves the interpreter's lock, or TimeoutError: then its thread is abandoned."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"given up after {seconds:.0f} s")
    return results[0]


@dataclass(frozen=True)
class _Shape:
    """What matters of a part of a pattern."""

    repeats: int = 0  # unbounded repeats on one way through it
    varies: bool = False  # it can match in more than one way at one place
    required: bool = True  # it can fail to match, so that what is before it backtracks
    delimited: bool = True  # there is one way to tell two of it in a row apart, as far as is seen
    pending: Risk = Risk.NONE  # what backtracking into it costs


_SUFFIX = re.compile(r"[*+?][?+]?|\{(?:\d+|\d*,\d*)\}\??")
_ESCAPE = re.compile(r"\\(?:[pP]\{[^}]*\}|x\{[^}]*\}|x[0-9A-Fa-f]{1,2}|u[0-9A-Fa-f]{4}|k<[^>]*>|.)", re.DOTALL)
_GROUP = re.compile(r"\(\?(?:#[^)]*|[imxadu-]+)\)|\(\?(?:<?[=!]|[imxadu-]*:|>|<[^>]*>|~)?|\(")


def _quantifier(match: re.Match[str]) -> tuple[int, int | None, bool]:
    """Least and greatest count (None: no limit), and whether it never gives back what it took."""
    text = match[0]
    if text[0] != "{":
        return int(text[0] == "+"), 1 if text[0] == "?" else None, len(text) > 1 and text[1] == "+"
    low, comma, high = text.rstrip("?").strip("{}").partition(",")
    if not comma:
        return int(low), int(low), False
    return int(low or 0), int(high) if high else None, False


class _Reader:
    """A recursive-descent reader of one pattern, which notes the worst that it sees."""

    def __init__(self, pattern: str):
        self._pattern = pattern
        self._at = 0
        self.risk = Risk.NONE

    def alternatives(self) -> _Shape:
        """`a|b|c`, up to the end or a closing parenthesis."""
        shapes = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            shapes.append(self._sequence())
        return _Shape(
            repeats=max(shape.repeats for shape in shapes),
            varies=len(shapes) > 1 or shapes[0].varies,
            required=all(shape.required for shape in shapes),
            delimited=all(shape.delimited for shape in shapes),
            pending=max(shape.pending for shape in shapes),
        )

    def _sequence(self) -> _Shape:
        parts: list[_Shape] = []
        repeats, pending = 0, Risk.NONE
        while self._peek() not in ("", "|", ")"):
            part = self._repeated(self._atom())
            if part.required:
                self._note(max(pending, Risk.SLOW if repeats >= 2 else Risk.NONE))
            repeats, pending = repeats + part.repeats, max(pending, part.pending)
            parts.append(part)
        return _Shape(
            repeats,
            varies=any(part.varies for part in parts),
            required=any(part.required for part in parts),
            delimited=any(part.delimited for part in parts),
            pending=pending,
        )

    def _repeated(self, shape: _Shape) -> _Shape:
        """An atom with the quantifiers that follow it."""
        while match := _SUFFIX.match(self._pattern, self._at):
            self._at = match.end()
            low, high, possessive = _quantifier(match)
            required = shape.required and low > 0
            if possessive:
                shape = _Shape(required=required)
                continue
            pending = shape.pending
            if high is None and shape.repeats and not shape.delimited:
                pending = Risk.NESTED
            elif high != 1 and shape.varies:
                pending = max(pending, Risk.SLOW)
            shape = _Shape(
                shape.repeats + (high is None),
                varies=shape.varies or low != high,
                required=required,
                delimited=shape.delimited and required and high is not None,
                pending=pending,
            )
        return shape

    def _atom(self) -> _Shape:
        """A group, a class, an escape or a character."""
        char = self._peek()
        if char == "(":
            return self._group()
        if char == "[":
            self._skip_class()
        elif char == "\\":
            match = _ESCAPE.match(self._pattern, self._at)
            self._at = match.end() if match else len(self._pattern)
            if match and (match[0][1] in "123456789k"):
                self._note(Risk.SLOW)  # a back reference
        else:
            self._at += 1
        return _Shape()

    def _group(self) -> _Shape:
        match = _GROUP.match(self._pattern, self._at)
        assert match is not None  # it matches "("
        self._at = match.end()
        if match[0].endswith(")"):  # a comment or flags
            return _Shape(required=False)
        shape = self.alternatives()
        if self._peek() != ")":
            raise IndexError("a group is not closed")
        self._at += 1
        if match[0] == "(?>":
            return _Shape(required=shape.required)
        return _Shape() if match[0].endswith(("=", "!")) else shape

    def _skip_class(self) -> None:
        """`[...]`, in which classes may be nested and the first `]` may be a character."""
        self._at += 1
        if self._peek() == "^":
            self._at += 1
        if self._peek() == "]":
            self._at += 1
        while (char := self._pattern[self._at]) != "]":
            if char == "[":
                self._skip_class()
            else:
                self._at += 2 if char == "\\" else 1
        self._at += 1

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _note(self, risk: Risk) -> None:
        self.risk = max(self.risk, risk)
