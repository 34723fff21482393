"""The allocator hands out each page once, side by side where it can, and evicts what was released first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm.config.reach import Chunk, Reach, Strided, Window
from tinyllm.kv.pages import (
    PADDING,
    BlockTable,
    IntegrityError,
    OutOfPagesError,
    PageAllocator,
    PageKind,
    readable_length,
)


def table_of(allocator: PageAllocator, count: int) -> BlockTable:
    table = BlockTable(allocator)
    table.reserve(count)
    return table


def test_the_padding_page_is_never_handed_out() -> None:
    allocator = PageAllocator(4)
    assert sorted(allocator.allocate() for _ in range(3)) == [1, 2, 3]
    with pytest.raises(OutOfPagesError, match="all 3 pages"):
        allocator.allocate()


def test_pages_are_touched_when_they_are_needed() -> None:
    allocator = PageAllocator(1000)
    assert (allocator.touched, allocator.available) == (1, 999)
    page = allocator.allocate()
    allocator.release([page])
    assert (allocator.touched, allocator.available) == (2, 999)
    assert allocator.allocate() == page


def test_the_following_page_is_preferred_where_it_is_free_or_was_never_used() -> None:
    allocator = PageAllocator(8)
    table = table_of(allocator, 4)
    allocator.release(table.pages[:2])
    assert allocator.allocate(after=4) == 5  # never used, though 1 and 2 are free
    assert allocator.allocate(after=1) == 2
    assert allocator.allocate(after=5) == 6
    assert allocator.allocate(after=2) == 1  # 3 is referenced


def test_pages_that_are_released_together_come_back_in_order() -> None:
    allocator = PageAllocator(5)
    table_of(allocator, 4).release()
    assert table_of(allocator, 4).pages == [1, 2, 3, 4]


def test_cached_pages_are_evicted_last_and_tails_before_heads() -> None:
    allocator, evicted = PageAllocator(7), list[int]()
    allocator.on_evict = evicted.append
    first, second = table_of(allocator, 3), table_of(allocator, 3)
    for page in [*first.pages, *second.pages[:2]]:
        allocator.keep(page)
    first.release()
    second.release()
    assert allocator.available == 6
    assert [allocator.allocate() for _ in range(6)] == [6, 3, 2, 1, 5, 4]
    assert evicted == [3, 2, 1, 5, 4]


def test_among_cached_pages_the_following_one_is_preferred() -> None:
    allocator = PageAllocator(4)
    table = table_of(allocator, 3)
    for page in table.pages:
        allocator.keep(page)
    table.release()
    assert allocator.allocate(after=1) == 2


def test_a_cached_page_is_revived_by_sharing_it_and_not_evicted_then() -> None:
    allocator = PageAllocator(3)
    table = table_of(allocator, 2)
    for page in table.pages:
        allocator.keep(page)
    table.release()
    allocator.share(2)
    assert allocator.references(2) == 1
    assert allocator.allocate() == 1
    with pytest.raises(OutOfPagesError):
        allocator.allocate()


def test_a_forgotten_page_is_free_at_once_or_when_it_is_released() -> None:
    allocator = PageAllocator(3)
    one, two = allocator.allocate(), allocator.allocate()
    allocator.keep(one)
    allocator.keep(two)
    allocator.release([one])
    allocator.forget(one)
    assert allocator.is_free(one)
    allocator.forget(two)
    assert not allocator.is_free(two)
    allocator.release([two])
    assert allocator.is_free(two)


@pytest.mark.parametrize(
    "references, kept, message",
    [({1: 1, 2: 1}, {2}, "references"), ({1: 1}, {1}, "kept, or indexed"), ({1: 2}, {2}, "references")],
)
def test_books_that_disagree_are_noticed(references: dict[int, int], kept: set[int], message: str) -> None:
    allocator = PageAllocator(4)
    pages = [allocator.allocate(), allocator.allocate()]
    allocator.keep(pages[1])
    allocator.release(pages[1:])
    allocator.check_integrity({1: 1}, {2})
    with pytest.raises(IntegrityError, match=message):
        allocator.check_integrity(references, kept)


class Naive:
    """The same allocator with scans in the place of books: what a page is, and when it became that."""

    def __init__(self, ceiling: int) -> None:
        self.references = dict.fromkeys(range(1, ceiling), 0)
        self.used: set[int] = set()
        self.kept: set[int] = set()
        self.released: list[int] = []  # all pages without a reference that were used, oldest first

    def allocate(self, after: int | None) -> int | None:
        following = None if after is None else after + 1
        free = [page for page in self.released if page not in self.kept]
        cached = [page for page in self.released if page in self.kept]
        unused = [page for page in self.references if page not in self.used][:1]
        easy = [page for page in free + unused if page == following]
        page = next(iter(easy + free + unused + [page for page in cached if page == following] + cached), None)
        if page is not None:
            self.released = [other for other in self.released if other != page]
            self.kept.discard(page)
            self.used.add(page)
            self.references[page] = 1
        return page

    def release(self, pages: list[int]) -> None:
        for page in pages:
            self.references[page] -= 1
        gone = [page for page in pages if not self.references[page]]
        self.released += [page for page in gone if page not in self.kept]
        self.released += [page for page in reversed(gone) if page in self.kept]


@given(st.integers(2, 9), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 100)), max_size=120))
def test_a_walk_agrees_with_scans(ceiling: int, steps: list[tuple[int, int]]) -> None:
    allocator, naive, held = PageAllocator(ceiling), Naive(ceiling), list[int]()
    evicted: list[int] = []
    allocator.on_evict = evicted.append
    for action, value in steps:
        cached = [page for page in naive.released if page in naive.kept]
        if action <= 1:
            after = value % ceiling if value % 3 else None
            expected = naive.allocate(after)
            if expected is None:
                assert allocator.available == 0
                with pytest.raises(OutOfPagesError):
                    allocator.allocate(after)
                continue
            assert allocator.allocate(after) == expected
            assert (evicted.pop() if evicted else None) == (expected if expected in cached else None)
            held.append(expected)
        elif action == 2 and held:
            count = 1 + value % len(held)
            pages = list(dict.fromkeys(held[:count]))
            for page in pages:
                held.remove(page)
            allocator.release(pages)
            naive.release(pages)
        elif action == 3 and (held or cached):
            page = (held + cached)[value % len(held + cached)]
            allocator.share(page)
            naive.released = [other for other in naive.released if other != page]
            naive.references[page] += 1
            held.append(page)
        elif action == 4 and held:
            page = held[value % len(held)]
            allocator.keep(page)
            naive.kept.add(page)
        elif action == 5 and naive.kept:
            page = sorted(naive.kept)[value % len(naive.kept)]
            allocator.forget(page)
            naive.kept.remove(page)
            if page in naive.released:  # free from now on, and the last in that line
                naive.released.remove(page)
                naive.released.append(page)
        allocator.check_integrity({page: n for page, n in naive.references.items() if n}, naive.kept)
        assert allocator.available == ceiling - 1 - sum(n > 0 for n in naive.references.values())


def test_a_lone_sequence_lies_in_one_piece_and_says_where() -> None:
    table = table_of(PageAllocator(9), 3)
    assert table.start == 1
    table.reserve(8)
    assert (table.start, table.live) == (1, [1, 2, 3, 4, 5, 6, 7, 8])
    table.drop_before(3)
    assert (table.start, table.first, table.pages) == (4, 3, [PADDING] * 3 + [4, 5, 6, 7, 8])


def test_a_table_in_pieces_has_no_start() -> None:
    allocator = PageAllocator(9)
    one, two = table_of(allocator, 2), table_of(allocator, 1)
    one.reserve(3)
    assert one.live == [1, 2, 4] and one.start is None
    one.drop_before(2)
    assert one.start == one.pages[2]
    two.release()
    assert two.start is None


def test_what_was_dropped_can_be_restored_while_it_is_cached() -> None:
    allocator = PageAllocator(9)
    table = table_of(allocator, 4)
    for page in table.pages[:3]:
        allocator.keep(page)
    table.drop_before(3)
    table.trim(2)
    assert (table.pages, table.first) == ([PADDING] * 2, 2)
    table.restore([1, 2])
    assert (table.pages, table.first) == ([1, 2], 0)
    allocator.check_integrity({1: 1, 2: 1}, {1, 2, 3})


def test_a_fork_shares_what_it_is_asked_to_and_is_released_apart() -> None:
    allocator = PageAllocator(9)
    table = table_of(allocator, 4)
    table.drop_before(1)
    fork = table.fork(3)
    assert (fork.pages, fork.first) == ([PADDING, 2, 3], 1)
    table.release()
    assert [allocator.references(page) for page in (1, 2, 3, 4)] == [0, 1, 1, 0]
    assert fork.replace(2) == (3, 1)
    fork.release()
    allocator.check_integrity({}, set())


@pytest.mark.parametrize(
    "reach, length, first",
    [
        (None, 9, 0),
        (Window(1), 8, 2),
        (Window(1), 7, 1),
        (Window(4), 7, 1),
        (Window(4), 6, 0),
        (Window(9), 3, 0),
        (Chunk(8), 7, 0),
        (Chunk(8), 8, 2),
        (Chunk(6), 11, 1),
        (Strided(2, 3), 99, 0),
    ],
)
def test_the_first_page_that_a_query_sees(reach: Reach | None, length: int, first: int) -> None:
    assert PageKind(reach, 2).first_page(length, page_size=4) == first


@given(st.integers(0, 30), st.integers(1, 9), st.sets(st.integers(0, 15)), st.sets(st.integers(0, 15)))
def test_the_readable_length_is_the_largest_whose_query_sees_all(
    length: int, window: int, gone: set[int], gone_too: set[int]
) -> None:
    kinds, size = [PageKind(None, 9), PageKind(Window(window), 9), PageKind(Window(2 * window), 9)], 2

    def page_at(kind: int, index: int) -> int:
        return int(index not in (set(), gone, gone_too)[kind])

    def sees_all(n: int) -> bool:
        return all(
            page_at(number, position // size)
            for number, kind in enumerate(kinds)
            for position in range(0 if kind.reach is None else kind.reach.first(n), n)
        )

    assert readable_length(length, kinds, size, page_at) == max(filter(sees_all, range(length + 1)))
