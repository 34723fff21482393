"""The command line: one Typer application, one module a command."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from tinyllm import __version__
from tinyllm.cli import console
from tinyllm.cli.bench import bench
from tinyllm.cli.chat import chat
from tinyllm.cli.convert import convert
from tinyllm.cli.doctor import doctor
from tinyllm.cli.generate import generate
from tinyllm.cli.inspect import inspect
from tinyllm.cli.models import list_models
from tinyllm.cli.perplexity import perplexity
from tinyllm.cli.pull import pull
from tinyllm.cli.use import use
from tinyllm.errors import UsageError

_HELP = "Run open-weight language models on this machine, through Apple's MLX."

app = typer.Typer(
    name="tinyllm",
    help=_HELP,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(chat)
app.command()(bench)
app.command()(doctor)
app.command()(inspect)
app.command()(pull)
app.command("list")(list_models)
app.command()(use)
app.command()(convert)
app.command()(perplexity)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tinyllm {__version__}")
        raise typer.Exit


@app.callback(help=_HELP, invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def main() -> None:
    """Run the command line; the entry point of the `tinyllm` script."""
    console.open_standard_streams()
    sys.exit(_run())


def _nearest(unknown: str, context: Any) -> str:
    """Suggest the option that was probably meant; click's own suggestions include some that only look alike."""
    known = [name for each in context.command.params for name in (*each.opts, *each.secondary_opts)]
    known = [name for name in known if name.startswith("--")]
    longer = [name for name in known if name.startswith(unknown)]
    shorter = [name for name in known if unknown.startswith(name)]
    found = sorted(longer, key=len) or get_close_matches(unknown, known, n=1, cutoff=0.75) or shorter
    return f" (did you mean {found[0]}?)" if found else ""


def _run() -> int:
    try:
        return app(standalone_mode=False) or 0
    except OSError as error:  # --help, to a full disk
        console.say(error.strerror or str(error))
        return 1
    except Exception as error:  # a usage error of click, which typer may bring under a name of its own
        tell, context = getattr(error, "format_message", None), getattr(error, "ctx", None)
        if tell is None:
            raise
        command = context.command_path if context else "tinyllm"
        unknown = getattr(error, "option_name", None) if hasattr(error, "possibilities") else None
        told = (
            tell().rstrip(".")
            if unknown is None or context is None
            else f"No such option: {unknown}{_nearest(unknown, context)}"
        )
        console.say(f"{told} ({command} --help says what there is)")
        return UsageError.exit_code
