"""A report of all results as a table (md), csv, json, or a line of JSON a test (jsonl). No mlx."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from tinyllm.bench.compare import RULE, Change
from tinyllm.bench.result import NOISY, Gaps, Result, Spread, Subject

__all__ = ["FORMATS", "Report", "changes_table", "differing", "md_table"]


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
    subjects = list(dict.fromkeys(result.model for result in results))
    lines = [report.title, *(_describe(subject) for subject in subjects)]
    lines.append(f"memory is read at {report.bandwidth / 1e9:.1f} GB/s (measured)")
    speed = {**_SPEED, "backend": lambda r: str(report.machine["backend"]), **_TEST}
    for column in {"features", "kv"} - differing(results).keys():
        del speed[column]
    details = {"test": lambda r: _name(r, results), **_DETAILS}
    if all(result.workload.batch == 1 for result in results):
        del details["a row"]
    parts = ["\n".join(f"- {line}" for line in lines), _columns(speed, results), _columns(details, results)]
    noisy = [f"{_name(r, results)} ({r.tps.relative:.0%})" for r in results if r.tps.relative > NOISY]
    if noisy:
        parts.append(f"The spread is over {NOISY:.0%} of the mean: {', '.join(noisy)}.")
    if any((r.bandwidth_share or 0) > 1 for r in results):
        parts.append("More than the bandwidth: the machine was busier while that was measured than during the tests.")
    if report.changes:
        parts.append(changes_table(report.changes))
    return "\n\n".join(parts) + "\n"


FORMATS: Mapping[str, Callable[[Report], str]] = {"md": as_md, "csv": as_csv, "json": as_json, "jsonl": as_jsonl}


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


def changes_table(changes: Sequence[Change]) -> str:
    """Write old and new side by side, and by which rule a change counts."""
    header = ["model", "features", "kv", "test", "batch", "old t/s", "new t/s", "change", "beyond the noise"]
    table = md_table(
        header,
        [
            [
                *(c.model, c.features, c.kv, c.test, str(c.batch)),
                *(f"{c.old:.2f}", f"{c.new:.2f}", f"{c.change:+.1%}", "yes" if c.beyond_noise else "no"),
            ]
            for c in changes
        ],
    )
    return f"{table}\n\n{RULE}"


def _describe(subject: Subject) -> str:
    return (
        f"{subject.name}: {subject.quantization} weights, computing in {subject.dtype}, mode {subject.features},"
        f" {subject.kv} KV cache, loaded in {subject.load_s:.2f} s"
    )


def _name(result: Result, results: Sequence[Result]) -> str:
    """The test, how many at once, and whose it is where there are several."""
    whose = [cell(result) for cell in differing(results).values()]
    rows = [f"x {result.workload.batch}"] * (result.workload.batch > 1)
    return " ".join([*whose, result.workload.label, *rows])


def _milliseconds(*seconds: float) -> str:
    return " / ".join(f"{s * 1000:.1f}" for s in seconds)


def _mib(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _kib(count: float) -> str:
    return f"{count / 1024:.1f}"


_Columns = Mapping[str, Callable[[Result], str]]

_VARIANT: _Columns = {
    "model": lambda r: r.model.name,
    "features": lambda r: r.model.features,
    "kv": lambda r: r.model.kv,
}
_SPEED: _Columns = {
    "model": _VARIANT["model"],
    "size": lambda r: _mib(r.model.size_bytes),
    "params": lambda r: f"{r.model.params / 1e6:.2f} M",
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
    "prefill t/s": lambda r: f"{r.prefill_tps.median:.2f}" if r.prefill_tps else "-",
    "first token, ms": lambda r: _milliseconds(r.ttft_s.median) if r.ttft_s else "-",
    "decode t/s": lambda r: f"{r.decode_tps.median:.2f}" if r.decode_tps else "-",
    "a row": lambda r: f"{r.decode_tps.median / r.workload.batch:.2f}" if r.decode_tps else "-",
    "between tokens p50 / p95 / max, ms": lambda r: (
        _milliseconds(r.gaps.p50_s, r.gaps.p95_s, r.gaps.max_s) if r.gaps else "-"
    ),
    "peak memory": lambda r: _mib(r.peak_bytes),
    "KV a token / held, KiB": lambda r: f"{_kib(r.model.kv_bytes_per_token)} / {_kib(r.kv_bytes_held)}",
    "read a token": lambda r: _mib(r.read_bytes) if r.read_bytes else "-",
    "of bandwidth": lambda r: f"{r.bandwidth_share:.0%}" if r.bandwidth_share else "-",
}


def _columns(columns: _Columns, results: Sequence[Result]) -> str:
    return md_table(list(columns), [[cell(result) for cell in columns.values()] for result in results])


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
