"""`tinyllm bench`: how fast models run on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tinyllm.cli import console, options
from tinyllm.errors import UsageError
from tinyllm.terminal.text import tell

if TYPE_CHECKING:
    from tinyllm.bench.compare import Old
    from tinyllm.bench.report import Report
    from tinyllm.bench.result import Result
    from tinyllm.bench.run import Plan
    from tinyllm.checkpoint.contents import Contents

PIPED_COLUMNS = 100
_PICTURES = (".png", ".svg")
_LONGEST_DELAY_S = 3600


def bench(
    model: Annotated[
        str | None, typer.Option("-m", "--model", metavar="MODEL,...", help="Folders or repositories of the hub.")
    ] = None,
    prompt: Annotated[
        str, typer.Option("-p", "--n-prompt", metavar="N,...", help="Prompt lengths (512, 1-8, 1-16*2, 128-512+128).")
    ] = "512",
    generate: Annotated[
        str, typer.Option("-n", "--n-gen", metavar="N,...", help="Answer lengths; 0 leaves these tests out.")
    ] = "128",
    pg: Annotated[
        list[str] | None, typer.Option("--pg", metavar="P,N", help="A prompt and its answer timed together; repeats.")
    ] = None,
    depth: Annotated[
        str, typer.Option("-d", "--depth", metavar="N,...", help="Tokens in the context before a test begins.")
    ] = "0",
    batch: Annotated[
        str, typer.Option("-b", "--batch", metavar="N,...", help="Sequences at once, each with a prompt of its own.")
    ] = "1",
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", metavar="N", min=1, help="How often each test is timed.")
    ] = 5,
    warmup: Annotated[
        bool, typer.Option("--warmup/--no-warmup", help="Run each test once, untimed, before it counts.")
    ] = True,
    delay: Annotated[float, typer.Option(metavar="S", min=0, help="Seconds to rest before each repetition.")] = 0.0,
    features: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Modes, in turns: fused (also called compiled, or paged), eager, dense, scattered, reference.",
        ),
    ] = "fused",
    kv: Annotated[
        str | None, typer.Option(metavar="KIND,...", help="KV caches for each mode, in turns: paged, dense.")
    ] = None,
    kv_bits: Annotated[
        str, typer.Option(metavar="BITS,...", help="Keys and values packed to 8 or 4 bits, or none, in turns.")
    ] = "none",
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the random prompts.")] = 0,
    ops: Annotated[
        bool, typer.Option("--ops", help="Time nothing; count what a decode step would dispatch on a GPU.")
    ] = False,
    form: Annotated[
        str, typer.Option("-o", metavar="FORMAT", help="md, csv, json (with every sample) or jsonl.")
    ] = "md",
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report there.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a picture, .png or .svg (extra: plot).")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="OLD.json", help="Say what changed against an earlier -o json.")
    ] = None,
    fail_slower: Annotated[
        float | None,
        typer.Option(metavar="PCT", min=0, help="With --compare: exit 3 if a test is slower by more, beyond noise."),
    ] = None,
    offline: options.Offline = False,
    debug: options.Debug = False,
) -> None:
    """Measure how fast models run on this machine.

    Prefill and decode, the time to the first token and between tokens, memory, and the share of its bandwidth.
    """

    def command() -> None:
        _check_number("--delay", delay, _LONGEST_DELAY_S)
        _check_number("--fail-slower", fail_slower or 0, 100)
        if fail_slower is not None and compare is None:
            raise UsageError("--fail-slower needs --compare, and a report to compare with")
        if ops and (form != "md" or plot or compare):
            raise UsageError("--ops counts, and makes a table: it takes no -o, --plot or --compare")
        _check_files(output, plot)

        from tinyllm.bench.measure import Schedule
        from tinyllm.bench.modes import KV_BITS, KV_KINDS, MEASURED, choose_modes
        from tinyllm.bench.report import FORMATS
        from tinyllm.bench.run import Plan
        from tinyllm.bench.workload import make_workloads, read_counts, read_pair
        from tinyllm.engine.engine import PREFILL_CHUNK

        names = list(dict.fromkeys(features.split(",")))
        kvs = [] if kv is None else list(dict.fromkeys(kv.split(",")))
        _check_one_of("-o", [form], FORMATS)
        bits = list(dict.fromkeys(kv_bits.split(",")))
        _check_one_of("--kv", kvs, KV_KINDS)
        _check_one_of("--kv-bits", bits, KV_BITS)
        _check_one_of("--features", names, MEASURED)
        modes = choose_modes(names, kvs, bits)
        if ops and any(mode.scattered for mode in modes):
            raise UsageError("--ops counts a step whose pages lie side by side: leave scattered out")
        workloads = make_workloads(
            prompts=read_counts("-p", prompt),
            generates=read_counts("-n", generate),
            pairs=[read_pair(pair) for pair in pg or []],
            depths=read_counts("-d", depth),
            batches=read_counts("-b", batch, least=1),
            chunk=PREFILL_CHUNK,
        )
        plan = Plan(_find(model, offline), workloads, modes, Schedule(repetitions, warmup, delay, seed))
        if ops:
            _count_ops(plan, output)
        else:
            _measure(plan, form, output, plot, compare, fail_slower)

    raise typer.Exit(console.run(command, debug=debug))


def _check_number(option: str, value: float, most: float) -> None:
    """Raise UsageError for a number above `most`, and for NaN, which passes every other check."""
    if not value <= most:
        raise UsageError(f"{option} must be from 0 to {most:g}, not {value:g}")


def _check_one_of(option: str, given: Iterable[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise UsageError(f"{option}: there is {', '.join(known)}, and no {name!r}")


def _check_files(output: Path | None, plot: Path | None) -> None:
    """Raise UsageError for files that could not be written when everything is measured."""
    for path in (output, plot):
        if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
            raise UsageError(f"{path}: cannot be written")
    if plot is None:
        return
    if plot.suffix not in _PICTURES:
        raise UsageError(f"--plot draws {' or '.join(_PICTURES)}, not {plot.name}")
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib")


def _find(model: str | None, offline: bool) -> list[tuple[str, Contents]]:
    """Return the models that are meant, each as (the name to report, what its headers have)."""
    from tinyllm.checkpoint.contents import read_contents
    from tinyllm.hub.locate import find_model, model_name

    names = [None] if model is None else model.split(",")
    folders = [find_model(name, offline=offline, report=console.say) for name in names]
    return [(model_name(folder), read_contents(folder)) for folder in folders]


def _measure(
    plan: Plan,
    form: str,
    output: Path | None,
    plot: Path | None,
    compare: Path | None,
    fail_slower: float | None,
) -> None:
    from tinyllm.bench.compare import compare as compared
    from tinyllm.bench.compare import fail_if_slower, read_report
    from tinyllm.bench.report import FORMATS, as_shown, changes_table
    from tinyllm.bench.run import run

    old = None if compare is None else read_report(compare)
    if old is not None:
        _check_comparable(old, plan)
    with _progress(plan.runs) as report_progress:
        report = run(plan, report_progress)
    if old is not None:
        report = replace(report, changes=compared(old, report.results))
        for difference in old.differences(report.machine):
            console.say(f"--compare: {difference}")
    width = None if output or form != "md" else console.stdout_columns() or PIPED_COLUMNS
    _write(FORMATS[form](report) if width is None else as_shown(report, width), output)
    if report.changes and form in ("csv", "jsonl"):
        tell(changes_table(report.changes, console.columns()))
    if plot is not None:
        from tinyllm.bench.plot import draw

        draw(report, plot)
    _show_chart(report)
    if fail_slower is not None:
        fail_if_slower(report.changes, fail_slower)


def _check_comparable(old: Old, plan: Plan) -> None:
    from tinyllm.bench.compare import Key

    keys = {
        Key(name, mode.name, mode.settings.cache, workload.label, workload.batch)
        for (name, _), mode, workload in product(plan.models, plan.modes, plan.workloads)
    }
    if not keys & old.rates.keys():
        raise UsageError(f"{old.path}: has none of these tests of these models: there is nothing to compare")


def _count_ops(plan: Plan, output: Path | None) -> None:
    from tinyllm.bench.ops import count_ops

    _write("\n\n".join(count_ops(*model, mode) for model, mode in product(plan.models, plan.modes)), output)


def _write(text: str, output: Path | None) -> None:
    if output is None:
        console.write(text)
    else:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise type(error)(error.errno, error.strerror, str(output)) from error


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on stderr where it is a terminal; yields what is called with each run that begins."""
    if not console.on_terminal():
        yield lambda doing: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from tinyllm.terminal.console import TerminalConsole

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=TerminalConsole(stderr=True), transient=True) as bar:
        task, begun = bar.add_task("loading", total=total), iter(range(total))
        yield lambda doing: bar.update(task, description=doing, completed=next(begun))


def _show_chart(report: Report) -> None:
    """Draw a bar for each test on stderr, if that is a terminal.

    Prompts, answers, and prompts timed with their answers differ too much in speed to share a scale.
    """
    if not console.on_terminal():
        return
    from rich.bar import Bar
    from rich.table import Table

    from tinyllm.bench.report import name_of
    from tinyllm.terminal.console import TerminalConsole

    kinds: dict[tuple[bool, bool], list[Result]] = {}
    for result in report.results:
        kinds.setdefault((result.workload.prompt > 0, result.workload.generate > 0), []).append(result)
    for results in kinds.values():
        highest = max(result.tps.median for result in results)
        chart = Table.grid(padding=(0, 1))
        for result in results:
            bar = Bar(highest, 0, result.tps.median, width=40, color="cyan")
            chart.add_row(name_of(result, report.results), bar, f"{result.tps.median:.1f} tokens/s")
        TerminalConsole(stderr=True).print(chart)
