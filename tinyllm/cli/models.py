"""`tinyllm list`: the models on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinyllm.cli import console, options
from tinyllm.errors import SettingsError

if TYPE_CHECKING:
    from tinyllm.hub.inventory import Entry, Place

_HEADER = (" ", "model", "size", "quant", "family", "runs")
_REASON_LENGTH = 100


def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with whole reasons.")] = False,
    debug: options.Debug = False,
) -> None:
    """Show the models on this machine.

    And every folder that is looked in; * marks the model in use.
    """

    def command() -> None:
        from tinyllm.hub.inventory import inventory, places

        entries, in_use = inventory(), _name_in_use()
        if as_json:
            _print_json(entries, places(), in_use)
            return
        if entries:
            _print_table([_row(entry, in_use) for entry in entries])
            console.write("\n")
        for place in places():
            missing = "" if place.folder.is_dir() else " (not there yet)"
            console.write(f"{place.title + ':':<15}{place.folder}{missing}\n")

    raise typer.Exit(console.run(command, debug=debug))


def _name_in_use() -> str | None:
    """Return the name of the model in use; None, and a line on stderr, where the settings are broken."""
    from tinyllm.hub.choice import DEFAULT, choose
    from tinyllm.hub.locate import EMBEDDED

    try:
        name = choose().name
    except SettingsError as error:
        console.say(str(error))
        return None
    return EMBEDDED if name == DEFAULT else name


def _is_in_use(entry: Entry, in_use: str | None) -> bool:
    return in_use is not None and (entry.name == in_use or entry.folder == Path(in_use).expanduser())


def _row(entry: Entry, in_use: str | None) -> tuple[str, ...]:
    from tinyllm.hub.sizes import disk_size

    mark = "*" if _is_in_use(entry, in_use) else " "
    size = disk_size(entry.disk_bytes)
    if entry.summary is None:
        return mark, entry.name, size, "-", "-", f"no: {_brief(entry.problem or '')}"
    return mark, entry.name, size, entry.summary.quantization, entry.summary.family, "yes"


def _brief(problem: str) -> str:
    """Cut a reason to its first part; --json has the whole of it."""
    first = problem.partition(";")[0]
    return first if len(first) <= _REASON_LENGTH else first[: _REASON_LENGTH - 1] + "…"


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    if not sys.stdout.isatty():
        table = [_HEADER, *rows]
        widths = [max(len(row[i]) for row in table) for i in range(len(_HEADER) - 1)]
        for row in table:
            cells = [cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)]
            console.write("  ".join(cells).rstrip() + "\n")
        return
    from rich.table import Table
    from rich.text import Text

    from tinyllm.terminal.console import TerminalConsole

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for title in _HEADER:
        folds = title in ("model", "runs")
        shown.add_column(title, justify="right" if title == "size" else "left", no_wrap=not folds, overflow="fold")
    for row in rows:
        shown.add_row(*map(Text, row))
    TerminalConsole().print(shown)


def _print_json(entries: Sequence[Entry], places: Sequence[Place], in_use: str | None) -> None:
    models: list[dict[str, Any]] = [
        {
            "name": entry.name,
            "path": str(entry.folder),
            "place": entry.place,
            "disk_bytes": entry.disk_bytes,
            "runs": entry.summary is not None,
            "problem": entry.problem,
            "in_use": _is_in_use(entry, in_use),
            **(asdict(entry.summary) if entry.summary else {}),
        }
        for entry in entries
    ]
    folders = [{"title": place.title, "path": str(place.folder)} for place in places]
    console.write(json.dumps({"models": models, "folders": folders}, ensure_ascii=False) + "\n")
