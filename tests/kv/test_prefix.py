"""A prefix is found again by its tokens, and by nothing else; what cannot be reached any more is kept by nobody."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm.config.reach import Window
from tinyllm.kv.pages import PADDING, IntegrityError, PageAllocator, PageKind
from tinyllm.kv.prefix import ChainHash, PrefixIndex

SIZE = 4


class Fixture:
    """An index over kinds of these windows, with sequences that are written and given back at once."""

    def __init__(self, *windows: int | None, ceiling: int = 100, chain_hash: ChainHash = hash) -> None:
        self.kinds = [PageKind(None if window is None else Window(window), ceiling) for window in windows]
        self.allocators = [PageAllocator(ceiling) for _ in windows]
        self.index = PrefixIndex(self.kinds, self.allocators, SIZE, chain_hash)
        self.held: list[int] = []  # pages of the first kind

    def hold(self) -> int:
        self.held.append(self.allocators[0].allocate())
        return self.held[-1]

    def release(self, page: int) -> None:
        self.held.remove(page)
        self.allocators[0].release([page])

    def put(self, tokens: str, regime: str = "") -> list[list[int]]:
        """Write `tokens` to fresh pages, give them back, and return them by kind."""
        pages = [[allocator.allocate() for _ in range(0, len(tokens), SIZE)] for allocator in self.allocators]
        node = self.index.root(regime)
        for i, start in enumerate(range(0, len(tokens), SIZE)):
            node = self.index.put(node, ids(tokens[start : start + SIZE]), [row[i] for row in pages])
        for allocator, row in zip(self.allocators, pages, strict=True):
            allocator.release(row)
        self.check()
        return pages

    def match(self, tokens: str, regime: str = "") -> tuple[int, list[list[int]]]:
        nodes, length = self.index.match(ids(tokens), len(tokens), regime)
        return length, [[node.pages[kind] for node in nodes] for kind in range(len(self.kinds))]

    def evict(self, page: int, kind: int = 0) -> None:
        """Have one cached page evicted: all that are not, and all that are free, are taken before it."""
        allocator = self.allocators[kind]
        taken = []
        while not taken or taken[-1] != page:
            taken.append(allocator.allocate(after=page - 1))
        allocator.release(taken)
        self.check()

    def check(self) -> None:
        self.index.check_integrity()
        for kind, allocator in enumerate(self.allocators):
            allocator.check_integrity({} if kind else dict.fromkeys(self.held, 1), self.index.kept(kind))


def ids(tokens: str) -> tuple[int, ...]:
    return tuple(map(ord, tokens))


def common(a: str, b: str) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


def test_whole_pages_and_a_partial_one_are_found() -> None:
    index = Fixture(None)
    [pages] = index.put("abcdefghij")
    assert index.match("abcdefghij") == (10, [pages])
    assert index.match("abcdefghijkl") == (10, [pages])
    assert index.match("abcdefghix") == (9, [pages])
    assert index.match("abcdefgx") == (7, [pages[:2]])
    assert index.match("abcdefgh") == (8, [pages[:2]])
    assert index.match("axcd") == (1, [pages[:1]])
    assert index.match("xbcd") == (0, [[]])
    assert index.match("") == (0, [[]])


def test_a_regime_sees_its_own_prefixes_alone() -> None:
    index = Fixture(None)
    short, long = index.put("abcdef", "short"), index.put("abcdef", "long")
    assert index.match("abcdef", "short") == (6, short)
    assert index.match("abcdef", "long") == (6, long)
    assert index.match("abcdef") == (0, [[]])


def test_the_pages_of_those_who_came_first_stay() -> None:
    index = Fixture(None)
    [first] = index.put("abcdef")
    [second] = index.put("abcdef")
    assert index.match("abcdef") == (6, [first])
    assert all(map(index.allocators[0].is_free, second))


def test_a_shorter_end_is_covered_by_a_longer_one() -> None:
    index = Fixture(None)
    [first] = index.put("abcdefg")
    [second] = index.put("abcde")
    assert index.match("abcde") == (5, [first])
    assert all(map(index.allocators[0].is_free, second))


def test_a_node_grows_in_place_with_its_page() -> None:
    index = Fixture(None)
    page, root = index.hold(), index.index.root("")
    grown = [index.index.put(root, ids("abcd"[:n]), [page]) for n in (1, 2, 4)]
    assert grown[0] is grown[1] is grown[2]
    assert index.match("abcx") == (3, [[page]])
    index.release(page)
    index.check()


def test_a_page_leaves_its_node_for_the_one_with_more_of_its_tokens() -> None:
    index = Fixture(None)
    page, root = index.hold(), index.index.root("")
    partial = index.index.put(root, ids("ab"), [page])
    [other] = index.put("abcd")
    assert index.index.put(root, ids("abcd"), [page]).pages == other
    assert partial.parent is None
    index.release(page)
    assert index.allocators[0].is_free(page)
    index.check()


@pytest.mark.parametrize("before, tokens", [("", "wxyz"), ("stuv", "abcd")])
def test_a_page_that_is_said_to_hold_something_else_is_found_by_that_alone(before: str, tokens: str) -> None:
    index = Fixture(None)
    first, second, root = index.hold(), index.hold(), index.index.root("")
    index.index.put(index.index.put(root, ids("abcd"), [first]), ids("ef"), [second])
    parent = index.index.put(root, ids(before), [index.hold()]) if before else root
    index.index.put(parent, ids(tokens), [first])
    assert index.match("abcdef") == (0, [[]])
    assert index.match(before + tokens + "ef")[0] == len(before + tokens)
    index.check()


@given(st.lists(st.text("ab", min_size=1, max_size=14), min_size=1, max_size=12), st.text("ab", max_size=14))
def test_the_longest_common_prefix_with_anything_that_was_written_is_found(written: list[str], asked: str) -> None:
    index = Fixture(None, 3)
    for tokens in written:
        index.put(tokens)
    length, pages = index.match(asked)
    assert length == max(common(tokens, asked) for tokens in written)
    assert all(len(row) == -(-length // SIZE) and PADDING not in row for row in pages)


def test_fault_41_a_hash_that_is_the_same_for_all_gives_no_page_of_other_tokens() -> None:
    index = Fixture(None, chain_hash=lambda link: 41)
    texts = ["abcdefgh", "efghabcd", "abcdabcd", "hgfedcba", "abcdefxx"]
    pages = {text: index.put(text)[0] for text in texts}
    assert index.match("abcdefgh") == (8, [pages["abcdefgh"]])
    assert index.match("efghabcd") == (8, [pages["efghabcd"]])
    assert index.match("abcdabcd") == (8, [[pages["abcdefgh"][0], pages["abcdabcd"][1]]])
    assert index.match("hgfedcba") == (8, [pages["hgfedcba"]])
    assert index.match("efghefgh") == (4, [pages["efghabcd"][:1]])  # `efgh` is known, but after other tokens
    assert index.match("xxxxefgh") == (0, [[]])


def test_fault_41_an_evicted_page_is_not_found_by_its_old_tokens_when_it_holds_others() -> None:
    index = Fixture(None, ceiling=3, chain_hash=lambda link: 41)
    [old] = index.put("abcdefgh")
    [new] = index.put("stuvwxyz")
    assert sorted(new) == sorted(old)
    assert index.match("abcdefgh") == (0, [[]])
    assert index.match("stuvwxyz") == (8, [new])


def test_what_hangs_below_an_evicted_page_goes_with_it() -> None:
    index = Fixture(None, 4, ceiling=5)
    [full, _] = index.put("abcdefghijklmnop")
    index.evict(full[1])
    assert index.match("abcdefghijklmnop") == (4, [[full[0]], [1]])
    assert index.allocators[1].is_free(3) and index.allocators[1].is_free(4)


def test_a_page_below_an_evicted_one_is_freed_when_it_is_released() -> None:
    index = Fixture(None, ceiling=3)
    [[head]] = index.put("abcd")
    held = index.hold()
    [parent] = index.index.root("").children
    child = index.index.put(parent, ids("ef"), [held])
    assert index.hold() == head
    assert child.parent is None and index.match("abcdef") == (0, [[]])
    index.check()
    index.release(held)
    assert index.allocators[0].is_free(held)
    index.check()


def test_a_windowed_kind_needs_the_pages_of_its_last_window_alone() -> None:
    index = Fixture(None, 5, ceiling=8)
    text = "abcdefghijklmnop"
    full, windowed = index.put(text)
    index.evict(windowed[1], kind=1)
    assert index.match(text) == (16, [full, [windowed[0], PADDING, *windowed[2:]]])
    assert index.match(text[:13])[0] == 13  # sees positions 9 to 12
    assert index.match(text[:11])[0] == 4  # would see 7, and so would all lengths down to 5
    assert index.match(text[:4])[0] == 4
    index.put(text)
    assert index.match(text[:11])[0] == 11  # it was computed again


def test_windowed_kinds_alone_keep_the_nodes_that_lead_to_a_page_and_no_others() -> None:
    index = Fixture(4, ceiling=9)
    [pages] = index.put("abcdefghijklmnop")
    for page in pages[:3]:
        index.evict(page)
    assert index.match("abcdefghijklmnop") == (16, [[PADDING] * 3 + pages[3:]])
    assert index.match("abcdefghijkl")[0] == 0
    index.evict(pages[3])
    assert index.index.root("").children == []


def test_a_discarded_node_takes_all_below_it_along_however_deep() -> None:
    index = Fixture(None, ceiling=3001)
    index.put("abcd" * 3000)
    [head] = index.index.root("").children
    assert len(index.index.discard(head)) == 3000
    assert index.index.discard(head) == []
    assert index.match("abcd") == (0, [[]])
    index.check()


def test_clearing_forgets_all() -> None:
    index = Fixture(None, 3)
    index.put("abcdefgh")
    index.put("axcdefgh", "long")
    index.index.clear()
    index.check()
    assert index.index.kept(0) == index.index.kept(1) == set()
    assert index.match("abcdefgh") == index.match("axcd", "long") == (0, [[], []])


def test_a_broken_tree_is_noticed() -> None:
    index = Fixture(None)
    index.put("abcdef")
    index.put("axcd")
    [one, two] = index.index.root("").children
    one.tokens, two.tokens = two.tokens, one.tokens
    with pytest.raises(IntegrityError, match="not sorted"):
        index.index.check_integrity()
    one.tokens, two.tokens = two.tokens, one.tokens
    index.index.check_integrity()
    one.pages[0] = 7
    with pytest.raises(IntegrityError, match="nodes name pages"):
        index.index.check_integrity()
