"""The scheduler, run with a model that is made of dictionaries: each request is answered as it is when alone.

`scripts/simulate` runs the same simulation for longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm.config.reach import Chunk, Reach, State, Strided, Window
from tinyllm.engine.scheduler import Scheduler, Sequence, Work
from tinyllm.errors import ContextLengthError
from tinyllm.kv.manager import PageManager, Tables
from tinyllm.kv.pages import IntegrityError, PageKind

VOCABULARY = 24
STOP = 0
SPOILT = -1  # what NaN is to a network: what has read it becomes it
ZERO = -2  # what a page holds that was zeroed: nobody may read it

Reaches = tuple[Reach | None, ...]
REACHES = st.one_of(
    st.none(), st.builds(Window, st.integers(1, 9)), st.builds(Chunk, st.integers(1, 9)), st.just(State())
)
# A setup's kinds of layers, and which are drawn as often as the first ones.
DRAWN: list[Reaches] = [
    (None,),
    (None, Window(5)),
    (Window(3), None),
    (None, Window(9), Window(4)),
    (Window(6),),
    (Chunk(7),),
    (None, Chunk(5)),
    (Strided(3, 4), Window(5)),
    (None, State()),
    (State(), Window(5), None),
    (State(),),
]
Places = list[list[int]]  # the pages of one sequence, of each kind of layer


@dataclass(frozen=True)
class Setup:
    """What is simulated: for each kind of layer what it sees, and how many pages there are."""

    reaches: Reaches = (None,)
    ceilings: tuple[int, ...] = (20,)
    page_size: int = 4
    max_rows: int = 4
    prefill_chunk: int = 6
    share: bool = True

    @staticmethod
    def drawn(rng: Random) -> Setup:
        """A setup in which pages are short."""
        reaches = rng.choice(DRAWN)
        return Setup(
            reaches,
            tuple(rng.randint(6, 24) for _ in reaches),
            page_size=rng.randint(2, 5),
            max_rows=rng.randint(1, 6),
            prefill_chunk=rng.randint(1, 9),
            share=rng.random() < 0.8,
        )


def value_of(token: int, seen: tuple[tuple[int, ...], ...]) -> int:
    """What the model computes of a token, and of the values before it that each kind of layer sees."""
    return SPOILT if any(SPOILT in values for values in seen) else hash((token, seen)) & 0xFFFFFFFF


def state_after(token: int, before: tuple[int, ...]) -> int:
    """What a recurrent layer makes of a token and of its state before, if there is one."""
    return SPOILT if SPOILT in before else hash((before, token)) & 0xFFFFFFFF


def seen_before(position: int, reach: Reach | None) -> list[int]:
    """Return the positions before its own that the query at `position` sees."""
    return [at for at in range(position) if reach is None or reach.sees(position, at)]


def alone(reaches: Reaches, prompt: tuple[int, ...], max_new: int) -> list[int]:
    """The reference: how a model answers that has no pages."""
    ids = list(prompt)
    values: list[int] = []
    states: list[int] = []
    for position, token in enumerate(ids):  # it grows as we go
        state = tuple(states[-1:])
        seen = (
            state if isinstance(reach, State) else tuple(values[at] for at in seen_before(position, reach))
            for reach in reaches
        )
        values.append(value_of(token, tuple(seen)))
        states.append(state_after(token, state))
        if position >= len(prompt) - 1:
            ids.append(values[-1] % VOCABULARY)
            if ids[-1] == STOP or len(ids) == len(prompt) + max_new:
                break
    return ids[len(prompt) :]


class Device:
    """A model that computes through tables, and what it has written: by kind, page and offset.

    A page of a recurrent kind has one state, and how many tokens this is of.
    """

    def __init__(self, setup: Setup, manager: PageManager) -> None:
        self._reaches = setup.reaches
        self._size = setup.page_size
        self._manager = manager
        self._contents: list[dict[int, list[int]]] = [{} for _ in setup.reaches]

    def compute(self, places: Places, start: int, ids: Ids[int], *, spoil: bool = False) -> int:
        """Feed `ids` from position `start` on; return what is computed of the last one, spoilt if asked for."""
        for copy in self._manager.take_copies():
            self._contents[copy.kind][copy.target] = list(self._contents[copy.kind][copy.source])
        value = SPOILT
        for position, token in enumerate(ids, start):
            seen = tuple(self._seen(places, kind, position) for kind in range(len(places)))
            value = value_of(token, seen)
            if spoil and position == start + len(ids) - 1:
                value = SPOILT
            for kind, (pages, contents) in enumerate(zip(places, self._contents, strict=True)):
                page = contents.setdefault(pages[position // self._size], [ZERO] * self._size)
                if isinstance(self._reaches[kind], State):
                    state = SPOILT if value == SPOILT else state_after(token, seen[kind])
                    page[:] = [position + 1, state]
                else:
                    page[position % self._size] = value
        return value

    def zero(self, freed: Ids[Ids[int]]) -> None:
        for contents, pages in zip(self._contents, freed, strict=True):
            for page in pages:
                contents[page] = [ZERO] * self._size

    @property
    def spoilt(self) -> bool:
        return any(SPOILT in page for contents in self._contents for page in contents.values())

    def _seen(self, places: Places, kind: int, position: int) -> tuple[int, ...]:
        pages, contents, size = places[kind], self._contents[kind], self._size
        if isinstance(self._reaches[kind], State):
            if not position:
                return ()
            length, state = contents[pages[(position - 1) // size]]
            assert length == position, "read a state of other tokens"
            return (state,)
        seen = [contents[pages[at // size]][at % size] for at in seen_before(position, self._reaches[kind])]
        assert ZERO not in seen, "read where nothing was written"
        return tuple(seen)


class Simulation:
    """An engine in small, with one token computed ahead where that can be had. `counts` says what has happened."""

    def __init__(self, setup: Setup, rng: Random | None = None) -> None:
        kinds = [PageKind(reach, ceiling) for reach, ceiling in zip(setup.reaches, setup.ceilings, strict=True)]
        self.manager = PageManager(
            kinds, page_size=setup.page_size, prefill_chunk=setup.prefill_chunk, share=setup.share
        )
        self.scheduler = Scheduler(self.manager, max_rows=setup.max_rows, prefill_chunk=setup.prefill_chunk)
        self.device = Device(setup, self.manager)
        self.setup = setup
        self.counts: Counter[str] = Counter()
        self.answers: dict[int, list[int]] = {}
        self.baseline = self.free
        self._rng = rng
        self._asked: dict[int, tuple[tuple[int, ...], int]] = {}
        self._in_flight: dict[int, int] = {}  # what is being computed, by request: the step after the last one
        self._texts: list[tuple[int, ...]] = [()]  # what prompts begin with

    @property
    def free(self) -> tuple[int, ...]:
        """How many pages of each kind can be had."""
        return self.manager.available

    def add(self, prompt: tuple[int, ...], max_new: int) -> int:
        request_id = self.counts["asked"] + 1
        self.scheduler.add(request_id, prompt, max_new)
        self.counts["asked"] += 1
        self._asked[request_id] = prompt, max_new
        return request_id

    def cancel(self, request_id: int) -> None:
        self.scheduler.cancel(request_id)
        self._asked.pop(request_id, None)
        self._in_flight.pop(request_id, None)
        self.check()

    def run(self) -> dict[int, list[int]]:
        """Step until all are answered; return the answers by request."""
        while self.scheduler.has_work:
            self.step()
        assert self.free == self.baseline
        return self.answers

    def step(self) -> Work:
        """Do what `Engine.step` does: a chunk of a prompt, then a token for each row."""
        wanted = self.scheduler.wants_prefill
        work = self.scheduler.next()
        assert wanted or not work.prefill
        self.check()
        assert work.prefill or work.decode, "nobody gets on"
        self.counts["steps"] += 1
        self.counts["preempted"] += len(work.preempted)
        for request_id in work.preempted:
            self._in_flight.pop(request_id, None)
        if work.prefill and not self._chance(0.1):  # now and then a chunk is put off
            self._prefill(work)
        if not self._chance(0.05):
            self._decode(work.decode)
        self.check()
        return work

    def check(self) -> None:
        self.scheduler.check_invariants()
        assert self._in_flight.keys() <= self._asked.keys()
        assert not self.device.spoilt

    def _prefill(self, work: Work) -> None:
        chunk = work.prefill
        assert chunk and 0 < chunk.end - chunk.start <= self.setup.prefill_chunk
        spoil = chunk.last and self._chance(0.04)
        value = self.device.compute(places(chunk.sequence.tables), chunk.start, chunk.ids, spoil=spoil)
        if value != SPOILT:
            self.scheduler.prefilled(chunk)
        if chunk.last:
            self._accept(chunk.sequence, value)

    def _decode(self, rows: tuple[Sequence, ...]) -> None:
        """A step that was begun goes on with the rows that it was begun with."""
        rows = tuple(row for row in rows if row.id in self._in_flight) if self._in_flight else rows
        values = {}
        for row in rows:
            spoil = row.id not in self._in_flight and self._chance(0.01)
            values[row.id] = self._in_flight.pop(row.id) if row.id in self._in_flight else self._one(row, spoil=spoil)
        following = [row for row in rows if len(row.ids) < row.longest]
        ahead = self._chance(0.7) and self.scheduler.reserve_ahead(tuple(following))
        built = {row.id: places(row.tables) for row in following} if ahead else {}
        going_on = [row for row in rows if self._accept(row, values[row.id])]
        if built.keys() == {row.id for row in going_on}:  # else what was built ahead is thrown away
            self.counts["ahead"] += len(built)
            self._in_flight = {
                row.id: self.device.compute(built[row.id], len(row.ids) - 1, row.ids[-1:]) for row in going_on
            }

    def _one(self, row: Sequence, *, spoil: bool) -> int:
        return self.device.compute(places(row.tables), len(row.ids) - 1, row.ids[-1:], spoil=spoil)

    def _accept(self, row: Sequence, value: int) -> bool:
        """Give a row its token; return whether it goes on."""
        if value == SPOILT:
            self._drop(row)
            return False
        self.scheduler.accepted(row, value % VOCABULARY)
        if row.ids[-1] != STOP and row.generated < row.max_new:
            return True
        self.scheduler.finish(row)
        emitted = row.ids[row.prompt_length :]
        assert emitted == alone(self.setup.reaches, *self._asked.pop(row.id)), f"request {row.id} is answered wrong"
        self.answers[row.id] = emitted
        self._texts = [*self._texts[-8:], tuple(row.ids)]
        self.counts["answered"] += 1
        return False

    def _drop(self, row: Sequence) -> None:
        self.device.zero(self.scheduler.drop(row))
        del self._asked[row.id]
        self.counts["spoilt"] += 1

    def _chance(self, probability: float) -> bool:
        return self._rng is not None and self._rng.random() < probability

    def meddle(self) -> None:
        """Have users come and go at random: some with texts that begin like others', or go on from an answer."""
        rng, longest = self._rng, self.scheduler.capacity
        assert rng is not None
        if len(self._asked) < 2 * self.setup.max_rows and rng.random() < 0.5:
            known = rng.choice(self._texts)
            new = rng.choices(range(VOCABULARY), k=rng.choice((0, 1, 2, 5, 20)))
            prompt = (*known[: rng.choice((len(known), rng.randint(0, len(known))))], *new) or (1,)
            max_new = rng.randint(1, 40)
            if len(prompt) + max_new - 1 <= min(longest, 100):
                self.add(prompt, max_new)
                self._texts = [*self._texts[-8:], prompt]
        if self._asked and rng.random() < 0.02:
            self.cancel(rng.choice(list(self._asked)))
            self.counts["cancelled"] += 1


