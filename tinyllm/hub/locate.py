"""Which folder a model's name means: one on this machine, a repository of the hub, the embedded model. No mlx."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tinyllm import hardware
from tinyllm.checkpoint.gguf_header import is_gguf
from tinyllm.checkpoint.gguf_parts import part_names
from tinyllm.errors import (
    GatedRepositoryError,
    HubError,
    MissingFileError,
    ModelNotFoundError,
    OfflineError,
    TinyllmError,
)
from tinyllm.hub import cache
from tinyllm.hub.choice import DEFAULT, Choice, choose
from tinyllm.hub.gguf_files import choose_files, gguf_below, split_variant, variant_of
from tinyllm.hub.recommended import recommend
from tinyllm.hub.sizes import memory_size

if TYPE_CHECKING:
    from tinyllm.hub.pull import Report

__all__ = [
    "EMBEDDED",
    "FETCH_COMMAND",
    "check_folder",
    "find_model",
    "local_folder",
    "model_name",
    "models_folder",
    "not_found",
    "split_revision",
]

EMBEDDED = "SmolLM2-135M-Instruct-from-Q4_1"
_DAY_S = 24 * 60 * 60
FETCH_COMMAND = "tinyllm pull default"

Fetch = Callable[[str, str | None], Path]


def models_folder() -> Path:
    """Return models/ of the checkout that this package runs from, else the platform's data folder for tinyllm."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file() and (checkout / "models").is_dir():
        return checkout / "models"
    from platformdirs import user_data_path

    return user_data_path("tinyllm") / "models"


def find_model(
    name: str | None = None,
    *,
    revision: str | None = None,
    offline: bool = False,
    report: Report = lambda line: None,
    fetch: Fetch | None = None,
) -> Path:
    """Return the folder or GGUF file that a person means by `name`, downloading a repository that is not here.

    `name` is a folder or a GGUF file, one in the models folder, OWNER/NAME of the hub (also with :VARIANT of GGUF
    files, and @REVISION), or "default" for the embedded model; with None it is chosen as `choose` says. A repository
    that is here is taken as it is, and the hub is not asked. `report` gets lines for the person; `fetch` gives the
    folder of a repository's revision, by default by `pull`. Raises ModelNotFoundError, saying what to do,
    OfflineError where `offline` or the environment forbids the connection that it would take, and as `fetch`.
    """
    choice = choose(name)
    try:
        return _find(choice, revision, offline, report, fetch)
    except TinyllmError as error:
        if name is not None or choice.is_fallback:
            raise
        raise type(error)(f"{error} (the model is from {choice.source})") from error


def local_folder(name: str) -> Path | None:
    """Return the folder, or GGUF file, that `name` means without the hub: a path, or a name in the models folder."""
    for found in (Path(name).expanduser(), models_folder() / name):
        if found.is_dir() or (is_gguf(found) and found.is_file()):
            return found
    return None


def check_folder(folder: Path, name: str) -> None:
    """Raise ModelNotFoundError for a folder, called `name`, without a model; MissingFileError for broken links.

    A GGUF file is a model in itself.
    """
    if is_gguf(folder) and folder.is_file():
        return
    cache.check_links(folder)
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{name}: is a folder without a model: it has no config.json")


def model_name(folder: Path) -> str:
    """Return how to call the model in a folder: OWNER/NAME in the hub's cache, else the folder's own name.

    A GGUF file is OWNER/NAME:VARIANT, or its own name; of several parts it is the first.
    """
    if is_gguf(folder):
        repo = cache.repository_of(folder.parent) or cache.repository_of(folder.parent.parent)
        return f"{repo}:{variant_of(folder.name)}" if repo else part_names(folder.name)[0]
    return cache.repository_of(folder) or folder.resolve().name


def split_revision(name: str) -> tuple[str, str | None]:
    """Split OWNER/NAME@REVISION."""
    repo, _, revision = name.partition("@")
    return repo, revision or None


def _find(choice: Choice, revision: str | None, offline: bool, report: Report, fetch: Fetch | None) -> Path:
    if choice.name == DEFAULT:
        return _embedded(choice, report)
    folder = local_folder(choice.name)
    if folder is not None:
        check_folder(folder, choice.name)
        return folder
    if Path(choice.name).expanduser().exists():
        raise ModelNotFoundError(f"{choice.name}: is a file, not a folder with a model, nor a GGUF file")
    name, pinned = split_revision(choice.name)
    if not cache.is_repository(split_variant(name)[0]):
        raise not_found(choice.name)
    return _repository(name, revision or pinned, offline, report, fetch)


