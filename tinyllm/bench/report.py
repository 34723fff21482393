"""A report of all results as a table (md), csv, json, or a line of JSON a test (jsonl), or for a terminal. No mlx."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from textwrap import fill
from typing import Any, TypeVar

from tinyllm.bench.compare import RULE, Change, Key
from tinyllm.bench.result import NOISY, Gaps, Result, Spread, Subject

__all__ = ["FORMATS", "Report", "as_shown", "changes_table", "differing", "md_table", "name_of"]


@dataclass(frozen=True)
class Report:
    """What ran on which machine (its facts, and their line of text); `changes` are against an earlier report.

    `bandwidth` is what was measured of the memory, in bytes a second.
    """

    machine: Mapping[str, Any]
    title: str
    bandwidth: float
    settings: Mapping[str, Any]
    results: Sequence[Result]
    changes: Sequence[Change] = ()


_LEAST_NAME = 24  # characters

# What stands in the columns of a figure that a test has none of.
_NOTHING: Mapping[str, Mapping[str, None]] = {
    **dict.fromkeys(["prefill_tps", "ttft_s", "decode_tps"], dict.fromkeys(field.name for field in fields(Spread))),
    "gaps": dict.fromkeys(field.name for field in fields(Gaps)),
}


def as_json(report: Report) -> str:
    """Write one object, with every sample."""
    whole = {**_head(report), "results": [_record(result) for result in report.results]}
    if report.changes:
        whole["changes"] = [asdict(change) for change in report.changes]
    return json.dumps(whole, indent=2) + "\n"


def as_jsonl(report: Report) -> str:
    """Write one object a test, each with the machine."""
    head = _head(report)
    return "".join(json.dumps({**head, **_record(result)}) + "\n" for result in report.results)


def as_csv(report: Report) -> str:
    """Write one line a test, without the samples; columns are named as in json, their levels joined by _."""
    rows = []
    for result in report.results:
        record = {**_head(report), **_record(result)}
        del record["samples"]
        rows.append(dict(_flat({name: _NOTHING.get(name) if v is None else v for name, v in record.items()})))
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_md(report: Report) -> str:
    """Write llama-bench's table (mean ± standard deviation), and below it what else was measured."""
    results = report.results
    about = [_describe(subject) for subject in _subjects(results)]
    speed = {**_SPEED, "backend": lambda r: str(report.machine["backend"]), **_test(results)}
    details = {"test": lambda r: name_of(r, results), **_details(results)}
    return _page(report, about, [_table(speed, results), _table(details, results)])


def as_shown(report: Report, width: int) -> str:
    """Write what `as_md` does for a terminal of `width` columns: where it is wider, laid out for them.

    What a model is stands above the tables then, and what else was measured has a line a measure, as many tests side
    by side as there is room for. What no test has is left out.
    """
    whole = as_md(report)
    if max(map(len, whole.splitlines())) <= width:
        return whole
    results = report.results
    about = [
        f"{_describe(subject)}, {_mib(subject.size_bytes)}, {_millions(subject.params)} parameters"
        for subject in _subjects(results)
    ]
    tables = [_tests(results, width), *_turned(_details(results), results, width)]
    return _page(report, about, tables, width)


FORMATS: Mapping[str, Callable[[Report], str]] = {"md": as_md, "csv": as_csv, "json": as_json, "jsonl": as_jsonl}


def _page(report: Report, about: Sequence[str], tables: Sequence[str], width: int | None = None) -> str:
    """Put what was measured where above the tables, and remarks below; lines of text are broken at `width`."""
    results = report.results
    lines = [report.title, *about, f"memory is read at {report.bandwidth / 1e9:.1f} GB/s (measured)"]
    parts = ["\n".join(_filled(f"- {line}", width, indent="  ") for line in lines), *tables]
    noisy = [f"{name_of(r, results)} ({r.tps.relative:.0%})" for r in results if r.tps.relative > NOISY]
    if noisy:
        parts.append(_filled(f"The spread is over {NOISY:.0%} of the mean: {', '.join(noisy)}.", width))
    if any((r.bandwidth_share or 0) > 1 for r in results):
        parts.append(
            _filled(
                "More than the bandwidth: the machine was busier while that was measured than during the tests.",
                width,
            )
        )
    if report.changes:
        parts.append(changes_table(report.changes, width))
    return "\n\n".join(parts) + "\n"


