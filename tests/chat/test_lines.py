"""Lines, before any terminal is there."""

from __future__ import annotations

from io import BytesIO, TextIOWrapper

import pytest

from tinyllm.chat import lines
from tinyllm.chat.lines import PlainLines, fit, fit_named, is_open
from tinyllm.chat.repl import unquoted
from tinyllm.errors import UsageError


@pytest.mark.parametrize(
    ("text", "opened"),
    [("hi", False), ('"""', True), ('"""a', True), ('"""a\nb"""', False), ('""" """', False), ('say """', False)],
)
def test_quotation_marks_hold_a_message_open(text: str, opened: bool) -> None:
    assert is_open(text) is opened


def test_what_stands_between_is_the_message() -> None:
    assert unquoted('"""\na\n  b\n"""') == "a\n  b"
    assert unquoted('"""/help"""') == "/help"
    assert unquoted(" plain ") == " plain "


def test_a_footer_leaves_out_what_does_not_fit() -> None:
    parts = ["model", "1 of 2 tokens", "3 tokens/s"]
    assert fit(parts, 80) == "model · 1 of 2 tokens · 3 tokens/s"
    assert fit(parts, 25) == "model · 1 of 2 tokens"
    assert fit(parts, 7) == "model" and fit(parts, 3) == "mod" and fit([], 9) == ""


def test_a_footer_cuts_the_name_for_its_figures() -> None:
    figures = ["1 of 2 tokens", "3 tokens/s", "first token 4 s"]
    whole = "the-name-of-a-model · 1 of 2 tokens · 3 tokens/s · first token 4 s"
    assert fit_named("the-name-of-a-model", figures, len(whole)) == whole
    assert (
        fit_named("the-name-of-a-model", figures, 60)
        == "the-name-of-… · 1 of 2 tokens · 3 tokens/s · first token 4 s"
    )
    assert fit_named("the-name-of-a-model", figures, 54) == "the-name-of-a-model · 1 of 2 tokens · 3 tokens/s"
    assert fit_named("tiny", figures, 20) == "tiny · 1 of 2 tokens"
    assert fit_named("tiny", figures, 19) == "1 of 2 tokens"


@pytest.mark.parametrize("rest", ["x" * 21, '"""\n' + "x\n" * 9])
def test_a_message_has_an_end(rest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MOST_BYTES", 20)
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(f"{'x' * 19}\n{rest}".encode())))
    read = PlainLines()
    assert read.read("") == "x" * 19
    with pytest.raises(UsageError, match="a message: larger than"):
        read.read("")
