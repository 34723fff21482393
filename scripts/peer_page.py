"""The parts of docs/BENCHMARKS.md that `compare_peers.py` writes: a table for each question."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from tinyllm.bench.report import md_table
from tinyllm.bench.result import Spread

if TYPE_CHECKING:
    from compare_peers import Runner


def peers_part(
    runners: Sequence[Runner],
    absent: Mapping[str, str],
    commands: Mapping[str, Sequence[float]],
    arguments: argparse.Namespace,
) -> str:
    """Write how fast other engines are, as installed and with what is the same for all."""
    left_out = [f"- {title} could not be run: {reason}." for title, reason in absent.items()]
    return "\n\n".join(
        [
            "## Beside other engines, as they are installed",
            f"Checkpoint {arguments.model.name}; {arguments.repetitions} repetitions.",
            speed_table([runner for runner in runners if not runner.peer.tuned], arguments),
            cost_table(runners, commands),
            *(["\n".join(left_out)] if left_out else []),
            *tuned_part([runner for runner in runners if runner.peer.tuned], arguments),
        ]
    )


def speed_table(runners: Sequence[Runner], arguments: argparse.Namespace) -> str:
    """Write a row a peer and batch."""
    columns = ["prefill {} tokens, t/s", "decode {} tokens after them, t/s"]
    header = [text.format(n) for text, n in zip(columns, (arguments.prompt, arguments.generate), strict=True)]
    rows = [
        [
            *(runner.peer.title, runner.about["version"], runner.about["dtype"], str(batch)),
            *(figure(runner.values[f"{what} x {batch}"]) for what in ("prefill", "decode")),
        ]
        for batch in sorted({batch for runner in runners for batch in runner.peer.batches})
        for runner in runners
        if batch in runner.peer.batches
    ]
    return md_table(["engine", "version", "computes in", "batch", *header], rows)


def cost_table(runners: Sequence[Runner], commands: Mapping[str, Sequence[float]]) -> str:
    """Write what it costs to begin, and the memory."""
    costs = {"import, s": ("import", 1.0), "process start to first token, s": ("start", 1.0)}
    costs |= {"peak memory, MB": ("peak", 1e-6)}
    rows = [
        [
            runner.peer.title,
            *(figure(runner.values[name], scale) for name, scale in costs.values()),
            figure(commands[runner.peer.title]) if runner.peer.title in commands else "-",
        ]
        for runner in runners
    ]
    return md_table(["engine", *costs, "command line, one token, s"], rows)


def tuned_part(runners: Sequence[Runner], arguments: argparse.Namespace) -> list[str]:
    """Write the section on engines with the same BLAS and type, with what the first does of each other's rate."""
    if not runners:
        return []
    first, *others = runners
    ratios = [
        f"- {first.peer.title} / {other.peer.title}, batch {batch}: "
        + ", ".join(
            f"{what} {median(first.values[name]) / median(other.values[name]):.2f}"
            for what in ("prefill", "decode")
            for name in [f"{what} x {batch}"]
        )
        for other in others
        for batch in first.peer.batches
    ]
    table = speed_table(runners, arguments)
    return ["## With the same BLAS and the same type", table, *(["\n".join(ratios)] if ratios else [])]


def pages_part(reports: Sequence[Mapping[str, Any]]) -> str:
    """Write each `tinyllm bench` of pages beside dense buffers, with the share of the memory's bandwidth."""
    rows = []
    for report in reports:
        results = report["results"]
        for pages, dense in zip(results[::2], results[1::2], strict=True):
            rates = [result["decode_tps"]["median"] for result in (pages, dense)]
            layout = "scattered" if pages["model"]["features"] == "scattered" else "side by side"
            rows.append(
                [
                    *(pages["test"], str(pages["workload"]["batch"]), layout),
                    *(f"{rate:.2f}" for rate in rates),
                    *(f"{rates[0] / rates[1]:.2f}", f"{pages['bandwidth_share']:.0%}"),
                ]
            )
    header = ["test", "batch", "pages", "paged, t/s", "dense, t/s", "paged / dense", "paged, of bandwidth"]
    return "## Pages against dense buffers\n\n" + md_table(header, rows)


def reuse_part(turns: Mapping[str, Any], crowd: Mapping[str, Any]) -> str:
    """Write what a second turn and many requests with one prefix save."""
    return f"## What is not computed again\n\n{turns_table(turns)}\n\n{crowd_text(crowd)}"


