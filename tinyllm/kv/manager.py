"""The pages of all sequences, in every layer kind: what a scheduler asks, and what a runner is told. No mlx.

A page is written only where nobody else reads it. `reserve` sees to that for the page that holds the next position,
the only one that may be shared, since those after it are fresh:

    held by one table, and the prefix index promises none of what will be overwritten    written in place
    otherwise                                                                            copied to a fresh page first

So a sequence that goes on exactly where one ended, as the next turn of a chat does, takes over its last page. A page
with a state that the index knows is always copied: what is written to it later takes the place of the whole state.
For the same reason the last, partial page of a sequence is published only when the sequence has ended.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tinyllm.kv.pages import PADDING, BlockTable, IntegrityError, PageAllocator, PageKind, readable_length
from tinyllm.kv.prefix import ChainHash, Node, PrefixIndex

__all__ = ["Copy", "PageManager", "Tables"]


@dataclass(frozen=True)
class Copy:
    """A page to be copied on the device, in every layer of a kind: from id `source` to id `target`."""

    kind: int
    source: int
    target: int


@dataclass(eq=False)
class Tables:
    """A sequence's block tables, one a kind. `length` positions are computed, from 0 on.

    `path` are the index's nodes of its first whole pages; `written` those that name a page which it wrote to.
    """

    by_kind: tuple[BlockTable, ...]
    regime: str = ""
    length: int = 0
    path: list[Node] = field(default_factory=list, repr=False)
    written: dict[Node, None] = field(default_factory=dict, repr=False)  # a set has no order


class PageManager:
    """Block tables for sequences, over a pool of pages for each of `kinds`.

    Of the `asked_tokens` that `open` was given, `hit_tokens` were there already. `page_size` and `prefill_chunk`, the
    most that is reserved at once, are in tokens. Without `share` no sequence sees another's pages.
    """

    def __init__(
        self,
        kinds: Sequence[PageKind],
        *,
        page_size: int = 128,
        prefill_chunk: int = 256,
        share: bool = True,
        chain_hash: ChainHash = hash,
    ) -> None:
        self.kinds = tuple(kinds)
        self.page_size = page_size
        self.hit_tokens = 0
        self.asked_tokens = 0
        self._prefill_chunk = prefill_chunk
        self._share = share
        self._allocators = [PageAllocator(kind.ceiling) for kind in self.kinds]
        self._recurrent = any(kind.recurrent for kind in self.kinds)
        self._index = PrefixIndex(self.kinds, self._allocators, page_size, chain_hash)
        self._copies: list[Copy] = []

    @property
    def shares(self) -> bool:
        """Whether sequences see each other's pages."""
        return self._share

    @property
    def available(self) -> tuple[int, ...]:
        """Pages that can be allocated now, by kind; cached ones count."""
        return tuple(allocator.available for allocator in self._allocators)

    @property
    def touched(self) -> tuple[int, ...]:
        """Pages that the arrays of each kind must hold, the padding page included. Grows, never shrinks."""
        return tuple(allocator.touched for allocator in self._allocators)

    @property
    def capacity(self) -> int:
        """The most tokens that one sequence can hold, alone: sys.maxsize where every kind has a window that fits."""
        return min(self._capacity(kind) for kind in self.kinds)

    def open(self, tokens: Sequence[int], regime: str = "") -> Tables:
        """Return tables for a new sequence that begins with `tokens`, holding what is known of them: `length` tokens.

        At most all but the last token, whose logits are yet to be computed. Allocates nothing, and cannot fail:
        pages are shared, and copied by `reserve` where they must be.
        """
        nodes, length = self._index.match(tokens, max(0, len(tokens) - 1), regime)
        self.asked_tokens += len(tokens)
        self.hit_tokens += length
        by_kind = tuple(
            BlockTable(allocator, [node.pages[n] for node in nodes], kind.first_page(length, self.page_size))
            for n, (kind, allocator) in enumerate(zip(self.kinds, self._allocators, strict=True))
        )
        return Tables(by_kind, regime, length, nodes[: length // self.page_size])

    def known(self, tokens: Sequence[int], regime: str = "") -> tuple[list[tuple[int, ...]], int]:
        """Return the pages, one a kind, that hold what is known of `tokens`, and how many of these that is.

        A page is 0 where a window has passed and it was evicted. Nobody holds them: the next `reserve` may evict any.
        """
        nodes, length = self._index.match(tokens, len(tokens), regime)
        return [tuple(node.pages) for node in nodes], length

    def missing(self, tables: Tables, length: int) -> tuple[int, ...]:
        """Return how many pages `reserve(tables, length)` would take of those available, by kind."""
        index = tables.length // self.page_size
        return tuple(
            max(0, self._pages(length) - len(table.pages))
            + (length > tables.length and allocator.references(table.page_at(index)) > 1)
            for table, allocator in zip(tables.by_kind, self._allocators, strict=True)
        )

    def reserve(self, tables: Tables, length: int) -> bool:
        """Make the positions from `tables.length` up to `length` writable, in every kind.

        Returns False, and changes nothing, where a kind lacks pages. Never lacks for a sequence that is alone, up
        to `capacity`. `take_copies` before the write.
        """
        missing = self.missing(tables, length)
        if any(count > available for count, available in zip(missing, self.available, strict=True)):
            return False
        for kind, table in enumerate(tables.by_kind):
            if length > tables.length:
                self._make_writable(kind, tables, missing[kind])
            table.reserve(self._pages(length))
        return True

    def advance(self, tables: Tables, length: int, tokens: Sequence[int] | None = None) -> None:
        """Note that the positions before `length` are computed, and give back pages that fell behind a window.

        With `tokens`, `publish` comes in between, so that those stay in the index until they are evicted: pass them
        with each chunk of a prompt. Raises ValueError if `length` was not reserved, or is less than before.
        """
        reserved = min(len(table.pages) for table in tables.by_kind) * self.page_size
        if not tables.length <= length <= reserved:
            raise ValueError(f"cannot advance from {tables.length} to {length}: {reserved} positions are reserved")
        tables.length = length
        if tokens is not None:
            self.publish(tables, tokens)
        for kind, table in zip(self.kinds, tables.by_kind, strict=True):
            table.drop_before(kind.first_kept(length, self.page_size))

    def publish(self, tables: Tables, tokens: Sequence[int], *, ended: bool = False) -> None:
        """Let later sequences share what is computed.

        `tokens` are the sequence's ids. Where there are states, that of a page which is not whole is shared only once
        the sequence has `ended`: no step that was begun has it stand after another length than `tables.length`.
        Raises ValueError if the tokens are fewer than `tables.length`.
        """
        if len(tokens) < tables.length:
            raise ValueError(f"{len(tokens)} tokens do not name {tables.length} positions")
        if not self._share:
            return
        size, path = self.page_size, tables.path
        while path and path[-1].parent is None:  # a node leaves the index with all below it: the end of the path
            path.pop()
        node = path[-1] if path else self._index.root(tables.regime)
        whole = self._recurrent and not ended
        for index in range(len(path), tables.length // size if whole else self._pages(tables.length)):
            content = tuple(tokens[index * size : min((index + 1) * size, tables.length)])
            pages = [table.pages[index] for table in tables.by_kind]
            node = self._index.put(node, content, pages)
            if any(page == named != PADDING for page, named in zip(pages, node.pages, strict=True)):
                tables.written[node] = None
            if len(content) == size:
                path.append(node)
        self._index.prune(node)

    def trim(self, tables: Tables, length: int) -> int:
        """Forget the positions from `length` on, and what is reserved. Returns the length that is left.

        It is less than `length` where a window's earlier pages are gone, or a state goes back to the end of a whole
        page: what follows is to be computed again. Never does one kind hold a position that another one lacks.
        Raises ValueError if there are fewer than `length`.
        """
        if not 0 <= length <= tables.length:
            raise ValueError(f"cannot trim {tables.length} positions to {length}")
        if self._recurrent and length < tables.length:
            length -= length % self.page_size

        def page_at(kind: int, index: int) -> int:
            indexed = tables.path[index].pages[kind] if index < len(tables.path) else PADDING
            return tables.by_kind[kind].page_at(index) or indexed

        length = readable_length(length, self.kinds, self.page_size, page_at)
        count = self._pages(length)
        for number, (kind, table) in enumerate(zip(self.kinds, tables.by_kind, strict=True)):
            dropped = range(kind.first_page(length, self.page_size), min(table.first, count))
            pages = [page_at(number, index) for index in dropped]
            table.trim(count)
            table.restore(pages)
        tables.length = length
        del tables.path[length // self.page_size :]
        return length

    def fork(self, tables: Tables) -> Tables:
        """Return a second sequence that has the same positions computed, sharing all pages.

        What was reserved before is to be reserved again: a page with a state, though it was writable, is shared now.
        """
        by_kind = tuple(table.fork(self._pages(tables.length)) for table in tables.by_kind)
        return Tables(by_kind, tables.regime, tables.length, list(tables.path))

    def release(self, tables: Tables) -> None:
        """Give back all pages; those published stay cached. `tables` are empty then: releasing again does nothing."""
        for table in tables.by_kind:
            table.release()
        tables.length = 0
        tables.path.clear()
        tables.written.clear()

    def drop(self, tables: Tables) -> tuple[tuple[int, ...], ...]:
        """Release a sequence whose numbers are not to be trusted, and take out of the index what it wrote.

        Returns the ids of the pages that are free by this, by kind: zero them before anything else is written. Drop
        before `advance`, which would have given back pages behind a window as if nothing were wrong with them.
        """
        suspects = [set(table.live) for table in tables.by_kind]
        for node in tables.written:
            for kind, page in self._index.discard(node):
                suspects[kind].add(page)
        self.release(tables)
        return tuple(
            tuple(sorted(filter(allocator.is_free, pages)))
            for pages, allocator in zip(suspects, self._allocators, strict=True)
        )

    def take_copies(self) -> list[Copy]:
        """Return the copies to do before the next write, one after the other in this order, and forget them."""
        copies, self._copies = self._copies, []
        return copies

    def clear(self) -> None:
        """Forget all prefixes: cached pages are free then."""
        self._index.clear()

    def check_integrity(self, live: Iterable[Tables]) -> None:
        """Raise IntegrityError, saying what is wrong, unless `live` are all sequences and the books are right."""
        references = [Counter[int]() for _ in self.kinds]
        for tables in live:
            for number, (kind, table, held) in enumerate(zip(self.kinds, tables.by_kind, references, strict=True)):
                held.update(table.live)
                if len(set(table.live)) < len(table.live) or any(table.pages[: table.first]):
                    raise IntegrityError(f"a table holds a page twice, or one that it gave back: {table.pages}")
                if table.first > kind.first_page(tables.length, self.page_size):
                    raise IntegrityError(
                        f"a window's pages are gone before {table.first} at {tables.length} positions"
                    )
                if kind.recurrent and tables.length:
                    self._check_state(number, tables)
                if len(table.pages) < self._pages(tables.length):
                    raise IntegrityError(f"{len(table.pages)} pages do not hold {tables.length} positions")
        self._index.check_integrity()
        for number, (allocator, held) in enumerate(zip(self._allocators, references, strict=True)):
            allocator.check_integrity(held, self._index.kept(number))

    def _check_state(self, kind: int, tables: Tables) -> None:
        """Raise IntegrityError if the index has a sequence's last state stand after other tokens than it does."""
        index = (tables.length - 1) // self.page_size
        node = self._index.node_of(kind, tables.by_kind[kind].page_at(index))
        if node is not None and len(node.tokens) != tables.length - index * self.page_size:
            raise IntegrityError(f"a state after {tables.length} positions is known as that after {node.tokens}")

    def _make_writable(self, kind: int, tables: Tables, missing: int) -> None:
        index, offset = divmod(tables.length, self.page_size)
        table, allocator = tables.by_kind[kind], self._allocators[kind]
        page = table.page_at(index)
        if page == PADDING:  # it will be a fresh one
            return
        if allocator.references(page) == 1:
            node = self._index.node_of(kind, page)
            if node is None:
                return
            if len(node.tokens) <= offset and not self.kinds[kind].recurrent:
                tables.written[node] = None
                return
            if allocator.available <= missing:  # a copy would have the page that it spares evicted
                self._index.discard(node)
                return
        self._copies.append(Copy(kind, *table.replace(index)))

    def _pages(self, length: int) -> int:
        return -(-length // self.page_size)

    def _capacity(self, kind: PageKind) -> int:
        pages = kind.ceiling - 1
        most = kind.most_pages(self._prefill_chunk, self.page_size)
        if most is not None and pages >= most:
            return sys.maxsize
        return pages * self.page_size
