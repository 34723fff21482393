"""The paged cache: keys and values of many sequences in one array a layer, handed out by the page.

An array is (1, kv_heads, pages * page_size, head_dim), head by head, so that the pages of a sequence that happen to
lie side by side are a view of it, and nothing is copied to read them. States are in arrays (1, 1, pages, elements).
Which page belongs to whom is the `PageManager`'s business; here is what is done with the arrays.

An array is always passed on whole and rebound before it is evaluated: MLX writes in place only where nothing else,
not even a view, holds the array that is written to.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import pairwise

from tinyllm._mx import mx
from tinyllm.errors import ContextLengthError
from tinyllm.kv.cache import State
from tinyllm.kv.kinds import StateForm
from tinyllm.kv.manager import PageManager, Tables
from tinyllm.kv.pages import PageKind
from tinyllm.ops.attention import AttentionSpec, attention_over, mask_of, pages_by_head
from tinyllm.ops.packed_kv import stored_form

PAGE_SIZE = 128
UNBOUNDED = 1 << 40  # pages, of a pool that nobody gave a budget
_LEAST_GROWTH = 8  # pages


class TinyKvPagedPool:
    """The pages of one kind of layer: `arrays` has of each of its `layers` one for the keys and one for the values.

    Latent attention has one alone, in which both are; recurrent layers have one for each of `states`. With `bits`
    there are three in place of each of the others: words, scales and biases. The arrays grow stepwise, as pages are
    handed out, up to the manager's ceiling for this `kind`. Without a manager the pool has one of its own, and no
    ceiling.
    """

    def __init__(
        self,
        page_size: int = PAGE_SIZE,
        *,
        layers: int = 1,
        manager: PageManager | None = None,
        kind: int = 0,
        states: Sequence[StateForm] = (),
        bits: int | None = None,
    ) -> None:
        self.manager = manager or PageManager([PageKind(None, UNBOUNDED)], page_size=page_size, share=False)
        self.kind = kind
        self.page_size = page_size
        self.bits = bits
        self.arrays: list[list[mx.array]] = []
        self.states = tuple(states)
        self._layers = layers
        self._slots = 1 if states else page_size  # of a page

    @property
    def pages(self) -> int:
        """How many pages the arrays hold."""
        return self.arrays[0][0].shape[2] // self._slots if self.arrays else 0

    @property
    def flat(self) -> list[mx.array]:
        """The arrays of all layers."""
        return [array for layer in self.arrays for array in layer]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.flat)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers; 0 where nothing was written yet."""
        return self.nbytes // self.pages if self.arrays else 0

    def make_room(self, like: Sequence[mx.array]) -> None:
        """Let the arrays hold every page that was handed out, for new ones `like` these (1, heads, _, head_dim).

        One array at a time is copied, and waited for; what it was copied from does not stay in MLX's cache.
        """
        needed = self.manager.touched[self.kind]
        if needed <= self.pages:
            return
        step = max(_LEAST_GROWTH, self.pages // 4)
        pages = min(max(needed, self.pages + step), self.manager.kinds[self.kind].ceiling)
        added = (pages - self.pages) * self._slots
        self.arrays = self.arrays or [[] for _ in range(self._layers)]
        for arrays in self.arrays:
            for n, new in enumerate(like):
                room = mx.zeros((1, new.shape[1], added, new.shape[3]), dtype=new.dtype)
                if n < len(arrays):
                    arrays[n] = mx.concatenate([arrays[n], room], axis=2)
                else:
                    arrays.append(room)
                mx.eval(arrays[n])
                del room
                mx.clear_cache()

    def copy_page(self, source: int, target: int) -> None:
        """Give page `target`, in every layer, what page `source` holds, and wait for it."""
        self.make_room(self.arrays[0])
        size = self._slots
        for arrays in self.arrays:
            # Read apart from the write, and before it: a view of the array would have the whole of it copied.
            pages = [gather(array, mx.array([[source]]), size) for array in arrays]
            mx.eval(pages)
            for array, page in zip(arrays, pages, strict=True):
                array[:, :, target * size : (target + 1) * size] = page
            mx.eval(arrays)

    def write(self, layer: int, pages: Sequence[int], start: int, new: Sequence[mx.array]) -> None:
        """Put new (1, kv_heads, seq, head_dim), one for each array, at positions from `start` on.

        The sequence has these `pages`.
        """
        for each, array in zip(new, self.arrays[layer], strict=True):
            done = 0
            for slot, length in _runs(pages, start, each.shape[2], self._slots):
                array[:, :, slot : slot + length] = each[:, :, done : done + length]
                done += length

    def read(self, layer: int, pages: Sequence[int], start: int, end: int) -> list[mx.array]:
        """Return of each array (1, kv_heads, end - start, head_dim), the positions from `start` on.

        A view where the pages lie side by side; else they are gathered.
        """
        size = self._slots
        live, skipped = pages[start // size : -(-end // size)], start % size
        if side_by_side(live):
            first = live[0] * size + skipped
            return [array[:, :, first : first + end - start] for array in self.arrays[layer]]
        index = mx.array([list(live)])
        return [gather(array, index, size)[:, :, skipped : skipped + end - start] for array in self.arrays[layer]]

    def write_state(self, layer: int, page: int, state: State) -> None:
        """Put the arrays of a state (1, ...) into a page."""
        for array, new in zip(self.arrays[layer], as_page(state), strict=True):
            array[:, :, page : page + 1] = new

    def read_states(self, layer: int, pages: Sequence[int]) -> State:
        """Return the arrays (rows, ...) of the states in one page for each row, which are yet to be evaluated.

        Evaluate them before anything is written to: while an array is read, a write has the whole of it copied.
        """
        index = mx.array(list(pages))[:, None]
        read = (gather(array, index, 1) for array in self.arrays[layer])
        return tuple(each.reshape(len(pages), *form.shape) for each, form in zip(read, self.states, strict=True))

    def clear(self, pages: Sequence[int]) -> None:
        """Set these pages to zero."""
        size = self._slots
        for array in self.flat:
            for page in pages:
                array[:, :, page * size : (page + 1) * size] = mx.zeros((), dtype=array.dtype)


def as_page(state: State) -> list[mx.array]:
    """Return the arrays of states (rows, ...) as a pool has them: (rows, 1, 1, elements)."""
    return [array.reshape(array.shape[0], 1, 1, -1) for array in state]


def gather(array: mx.array, pages: mx.array, page_size: int) -> mx.array:
    """Collect `pages` (rows, n) of an array (1, kv_heads, pages * page_size, head_dim).

    Returns (rows, kv_heads, n * page_size, head_dim). The index runs over heads and pages at once, so that each page
    of a head is one copy: `mx.take` along the page axis takes eight times as long on a CPU.
    """
    _, heads, slots, head_dim = array.shape
    rows, n = pages.shape
    flat = array.reshape(heads * slots // page_size, page_size, head_dim)
    index = pages_by_head(pages, heads, slots // page_size)
    return flat[index].reshape(rows, heads, n * page_size, head_dim)


def gather_reference(array: mx.array, pages: Sequence[Sequence[int]], page_size: int) -> mx.array:
    """The same, page by page."""
    rows = [
        mx.concatenate([array[:, :, page * page_size : (page + 1) * page_size] for page in row], axis=2)
        for row in pages
    ]
    return mx.concatenate(rows)


def side_by_side(pages: Sequence[int]) -> bool:
    """Whether pages follow one another, so that they are one slice."""
    return pages[-1] - pages[0] == len(pages) - 1 and all(b - a == 1 for a, b in pairwise(pages))


def _runs(pages: Sequence[int], start: int, length: int, size: int) -> list[tuple[int, int]]:
    """Return where positions from `start` on lie, as (first slot, length) of as few runs as possible."""
    runs: list[tuple[int, int]] = []
    position, end = start, start + length
    while position < end:
        slot = pages[position // size] * size + position % size
        here = min(size - position % size, end - position)
        if runs and sum(runs[-1]) == slot:
            runs[-1] = runs[-1][0], runs[-1][1] + here
        else:
            runs.append((slot, here))
        position += here
    return runs


class PagedSequence:
    """One sequence on the pools of its model: its block tables, one a kind.

    Without `tables` it opens some. Those, and others that it `owns`, are released when nothing refers to the
    sequence any more.
    """

    def __init__(self, pools: Sequence[TinyKvPagedPool], tables: Tables | None = None, *, owns: bool = False) -> None:
        self.pools = pools
        self.manager = pools[0].manager
        self.tables = tables or self.manager.open(())
        if owns or tables is None:
            weakref.finalize(self, self.manager.release, self.tables)

    def reserve(self, start: int, end: int) -> None:
        """Make the positions from `start` to `end` writable; pages behind the windows of all queries are given back.

        Raises ContextLengthError if the pool has no pages left.
        """
        if self.tables.length < start:
            self.manager.advance(self.tables, start)
        if not self.manager.reserve(self.tables, end):
            raise ContextLengthError(f"the KV pool has no pages left for {end:,} positions")
        carry_out_copies(self.pools)


def carry_out_copies(pools: Sequence[TinyKvPagedPool]) -> None:
    """Copy the pages that the manager of these pools wants copied before the next write."""
    for copy in pools[0].manager.take_copies():
        pools[copy.kind].copy_page(copy.source, copy.target)


class TinyKvPagedCache:
    """One layer's view of a sequence in a `pool`; alone, of a sequence of its own.

    It holds positions from 0 to `offset`, of which a windowed kind gives back what no query will see again. A state
    is read from its page when a sequence is taken up, and only written there from then on.
    """

    def __init__(self, pool: TinyKvPagedPool, layer: int = 0, sequence: PagedSequence | None = None) -> None:
        self.sequence = sequence or PagedSequence([pool])
        self.offset = self.sequence.tables.length
        self._pool = pool
        self._layer = layer
        self._state: State | None = None

    def attend(
        self, q: mx.array, k: mx.array | None, v: mx.array | None, spec: AttentionSpec, mask: mx.array | None = None
    ) -> mx.array:
        """Append k and v (1, kv_heads, seq, head_dim), then attend with q (1, heads, seq, head_dim).

        Queries are causal, and see as far as `spec` says, unless `mask` (seq, offset + seq) takes the place of that.
        Without k nothing is appended: q is of the last positions that are held. Raises ValueError for a batch, and
        ContextLengthError if the pool has no pages left.
        """
        batch, _, seq, _ = q.shape
        if batch != 1:
            raise ValueError(f"a paged cache holds one sequence, not a batch of {batch}")
        if k is not None:
            self._append(stored_form([k] if v is None else [k, v], self._pool.bits))
        start, end = self.offset - seq, self.offset
        pages = self.sequence.tables.by_kind[self._pool.kind].pages
        first = 0 if spec.reach is None or mask is not None else spec.reach.first(start)
        stored = self._pool.read(self._layer, pages, first, end)
        seen = mask_of(spec, start, seq, first, own=mask, dtype=q.dtype)
        return attention_over(q, stored, spec, seen, self._pool.bits)

    def _append(self, new: Sequence[mx.array]) -> None:
        start, end = self.offset, self.offset + new[0].shape[2]
        self.sequence.reserve(start, end)
        self._pool.make_room(new)
        pages = self.sequence.tables.by_kind[self._pool.kind].pages
        self._pool.write(self._layer, pages, start, new)
        self.offset = end

    def pieces(self, seq: int) -> Sequence[int]:
        """Return the lengths of pieces that end where pages do, so that there is a state at the end of each page.

        Raises ContextLengthError if the pool has no pages left.
        """
        self.sequence.reserve(self.offset, self.offset + seq)
        if self._state is not None:  # what the last call wrote is computed with what this one gives
            self._state = tuple(mx.depends(list(self._state), self._pool.arrays[self._layer]))
        size = self._pool.page_size
        ends = [*range((self.offset // size + 1) * size, self.offset + seq, size), self.offset + seq]
        return [end - start for start, end in pairwise([self.offset, *ends])]

    def read_state(self) -> State | None:
        """Return the state after the positions that are held, (1, ...) each; None where there is no position yet."""
        if self._state is None and self.offset:
            self._state = self._pool.read_states(self._layer, [self._page])
            mx.eval(self._state)
        return self._state

    def write_state(self, state: State, length: int) -> None:
        """Append `length` positions of one of `pieces`, which leave this state. Raises ValueError for a batch."""
        if state[0].shape[0] != 1:
            raise ValueError(f"a paged cache holds one sequence, not a batch of {state[0].shape[0]}")
        self.offset += length
        self._pool.make_room(as_page(state))
        self._pool.write_state(self._layer, self._page, state)
        self._state = state

    def go_back(self, offset: int) -> None:
        """Hold only the positions up to `offset`, as the sequence's tables do."""
        self.offset = offset
        self._state = None

    @property
    def _page(self) -> int:
        """The page that holds the last position."""
        return self.sequence.tables.by_kind[self._pool.kind].pages[(self.offset - 1) // self._pool.page_size]