def places(tables: Tables) -> Places:
    """The pages of a sequence as they are now, which is what a step that is built ahead goes by."""
    return [list(table.pages) for table in tables.by_kind]


def simulate(rng: Random, steps: int, episode: int = 300) -> Counter[str]:
    """Run simulations of about `episode` steps each, `steps` in all, and return what has happened in them."""
    counts: Counter[str] = Counter()
    while counts["steps"] < steps:
        simulation = Simulation(Setup.drawn(rng), rng)
        while simulation.counts["steps"] < episode:
            simulation.meddle()
            if simulation.scheduler.has_work:
                simulation.step()
        simulation.run()
        simulation.manager.clear()
        assert simulation.free == simulation.baseline
        counts += simulation.counts + Counter(shared=simulation.manager.hit_tokens, simulations=1)
    return counts


def lasting_prompts(reaches: Reaches, length: int, max_new: int, count: int) -> list[tuple[int, ...]]:
    """Return prompts whose answers do not stop early."""
    rng, found = Random(0), set[tuple[int, ...]]()
    while len(found) < count:
        prompt = tuple(rng.choices(range(VOCABULARY), k=length))
        if len(alone(reaches, prompt, max_new)) == max_new:
            found.add(prompt)
    return sorted(found)


def test_each_answer_is_the_one_given_alone_whatever_happens() -> None:
    """Fault 48, with arrivals, shared prefixes, stops, cancels, preemptions and pages in short supply."""
    counts = simulate(Random(1), steps=3000)
    for event in ("answered", "cancelled", "spoilt", "preempted", "ahead", "shared"):
        assert counts[event] > 5, counts