def not_found(name: str) -> ModelNotFoundError:
    """Return the error for a name that is neither a folder here nor a repository, with the nearest name on disk."""
    return ModelNotFoundError(
        f"{name}: there is no such folder here, and it is not the name of a repository (OWNER/NAME):"
        f" tinyllm list shows what is on this machine{_nearest(name)}"
    )


def _embedded(choice: Choice, report: Report) -> Path:
    folder = models_folder() / EMBEDDED
    if not folder.is_dir():
        raise ModelNotFoundError(
            f"the embedded model has not been fetched: run {FETCH_COMMAND} (93 MB), or name a model with -m MODEL"
        )
    if choice.is_fallback and sys.stderr.isatty() and _is_first_today("embedded-model"):
        memory = hardware.total_memory()
        better = recommend(memory, on_cpu=not hardware.has_gpu_backend())
        report(
            "using the embedded model, a demonstration of 135M parameters; a better one for"
            f" {memory_size(memory)} of memory ({better.gigabytes} GB): tinyllm pull --use {better.repo}"
        )
    return folder


def _is_first_today(name: str) -> bool:
    """Whether nobody has asked this for a day; from now on somebody has."""
    from platformdirs import user_cache_path

    stamp = user_cache_path("tinyllm") / f"{name}.told"
    try:
        if stamp.exists() and time.time() - stamp.stat().st_mtime < _DAY_S:
            return False
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
    except OSError:
        return False
    return True


def _nearest(name: str) -> str:
    """Suggest a model of this machine whose name is like another."""
    names = [path.name for path in models_folder().iterdir()] if models_folder().is_dir() else []
    names += [cached.name for cached in cache.cached_models()]
    by_end = {each.rpartition("/")[2].lower(): each for each in names if not each.startswith(".")}
    wanted = name.rpartition("/")[2].lower()
    found = [end for end in by_end if wanted and wanted in end] or get_close_matches(wanted, by_end, n=1, cutoff=0.5)
    return f" (did you mean {by_end[found[0]]}?)" if found else ""


def _here(name: str, revision: str) -> tuple[Path | None, str | None]:
    """Return what is here of a repository, a folder or the GGUF file of its variant, and what it lacks."""
    repo, variant = split_variant(name)
    snapshot = cache.find_snapshot(repo, revision)
    if snapshot is None:
        return None, None
    if variant is None:
        return snapshot, cache.why_incomplete(snapshot)
    try:
        names = [str(path.relative_to(snapshot)) for path in gguf_below(snapshot) if path.exists()]
        return snapshot / choose_files(repo, names, variant)[0], None
    except MissingFileError as error:
        return None, str(error).removeprefix(f"{repo}: ")
    except ModelNotFoundError:
        return None, None


def _repository(repo: str, revision: str | None, offline: bool, report: Report, fetch: Fetch | None) -> Path:
    """Find or fetch OWNER/NAME, or OWNER/NAME:VARIANT."""
    found, lack = _here(repo, revision or cache.MAIN)
    if found is not None and lack is None:
        return found
    state = f"its download is not whole ({lack})" if lack else "it has not been downloaded"
    if offline or cache.is_offline():
        word = "--offline" if offline else "HF_HUB_OFFLINE"
        raise OfflineError(
            f"{repo}: there is no such folder here; as a repository, {state}, and {word} forbids asking the hub:"
            f" with a connection, run tinyllm pull {repo}{_nearest(repo)}"
        )
    report(f"{repo}: {state}: asking the hub")
    if fetch is None:
        from tinyllm.hub.pull import pull  # of no use to what is here

        fetch = partial(pull, report=report)
    try:
        return fetch(repo, revision)
    except GatedRepositoryError:
        raise
    except (ModelNotFoundError, HubError) as error:
        reason = str(error).removeprefix(f"{split_variant(repo)[0]}: ")
        near = _nearest(repo) if isinstance(error, ModelNotFoundError) else ""
        raise type(error)(f"{repo}: there is no such folder here, and {reason}{near}") from error
