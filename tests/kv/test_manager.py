"""Whatever sequences do to each other's pages, each reads what it would have computed alone.

`World` plays the device: a page is a list of cells, and what is written at a position is all tokens up to it, which
is what keys and values there depend on. A page of a recurrent kind has one such cell, that of the last position.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm.config.reach import Chunk, Reach, State, Strided, Window
from tinyllm.kv.manager import Copy, PageManager, Tables
from tinyllm.kv.pages import IntegrityError, PageKind
from tinyllm.kv.prefix import ChainHash

CHUNK = 5
POISON = "not a number"
Cell = tuple[str, tuple[int, ...]] | str | None


@dataclass(eq=False)
class Sequence:
    tokens: list[int]
    tables: Tables
    reserved: int = 0

    def cell(self, position: int) -> Cell:
        return (self.tables.regime, tuple(self.tokens[: position + 1]))


@dataclass
class World:
    kinds: Tokens[PageKind]
    page_size: int = 4
    share: bool = True
    chain_hash: ChainHash = hash
    live: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.manager = PageManager(
            self.kinds,
            page_size=self.page_size,
            prefill_chunk=CHUNK,
            share=self.share,
            chain_hash=self.chain_hash,
        )
        self.contents: list[dict[int, list[Cell]]] = [{} for _ in self.kinds]
        self.baseline = self.manager.available

    # The device

    def page(self, kind: int, page: int) -> list[Cell]:
        assert 0 < page < self.manager.touched[kind] <= self.kinds[kind].ceiling
        return self.contents[kind].setdefault(page, [None] * self.page_size)

    def copy(self) -> None:
        for copy in self.manager.take_copies():
            self.page(copy.kind, copy.target)[:] = self.page(copy.kind, copy.source)

    def write(self, sequence: Sequence, end: int, poison: bool = False) -> None:
        """One step of the device. Copies wait until there is one, and nothing is read in between."""
        self.copy()
        self.read()
        for position in range(sequence.tables.length, end):
            index, offset = divmod(position, self.page_size)
            for kind, table in enumerate(sequence.tables.by_kind):
                page, at = self.page(kind, table.pages[index]), 0 if self.kinds[kind].recurrent else offset
                page[at] = POISON if poison else sequence.cell(position)

    def poisoned(self) -> set[tuple[int, int]]:
        every = ((kind, page, cells) for kind, pages in enumerate(self.contents) for page, cells in pages.items())
        return {(kind, page) for kind, page, cells in every if POISON in cells}

    def read(self) -> None:
        for sequence in self.live:
            length = sequence.tables.length
            for number, (kind, table) in enumerate(zip(self.kinds, sequence.tables.by_kind, strict=True)):
                for position in range(0 if kind.reach is None else kind.reach.first(length), length):
                    page = self.page(number, table.pages[position // self.page_size])
                    at = 0 if kind.recurrent else position % self.page_size
                    assert page[at] == sequence.cell(position)

    def check(self) -> None:
        self.manager.check_integrity([sequence.tables for sequence in self.live])

    # What a scheduler does

    def open(self, tokens: Tokens[int], regime: str = "") -> Sequence:
        tables = self.manager.open(tokens, regime)
        assert tables.length <= max(0, len(tokens) - 1)
        self.live.append(Sequence(list(tokens), tables))
        return self.live[-1]

    def reserve(self, sequence: Sequence, length: int) -> bool:
        tables, before = sequence.tables, self.manager.available
        missing, pages = self.manager.missing(tables, length), [list(table.pages) for table in tables.by_kind]
        fits = all(count <= available for count, available in zip(missing, before, strict=True))
        assert self.manager.reserve(tables, length) == fits
        if fits:
            sequence.reserved = max(sequence.reserved, length)
            after = tuple(available - count for available, count in zip(before, missing, strict=True))
            assert self.manager.available == after
        else:
            assert self.manager.available == before
            assert pages == [table.pages for table in tables.by_kind]
        return fits

    def compute(self, sequence: Sequence, end: int, tokens: bool = True) -> bool:
        if end > sequence.reserved and not self.reserve(sequence, end):
            assert len(self.live) > 1 or end > self.manager.capacity
            return False
        self.write(sequence, end)
        self.manager.advance(sequence.tables, end, sequence.tokens if tokens else None)
        return True

    def compute_all(self, sequence: Sequence) -> bool:
        while (length := sequence.tables.length) < len(sequence.tokens):
            if not self.compute(sequence, min(len(sequence.tokens), length + CHUNK)):
                return False
        return True

    def trim(self, sequence: Sequence, length: int) -> None:
        assert self.manager.trim(sequence.tables, length) == sequence.tables.length <= length
        sequence.reserved = 0

    def fork(self, sequence: Sequence) -> Sequence:
        sequence.reserved = 0
        self.live.append(Sequence(list(sequence.tokens), self.manager.fork(sequence.tables)))
        return self.live[-1]

    def release(self, sequence: Sequence) -> None:
        self.manager.release(sequence.tables)
        self.live.remove(sequence)

    def spoil(self, sequence: Sequence, end: int, notice: bool) -> None:
        """Compute numbers that are not finite, which is noticed before they are shared, or just after."""
        if not self.reserve(sequence, end):
            return
        before = self.poisoned()
        self.write(sequence, end, poison=True)
        if not notice:
            self.manager.advance(sequence.tables, end, sequence.tokens)
        self.live.remove(sequence)
        for kind, pages in enumerate(self.manager.drop(sequence.tables)):
            for page in pages:
                self.page(kind, page)[:] = [None] * self.page_size
        if notice:
            assert self.poisoned() <= before

    def run(self, text: str) -> Sequence:
        """Open, compute, give back; return the sequence as it was opened, with the length that it found."""
        sequence = self.open([ord(c) for c in text])
        found = Sequence(sequence.tokens, Tables((), "", sequence.tables.length))
        assert self.compute_all(sequence)
        self.check()
        self.release(sequence)
        self.check()
        return found


Step = tuple[int, int, int]
KINDS: dict[str, tuple[Reach | None, ...]] = {
    "full": (None,),
    "windowed": (Window(5),),
    "window of one": (Window(1),),
    "full and windowed": (None, Window(3)),
    "three": (None, Window(7), Window(2)),
    "chunked": (Chunk(5),),
    "full and chunked": (None, Chunk(3)),
    "strided and windowed": (Strided(2, 3), Window(4)),
    "states": (State(),),
    "full and states": (None, State()),
    "states and two more": (State(), Window(3), None),
}


def apply(world: World, step: Step, known: list[list[int]]) -> None:
    """Do one of the things that can happen; two numbers choose to whom, and how."""
    action, a, b = step
    sequence = world.live[a % len(world.live)] if world.live else None
    if sequence is None or (action < 4 and len(world.live) < 5):
        begin = known[a % len(known)][: b % 14] if known else []
        end = [b >> i & 1 for i in range(1 + a % 4)]
        known.append(begin + end)
        world.open(begin + end, "long" if b % 11 == 0 else "")
    elif action < 12:
        end = sequence.tables.length + 1 + b % CHUNK
        sequence.tokens += [b >> i & 1 for i in range(end - len(sequence.tokens))]
        if action < 10:
            world.compute(sequence, end, tokens=action < 9)
        else:
            world.reserve(sequence, end)
        known.append(list(sequence.tokens))
    elif action < 14:
        world.manager.publish(sequence.tables, sequence.tokens)
    elif action < 15:
        world.trim(sequence, b % (sequence.tables.length + 1))
        del sequence.tokens[sequence.tables.length + b % 2 :]
    elif action < 16 and len(world.live) < 5:
        world.fork(sequence)
    elif action < 19:
        if b % 3:
            world.manager.publish(sequence.tables, sequence.tokens, ended=True)
        world.release(sequence)
    elif action < 20:
        end = sequence.tables.length + 1 + b % CHUNK
        sequence.tokens += [b & 1] * (end - len(sequence.tokens))
        world.spoil(sequence, end, notice=b % 2 == 0)
    elif b % 5 == 0:
        world.manager.clear()
    del known[:-8]
    world.check()


def finish(world: World) -> None:
    world.copy()
    world.read()
    for sequence in list(world.live):
        world.release(sequence)
    world.check()
    assert world.manager.available == world.baseline
    world.manager.clear()
    world.check()
    assert world.manager.available == world.baseline


def constant(link: object) -> int:
    return 41


@pytest.mark.parametrize("reaches", KINDS.values(), ids=KINDS.keys())
@given(
    steps=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 99), st.integers(0, 999)), max_size=80),
    page_size=st.integers(1, 4),
    ceiling=st.integers(3, 14),
    share=st.sampled_from([True, True, True, False]),
    chain_hash=st.sampled_from([hash, constant]),
)
@settings(max_examples=60)
def test_each_sequence_reads_what_it_would_have_computed_alone(
    reaches: tuple[Reach | None, ...],
    steps: list[Step],
    page_size: int,
    ceiling: int,
    share: bool,
    chain_hash: ChainHash,
) -> None:
    world = World([PageKind(reach, ceiling) for reach in reaches], page_size, share, chain_hash)
    known: list[list[int]] = []
    for step in steps:
        apply(world, step, known)
    finish(world)


@pytest.mark.parametrize("reaches", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("page_size, ceiling", [(1, 9), (2, 12), (3, 9), (4, 6), (4, 40)])
def test_a_long_walk_reads_what_it_would_have_computed(
    reaches: tuple[Reach | None, ...], page_size: int, ceiling: int
) -> None:
    rng = random.Random(f"{reaches} {page_size} {ceiling}")
    world = World([PageKind(reach, ceiling) for reach in reaches], page_size)
    known: list[list[int]] = []
    for _ in range(400):
        apply(world, (rng.randrange(21), rng.randrange(100), rng.randrange(1000)), known)
    assert world.manager.hit_tokens > 0
    finish(world)


def letters(text: str) -> list[int]:
    return list(map(ord, text))


def test_fault_36_full_and_windowed_kinds_are_trimmed_and_found_together() -> None:
    """A long prompt, then a short prefix of it: no kind has positions that another one lacks."""
    world = World([PageKind(None, 40), PageKind(Window(6), 40)])
    sequence = world.open(letters("abcdefghijklmnopqrstuvwxyz"))
    assert world.compute_all(sequence)
    assert [table.first for table in sequence.tables.by_kind] == [0, 5]
    world.trim(sequence, 10)  # sees positions from 5 on, whose pages are still in the index
    assert sequence.tables.length == 10
    assert [table.first for table in sequence.tables.by_kind] == [0, 1]
    fork = world.fork(sequence)
    world.trim(fork, 5)
    assert fork.tables.length == 5
    world.read()
    world.check()
    assert world.run("abcdefghij").tables.length == 9
    assert world.run("abcdefghijkX").tables.length == 11


def test_fault_36_where_a_windows_pages_are_gone_all_kinds_go_back_to_where_none_is() -> None:
    world = World([PageKind(None, 40), PageKind(Window(6), 40)], share=False)
    sequence = world.open(letters("abcdefghijklmnopqrstuvwxyz"))
    assert world.compute_all(sequence)
    world.trim(sequence, 10)
    assert sequence.tables.length == 0
    assert [table.pages for table in sequence.tables.by_kind] == [[], []]
    assert world.compute_all(sequence)
    world.trim(sequence, 25)
    assert sequence.tables.length == 25


@pytest.mark.parametrize("text", ["abcdefghij", "abcdefgh", "abcd", "abc", "a"])
@pytest.mark.parametrize("reaches", KINDS.values(), ids=KINDS.keys())
def test_fault_37_an_exact_repeat_still_computes_its_last_token(text: str, reaches: tuple[Reach | None, ...]) -> None:
    world = World([PageKind(reach, 20) for reach in reaches])
    assert world.run(text).tables.length == 0
    found = (len(text) - 1) // 4 * 4 if State() in reaches else len(text) - 1  # states are at the ends of pages
    for _ in range(3):
        assert world.run(text).tables.length == found
    assert (world.manager.hit_tokens, world.manager.asked_tokens) == (3 * found, 4 * len(text))


@pytest.mark.parametrize("share", [True, False])
def test_fault_40_fifty_sequences_that_are_given_up_leave_all_pages_available(share: bool) -> None:
    world = World([PageKind(None, 12), PageKind(Window(5), 9)], share=share)
    for i in range(50):
        sequence = world.open(letters("abcdefgh" + chr(ord("a") + i % 20) * (i % 7)))
        assert world.compute(sequence, min(len(sequence.tokens), sequence.tables.length + 1 + i % CHUNK))
        if i % 2:
            world.fork(sequence)
        for other in list(world.live):
            world.release(other)
            world.manager.release(other.tables)  # again: nothing happens
        world.check()
        assert world.manager.available == world.baseline
    assert world.run("zyxwvutsrqponmlk").tables.length == 0


@pytest.mark.parametrize("ceiling", [4, 40])
def test_fault_41_with_one_hash_for_all_each_reads_its_own(ceiling: int) -> None:
    world = World([PageKind(None, ceiling), PageKind(Window(3), ceiling)], chain_hash=constant)
    for text in ["abcdefgh", "efghabcd", "hgfedcbax", "abcdabcd", "abcdefgh"]:
        world.run(text)


def test_the_next_turn_of_a_chat_takes_over_the_last_page_and_stays_in_one_piece() -> None:
    world = World([PageKind(None, 20)])
    world.run("Hello, mod")
    sequence = world.open(letters("Hello, model, and more"))
    assert sequence.tables.length == 10
    assert world.compute_all(sequence)
    assert (sequence.tables.by_kind[0].start, sequence.tables.by_kind[0].pages) == (1, [1, 2, 3, 4, 5, 6])
    world.release(sequence)
    assert world.run("Hello, model, and more, and more").tables.length == 22


def test_a_last_page_that_somebody_holds_is_copied() -> None:
    world = World([PageKind(None, 20)])
    first = world.open(letters("abcdef"))
    assert world.compute_all(first)
    second = world.open(letters("abcdefgh"))
    assert world.manager.missing(second.tables, 8) == (1,)
    assert world.reserve(second, 8)
    [copied] = world.manager.take_copies()
    assert copied == Copy(0, first.tables.by_kind[0].pages[1], second.tables.by_kind[0].pages[1])
    assert world.manager.take_copies() == []


def test_a_page_of_which_fewer_tokens_are_wanted_is_copied_and_stays_known() -> None:
    world = World([PageKind(None, 20)])
    world.run("abcdefgh")
    assert world.run("abcdefX").tables.length == 6
    assert world.run("abcdefghi").tables.length == 8
    assert world.run("abcdefXY").tables.length == 7


def test_a_page_that_is_copied_in_one_kind_and_written_in_place_in_another_is_published_as_both() -> None:
    world = World([PageKind(None, 20), PageKind(Window(2), 20)])
    first = world.open(letters("abcdefghij"))
    assert world.compute(first, 6)
    assert world.compute(first, 10, tokens=False)  # the second page is behind the window, and known up to `f`
    second = world.open(letters("abcdefX"))
    assert second.tables.length == 6
    assert world.compute(second, 7)
    third = world.open(letters("abcdefXY"))
    assert third.tables.length == 7
    world.read()
    world.check()


def test_a_last_page_is_not_copied_where_that_would_cost_the_page_itself() -> None:
    world = World([PageKind(None, 3)])
    world.run("abcdefgh")
    sequence = world.open(letters("abcdefgX"))
    assert (sequence.tables.length, world.manager.available) == (7, (0,))
    assert world.compute_all(sequence)
    assert world.manager.take_copies() == []
    world.release(sequence)
    assert world.run("abcdefgh").tables.length == 7


def test_a_fork_goes_its_own_way_and_what_was_reserved_stays_behind() -> None:
    world = World([PageKind(None, 20), PageKind(Window(3), 20)])
    sequence = world.open(letters("abcdef"))
    assert world.compute_all(sequence) and world.reserve(sequence, 14)
    fork = world.fork(sequence)
    assert [len(table.pages) for table in fork.tables.by_kind] == [2, 2]
    sequence.tokens += letters("ghij")
    fork.tokens += letters("GHIJ")
    assert world.compute_all(fork) and world.compute_all(sequence)
    world.read()
    world.check()


def test_nothing_is_copied_for_what_is_computed_already() -> None:
    world = World([PageKind(None, 20)])
    sequence = world.open(letters("abcdef"))
    assert world.compute_all(sequence)
    fork = world.fork(sequence)
    assert world.manager.missing(fork.tables, 6) == (0,)
    assert world.manager.reserve(fork.tables, 6)
    assert world.manager.missing(fork.tables, 7) == (1,)
    assert world.manager.take_copies() == []


def test_pages_behind_a_window_stay_in_the_index_where_they_are_published_in_time() -> None:
    world = World([PageKind(None, 40), PageKind(Window(5), 40)])
    world.run("the same beginning, one end")
    assert world.run("the same beginning, another").tables.length == 20
    late = World([PageKind(None, 40), PageKind(Window(5), 40)])
    sequence = late.open(letters("the same beginning, one end"))
    while sequence.tables.length < len(sequence.tokens):
        assert late.compute(sequence, min(sequence.tables.length + CHUNK, len(sequence.tokens)), tokens=False)
    late.manager.publish(sequence.tables, sequence.tokens)
    assert late.open(letters("the same beginning, another")).tables.length == 0


@pytest.mark.parametrize(
    "kinds, tokens",
    [
        ([PageKind(None, 10)], 36),
        (
            [PageKind(None, 10), PageKind(Window(5), 4)],
            36,
        ),  # 4 positions and a chunk of 5: three pages, however they lie
        ([PageKind(None, 10), PageKind(Window(6), 4)], 12),
        ([PageKind(Window(5), 4), PageKind(Window(1), 3)], sys.maxsize),
        ([PageKind(None, 10), PageKind(Chunk(5), 4)], 36),
        ([PageKind(Chunk(5), 4)], sys.maxsize),
        ([PageKind(Strided(2, 3), 10)], 36),
    ],
)
def test_capacity_is_what_a_lone_sequence_can_always_hold(kinds: list[PageKind], tokens: int) -> None:
    world = World(kinds)
    assert world.manager.capacity == tokens
    for start in range(CHUNK):  # among the cached pages of those before
        sequence = world.open([start] + [7] * (min(tokens, 100) - 1))
        assert world.compute(sequence, sequence.tables.length + 1 + start)
        assert world.compute_all(sequence)
        world.check()
        world.release(sequence)


def test_what_a_lone_sequence_cannot_hold_is_not_reserved() -> None:
    world = World([PageKind(Window(3), 10), PageKind(None, 10)])
    sequence = world.open([7] * 36)
    assert world.compute_all(sequence)
    assert world.manager.missing(sequence.tables, 37) == (1, 1)
    assert not world.reserve(sequence, 37)
    world.check()


def test_nothing_is_shared_where_that_is_not_wanted() -> None:
    world = World([PageKind(None, 20)], share=False)
    world.run("abcdefgh")
    assert world.run("abcdefgh").tables.length == 0
    assert world.manager.hit_tokens == 0


def test_a_regime_does_not_see_what_another_one_computed() -> None:
    world = World([PageKind(None, 20)])
    world.run("abcdefgh")
    assert world.open(letters("abcdefgh"), "long").tables.length == 0


def test_a_dropped_sequence_leaves_nothing_that_it_wrote_and_all_that_it_found() -> None:
    world = World([PageKind(None, 20)])
    world.run("abcdef")
    world.run("stu")
    sequence = world.open(letters("abcdefghijkl"))
    assert world.compute(sequence, 11)
    fork = world.fork(sequence)
    world.live.remove(sequence)
    assert world.manager.drop(sequence.tables) == ((),)  # the fork holds them yet
    world.check()
    world.live.remove(fork)
    [freed] = world.manager.drop(fork.tables)
    world.check()
    assert len(freed) == 2
    assert world.open(letters("abcdefghijkl")).tables.length == 4
    assert world.open(letters("stuv")).tables.length == 3


def test_clearing_spares_those_who_are_running() -> None:
    world = World([PageKind(None, 20)])
    sequence = world.open(letters("abcdefgh"))
    assert world.compute_all(sequence)
    world.manager.clear()
    world.check()
    assert world.open(letters("abcdefgh")).tables.length == 0
    world.manager.publish(sequence.tables, sequence.tokens)
    assert world.open(letters("abcdefgh")).tables.length == 7


def test_what_cannot_be_meant_is_refused() -> None:
    world = World([PageKind(None, 20)])
    sequence = world.open(letters("abcdef"))
    assert world.compute(sequence, 4)
    with pytest.raises(ValueError, match="cannot advance from 4 to 9: 4 positions are reserved"):
        world.manager.advance(sequence.tables, 9)
    with pytest.raises(ValueError, match="cannot advance from 4 to 3"):
        world.manager.advance(sequence.tables, 3)
    with pytest.raises(ValueError, match="cannot trim 4 positions to 5"):
        world.manager.trim(sequence.tables, 5)
    with pytest.raises(ValueError, match="3 tokens do not name 4 positions"):
        world.manager.publish(sequence.tables, letters("abc"))


def test_a_sequence_that_is_forgotten_or_counted_twice_is_noticed() -> None:
    world = World([PageKind(None, 20)])
    sequence = world.open(letters("abcdef"))
    assert world.compute_all(sequence)
    with pytest.raises(IntegrityError, match="references"):
        world.manager.check_integrity([])
    with pytest.raises(IntegrityError, match="references"):
        world.manager.check_integrity([sequence.tables, sequence.tables])
    sequence.tables.length = 99
    with pytest.raises(IntegrityError, match="do not hold 99 positions"):
        world.check()


# ---------------------------------------------------------------- states


def with_states(share: bool = True) -> World:
    return World([PageKind(None, 40), PageKind(State(), 40)], share=share)


def end(world: World, text: str) -> Sequence:
    """Compute a text to its end, as a request that is answered is; return the sequence as it was opened."""
    sequence = world.open(letters(text))
    found = Sequence(sequence.tokens, Tables((), "", sequence.tables.length))
    assert world.compute_all(sequence)
    world.manager.publish(sequence.tables, sequence.tokens, ended=True)
    world.check()
    world.release(sequence)
    return found


def test_a_state_is_found_at_the_ends_of_pages_and_where_its_sequence_ended() -> None:
    world = with_states()
    assert end(world, "abcdefghij").tables.length == 0
    assert world.run("abcdefghijk").tables.length == 10
    assert world.run("abcdefghiX").tables.length == 8  # keys of "i" are there, but no state after it
    assert world.run("abcdefghij").tables.length == 8
    assert world.run("abcdef").tables.length == 4
    assert world.run("abc").tables.length == 0


def test_ends_of_several_sequences_are_found_below_one_page() -> None:
    world = with_states()
    for text in ("abcdefg", "abcdez", "abcdefz", "abcdef"):
        end(world, text)
    found = {text: world.run(text).tables.length for text in ("abcdefgX", "abcdefX", "abcdezX", "abcdefzX", "abcdX")}
    assert found == {"abcdefgX": 7, "abcdefX": 6, "abcdezX": 6, "abcdefzX": 7, "abcdX": 4}


def test_who_goes_on_from_a_state_leaves_it_to_others() -> None:
    world = with_states()
    end(world, "abcdef")
    first, second = world.open(letters("abcdefgh")), world.open(letters("abcdefXY"))
    assert first.tables.length == second.tables.length == 6
    assert world.compute(first, 7) and world.compute(second, 7)
    world.read()
    world.check()
    assert world.run("abcdefZ").tables.length == 6


def test_what_goes_on_is_not_found_in_the_middle_of_a_page() -> None:
    """Its next token would take the place of the state."""
    world = with_states()
    sequence = world.open(letters("abcdefgh"))
    assert world.compute(sequence, 6)
    assert world.open(letters("abcdefg")).tables.length == 4


def test_a_trim_goes_back_to_the_end_of_a_page() -> None:
    world = with_states()
    sequence = world.open(letters("abcdefghijklmn"))
    assert world.compute_all(sequence)
    for length, left in ((14, 14), (13, 12), (11, 8), (3, 0)):
        world.trim(sequence, length)
        assert sequence.tables.length == left
        world.read()
        world.check()
    assert world.compute_all(sequence)
    world.read()


def test_without_an_index_only_the_states_at_the_end_and_before_its_page_are_held() -> None:
    world = with_states(share=False)
    sequence = world.open(letters("abcdefghijklmn"))
    for length, held in ((4, 1), (5, 2), (8, 1), (14, 2)):
        assert world.compute(sequence, length)
        assert len(sequence.tables.by_kind[1].live) == held
    fork = world.fork(sequence)
    sequence.tokens += letters("op")
    fork.tokens += letters("OP")
    assert world.compute(sequence, 16) and world.compute(fork, 16)
    world.read()
    world.check()


def test_a_state_that_the_index_promises_elsewhere_is_noticed() -> None:
    world = with_states()
    end(world, "abcdef")
    sequence = world.open(letters("abcdefgh"))
    sequence.tables.length = 7
    with pytest.raises(IntegrityError, match="a state after 7 positions is known as that after"):
        world.check()