@settings(max_examples=60)
@given(
    st.builds(
        lambda kinds, **rest: Setup(tuple(reach for reach, _ in kinds), tuple(pages for _, pages in kinds), **rest),
        st.lists(st.tuples(REACHES, st.integers(12, 24)), min_size=1, max_size=3),
        page_size=st.integers(1, 5),
        max_rows=st.integers(1, 5),
        prefill_chunk=st.integers(1, 9),
        share=st.booleans(),
    ),
    st.lists(
        st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=12).map(tuple), st.integers(1, 9)), max_size=8
    ),
    st.integers(0, 99),
)
def test_any_requests_added_at_once_are_answered_as_alone(
    setup: Setup, requests: list[tuple[tuple[int, ...], int]], seed: int
) -> None:
    simulation = Simulation(setup, Random(seed))
    for prompt, max_new in requests:
        if len(prompt) + max_new - 1 <= simulation.scheduler.capacity:
            simulation.add(prompt, max_new)
    assert len(simulation.run()) + simulation.counts["spoilt"] == simulation.counts["asked"]


def test_sixteen_distinct_prompts_at_once_get_each_their_own_answer() -> None:
    """Fault 48."""
    simulation = Simulation(Setup(ceilings=(40,), max_rows=8))
    prompts = lasting_prompts((None,), 6, 9, 16)
    ids = [simulation.add(prompt, 9) for prompt in prompts]
    assert simulation.run() == {i: alone((None,), prompt, 9) for i, prompt in zip(ids, prompts, strict=True)}


