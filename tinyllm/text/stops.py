"""Stop strings, found in text whatever the pieces that it comes in."""

from __future__ import annotations

from collections.abc import Iterable

from tinyllm.errors import UsageError

__all__ = ["StopStrings", "overlap"]


class StopStrings:
    """Passes a stream of text on until a stop string is complete.

    Text that may be the beginning of a stop string is held until it is known not to be. The string that completes
    first ends the stream (of two that end together, the longer), so that the result is the same for any pieces.
    One alone may be given as it is. Raises UsageError for an empty stop string.
    """

    def __init__(self, stops: str | Iterable[str]):
        self._stops = (stops,) if isinstance(stops, str) else tuple(dict.fromkeys(stops))
        if "" in self._stops:
            raise UsageError("a stop string must not be empty")
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str) -> str:
        """Take the next piece; give what may be shown now: nothing after `matched` is set."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        held = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """The text that was held, when the stream ends without a stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of the text are the beginning of the mark, without being all of it."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
