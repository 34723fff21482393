"""`tinyllm inspect`: what a model is made of, from its config.json and the headers of its files alone."""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinyllm.cli import console, options
from tinyllm.errors import TensorMismatchError, UsageError

if TYPE_CHECKING:
    from tinyllm.anatomy.subject import Subject
    from tinyllm.engine.plan import MemoryPlan

_PLAIN = str.maketrans(
    {"│": "|", "├": "+", "└": "+", "┘": "+", "─": "-", "►": ">", "◄": "<", "▼": "v", "→": "->", "×": "x"}
)


def inspect(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a GGUF file, a config.json, or OWNER/NAME on the hub; without it, the one in use.",
        ),
    ] = None,
    block: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Only layer N, as config.json has it beside the files.")
    ] = None,
    shapes: Annotated[bool, typer.Option("--shapes", help="Every tensor's shape, too.")] = False,
    fit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Plan its memory on a Mac with so much (16GB).")
    ] = None,
    context: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens that the KV cache and --fit make room for.")
    ] = None,
    kv_bits: Annotated[
        int | None, typer.Option(metavar="BITS", help="Plan with a KV cache packed to 8 or 4 bits an element.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    native: Annotated[
        bool, typer.Option("--native", help="Print what it computes as a config.json of model_type tinyllm.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="NAME", help="A branch, tag or commit; without it, main.")
    ] = None,
    offline: options.Offline = False,
    debug: options.Debug = False,
) -> None:
    """Show what a model is made of, reading no weights.

    A repository of the hub is not downloaded; exit code 1 where a tensor is missing, surplus or mis-shaped.
    """

    def command() -> None:
        from tinyllm.anatomy.subject import open_subject

        if native and (as_json or shapes or block is not None or fit is not None):
            raise UsageError("--native prints a config.json, and nothing else with it")
        gc.disable()  # a large model's headers are half a million objects, and none of them is ever garbage
        machine = None if fit is None else _read_fit(fit)
        options.check_kv_bits(kv_bits)
        if kv_bits is not None and machine is None:
            raise UsageError("--kv-bits is for the plan that --fit makes: say for how much memory")
        subject = open_subject(model, revision=revision, offline=offline, report=console.say)
        _check_block(subject, block)
        plan = None if machine is None else _plan(subject, machine, context, kv_bits)
        if native:
            console.write(_native(subject))
        elif as_json:
            console.write(json.dumps(_as_json(subject, block, shapes, context, plan), ensure_ascii=False) + "\n")
        else:
            _write(_page(subject, block, shapes, context, plan, machine))
        _check_tensors(subject)

    raise typer.Exit(console.run(command, debug=debug))


def _read_fit(text: str) -> int:
    from tinyllm.engine.plan_text import read_size

    binary = re.sub(r"(?i)(?<=[kmgt])b$", "iB", text.strip())  # memory is sold as 16 GB, and has 16 GiB
    size = read_size("--fit", binary)
    if not isinstance(size, int):
        raise UsageError(f"--fit must be the memory of a machine (16GB), not a share of it: {text!r}")
    return size


def _plan(subject: Subject, machine: int, context: int | None, kv_bits: int | None) -> MemoryPlan:
    from tinyllm.anatomy.fit import plan_for

    return plan_for(subject, machine, context, kv_bits)


def _check_block(subject: Subject, block: int | None) -> None:
    layers = subject.config.num_hidden_layers
    if block is not None and block >= layers:
        raise UsageError(f"--block must be below {layers:,}, the number of layers of {subject.name}, not {block:,}")


def _check_tensors(subject: Subject) -> None:
    wrong = [f"{len(names):,} {kind}" for kind, names in subject.problems.items()]
    if wrong:
        raise TensorMismatchError(f"{subject.name}: the weights do not fit config.json: {', '.join(wrong)}")


def _native(subject: Subject) -> str:
    from tinyllm.config.native import write_native

    return json.dumps(write_native(subject.config), indent=2) + "\n"


def _as_json(
    subject: Subject, block: int | None, shapes: bool, context: int | None, plan: MemoryPlan | None
) -> dict[str, Any]:
    from tinyllm.anatomy.facts import block_facts, facts, tensor_facts

    if block is not None:
        return block_facts(subject, block)
    return {
        **facts(subject, context),
        **({"tensors": tensor_facts(subject)} if shapes else {}),
        **({} if plan is None else {"plan": _plan_facts(plan)}),
    }


def _plan_facts(plan: MemoryPlan) -> dict[str, Any]:
    sizes = {name: value for name, value in asdict(plan).items() if name != "kinds"}
    return {
        **sizes,
        "wired_bytes": plan.wired_bytes,
        "token_bytes": plan.token_bytes,
        "kv_bits": plan.kv_bits,
        "sequences": plan.sequences,
    }


def _page(
    subject: Subject,
    block: int | None,
    shapes: bool,
    context: int | None,
    plan: MemoryPlan | None,
    machine: int | None,
) -> Iterable[str]:
    from tinyllm.anatomy.page import block_page, page, plan_page, shapes_page

    if block is not None:
        yield from block_page(subject, block)
    else:
        yield from page(subject, context)
        if shapes:
            yield from ("", *shapes_page(subject))
    if plan is not None and machine is not None:
        yield from ("", *plan_page(plan, machine))


def _write(lines: Iterable[str]) -> None:
    text = "\n".join(lines) + "\n"
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeError:
        text = text.translate(_PLAIN)
    console.write(text)