def turns_table(turns: Mapping[str, Any]) -> str:
    """Write the first token of a second turn beside a cold one."""
    header = ["tokens of the second turn", "there already", "first token, ms", "cold, ms", "times faster"]
    warm, cold = turns["warm_s"], turns["cold_s"]
    times = [figure(warm, 1000), figure(cold, 1000), f"{median(cold) / median(warm):.1f}"]
    return md_table(header, [[str(turns["tokens"]), str(turns["cached"]), *times]])


def crowd_text(crowd: Mapping[str, Any]) -> str:
    """Say how many requests at once came through."""
    return (
        f"{crowd['requests']} requests at once, half of which begin with the same {crowd['prefix']} tokens, on"
        f" {crowd['pages']} pages, of {crowd['dense_pages']} that they take when nothing is shared:"
        f" {crowd['finished']} finished, {crowd['agree']} of them with the ids that they have alone,"
        f" {crowd['preemptions']} had to give way and were computed again; {crowd['together_s']:.1f} s, and"
        f" {crowd['alone_s']:.1f} s one after another on dense buffers."
    )


def step_part(products: Mapping[str, Any], ops: str) -> str:
    """Write where the time of a decode step goes, and what it dispatches (`tinyllm bench --ops`)."""
    return f"## A decode step\n\n{products_text(products)}\n\n{ops.strip()}"


def products_text(products: Mapping[str, Any]) -> str:
    """Say how much of a decode step its matrix products are, and how near they come to the memory's limit."""
    (alone, of_products), (step, of_all) = (
        map(median, zip(*products[name], strict=True)) for name in ("products", "steps")
    )
    share = products["bytes"] / alone / products["bandwidth"]
    return (
        f"The matrix products of a step at batch 1, one after another with nothing between them, take"
        f" {alone * 1e3:.1f} ms; the whole step takes {step * 1e3:.1f} ms. They read"
        f" {products['bytes'] / 1e6:.0f} MB of weights, at {share:.0%} of the {products['bandwidth'] / 1e9:.1f} GB/s"
        f" that the memory was measured to give: a step that did nothing else would give {1 / alone:.1f} tokens a"
        f" second. All cores together work {of_all * 1e3:.1f} ms for a step, of which its products alone take"
        f" {of_products * 1e3:.1f} ms. The rest is some 280 small operations, and the host's work: it builds the"
        " graph of a step and hands over its operations on the cores that the products run on, so that none of it can"
        " be hidden behind them, as it is on a GPU, and takes longer by the clock than it works."
    )


METHOD = """\
## How it was measured

- A load average near 0 at the start of a part: nothing else ran.
- All engines read the same random token ids and decode greedily; no token ends an answer. Prefill is from handing
  the prompts over to the first token of the last row; decode is the tokens after the first, of all rows together.
- Start to first token is a new process that imports, loads and reads {start} tokens, files being in the system's
  cache; no tokenizer is needed for it. Import is a process that does nothing else. Peak memory is the resident set of
  the process that the speeds are from. The command line is `tinyllm generate` or `mlx_lm generate`, from its start to
  its end, for one token after {start}.
- mlx-lm as it is installed computes in the checkpoint's own dtype with what its wheels bring. Where the BLAS is
  named, all have that library, and float32; tinyllm leaves it all but products of up to eight rows
  (`tinyllm/blas_rows.py`).
- Engines that have the same BLAS and type read the same bytes of weights for a token: the time of the products, which
  the part on a decode step tells, is a floor for all of them, and an engine can only be faster by the rest.
- A batch is read together by mlx-lm's `BatchGenerator`, and one prompt after another by tinyllm's engine.
- mlx-lm ignores `rope_parameters` (as of 0.32.2): where a checkpoint has no top-level `rope_theta` it is given a copy
  that has one.
- transformers runs in a plain loop over the model and its cache, which is faster than its `generate`.
- llama.cpp runs the Q4_1 file that the embedded model was made from, not the weights that the others read.
- Scattered pages are pages none of which follows the one before it. The share of the bandwidth is what a token must
  read at least, times the rate, against what the memory was measured to give.
- Ids are the same if they differ nowhere, or first where the two best logits are within 0.001 of each other."""


def figure(values: Sequence[float], scale: float = 1.0) -> str:
    """Write median ± standard deviation with three digits."""
    spread = Spread.of([value * scale for value in values])
    digits = 0 if spread.median >= 100 else 1 if spread.median >= 10 else 2
    return f"{spread.median:.{digits}f} ± {spread.sd:.{digits}f}"
