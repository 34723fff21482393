"""The command line: one Typer application, one module a command."""

from __future__ import annotations

from typing import Annotated

import typer

from tinyllm import __version__
from tinyllm.cli.bench import bench
from tinyllm.cli.doctor import doctor
from tinyllm.cli.generate import generate
from tinyllm.cli.models import list_models
from tinyllm.cli.pull import pull
from tinyllm.cli.use import use

app = typer.Typer(
    name="tinyllm",
    help="Run open-weight language models on Apple Silicon through MLX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(bench)
app.command()(doctor)
app.command()(pull)
app.command("list")(list_models)
app.command()(use)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tinyllm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run open-weight language models on Apple Silicon through MLX."""


def main() -> None:
    """Run the command line; the entry point of the `tinyllm` script."""
    app()
