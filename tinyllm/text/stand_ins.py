"""Control strings in what people write, hidden from the tokenizer but not from the template.

A message may hold `<|im_end|>` as text. The chat template writes the same string to end a turn. To tell them apart
in the rendered prompt, each control string in a message is replaced, before rendering, by one character that occurs
nowhere in the input. A template can cut, join and strip around it; afterwards it is turned back into plain text.
"""

from __future__ import annotations

import functools
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from tinyllm.text.arguments import Arguments

__all__ = ["ControlStrings", "StandIns"]

# CJK extension G: characters that are printable, have no case and almost no use, so that templates leave them alone.
_POOL = range(0x30000, 0x31340)


class ControlStrings:
    """The strings that a tokenizer turns into control ids, and how to find them in text."""

    def __init__(self, controls: Collection[str]):
        self.all = frozenset(controls)
        self._sorted = sorted(self.all)
        self._longest = max(map(len, self.all), default=0)
        self.pattern = functools.lru_cache(maxsize=8)(self._pattern)

    def _pattern(self, without: frozenset[str] = frozenset()) -> re.Pattern[str]:
        """Matches any of them, longest first, but those in `without`."""
        texts = sorted(self.all.difference(without), key=lambda text: (-len(text), text))
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def begins_at_end(self, text: str) -> bool:
        """Whether the text ends (spaces aside) with the beginning of one, which text after it might complete."""
        text = text.rstrip()
        lengths = range(1, min(len(text), self._longest) + 1)
        return any(self._begins(text[-length:]) for length in lengths)

    def _begins(self, text: str) -> bool:
        """Whether a longer control string begins with the text: if any does, the first one that sorts after it."""
        after = bisect_right(self._sorted, text)
        return after < len(self._sorted) and self._sorted[after].startswith(text)


class StandIns:
    """One prompt's control strings and the characters that stand for them.

    `kept` are control strings that the content of an assistant's message may hold as they are: the marks of its
    reasoning, which it wrote as tokens and which templates look for.
    """

    def __init__(self, controls: ControlStrings, data: Any, kept: frozenset[str] = frozenset()):
        self._controls = controls
        self._everywhere = controls.pattern()
        self._assistant = controls.pattern(kept)
        self._free = _free_characters(data)
        self._of_text: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._of_text)

    @property
    def texts(self) -> dict[str, str]:
        """What each stand-in is to become again."""
        return {char: text for text, char in self._of_text.items()}

    def hide(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of `chat_values` with every control string hidden, in nested values and in keys too."""
        return {
            name: [self._hide_message(message) for message in value]
            if name == "messages"
            else _map_texts(value, self._hider(self._everywhere))
            for name, value in values.items()
        }

    def _hide_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        own = self._assistant if message.get("role") == "assistant" else self._everywhere
        return {
            key: _map_texts(value, self._hider(own if key == "content" else self._everywhere))
            for key, value in message.items()
        }

    def reveal_escapes(self, rendered: str) -> str:
        """The prompt with stand-ins that a template escaped (`tojson(ensure_ascii=true)`) written as themselves."""
        for char in self._of_text.values():
            rendered = rendered.replace(json.dumps(char)[1:-1], char)
        return rendered

    def _hider(self, pattern: re.Pattern[str]) -> Callable[[str], str]:
        def hide(text: str) -> str:
            text = pattern.sub(lambda match: self._stand_in(match[0]), text)
            if not self._controls.begins_at_end(text):
                return text
            body = text.rstrip()
            return body[:-1] + self._stand_in(body[-1]) + text[len(body) :]

        return hide

    def _stand_in(self, text: str) -> str:
        if text not in self._of_text:
            self._of_text[text] = next(self._free)
        return self._of_text[text]


def _free_characters(data: Any) -> Iterator[str]:
    """Characters that no text of the data holds, nor (by one escaped) any JSON in it."""
    used: set[str] = set()
    escaped: list[str] = []

    def collect(text: str) -> str:
        used.update(text)
        if "\\u" in text:
            escaped.append(text)
        return text

    _map_texts(data, collect)
    for char in map(chr, _POOL):
        if char not in used and not any(json.dumps(char)[1:-1] in text for text in escaped):
            yield char


def _map_texts(value: Any, function: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Arguments):
        return value.map_texts(lambda part: _map_texts(part, function))
    if isinstance(value, Mapping):
        return {_map_texts(key, function): _map_texts(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_texts(item, function) for item in value]
    return value
