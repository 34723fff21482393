"""`tinyllm pull`: a model onto this machine, after a look at what it would take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tinyllm.cli import console, options
from tinyllm.errors import UsageError


def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="OWNER/NAME on the hub (:Q4_K_M of GGUF files), or default: the embedded model."
        ),
    ],
    revision: Annotated[
        str | None, typer.Option(metavar="NAME", help="A branch, tag or commit; without it, main.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Download also what this machine's memory cannot hold.")
    ] = False,
    use: Annotated[bool, typer.Option("--use", help="Use it from now on where no model is named.")] = False,
    debug: options.Debug = False,
) -> None:
    """Download a model, if it runs and fits here.

    Its size and whether it runs are looked at first; prints the folder.
    """

    def command() -> None:
        from tinyllm.hub.choice import DEFAULT, save_choice

        folder = _fetch_embedded() if model == DEFAULT else _fetch_repository(model, revision, force)
        if use:
            save_choice(model if revision is None else f"{model}@{revision}")
            console.say(f"{model} is used from now on where no model is named")
        console.write(f"{folder}\n")

    raise typer.Exit(console.run(command, debug=debug))


def _fetch_embedded() -> Path:
    from tinyllm.hub.embedded import SMOLLM2_135M, fetch
    from tinyllm.hub.locate import models_folder

    return fetch(SMOLLM2_135M, models_folder(), report=console.say)


def _fetch_repository(model: str, revision: str | None, force: bool) -> Path:
    from tinyllm.hub import cache, locate
    from tinyllm.hub.gguf_files import split_variant
    from tinyllm.hub.pull import pull as pull_repository

    repo, pinned = locate.split_revision(model)
    if revision is not None and pinned is not None:
        raise UsageError(f"{model} names a revision already, beside --revision {revision}")
    if locate.local_folder(repo):
        raise UsageError(f"{model}: is a folder here, with nothing to download")
    if not cache.is_repository(split_variant(repo)[0]):
        raise UsageError(f"{model}: is not the name of a repository, OWNER/NAME, as in mlx-community/Qwen3-4B-4bit")
    return pull_repository(repo, revision or pinned, force=force, report=console.say)
