"""Which tokens are scored, by hand and for all sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm.errors import UsageError
from tinyllm.perplexity.windows import Window, windows


def test_windows_side_by_side_score_all_but_their_first_tokens() -> None:
    assert windows(10, 4, 4) == [Window(0, 4, 1), Window(4, 8, 5), Window(8, 10, 9)]


def test_windows_that_overlap_score_what_is_new() -> None:
    assert windows(9, 4, 2) == [Window(0, 4, 1), Window(2, 6, 4), Window(4, 8, 6), Window(6, 9, 8)]


def test_a_last_token_alone_is_not_scored() -> None:
    assert windows(9, 4, 4) == [Window(0, 4, 1), Window(4, 8, 5)]


def test_a_short_text_is_one_window() -> None:
    assert windows(3, 512, 512) == [Window(0, 3, 1)]


@given(st.integers(2, 200), st.integers(2, 50), st.data())
def test_each_token_is_scored_once_if_one_comes_before_it(count: int, context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context))
    found = windows(count, context, stride)
    scored = [token for window in found for token in range(window.first, window.end)]
    assert len(scored) == sum(window.scored for window in found)
    assert all(window.start < window.first < window.end <= window.start + context for window in found)
    wanted = [token for token in range(1, count) if stride < context or token % stride]
    assert scored == wanted
    assert all(window.first - window.start >= context - stride for window in found[1:])


@pytest.mark.parametrize(("context", "stride"), [(1, 1), (4, 0), (4, 5)])
def test_windows_that_cannot_be_are_refused(context: int, stride: int) -> None:
    with pytest.raises(UsageError, match="the stride no more than it"):
        windows(10, context, stride)


def test_a_text_of_one_token_is_refused() -> None:
    with pytest.raises(UsageError, match="the text has 1 token,"):
        windows(1, 4, 4)
