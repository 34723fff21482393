import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm.errors import UsageError
from tinyllm.text.stops import StopStrings, overlap


def run(stops, pieces):
    """What is shown, and the stop string that ended it."""
    watcher = StopStrings(stops)
    return "".join([*map(watcher.add, pieces), watcher.finish()]), watcher.matched


def test_a_stop_string_over_several_tokens_is_found_and_not_leaked():
    """fault 20."""
    watcher = StopStrings(["two three"])
    pieces = ["o", "ne", " t", "wo", " th", "ree", " four"]
    assert [watcher.add(piece) for piece in pieces] == ["o", "ne", " ", "", "", "", ""]
    assert watcher.matched == "two three"
    assert watcher.finish() == ""


def test_a_stop_string_within_one_piece_is_found():
    """fault 20, not streamed."""
    assert run(["two three"], ["one two three four"]) == ("one ", "two three")


def test_the_beginning_of_a_stop_string_is_given_when_it_does_not_complete():
    assert run(["two three"], ["one two", " thr", "u"]) == ("one two thru", None)
    assert run(["two three"], ["one two thre"]) == ("one two thre", None)


def test_a_stop_string_may_begin_within_a_failed_beginning():
    assert run(["aab"], ["a", "a", "a", "b"]) == ("a", "aab")


def test_of_two_stop_strings_the_first_to_complete_ends_the_stream():
    assert run(["abc", "b"], ["abc"]) == run(["abc", "b"], ["a", "b", "c"]) == ("a", "b")
    assert run(["b", "ab"], ["xab"]) == ("x", "ab")


def test_without_stop_strings_all_passes_at_once():
    watcher = StopStrings([])
    assert watcher.add("any") == "any"
    assert watcher.finish() == ""


def test_an_empty_stop_string_is_a_usage_error():
    with pytest.raises(UsageError, match="empty"):
        StopStrings(["x", ""])


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.text("abc", max_size=5), max_size=6))
def test_the_result_is_that_of_the_whole_text(stops, pieces):
    """Never a stop string leaked, never its beginning lost, whatever the pieces."""
    text = "".join(pieces)
    shown, matched = run(stops, pieces)
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        assert (shown, matched) == (text, None)
    else:
        end, negative_length = min(ends)
        assert shown == text[: end + negative_length]
        assert matched == text[end + negative_length : end]
        assert not any(stop in shown for stop in stops)


def test_the_work_for_a_piece_does_not_grow_with_the_number_of_stop_strings(monkeypatch):
    """Counted in looks at stop strings."""

    class Counted(str):
        compared = 0

        def __lt__(self, other):
            Counted.compared += 1
            return str(self) < str(other)

        def startswith(self, *arguments):
            Counted.compared += 1
            return super().startswith(*arguments)

        def __len__(self):
            Counted.compared += 1
            return super().__len__()

        __hash__ = str.__hash__

    watcher = StopStrings([Counted(f"stop {n:04}") for n in range(5_000)])
    Counted.compared = 0
    shown = [watcher.add(piece) for piece in ["some text, s", "top", " it, stop 049", "9", "9"]]
    assert (shown, watcher.matched) == (["some text, ", "", "stop it, ", "", ""], "stop 0499")
    assert 0 < Counted.compared < 1_000


@given(st.text("ab", max_size=8), st.text("ab", min_size=1, max_size=5))
def test_overlap_is_the_longest_beginning_at_the_end(text, mark):
    lengths = [n for n in range(len(mark)) if text.endswith(mark[:n])]
    assert overlap(text, mark) == max(lengths)
