"""A picture has a panel for each figure that was measured."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from test_report import ANSWER, PROMPT, REPORT

from tinyllm.bench.plot import draw


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
