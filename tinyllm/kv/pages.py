"""Who holds which page of a key/value pool: the allocator of a layer kind, and the block table of a sequence. No mlx.

A page is room for the keys and values of `page_size` consecutive positions, in every layer of one kind; of recurrent
layers it is room for one state, that after the last of these positions which is computed. So the pages of whole
blocks hold the states at their ends, and going on from one of them never writes to it. A page's id says where in the
kind's arrays it lies. Page 0 is the padding page: rows that fill up a batch write into it, nobody reads it, and it is
never handed out, so that here 0 also stands for "no page".
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from tinyllm.config.reach import Reach, State

__all__ = [
    "PADDING",
    "BlockTable",
    "IntegrityError",
    "OutOfPagesError",
    "PageAllocator",
    "PageKind",
    "readable_length",
]

_RUNS_TRIED = 4  # first pages of a run; looking at all would take longer the more pages are free
PADDING = 0


class OutOfPagesError(Exception):
    """Every page of a kind is held by a sequence. Callers ask `available` first."""


class IntegrityError(AssertionError):
    """The books disagree with each other; the message says where."""


@dataclass(frozen=True)
class PageKind:
    """What the layers of one kind have in common here.

    `reach` is how far a query sees (None: all positions before it). `ceiling` is how many pages there may ever be,
    the padding page included.
    """

    reach: Reach | None
    ceiling: int

    @property
    def lasting(self) -> bool:
        """Whether no page is ever out of reach."""
        return self.reach is None or self.reach.held(1) is None

    @property
    def recurrent(self) -> bool:
        """Whether a page holds a state, which is of use at one length only."""
        return isinstance(self.reach, State)

    def first_page(self, length: int, page_size: int) -> int:
        """Return the index in a block table of the first page that the query at position `length` sees."""
        return 0 if self.reach is None else self.reach.first(length) // page_size

    def first_kept(self, length: int, page_size: int) -> int:
        """Return the index of the first page that a sequence of `length` holds.

        Before the state that it goes on from, that at the end of the last whole page, which it can be trimmed to.
        """
        return max(0, length // page_size - 1) if self.recurrent else self.first_page(length, page_size)

    def most_pages(self, queries: int, page_size: int) -> int | None:
        """Return how many pages a sequence holds at most while so many queries are computed, None without a limit."""
        held = None if self.reach is None else self.reach.held(queries)
        # The first position of those that are held may be the last of a page.
        return None if held is None else 1 + -(-(held - 1) // page_size) + self.recurrent


def readable_length(
    length: int, kinds: Sequence[PageKind], page_size: int, page_at: Callable[[int, int], int]
) -> int:
    """Return the largest n up to `length` such that the query at position n finds every page that it sees.

    `page_at(kind, index)` is the page there, or 0 if it is gone. Pages of a lasting kind are never gone. A state is
    taken to stand after `length` positions, or those of the whole pages before it.
    """
    windowed = [(number, kind) for number, kind in enumerate(kinds) if not kind.lasting]
    while True:
        seen = (
            (n, i)
            for n, kind in windowed
            for i in reversed(range(kind.first_page(length, page_size), -(-length // page_size)))
        )
        gone = next((i for n, i in seen if not page_at(n, i)), None)
        if gone is None:
            return length
        length = gone * page_size  # a query between here and there would see the page that is gone


class PageAllocator:
    """The pages of one kind. Each has never been used, or is free, referenced, or cached.

    A cached page has no reference left, but the prefix index keeps it: it can be shared again, until it is evicted
    because nothing else is left, the one that was released first before all others. `on_evict` is then called with
    the page. Every operation takes constant time for each page.
    """

    def __init__(self, ceiling: int) -> None:
        self.ceiling = ceiling
        self.touched = 1  # pages that the arrays must hold: all ids below are in use or have been
        self.on_evict: Callable[[int], None] = lambda page: None
        self._references: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict()
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._kept: set[int] = set()

    @property
    def available(self) -> int:
        """How many pages can be allocated now."""
        return len(self._free) + len(self._cached) + self.ceiling - self.touched

    def references(self, page: int) -> int:
        """Return how many block tables hold `page`."""
        return self._references.get(page, 0)

    def is_free(self, page: int) -> bool:
        """Return whether nobody holds `page` or keeps it."""
        return page in self._free

    def allocate(self, after: int | None = None) -> int:
        """Take a page, with one reference; the one that follows page `after` if it can be had without an eviction.

        Otherwise the page that has been free for longest is taken, else one that was never used, else a cached one
        (again the one that follows `after`, else the least recently released). Raises OutOfPagesError when all pages
        are referenced.
        """
        following = PADDING if after is None else after + 1
        if following in self._free:
            page = following
            del self._free[page]
        elif self.touched < self.ceiling and (following == self.touched or not self._free):
            page = self.touched
            self.touched += 1
        elif self._free:
            page, _ = self._free.popitem(last=False)
        else:
            page = self._evict(following)
        self._references[page] = 1
        return page

    def before_run(self, count: int) -> int | None:
        """Return after which page `count` of them lie side by side that can be had: free ones, else never used ones.

        None where there is no such run, as far as a look at few free pages can tell.
        """
        for first in islice(self._free, _RUNS_TRIED):
            if all(page in self._free for page in range(first, first + count)):
                return first - 1
        return self.touched - 1 if self.touched + count <= self.ceiling else None

    def share(self, page: int) -> None:
        """Add a reference to a page that is referenced or cached."""
        self._cached.pop(page, None)
        self._references[page] = self.references(page) + 1

    def release(self, pages: Sequence[int]) -> None:
        """Take one reference from each of `pages`, which are in the order of a sequence.

        Those that are free then will be allocated in this order; those that stay cached will be evicted in the
        opposite one, because the end of a prefix is of no use without its start.
        """
        unheld = [page for page in pages if not self._unreference(page)]
        self._free.update((page, None) for page in unheld if page not in self._kept)
        self._cached.update((page, None) for page in reversed(unheld) if page in self._kept)

    def keep(self, page: int) -> None:
        """Have a referenced page stay cached when its last reference goes."""
        self._kept.add(page)

    def forget(self, page: int) -> None:
        """End `keep`: a cached page is free now, a referenced one will be."""
        self._kept.remove(page)
        if page in self._cached:
            del self._cached[page]
            self._free[page] = None

    def check_integrity(self, references: dict[int, int], kept: set[int]) -> None:
        """Raise IntegrityError unless the books say that there are these `references`, and that these are kept."""
        _check(self._references == references, f"references {self._references}, but tables hold {references}")
        _check(self._kept == kept, f"pages {sorted(self._kept ^ kept)} are kept, or indexed, but not both")
        _check(self._cached.keys() <= kept, f"pages {sorted(self._cached.keys() - kept)} are cached, but not kept")
        _check(not self._free.keys() & kept, f"pages {sorted(self._free.keys() & kept)} are kept, but free")
        states = sorted([*self._free, *self._cached, *self._references])
        _check(
            states == list(range(1, self.touched)), f"of pages 1 to {self.touched - 1} these have a state: {states}"
        )
        _check(1 <= self.touched <= self.ceiling, f"{self.touched} pages touched, of {self.ceiling}")

    def _unreference(self, page: int) -> int:
        left = self._references[page] - 1
        if left:
            self._references[page] = left
        else:
            del self._references[page]
        return left

    def _evict(self, preferred: int) -> int:
        if not self._cached:
            raise OutOfPagesError(f"all {self.ceiling - 1} pages are referenced")
        page = preferred if preferred in self._cached else next(iter(self._cached))
        del self._cached[page]
        self._kept.remove(page)
        self.on_evict(page)
        return page


class BlockTable:
    """The pages of one sequence in one kind: `pages[i]` holds the positions from i * page_size on.

    Those before index `first` were given back, and read as the padding page.
    """

    def __init__(self, allocator: PageAllocator, pages: Sequence[int] = (), first: int = 0) -> None:
        """Share `pages` from index `first` on."""
        self.first = first
        self.pages = [PADDING] * first + list(pages[first:])
        self._allocator = allocator
        for page in self.live:
            allocator.share(page)

    @property
    def live(self) -> list[int]:
        """The pages that are held, in order."""
        return self.pages[self.first :]

    @property
    def start(self) -> int | None:
        """The first of the live pages if each follows the one before it in the arrays, else None."""
        live = self.live
        return live[0] if live and live == list(range(live[0], live[0] + len(live))) else None

    def page_at(self, index: int) -> int:
        """Return the page at `index`, or the padding page if there is none."""
        return self.pages[index] if index < len(self.pages) else PADDING

    def reserve(self, count: int) -> None:
        """Allocate until there are `count` pages, side by side if that can be. Raises OutOfPagesError."""
        lacking = count - len(self.pages)
        last = self.pages[-1] if self.live else self._allocator.before_run(lacking)
        for _ in range(lacking):
            last = self._allocator.allocate(after=last)
            self.pages.append(last)

    def replace(self, index: int) -> tuple[int, int]:
        """Put a new page in the place of a live one; return the ids of both, (old, new). Raises OutOfPagesError."""
        old = self.pages[index]
        before = self.pages[index - 1] if index > self.first else None
        self.pages[index] = self._allocator.allocate(after=before)
        self._allocator.release([old])
        return old, self.pages[index]

    def trim(self, count: int) -> None:
        """Give back all but the first `count` pages."""
        self._allocator.release(self.pages[max(count, self.first) :])
        del self.pages[count:]
        self.first = min(self.first, count)

    def drop_before(self, first: int) -> None:
        """Give back the pages before index `first`."""
        if first > self.first:
            self._allocator.release(self.pages[self.first : first])
            self.pages[self.first : first] = [PADDING] * (first - self.first)
            self.first = first

    def restore(self, pages: Sequence[int]) -> None:
        """Share `pages`, which belong immediately before the live ones: undo a `drop_before`."""
        for page in pages:
            self._allocator.share(page)
        self.pages[self.first - len(pages) : self.first] = pages
        self.first -= len(pages)

    def fork(self, count: int) -> BlockTable:
        """Return a table that shares the first `count` pages, those of them that are live."""
        return BlockTable(self._allocator, self.pages[:count], self.first)

    def release(self) -> None:
        """Give back all pages."""
        self.trim(0)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise IntegrityError(message)
