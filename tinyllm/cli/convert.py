"""`tinyllm convert`: a checkpoint in other forms, written as a new folder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tinyllm.cli import console, options
from tinyllm.errors import UsageError

if TYPE_CHECKING:
    from tinyllm.convert.recipe import Recipe

_NAMES = 3  # of modules that share a reason to stay dense


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A folder, a GGUF file, or a repository of the hub.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="A folder that is not there yet.")],
    quantize: Annotated[
        int | None, typer.Option(metavar="BITS", help="Pack matrices: 2, 3, 4, 5, 6 or 8 bits a number.")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(metavar="N", help="How many numbers share a scale. Default: 64; as the mode has it.")
    ] = None,
    mode: Annotated[
        str, typer.Option(metavar="MODE", help="affine, mxfp4, mxfp8 or nvfp4, which is a form by itself.")
    ] = "affine",
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="RULES",
            help="mixed: more bits where the loss is; or NAME=BITS,..., the first that fits, false for dense:"
            " lm_head=8,layers.*.mlp.down=6,*=4.",
        ),
    ] = None,
    dequantize: Annotated[bool, typer.Option("--dequantize", help="Unpack all matrices.")] = False,
    dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Write numbers as float32, float16 or bfloat16.")
    ] = None,
    offline: options.Offline = False,
    debug: options.Debug = False,
) -> None:
    """Write a model in other forms; prints the new folder.

    Without --quantize, --mode, --recipe or --dequantize it is a copy, in one type with --dtype. A GGUF file
    (FILE.gguf, or OWNER/NAME:Q4_K_M) becomes a folder as Hugging Face has them, its blocks MLX's packed matrices.
    A folder in which anything is packed has the names of mlx-lm, another one those of transformers.
    """

    def command() -> None:
        wanted = _read_recipe(quantize, group_size, mode, recipe)
        if dequantize and wanted is not None:
            raise UsageError("--dequantize unpacks: it takes no --quantize, --mode or --recipe")
        if dtype is not None and dtype not in options.DTYPES:
            raise UsageError(f"--dtype must be one of {', '.join(options.DTYPES)}, not {dtype!r}")
        if target.exists():
            raise UsageError(f"{target}: is there already, and is never overwritten: name a new folder")

        from tinyllm._mx import mx
        from tinyllm.convert.convert import convert as write
        from tinyllm.hub.locate import find_model
        from tinyllm.hub.pull import pull
        from tinyllm.hub.sizes import disk_size

        # What does not fit into memory may fit once it is packed; to convert it takes little.
        fetch = partial(pull, force=True, report=console.say)
        folder = find_model(source, offline=offline, report=console.say, fetch=fetch)
        with _bar() as progress:
            done = write(
                folder,
                target,
                recipe=wanted,
                dequantize=dequantize,
                dtype=None if dtype is None else getattr(mx, dtype),
                progress=progress,
            )
        _tell_dense(done.dense)
        _tell_packed(done.kept, done.repacked)
        console.say(
            f"{disk_size(done.nbytes)}, {done.bits_per_weight:.2f} bits a number, {done.packed:,} matrices packed"
        )
        console.write(f"{target}\n")

    raise typer.Exit(console.run(command, debug=debug))


def _read_recipe(bits: int | None, group_size: int | None, mode: str, recipe: str | None) -> Recipe | None:
    """Return what is to be packed, or None where nothing says that anything is."""
    from tinyllm.convert.recipe import Recipe, read_format, read_recipe

    if (bits, recipe, mode) == (None, None, "affine"):
        if group_size is not None:
            raise UsageError("--group-size needs --quantize, --mode or --recipe")
        return None
    form = read_format(bits, group_size, mode)
    return Recipe(form) if recipe is None else read_recipe(recipe, form)


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """Show on a terminal how much is written."""
    if not console.on_terminal():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from tinyllm.terminal.console import TerminalConsole

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=TerminalConsole(stderr=True), transient=True, redirect_stdout=False) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _tell_dense(dense: Mapping[str, str]) -> None:
    """Say which modules stay as they are, those with the same reason in one line."""
    from tinyllm.checkpoint.folded import folded

    by_reason: dict[str, list[str]] = defaultdict(list)
    for module, reason in dense.items():
        by_reason[reason].append(module)
    for reason, modules in by_reason.items():
        names = folded(modules)
        more = [f"and {len(names) - _NAMES} more"] if len(names) > _NAMES else []
        console.say(f"stays dense: {', '.join(names[:_NAMES] + more)} ({reason})")


def _tell_packed(kept: int, repacked: Mapping[str, int]) -> None:
    """Say what becomes of matrices that were packed already."""
    said = []
    if repacked:
        names = ", ".join(sorted(repacked))
        said.append(f"{sum(repacked.values()):,} are packed anew (they were {names}), which adds to what that lost")
    if kept:
        said.append(f"{kept:,} stay as they are")
    if said:
        console.say(f"packed already: {'; '.join(said)}")
