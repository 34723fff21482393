"""`tinyllm use`: the model that is meant where none is named."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tinyllm.cli import console, options
from tinyllm.errors import UsageError


def use(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A folder, OWNER/NAME, or default; without it, show the one in use."),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Forget the choice: back to the embedded model.")] = False,
    debug: options.Debug = False,
) -> None:
    """Choose the model that is meant where none is named.

    Without MODEL, show which it is, and who chose it.
    """

    def command() -> None:
        from tinyllm.hub.choice import ENVIRONMENT, choose, save_choice

        if clear and model is not None:
            raise UsageError("--clear forgets the choice, and takes no model")
        if clear or model is not None:
            save_choice(None if model is None else _stored_name(model))
        choice = choose()
        if model is not None and choice.source == f"${ENVIRONMENT}":
            console.say(f"kept for later: ${ENVIRONMENT} is set, and goes before it")
        console.write(f"{choice.name} ({choice.source})\n")

    raise typer.Exit(console.run(command, debug=debug))


def _stored_name(model: str) -> str:
    """Return the name to keep: a folder's whole path, since the next command may run elsewhere."""
    from tinyllm.checkpoint.gguf_header import is_gguf
    from tinyllm.hub import cache, locate
    from tinyllm.hub.choice import DEFAULT
    from tinyllm.hub.gguf_files import split_variant

    if model == DEFAULT:
        return model
    folder = locate.local_folder(model)
    if folder is not None:
        locate.check_folder(folder, model)
        if not Path(model).expanduser().exists():
            return model
        # What a file's link leads to has another name, in the hub's cache, and no other parts beside it.
        return str(folder.parent.resolve() / folder.name if is_gguf(folder) else folder.resolve())
    name, revision = locate.split_revision(model)
    repo, _ = split_variant(name)
    if not cache.is_repository(repo):
        raise locate.not_found(model)
    if cache.find_snapshot(repo, revision or cache.MAIN) is None:
        console.say(f"{model} is not on this machine: its first use downloads it, or now tinyllm pull {model}")
    return model
