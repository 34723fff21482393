"""A picture has a panel for each figure that was measured."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from test_report import ANSWER, PROMPT, REPORT

from tinyllm.bench.plot import draw
from tinyllm.bench.result import Spread


def words(path: Path) -> list[str]:
    """What stands in an SVG, where matplotlib names each text in a comment."""
    return re.findall(r"<!-- (.*?) -->", path.read_text())


def test_bars_where_there_is_one_depth(tmp_path: Path) -> None:
    draw(REPORT, tmp_path / "a.svg")
    found = words(tmp_path / "a.svg")
    assert {"Decode", "Time to the first token", "Prefill", "pp512", "tg2 @ d256", "3,000", "192", "4.0"} <= set(
        found
    )


def test_lines_over_depth_where_there_are_several(tmp_path: Path) -> None:
    deeper = replace(ANSWER, workload=replace(ANSWER.workload, depth=512))
    draw(replace(REPORT, results=[ANSWER, deeper]), tmp_path / "a.svg")
    found = words(tmp_path / "a.svg")
    assert "tg2" in found and "tokens in the context before" in found
    assert "Prefill" not in found


def test_a_png_is_one(tmp_path: Path) -> None:
    draw(replace(REPORT, results=[PROMPT]), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_scales_begin_at_0_however_much_repetitions_vary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    wild = Spread(2, 10.0, 10.0, 30.0, 1.0, 40.0)
    result = replace(ANSWER, decode_tps=wild)
    draw(replace(REPORT, results=[result]), tmp_path / "a.svg")
    deeper = replace(result, workload=replace(ANSWER.workload, depth=512))
    draw(replace(REPORT, results=[result, deeper]), tmp_path / "a.svg")
    bars, lines = (figure.axes[0] for figure in figures)
    assert bars.get_xlim()[0] == lines.get_ylim()[0] == lines.get_xlim()[0] == 0
