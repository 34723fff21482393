"""Figures, in lines as wide as a terminal."""

from __future__ import annotations

from tinyllm.chat.figures import folded


def test_lines_end_between_parts() -> None:
    parts = ["prompt 3", "answer 12", "first"]
    assert list(folded(parts, None)) == ["prompt 3 · answer 12 · first"]
    assert list(folded(parts, 28)) == ["prompt 3 · answer 12 · first"]
    assert list(folded(parts, 27)) == ["prompt 3 · answer 12", "first"]
    assert list(folded(parts, 5)) == parts and list(folded([], 5)) == []