@pytest.mark.parametrize(
    "setup", [Setup((None,), (8,)), Setup((None, Window(5)), (8, 30)), Setup((None,), (8,), share=False)]
)
@pytest.mark.parametrize("rng", [None, Random(5)], ids=["", "ahead"])
def test_two_requests_that_need_a_page_too_many_answer_as_alone_and_a_larger_one_is_refused(
    setup: Setup, rng: Random | None
) -> None:
    """Fault 39: of 7 pages of 4 tokens, both need 4."""
    simulation = Simulation(setup, rng)
    prompts = lasting_prompts(setup.reaches, 5, 12, 2)
    ids = [simulation.add(prompt, 12) for prompt in prompts]
    with pytest.raises(ContextLengthError, match=r"take 29 of the KV cache, and it holds 28:"):
        simulation.add(tuple(range(20)), 10)
    assert simulation.run() == {i: alone(setup.reaches, prompt, 12) for i, prompt in zip(ids, prompts, strict=True)}
    assert simulation.counts["preempted"] > 0


def test_what_fills_all_pages_is_answered() -> None:
    simulation = Simulation(Setup(ceilings=(8,)))
    [prompt] = lasting_prompts((None,), 17, 12, 1)
    for _ in range(2):  # the second time, all pages are cached ones of its own prefix
        request_id = simulation.add(prompt, 12)
        assert simulation.run()[request_id] == alone((None,), prompt, 12)


