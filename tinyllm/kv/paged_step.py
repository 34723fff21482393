"""One decode step of many sequences over the paged cache: where each row stands, and what it writes and reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tinyllm._mx import mx
from tinyllm.config.reach import Reach
from tinyllm.kv.cache import State
from tinyllm.kv.paged import TinyKvPagedPool, as_page, gather, side_by_side
from tinyllm.kv.pages import BlockTable
from tinyllm.ops.attention import AttentionSpec, attention_over, attention_over_pages, seen_by, with_bias
from tinyllm.ops.packed_kv import stored_form


@dataclass(frozen=True)
class Placement:
    """Where the rows of one decode step stand in the pool of one kind.

    `slots` (rows,) is where each row's token goes. Either the row is one and reads `span`, slots that it has side by
    side, or `pages` (rows, n) are gathered. `first` (rows,) is the position of the first slot that is read. Of
    states, which are not read within a step, `slots` are the pages, and there is neither span nor pages.
    """

    slots: mx.array
    first: mx.array
    pages: mx.array | None = None
    span: tuple[int, int] | None = None

    def keys(self, page_size: int) -> mx.array:
        """Return the positions (rows, keys) of what is read."""
        if self.pages is None:
            assert self.span is not None
            count = self.span[1] - self.span[0]
        else:
            count = self.pages.shape[1] * page_size
        return self.first[:, None] + mx.arange(count)

    def mask(self, positions: mx.array, reach: Reach | None, page_size: int) -> mx.array:
        """Return (rows, 1, 1, keys): True where the row at one of `positions` (rows,) sees what is read."""
        return seen_by(positions[:, None], self.keys(page_size), reach)[:, None, None]


class Places(NamedTuple):
    """Where the rows of a decode step stand in the pool of one kind, as `Placement` has it, on the host."""

    slots: list[int]
    first: list[int]
    pages: list[list[int]] | None
    span: tuple[int, int] | None


def find_slots(pool: TinyKvPagedPool, tables: Sequence[BlockTable], positions: Sequence[int], *, rows: int) -> Places:
    """Find the pages of states: in `first` of those before tokens at `positions`, in `slots` of those after them.

    The sequences have these `tables`. Of `rows`, those beyond `positions` are padding, which has page 0.
    """
    size, nobody = pool.page_size, [0] * (rows - len(tables))
    at = list(zip(tables, positions, strict=True))
    before = [table.pages[(position - 1) // size] for table, position in at]
    after = [table.pages[position // size] for table, position in at]
    return Places(after + nobody, before + nobody, None, None)


def find_places(
    pool: TinyKvPagedPool, tables: Sequence[BlockTable], positions: Sequence[int], *, rows: int, reach: Reach | None
) -> Places:
    """Find where tokens at `positions` of the sequences that have these `tables` are written, and what they read.

    Numbers of pages are rounded up, so that there are few of them. Of `rows`, those beyond `positions` are padding,
    which reads and writes page 0.
    """
    size = pool.page_size
    live: list[list[int]] = []
    first, slots = [], []
    for table, position in zip(tables, positions, strict=True):
        start = 0 if reach is None else reach.first(position) // size
        live.append(table.pages[start : position // size + 1])
        first.append(start * size)
        slots.append(live[-1][-1] * size + position % size)
    if rows == 1 and side_by_side(live[0]):
        end = min(live[0][0] + rounded_up(len(live[0])), pool.pages)
        return Places(slots, first, None, (live[0][0] * size, end * size))
    width = rounded_up(max(map(len, live)))
    nobody = [0] * (rows - len(live))
    pages = [[*row, *[0] * (width - len(row))] for row in live] + [[0] * width for _ in nobody]
    return Places(slots + nobody, first + nobody, pages, None)


def rounded_up(n: int) -> int:
    """Round up by at most a quarter, to one of few numbers."""
    unit = 1 << max(0, n.bit_length() - 3)
    return -(-n // unit) * unit


class TinyKvPagedStep:
    """One layer's pool within one decode step of several rows, each of one token and of a sequence of its own.

    `arrays` are those of the pool after the write: whoever made the step puts them back. `positions` (rows,) are
    those of the tokens, `seen` is what `Placement.mask` gives, or what is added to scores in its place. Of a
    recurrent layer, `state` (rows, ...) is what each row's state is before the step, and then after it. `bits` are
    the pool's.
    """

    offset = None  # each row has its own

    def __init__(
        self,
        arrays: Sequence[mx.array],
        placement: Placement,
        positions: mx.array,
        seen: mx.array | None,
        page_size: int,
        state: State | None = None,
        bits: int | None = None,
    ) -> None:
        self.arrays = list(arrays)
        self.state = state
        self._placement = placement
        self._positions = positions
        self._seen = seen
        self._page_size = page_size
        self._bits = bits

    def attend(
        self, q: mx.array, k: mx.array | None, v: mx.array | None, spec: AttentionSpec, mask: mx.array | None = None
    ) -> mx.array:
        """Write k and v (rows, kv_heads, 1, head_dim), if there are any; each row of q then sees its own.

        q is (rows, heads, 1, head_dim).
        """
        placement, size = self._placement, self._page_size
        new = stored_form([each for each in (k, v) if each is not None], self._bits)
        if new:
            self.arrays = [
                _written(array, placement.slots, each) for array, each in zip(self.arrays, new, strict=True)
            ]
        seen = self._seen if mask is None else mask
        assert seen is not None
        if spec.bias is not None:
            query, key = self._positions[:, None, None], placement.keys(size)[:, None]
            seen = with_bias(spec.bias, query, key, seen, q.dtype)
        if placement.pages is None:
            assert placement.span is not None
            first, end = placement.span
            stored = [array[:, :, first:end] for array in self.arrays]
        elif spec.paged_products and self._bits is None and len(self.arrays) == 2:
            keys, values = self.arrays
            return attention_over_pages(q, keys, values, placement.pages, size, spec, seen)
        else:
            stored = [gather(array, placement.pages, size) for array in self.arrays]
        return attention_over(q, stored, spec, seen, self._bits)

    def pieces(self, seq: int) -> Sequence[int]:
        """Return the length of the only piece: a token."""
        return [seq]

    def read_state(self) -> State | None:
        """Return each row's state before its token."""
        return self.state

    def write_state(self, state: State, length: int) -> None:
        """Write the states (rows, ...) after the tokens."""
        slots = self._placement.slots
        self.arrays = [_written(array, slots, new) for array, new in zip(self.arrays, as_page(state), strict=True)]
        self.state = state


def _written(array: mx.array, slots: mx.array, new: mx.array) -> mx.array:
    """Return a pool's array with new (rows, kv_heads, 1, head_dim) in `slots` (rows,): one kernel, in place."""
    new = new.swapaxes(0, 2) if new.shape[0] > 1 else new  # the same of one row, with less to build
    return mx.put_along_axis(array, mx.broadcast_to(slots[:, None], new.shape), new, axis=2)
