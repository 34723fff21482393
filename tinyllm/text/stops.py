"""Stop strings, found in text whatever the pieces that it comes in."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from tinyllm.errors import UsageError

__all__ = ["StopStrings", "overlap"]


class StopStrings:
    """Passes a stream of text on until a stop string is complete.

    Text that may be the beginning of a stop string is held until it is known not to be. The string that completes
    first ends the stream (of two that end together, the longer), so that the result is the same for any pieces.
    One alone may be given as it is. Raises UsageError for an empty stop string.

    Stop strings are looked up, not tried one after another, so the time for a piece of text does not grow with their
    number.
    """

    def __init__(self, stops: str | Iterable[str]):
        self._stops = frozenset((stops,) if isinstance(stops, str) else stops)
        if "" in self._stops:
            raise UsageError("a stop string must not be empty")
        self._sorted = sorted(self._stops)
        self._lengths = sorted({len(stop) for stop in self._stops}, reverse=True)
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str) -> str:
        """Take the next piece; give what may be shown now: nothing after `matched` is set."""
        if self.matched is not None:
            return ""
        first, text = len(self._held) + 1, self._held + text
        for end in range(first, len(text) + 1):
            for length in self._lengths:
                if length <= end and text[end - length : end] in self._stops:
                    self.matched, self._held = text[end - length : end], ""
                    return text[: end - length]
        starts = range(max(0, len(text) - self._lengths[0] + 1) if self._lengths else len(text), len(text))
        start = next((start for start in starts if self._begins(text[start:])), len(text))
        self._held = text[start:]
        return text[:start]

    def finish(self) -> str:
        """The text that was held, when the stream ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _begins(self, text: str) -> bool:
        """Whether some stop string begins with `text`: then the first one that is not less than it does."""
        place = bisect_left(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of the text are the beginning of the mark, without being all of it."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