def _filled(text: str, width: int | None, indent: str = "") -> str:
    return text if width is None else fill(text, width, subsequent_indent=indent, break_on_hyphens=False)


def _subjects(results: Sequence[Result]) -> list[Subject]:
    return list(dict.fromkeys(result.model for result in results))


def differing(results: Sequence[Result]) -> dict[str, Callable[[Result], str]]:
    """Return what tells the subjects of these results apart: those of model, features and kv that differ."""
    return {name: cell for name, cell in _VARIANT.items() if len({cell(result) for result in results}) > 1}


def md_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table that also reads well as plain text; columns with a number in them stand to the right."""
    right = [any(row[i].lstrip("+-")[:1].isdigit() for row in rows) for i in range(len(header))]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(cells, widths, right, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    rule = " | ".join("-" * (w - 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True))
    return "\n".join([line(header), f"| {rule} |", *map(line, rows)])


def changes_table(changes: Sequence[Change], width: int | None = None) -> str:
    """Write old and new side by side, and by which rule a change counts.

    Where that is wider than `width`, what is the same of all tests is left out.
    """
    columns: Mapping[str, Callable[[Change], str]] = {
        "model": lambda c: c.model,
        "features": lambda c: c.features,
        "kv": lambda c: c.kv,
        "test": lambda c: c.test,
        "batch": lambda c: str(c.batch),
        "old t/s": lambda c: f"{c.old:.2f}",
        "new t/s": lambda c: f"{c.new:.2f}",
        "change": lambda c: f"{c.change:+.1%}",
        "beyond the noise": lambda c: "yes" if c.beyond_noise else "no",
    }
    table = _table(columns, changes)
    if width is not None and _width(table) > width:
        same = {name for name in Key._fields if name != "test" and len({columns[name](c) for c in changes}) == 1}
        table = _table({name: cell for name, cell in columns.items() if name not in same}, changes)
    return f"{table}\n\n{_filled(RULE, width)}"


def _describe(subject: Subject) -> str:
    return (
        f"{subject.name}: {subject.quantization} weights, computing in {subject.dtype}, mode {subject.features},"
        f" {subject.kv} KV cache, loaded in {subject.load_s:.2f} s"
    )


def name_of(result: Result, results: Sequence[Result]) -> str:
    """The test, how many at once, and whose it is where there are several."""
    whose = [cell(result) for cell in differing(results).values()]
    rows = [f"x {result.workload.batch}"] * (result.workload.batch > 1)
    return " ".join([*whose, result.workload.label, *rows])


def _milliseconds(*seconds: float) -> str:
    return " / ".join(f"{s * 1000:.1f}" for s in seconds)


def _mib(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _millions(count: float) -> str:
    return f"{count / 1e6:.2f} M"


def _kib(count: float) -> str:
    return f"{count / 1024:.1f}"


_Columns = Mapping[str, Callable[[Result], str]]

_NONE, _A_ROW = "-", "a row"
_VARIANT: _Columns = {
    "model": lambda r: r.model.name,
    "features": lambda r: r.model.features,
    "kv": lambda r: r.model.kv,
}
_SPEED: _Columns = {
    "model": _VARIANT["model"],
    "size": lambda r: _mib(r.model.size_bytes),
    "params": lambda r: _millions(r.model.params),
}
_TEST: _Columns = {
    "features": _VARIANT["features"],
    "kv": _VARIANT["kv"],
    "test": lambda r: r.workload.label,
    "batch": lambda r: str(r.workload.batch),
    "t/s": lambda r: f"{r.tps.mean:.2f} ± {r.tps.sd:.2f}",
}
_DETAILS: _Columns = {
    "median t/s": lambda r: f"{r.tps.median:.2f}",
    "min … max": lambda r: f"{r.tps.min:.2f} … {r.tps.max:.2f}",
    "prefill t/s": lambda r: f"{r.prefill_tps.median:.2f}" if r.prefill_tps else _NONE,
    "first token, ms": lambda r: _milliseconds(r.ttft_s.median) if r.ttft_s else _NONE,
    "decode t/s": lambda r: f"{r.decode_tps.median:.2f}" if r.decode_tps else _NONE,
    _A_ROW: lambda r: f"{r.decode_tps.median / r.workload.batch:.2f}" if r.decode_tps else _NONE,
    "between tokens p50 / p95 / max, ms": lambda r: (
        _milliseconds(r.gaps.p50_s, r.gaps.p95_s, r.gaps.max_s) if r.gaps else _NONE
    ),
    "peak memory": lambda r: _mib(r.peak_bytes),
    "KV a token / held, KiB": lambda r: f"{_kib(r.model.kv_bytes_per_token)} / {_kib(r.kv_bytes_held)}",
    "read a token": lambda r: _mib(r.read_bytes) if r.read_bytes else _NONE,
    "of bandwidth": lambda r: f"{r.bandwidth_share:.0%}" if r.bandwidth_share else _NONE,
}


def _test(results: Sequence[Result]) -> _Columns:
    same = {"features", "kv"} - differing(results).keys()
    return {name: cell for name, cell in _TEST.items() if name not in same}


def _tests(results: Sequence[Result], width: int) -> str:
    """Make the table with a line for each test; names that are too long for `width` lose their beginning."""
    if "model" not in differing(results):
        return _table(_test(results), results)
    table = _table({"model": _VARIANT["model"], **_test(results)}, results)
    most = max(len(result.model.name) for result in results) - max(0, _width(table) - width)
    shortened = {"model": lambda r: _without_beginning(r.model.name, max(0, len(r.model.name) - most))}
    return _table({**shortened, **_test(results)}, results)


def _details(results: Sequence[Result]) -> _Columns:
    alone = all(result.workload.batch == 1 for result in results)
    return {name: cell for name, cell in _DETAILS.items() if not (alone and name == _A_ROW)}


_Row = TypeVar("_Row")


def _table(columns: Mapping[str, Callable[[_Row], str]], rows: Sequence[_Row]) -> str:
    return md_table(list(columns), [[cell(row) for cell in columns.values()] for row in rows])


def _turned(measures: _Columns, results: Sequence[Result], width: int) -> list[str]:
    """Make tables with a line a measure and a column a test, each with as many tests as `width` holds."""
    left, tables = list(results), []
    while left:
        for count in range(len(left), 0, -1):
            table = _measured(measures, left[:count], results)
            if _width(table) <= width:
                break
            if count == 1:
                table = _measured(measures, left[:1], results, narrower=_width(table) - width)
        tables.append(table)
        left = left[count:]
    return tables


def _measured(measures: _Columns, some: Sequence[Result], results: Sequence[Result], *, narrower: int = 0) -> str:
    """Make one such table; with `narrower`, so many characters are left out at the beginning of long names."""
    rows = [[name, *map(cell, some)] for name, cell in measures.items()]
    names = [_without_beginning(name_of(result, results), narrower) for result in some]
    return md_table(["", *names], [row for row in rows if set(row[1:]) != {_NONE}])


def _without_beginning(name: str, count: int) -> str:
    """Leave `count` characters out, but none of the last ones, which tell tests apart."""
    count = min(count, len(name) - _LEAST_NAME)
    return f"…{name[count + 1 :]}" if count > 0 else name


def _width(table: str) -> int:
    return max(map(len, table.splitlines()))


def _head(report: Report) -> dict[str, Any]:
    machine = {**report.machine, "bandwidth_bytes_per_s": report.bandwidth}
    return {"machine": machine, "settings": dict(report.settings)}


def _record(result: Result) -> dict[str, Any]:
    return {"test": result.workload.label, **asdict(result)}


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}_")
        else:
            yield f"{prefix}{name}", value
