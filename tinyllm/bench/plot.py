"""A report as one picture: decode speed, time to the first token and prefill speed. Needs matplotlib, and no mlx."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from tinyllm.bench.report import Report, differing
from tinyllm.bench.result import Result, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

_COLORS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2")


@dataclass(frozen=True)
class _Panel:
    title: str
    unit: str
    figure: Callable[[Result], Spread | None]
    scale: float = 1.0


_PANELS = (
    _Panel("Decode", "tokens/s", lambda result: result.decode_tps),
    _Panel("Time to the first token", "ms", lambda result: result.ttft_s, scale=1000),
    _Panel("Prefill", "tokens/s", lambda result: result.prefill_tps),
)


def draw(report: Report, path: Path) -> None:
    """Draw a panel for each figure that the results have: over depth where there are several, else a bar a test."""
    from matplotlib.figure import Figure

    panels = [panel for panel in _PANELS if any(panel.figure(result) for result in report.results)]
    shown = [[result for result in report.results if panel.figure(result)] for panel in panels]
    over_depth = any(len({result.workload.depth for result in results}) > 1 for results in shown)
    rows = max(map(len, shown))
    height = 3.8 if over_depth else 1.7 + 0.5 * max(rows, 2)
    figure = Figure(figsize=(4.6 * len(panels) + 0.4, height), layout="constrained")
    for axes, panel, results in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, shown, strict=True):
        if over_depth:
            _lines(axes, results, panel)
        else:
            _bars(axes, results, panel, rows)
        axes.set_title(panel.title, loc="left", fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
    models = list(dict.fromkeys(result.model.name for result in report.results))
    figure.suptitle(", ".join(models), fontsize=13, fontweight="bold", x=0.01, ha="left")
    dtypes = ", ".join(dict.fromkeys(f"{r.model.quantization} in {r.model.dtype}" for r in report.results))
    figure.supxlabel(f"{report.title.replace('; ', chr(10), 1)}; {dtypes}", fontsize=8, color="#555555")
    figure.savefig(path, dpi=200)


def _bars(axes: Axes, results: Sequence[Result], panel: _Panel, rows: int) -> None:
    variants = list(dict.fromkeys(result.model for result in results))
    colors = [_COLORS[variants.index(result.model) % len(_COLORS)] for result in results]
    medians, deviations = _values(results, panel)
    bars = axes.barh(range(len(results)), medians, xerr=deviations, color=colors, ecolor="#555555", height=0.6)
    axes.bar_label(bars, [f"{value:,.{0 if value >= 100 else 1}f}" for value in medians], padding=6)
    axes.set_yticks(range(len(results)), [_name(result, results) for result in results])
    axes.set_ylim(rows - 0.5, -0.5)  # the first on top, and bars alike in all panels
    axes.margins(x=0.2)
    axes.set_xlim(left=0)  # a deviation may reach below
    axes.set_xlabel(panel.unit)


def _lines(axes: Axes, results: Sequence[Result], panel: _Panel) -> None:
    lines: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: result.workload.depth):
        lines.setdefault(_name(result, results).replace(f" @ d{result.workload.depth}", ""), []).append(result)
    for (name, mine), color in zip(lines.items(), cycle(_COLORS), strict=False):
        medians, deviations = _values(mine, panel)
        depths = [result.workload.depth for result in mine]
        axes.errorbar(depths, medians, yerr=deviations, marker="o", capsize=3, color=color, label=name)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in the context before")
    axes.set_ylabel(panel.unit)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)


def _values(results: Sequence[Result], panel: _Panel) -> tuple[list[float], list[float]]:
    spreads = [spread for result in results if (spread := panel.figure(result))]
    return [spread.median * panel.scale for spread in spreads], [spread.sd * panel.scale for spread in spreads]


def _name(result: Result, results: Sequence[Result]) -> str:
    """The test, and of model, features, kv and batch what is not the same in all results."""
    parts = [result.workload.label, *(cell(result) for cell in differing(results).values())]
    if len({r.workload.batch for r in results}) > 1:
        parts.append(f"batch {result.workload.batch}")
    return ", ".join(parts)
