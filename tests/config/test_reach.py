"""What a query sees, said in three ways that must agree: key by key, from where on, and how many at most."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm.config.reach import Chunk, Reach, Strided, Window

SIZES = st.integers(1, 12)
BOUNDED = st.builds(Window, SIZES) | st.builds(Chunk, SIZES)
REACHES = BOUNDED | st.builds(Strided, SIZES, SIZES)
LATER = 40  # queries that are looked at after one


def seen_by_definition(reach: Reach, query: int) -> list[int]:
    """The positions that a query sees, of a list that is made as the words say it."""
    before = list(range(query + 1))
    match reach:
        case Window(size):
            return before[-size:]
        case Chunk(size):
            chunks = [before[start : start + size] for start in range(0, len(before), size)]
            return chunks[-1]
        case Strided(local, stride):
            return sorted({*before[-local:], *before[::-1][::stride]})


@given(REACHES, st.integers(0, 60))
def test_a_query_sees_what_the_words_say(reach: Reach, query: int) -> None:
    assert [key for key in range(query + 1) if reach.sees(query, key)] == seen_by_definition(reach, query)


@given(REACHES, st.integers(1, 30))
def test_arrays_of_positions_are_seen_like_numbers(reach: Reach, n: int) -> None:
    query, key = np.arange(n)[:, None], np.arange(n)
    expected = [[reach.sees(q, k) for k in range(n)] for q in range(n)]
    assert np.array_equal(reach.sees(query, key), expected)


@given(REACHES, st.integers(0, 60))
def test_what_is_before_the_first_is_out_of_reach_for_good(reach: Reach, query: int) -> None:
    first = reach.first(query)
    assert not any(reach.sees(later, key) for later in range(query, query + LATER) for key in range(first))
    assert any(reach.sees(later, first) for later in range(query, query + LATER)), "so it is not kept in vain"


@given(REACHES, st.integers(0, 60))
def test_the_first_never_goes_back(reach: Reach, query: int) -> None:
    assert 0 <= reach.first(query) <= reach.first(query + 1) <= query + 1


@given(BOUNDED, st.integers(1, 12))
def test_held_is_the_most_that_is_between_the_first_and_the_last_of_so_many_queries(reach: Reach, n: int) -> None:
    assert reach.held(n) == max(query + n - reach.first(query) for query in range(60))


@given(st.builds(Strided, SIZES, SIZES), st.integers(1, 12))
def test_strides_hold_on_to_everything(reach: Strided, n: int) -> None:
    assert reach.held(n) is None


@pytest.mark.parametrize(
    ("reach", "told"),
    [
        (Window(4096), "the last 4,096 tokens"),
        (Chunk(8192), "their chunk of 8,192 tokens"),
        (Strided(128, 3), "the last 128 tokens and every 3th before"),
    ],
)
def test_it_is_told_in_words(reach: Reach, told: str) -> None:
    assert reach.describe() == told
