"""`tinyllm doctor`: what this machine is, and whether models compute right on it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinyllm.cli import console, options
from tinyllm.errors import DisagreementError

if TYPE_CHECKING:
    from tinyllm.doctor import Check

_PACKAGES = ("tokenizers", "safetensors", "huggingface_hub", "numpy", "gguf", "typer", "rich")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: options.Debug = False,
) -> None:
    """Check that this device computes the right numbers.

    The first line says whether all is right, and what to do if not. What is installed where follows, for bug reports.
    """

    def command() -> None:
        # Read by MLX when it is loaded: some GPUs round the factors of float32 products, which would hide faults.
        os.environ["MLX_ENABLE_TF32"] = "0"
        from tinyllm.doctor import verdict

        facts, checks = _facts(), list(_checks())
        if as_json:
            found = [{**asdict(check), "agrees": check.agrees} for check in checks]
            report = {"verdict": verdict(checks), **facts, "checks": found}
            console.write(json.dumps(report, ensure_ascii=False) + "\n")
        else:
            console.write(f"{verdict(checks)}\n\n")
            _print_text(facts, checks)
        wrong = sum(not check.agrees for check in checks)
        if wrong:
            raise DisagreementError(f"{wrong} of {len(checks)} checks disagree on this machine: please report it")

    raise typer.Exit(console.run(command, debug=debug))


def _facts() -> dict[str, Any]:
    from importlib.metadata import version

    from tinyllm._mx import BLAS
    from tinyllm.bench.machine import describe_machine
    from tinyllm.engine.device_memory import device_memory
    from tinyllm.hub.inventory import places

    machine = asdict(describe_machine())
    return {
        "machine": {**machine, "available_bytes": device_memory().available, "blas_path": BLAS.path},
        "packages": {package: version(package) for package in _PACKAGES},
        "folders": {place.title: str(place.folder) for place in places()},
    }


def _checks() -> Iterator[Check]:
    from tinyllm.cli.progress import Progress
    from tinyllm.doctor import GOLDEN, LONG, check_attention, check_golden, check_long, check_model
    from tinyllm.hub.locate import EMBEDDED, models_folder

    with Progress() as progress:
        for name in GOLDEN:
            progress.show(f"checking {name}")
            yield from check_golden(name)
        progress.show("checking long contexts")
        for keys in LONG:
            yield from check_attention(keys)
        yield from check_long()
        folder = models_folder() / EMBEDDED
        if folder.is_dir():
            progress.show(f"checking {folder.name}")
            yield check_model(folder)


def _print_text(facts: dict[str, Any], checks: Sequence[Check]) -> None:
    from tinyllm.bench.report import md_table

    for group in facts.values():
        for name, value in group.items():
            console.write(f"{name + ':':<17}{value}\n")
        console.write("\n")
    rows = [
        [
            "ok" if check.agrees else "WRONG",
            check.what,
            check.dtype,
            check.way,
            check.error or f"{check.difference:.1e}",
            f"{check.tolerance:.1e}",
        ]
        for check in checks
    ]
    console.write(md_table(["", "checkpoint", "in", "way", "difference", "allowed"], rows) + "\n")
