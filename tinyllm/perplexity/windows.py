"""Which tokens of a text are scored, and what each of them sees. No mlx."""

from __future__ import annotations

from dataclasses import dataclass

from tinyllm.errors import UsageError

__all__ = ["Window", "windows"]


@dataclass(frozen=True)
class Window:
    """Tokens `start` to `end` are read as a sequence of their own; those from `first` on are scored."""

    start: int
    end: int
    first: int

    @property
    def scored(self) -> int:
        """How many tokens are scored."""
        return self.end - self.first


def windows(count: int, context: int, stride: int) -> list[Window]:
    """Lay windows of `context` tokens over `count` tokens, each beginning `stride` after the one before it.

    A token is scored once, in the first window that holds it and a token before it. With a stride as long as the
    context these are all but the first of each window; with a shorter one, all but the first of the text, and in
    windows after the first there are context - stride tokens or more before each. The last window ends with the text.
    Raises UsageError where the numbers leave nothing to score, or tokens between windows.
    """
    if context < 2 or not 1 <= stride <= context:
        raise UsageError(
            f"windows of {context} tokens, {stride} apart: a window has 2 or more, the stride no more than it"
        )
    if count < 2:
        raise UsageError(
            f"the text has {count} token{'s' * (count != 1)}, and a token is scored by what is before it"
        )
    found: list[Window] = []
    reached = 0
    for start in range(0, count, stride):
        end = min(start + context, count)
        first = max(reached, start + 1)
        if first < end:
            found.append(Window(start, end, first))
        reached = end
        if end == count:
            break
    return found
