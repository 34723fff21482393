"""The bar of a long prompt, by a clock that the test sets."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tinyllm.terminal import prefill_bar
from tinyllm.terminal.prefill_bar import PrefillBar


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_bar_appears_after_half_a_second_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    now = [0.0]
    monkeypatch.setattr(prefill_bar, "monotonic", lambda: now[0])
    file = io.StringIO()
    bar = PrefillBar(Console(file=file, width=width, force_terminal=True, color_system=None), 30_000)
    bar.show(256)
    bar.refresh()
    now[0] = 0.4
    bar.refresh()
    assert "reading" not in file.getvalue() and "\n" not in file.getvalue()
    now[0] = 0.6
    bar.show(1024)
    bar.refresh()
    shown = file.getvalue().rsplit("\r", 1)[-1]
    assert "1,024" in shown and len(shown.splitlines()) == 1
    if width == 80:
        assert "reading the prompt" in shown and "1,024 of 30,000 tokens" in shown
    bar.show(30_000)
    assert "\x1b[2K" in file.getvalue().rsplit("tokens", 1)[-1]
    bar.stop()


def test_nothing_is_shown_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_bar, "_PATIENCE_S", 0)
    file = io.StringIO()
    bar = PrefillBar(Console(file=file, force_terminal=False), 1000)
    bar.show(10)
    bar.stop()
    assert file.getvalue() == ""