def test_fifty_requests_that_are_cancelled_leave_every_page_free() -> None:
    """Fault 40: cancelled in the line, while they prefill, and while they decode."""
    simulation = Simulation(Setup(ceilings=(12,)))
    for i in range(50):
        request_id = simulation.add(tuple(Random(i).choices(range(1, VOCABULARY), k=15)), 9)
        for _ in range(i % 5):
            if simulation.scheduler.has_work:
                simulation.step()
        simulation.cancel(request_id)
        simulation.cancel(request_id)
        assert simulation.free == simulation.baseline
        assert not simulation.scheduler.has_work
    request_id = simulation.add((1, 2, 3), 9)
    assert simulation.run()[request_id] == alone((None,), (1, 2, 3), 9)


def test_a_prompt_is_prefilled_in_chunks_between_the_tokens_of_those_that_decode() -> None:
    simulation = Simulation(Setup(prefill_chunk=6))
    first, second = lasting_prompts((None,), 8, 12, 2)
    simulation.add(first, 12)
    simulation.step()
    simulation.step()
    simulation.add(second, 12)
    works = [simulation.step() for _ in range(3)]
    chunks = [work.prefill and (work.prefill.start, work.prefill.end, work.prefill.last) for work in works]
    assert chunks == [(0, 6, False), (6, 8, True), None]
    assert [[row.id for row in work.decode] for work in works] == [[1], [1], [1, 2]]


def test_one_that_waits_for_the_same_prompt_shares_what_the_first_has_computed() -> None:
    simulation = Simulation(Setup(prefill_chunk=6))
    prompt = tuple(range(1, 12))
    simulation.add(prompt, 2)
    simulation.add(prompt, 2)
    starts = [(chunk.sequence.id, chunk.start) for _ in range(3) if (chunk := simulation.step().prefill)]
    assert starts == [(1, 0), (1, 6), (2, 10)]


@pytest.mark.parametrize("reaches", [(None,), (None, Window(5))], ids=str)
def test_a_prompt_that_goes_on_from_an_answer_shares_all_that_was_computed(reaches: Reaches) -> None:
    simulation = Simulation(Setup(reaches, (20,) * len(reaches)))
    [prompt] = lasting_prompts(reaches, 6, 9, 1)
    request_id = simulation.add(prompt, 9)
    said = (*prompt, *simulation.run()[request_id])
    simulation.add((*said, 1, 2), 1)
    chunk = simulation.step().prefill
    assert chunk and chunk.start == len(said) - 1


def test_an_answer_that_is_still_under_way_is_shared_by_the_page() -> None:
    simulation = Simulation(Setup())
    [prompt] = lasting_prompts((None,), 6, 12, 1)
    simulation.add(prompt, 12)
    for _ in range(9):
        work = simulation.step()
    [row] = work.decode
    simulation.add(tuple(row.ids), 1)
    chunk = simulation.step().prefill
    assert chunk and chunk.start == row.tables.length // 4 * 4 == 12


def test_a_long_prompt_takes_no_more_room_of_a_window_than_the_window() -> None:
    simulation = Simulation(Setup((None, Window(5)), (40, 10)))
    for prompt in lasting_prompts((None, Window(5)), 60, 9, 2):  # 15 pages; of the window 4, of which there are 9
        simulation.add(prompt, 9)
    works = [simulation.step() for _ in range(11)]
    assert [row.id for row in works[-1].decode] == [1]
    assert works[-1].prefill and works[-1].prefill.sequence.id == 2


