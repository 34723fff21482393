"""Who computes next, who waits, who gives way when pages run out. Ids and page tables only. No mlx."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tinyllm.errors import ContextLengthError
from tinyllm.kv.manager import PageManager, Tables
from tinyllm.kv.pages import IntegrityError, PageKind


@dataclass(eq=False)
class Sequence:
    """A request on its way. `ids` are its tokens so far: `prompt_length` of the prompt, then those of the answer.

    It waits without tables; it is active with them, and then first prefills what of `ids` is not computed, and
    decodes once it is `prefilled`. Of a sequence that decodes, the last id is not computed yet.
    """

    id: int
    ids: list[int]
    prompt_length: int
    max_new: int
    arrival: int
    prefilled: bool = False
    held: Tables | None = None

    @property
    def tables(self) -> Tables:
        """The tables of its pages. Only an active sequence has them."""
        assert self.held is not None, f"request {self.id} is not active"
        return self.held

    @property
    def generated(self) -> int:
        """How many tokens the answer has so far: the index of the token that comes next."""
        return len(self.ids) - self.prompt_length

    @property
    def longest(self) -> int:
        """How many tokens its tables will ever hold. The last token of an answer is never computed."""
        return self.prompt_length + self.max_new - 1


@dataclass(frozen=True)
class Chunk:
    """The ids [start, end) of a sequence, to be computed in one forward; the `last` one gives its next token."""

    sequence: Sequence
    start: int
    end: int
    last: bool

    @property
    def ids(self) -> list[int]:
        """The tokens to feed."""
        return self.sequence.ids[self.start : self.end]


@dataclass(frozen=True)
class Work:
    """What the device can do now: a chunk of one prompt, and a token for each of the `decode` rows, oldest first.

    Every position that this writes is reserved. `preempted` are the ids of requests that have just lost their pages:
    a token that was being computed for one is void, and will be computed again.
    """

    prefill: Chunk | None
    decode: tuple[Sequence, ...]
    preempted: tuple[int, ...]


class Scheduler:
    """Shares out the pages of `manager` to requests, of which at most `max_rows` are active at once.

        add -> waiting -> admitted: prefilling, a chunk at a time -> decoding, a token at a time -> finish
                  ^------------------------ preempted ------------------------'

    Everything is first come, first served: the active sequences are always the oldest of all that are unfinished, so
    the active list followed by the waiting line is in order of arrival. A sequence is admitted from the head of the
    line alone, when no other is prefilling (so that it may share what the one before has computed) and the pages for
    all that it must prefill, and for one token more, can be had. Where an active sequence cannot get a page, the
    youngest active one is preempted, perhaps itself: its pages go back, indexed, and it returns to the head of the
    line, to compute prompt and answer so far again and go on from there.

    Every request ends. The oldest can only be preempted when it is active alone, and alone it always gets its pages,
    since `add` refuses what the whole pool cannot hold. So it is part of each `Work`, until its finite answer is
    complete and another is the oldest.

    RoPE of some kinds rotates the whole of a sequence otherwise from some length on. `regime` of a length names how,
    and a sequence that gets there is preempted, with those that are younger, to be computed again.

    `next` only reserves: work that is not carried out is offered again. What was computed is told by `prefilled` and
    `accepted`, and no page is indexed beyond that.
    """

    def __init__(
        self,
        manager: PageManager,
        *,
        max_rows: int,
        prefill_chunk: int = 256,
        regime: Callable[[int], str] = lambda length: "",
    ) -> None:
        self._manager = manager
        self._regime = regime
        self._max_rows = max_rows
        self._prefill_chunk = prefill_chunk
        self._active: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._added = 0
        self._refused: tuple[Sequence, tuple[int, ...]] | None = None  # who, and the pages that were available

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._active or self._waiting)

    @property
    def capacity(self) -> int:
        """How many tokens one sequence can ever hold, with all pages to itself."""
        return self._manager.capacity

    def add(self, request_id: int, prompt_ids: tuple[int, ...], max_new: int) -> None:
        """Put a request at the end of the line: at least one id of a prompt, at least one new token.

        Raises ContextLengthError, with both numbers, if all the pages there are cannot hold it.
        """
        sequence = Sequence(request_id, list(prompt_ids), len(prompt_ids), max_new, self._added)
        if sequence.longest > self.capacity:
            raise ContextLengthError(
                f"a prompt of {len(prompt_ids):,} and an answer of {max_new:,} tokens take {sequence.longest:,} of"
                f" the KV cache, and it holds {self.capacity:,}: ask for fewer, or raise --kv-budget"
            )
        self._added += 1
        self._waiting.append(sequence)

    def next(self) -> Work:
        """Say what to compute now. Reserves it, preempting where pages lack, and admits the head of the line."""
        preempted: list[int] = []
        while any(self._is_outdated(sequence, len(sequence.ids)) for sequence in self._active):
            preempted.append(self._preempt_youngest())
        ready = 0
        while ready < len(self._active):  # from the oldest on; the youngest gives way, which may be the one that asks
            if self._reserve(self._active[ready]):
                ready += 1
            else:
                preempted.append(self._preempt_youngest())
        if not preempted:
            self._admit()
        decode = self.decoding
        prefilling = self._active[len(decode) :]
        return Work(self._chunk(prefilling[0]) if prefilling else None, decode, tuple(preempted))

    @property
    def decoding(self) -> tuple[Sequence, ...]:
        """The active sequences whose prompts are computed, oldest first."""
        return tuple(sequence for sequence in self._active if sequence.prefilled)

    @property
    def wants_prefill(self) -> bool:
        """Whether `next` is about to give a chunk of a prompt, as far as can be told without looking for its room."""
        return self._is_prefilling or self._may_admit

    def reserve_ahead(self, rows: Iterable[Sequence]) -> bool:
        """Reserve for the step after the one that `rows` take now; return whether all of them have what it writes.

        Nobody is preempted for it. It cannot be had for a row that is about to get the last token of its answer, or
        to be computed again.
        """
        return all(
            len(row.ids) < row.longest
            and not self._is_outdated(row, len(row.ids) + 1)
            and self._manager.reserve(row.tables, len(row.ids) + 1)
            for row in rows
        )

    def prefilled(self, chunk: Chunk) -> None:
        """Note that a chunk is computed. After the last one, `accepted` brings the token that it gave."""
        chunk.sequence.prefilled = chunk.last
        self._manager.advance(chunk.sequence.tables, chunk.end, chunk.sequence.ids)

    def accepted(self, sequence: Sequence, token: int) -> None:
        """Note that all ids of a sequence are computed, and that `token` comes after them."""
        filled = len(sequence.ids) % self._manager.page_size == 0
        self._manager.advance(sequence.tables, len(sequence.ids), sequence.ids if filled else None)
        sequence.ids.append(token)

    def finish(self, sequence: Sequence) -> None:
        """Let an active sequence go that has its answer; no step of it is under way.

        What is computed of it stays for others to share, until its pages are needed.
        """
        self._let_go(sequence, ended=True)

    def drop(self, sequence: Sequence) -> tuple[tuple[int, ...], ...]:
        """Let an active sequence go whose numbers are spoilt: nothing of it stays.

        Returns the pages that this has freed, by kind, for the caller to zero before anything else is written.
        """
        self._active.remove(sequence)
        freed = self._manager.drop(sequence.tables)
        self._release(sequence)
        return freed

    def cancel(self, request_id: int) -> None:
        """Let a request go, wherever it is; one that is over already is no error."""
        self._waiting = deque(sequence for sequence in self._waiting if sequence.id != request_id)
        for sequence in [sequence for sequence in self._active if sequence.id == request_id]:
            self._let_go(sequence, ended=False)

    def check_invariants(self) -> None:
        """Raise IntegrityError, saying what is wrong, unless the books are right."""
        self._manager.check_integrity([sequence.tables for sequence in self._active])
        active, arrivals = self._active, [sequence.arrival for sequence in (*self._active, *self._waiting)]
        left = {sequence.id: len(sequence.ids) - sequence.tables.length for sequence in active}
        for holds, message in (
            (arrivals == sorted(set(arrivals)), f"active and waiting arrived in the order {arrivals}"),
            (len(active) <= self._max_rows, f"{len(active)} are active, of at most {self._max_rows}"),
            (all(sequence.held is None for sequence in self._waiting), "one that waits has tables"),
            (all(sequence.prefilled for sequence in active[:-1]), "one is prefilling that is not the youngest"),
            (
                all(left[s.id] <= 1 for s in active if s.prefilled),
                f"one decodes with more than its last id left: {left}",
            ),
            (all(left[s.id] >= 1 for s in active if not s.prefilled), f"one has nothing left to prefill: {left}"),
        ):
            if not holds:
                raise IntegrityError(message)

    def _admit(self) -> None:
        """Make the head of the line active, with its first chunk reserved, if it is its turn and there is room."""
        if self._is_prefilling or not self._may_admit:
            return
        head = self._waiting[0]
        head.held = self._manager.open(head.ids, self._regime(len(head.ids)))
        if (not self._active or self._has_room(head)) and self._reserve(head):
            self._active.append(self._waiting.popleft())
        else:
            self._release(head)
            self._refused = head, self._manager.available

    @property
    def _is_prefilling(self) -> bool:
        return bool(self._active) and not self._active[-1].prefilled

    @property
    def _may_admit(self) -> bool:
        """Whether it is worth looking for room for the head of the line.

        Not if there was none and no page has come back since: looking a prefix up in every step would cost time.
        """
        if not self._waiting or len(self._active) == self._max_rows:
            return False
        if not self._active or self._refused is None or self._refused[0] is not self._waiting[0]:
            return True
        return any(now > then for now, then in zip(self._manager.available, self._refused[1], strict=True))

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether the pages can be had for all that it must prefill, and for one token more if it will hold one."""
        manager, tables = self._manager, sequence.tables
        missing = manager.missing(tables, min(len(sequence.ids) + 1, sequence.longest))
        kinds = zip(manager.kinds, tables.by_kind, missing, manager.available, strict=True)
        return all(
            min(lacking, self._most_pages(kind) - len(table.live)) <= available
            for kind, table, lacking, available in kinds
        )

    def _most_pages(self, kind: PageKind) -> int:
        """Return how many pages of a kind a sequence holds at most: with a window, it gives some back as it goes."""
        return kind.most_pages(self._prefill_chunk, self._manager.page_size) or kind.ceiling

    def _reserve(self, sequence: Sequence) -> bool:
        """Reserve what an active sequence computes next: a chunk of what it has to prefill, or its last id."""
        return self._manager.reserve(sequence.tables, self._next_end(sequence))

    def _next_end(self, sequence: Sequence) -> int:
        return min(sequence.tables.length + self._prefill_chunk, len(sequence.ids))

    def _chunk(self, sequence: Sequence) -> Chunk:
        end = self._next_end(sequence)
        return Chunk(sequence, sequence.tables.length, end, last=end == len(sequence.ids))

    def _is_outdated(self, sequence: Sequence, length: int) -> bool:
        """Whether an active sequence of that length needs other keys than those that it has."""
        return self._regime(length) != sequence.tables.regime

    def _preempt_youngest(self) -> int:
        sequence = self._active[-1]
        self._let_go(sequence, ended=False)
        self._waiting.appendleft(sequence)
        return sequence.id

    def _let_go(self, sequence: Sequence, *, ended: bool) -> None:
        """Take an active sequence's pages back, indexed. Unless it `ended`, a step may be changing its state."""
        self._active.remove(sequence)
        self._manager.publish(sequence.tables, sequence.ids, ended=ended)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._manager.release(sequence.tables)
        sequence.held = None
        sequence.prefilled = False
