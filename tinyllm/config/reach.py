"""Which of the earlier positions a query sees, beside being causal. No mlx.

`sees` is written with operators alone, so that positions may be numbers or arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Window:
    """The last `size` positions, the query's own included (arXiv 2004.05150)."""

    size: int

    def describe(self) -> str:
        """Say what is seen."""
        return f"the last {self.size:,} tokens"

    def first(self, query: int) -> int:
        """Return the first position that is seen."""
        return max(0, query - self.size + 1)

    def sees(self, query: Any, key: Any) -> Any:
        """Whether a query sees a key before it."""
        return key > query - self.size

    def held(self, queries: int) -> int:
        """Return how many positions as many consecutive queries see at most."""
        return self.size - 1 + queries


@dataclass(frozen=True)
class Chunk:
    """The positions of the query's own chunk (Llama 4): chunks of `size` do not see each other."""

    size: int

    def describe(self) -> str:
        """Say what is seen."""
        return f"their chunk of {self.size:,} tokens"

    def first(self, query: int) -> int:
        """Return the first position that is seen."""
        return query // self.size * self.size

    def sees(self, query: Any, key: Any) -> Any:
        """Whether a query sees a key before it."""
        return key // self.size == query // self.size

    def held(self, queries: int) -> int:
        """Return how many positions as many consecutive queries see at most."""
        return self.size - 1 + queries


@dataclass(frozen=True)
class Strided:
    """The last `local` positions, and of those before them every `stride`-th, counted back from the query.

    The fixed pattern of arXiv 1904.10509; nothing is ever out of reach for all later queries.
    """

    local: int
    stride: int

    def describe(self) -> str:
        """Say what is seen."""
        return f"the last {self.local:,} tokens and every {self.stride:,}th before"

    def first(self, query: int) -> int:
        """Return the first position that is seen by this query or a later one."""
        return 0

    def sees(self, query: Any, key: Any) -> Any:
        """Whether a query sees a key before it."""
        return (key > query - self.local) | ((query - key) % self.stride == 0)

    def held(self, queries: int) -> int | None:
        """Return how many positions as many consecutive queries see at most: None, for there is no limit."""
        return None


@dataclass(frozen=True)
class State:
    """Nothing but the state that a recurrent layer has after the position before the query's."""

    def describe(self) -> str:
        """Say what is seen."""
        return "a state of all tokens before"

    def first(self, query: int) -> int:
        """Return the first position that is seen: the one that the state stands after."""
        return max(0, query - 1)

    def sees(self, query: Any, key: Any) -> Any:
        """Whether a query sees a key before it."""
        return key > query - 2

    def held(self, queries: int) -> int:
        """Return how many positions as many consecutive queries see at most."""
        return 1 + queries


Pattern = Window | Chunk | Strided  # of layers that attend
Reach = Pattern | State