def test_a_large_request_is_not_overtaken_by_small_ones_behind_it() -> None:
    simulation = Simulation(Setup(ceilings=(8,)))
    first, large = lasting_prompts((None,), 8, 12, 2)
    simulation.add(large, 1)
    simulation.run()  # so that the large one's beginning is known, and not held
    simulation.add(first, 12)
    simulation.add((*large, *range(1, 13)), 2)
    simulation.add((1,), 2)
    order, waits = [], 0
    while simulation.scheduler.has_work:
        chunk = simulation.step().prefill
        order += [chunk.sequence.id] if chunk and chunk.last else []
        waits += order == [2] and not simulation.scheduler.wants_prefill
    assert order == [2, 3, 4]
    assert waits > 5
    assert simulation.manager.asked_tokens == 8 + 8 + 20 + 1 + 20  # looked up again only once pages had come back


def test_when_the_head_of_the_line_is_cancelled_the_next_one_is_looked_at() -> None:
    simulation = Simulation(Setup(ceilings=(8,)))
    first, large = lasting_prompts((None,), 8, 12, 1) + lasting_prompts((None,), 20, 2, 1)
    simulation.add(first, 12)
    request_id = simulation.add(large, 2)
    simulation.add((1,), 2)
    for _ in range(4):
        assert len(simulation.step().decode) <= 1
    simulation.cancel(request_id)
    chunk = simulation.step().prefill
    assert chunk and chunk.sequence.id == 3


def test_no_more_than_max_rows_are_active() -> None:
    simulation = Simulation(Setup(ceilings=(40,), max_rows=3))
    for prompt in lasting_prompts((None,), 3, 9, 5):
        simulation.add(prompt, 9)
    assert max(len(simulation.step().decode) for _ in range(8)) == 3


def test_work_that_is_not_carried_out_is_offered_again() -> None:
    simulation = Simulation(Setup())
    simulation.add(tuple(range(1, 9)), 5)
    assert simulation.scheduler.next() == simulation.scheduler.next()
    simulation.step()
    simulation.step()
    assert simulation.scheduler.next() == simulation.scheduler.next()


def test_the_youngest_gives_way_and_goes_on_where_it_was() -> None:
    simulation = Simulation(Setup(ceilings=(7,)))
    prompts = lasting_prompts((None,), 5, 12, 2)
    for prompt in prompts:
        simulation.add(prompt, 12)
    works = []
    while simulation.scheduler.has_work:
        works.append(simulation.step())
    assert {request_id for work in works for request_id in work.preempted} == {2}
    [again] = [work.prefill for work in works if work.prefill and work.prefill.end > 6]
    assert again.last and again.ids == again.sequence.ids[again.start : again.end]


def test_a_step_ahead_is_reserved_where_nobody_must_give_way_for_it() -> None:
    simulation = Simulation(Setup(ceilings=(4,)))
    for prompt in lasting_prompts((None,), 3, 3, 2):
        simulation.add(prompt, 3)
    for _ in range(2):
        simulation.step()
    first, second = simulation.scheduler.next().decode
    assert (first.tables.length, second.tables.length) == (4, 3)
    assert simulation.free == (0,)  # the first has two pages, the second one
    assert not simulation.scheduler.reserve_ahead([first])  # about to be complete
    assert not simulation.scheduler.reserve_ahead([second])  # no page
    assert simulation.scheduler.next().decode == (first, second)
    simulation.cancel(first.id)
    assert simulation.scheduler.reserve_ahead([second])
    assert len(second.tables.by_kind[0].pages) == 2


def test_books_that_are_wrong_are_noticed() -> None:
    simulation = Simulation(Setup())
    for prompt in lasting_prompts((None,), 3, 9, 2):
        simulation.add(prompt, 9)
    simulation.step()
    simulation.step()
    simulation.scheduler.next().decode[0].prefilled = False
    with pytest.raises(IntegrityError, match="not the youngest"):
        simulation.check()
