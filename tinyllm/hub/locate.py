"""Which folder a model's name means: one on this machine, a repository of the hub, the embedded model. No mlx."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tinyllm import hardware
from tinyllm.errors import GatedRepositoryError, HubError, ModelNotFoundError, OfflineError, TinyllmError
from tinyllm.hub import cache
from tinyllm.hub.choice import DEFAULT, Choice, choose
from tinyllm.hub.pull import Report, pull
from tinyllm.hub.recommended import recommend
from tinyllm.hub.sizes import memory_size

__all__ = [
    "EMBEDDED",
    "FETCH_COMMAND",
    "check_folder",
    "find_model",
    "local_folder",
    "model_name",
    "models_folder",
    "split_revision",
]

EMBEDDED = "SmolLM2-135M-Instruct-from-Q4_1"
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
    """Return the folder that a person means by `name`, downloading a repository that is not on this machine.

    `name` is a folder, one in the models folder, OWNER/NAME of the hub (also with @REVISION), or "default" for the
    embedded model; with None it is chosen as `choose` says. A repository that is here is taken as it is, and the hub
    is not asked. `report` gets lines for the person; `fetch` gives the folder of a repository's revision, by default
    by `pull`. Raises ModelNotFoundError, saying what to do, OfflineError where `offline` or the environment forbids
    the connection that it would take, and as `fetch`.
    """
    choice = choose(name)
    fetch = partial(pull, report=report) if fetch is None else fetch
    try:
        return _find(choice, revision, offline, report, fetch)
    except TinyllmError as error:
        if name is not None or choice.is_fallback:
            raise
        raise type(error)(f"{error} (the model is from {choice.source})") from error


def local_folder(name: str) -> Path | None:
    """Return the folder that `name` means without the hub: a path, or the name of a folder in the models folder."""
    for folder in (Path(name).expanduser(), models_folder() / name):
        if folder.is_dir():
            return folder
    return None


def check_folder(folder: Path, name: str) -> None:
    """Raise ModelNotFoundError for a folder, called `name`, without a model; MissingFileError for broken links."""
    cache.check_links(folder)
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{name}: is a folder without a model: it has no config.json")


def model_name(folder: Path) -> str:
    """Return how to call the model in a folder: OWNER/NAME in the hub's cache, else the folder's own name."""
    return cache.repository_of(folder) or folder.resolve().name


def split_revision(name: str) -> tuple[str, str | None]:
    """Split OWNER/NAME@REVISION."""
    repo, _, revision = name.partition("@")
    return repo, revision or None


def _find(choice: Choice, revision: str | None, offline: bool, report: Report, fetch: Fetch) -> Path:
    if choice.name == DEFAULT:
        return _embedded(choice, report)
    folder = local_folder(choice.name)
    if folder is not None:
        check_folder(folder, choice.name)
        return folder
    if Path(choice.name).expanduser().exists():
        raise ModelNotFoundError(f"{choice.name}: is a file, not a folder with a model")
    repo, pinned = split_revision(choice.name)
    if not cache.is_repository(repo):
        raise ModelNotFoundError(
            f"{choice.name}: there is no such folder here, and it is not the name of a repository (OWNER/NAME):"
            " tinyllm list shows what is on this machine"
        )
    return _repository(repo, revision or pinned, offline, report, fetch)


def _embedded(choice: Choice, report: Report) -> Path:
    folder = models_folder() / EMBEDDED
    if not folder.is_dir():
        raise ModelNotFoundError(
            f"the embedded model has not been fetched: run {FETCH_COMMAND} (93 MB), or name a model with -m MODEL"
        )
    if choice.is_fallback:
        memory = hardware.total_memory()
        better = recommend(memory, on_cpu=not hardware.has_gpu_backend())
        report(
            "using the embedded model, a demonstration of 135M parameters; a better one for"
            f" {memory_size(memory)} of memory ({better.gigabytes} GB): tinyllm pull --use {better.repo}"
        )
    return folder


def _repository(repo: str, revision: str | None, offline: bool, report: Report, fetch: Fetch) -> Path:
    snapshot = cache.find_snapshot(repo, revision or cache.MAIN)
    lack = None if snapshot is None else cache.why_incomplete(snapshot)
    if snapshot is not None and lack is None:
        return snapshot
    state = f"its download is not whole ({lack})" if lack else "it has not been downloaded"
    if offline or cache.is_offline():
        word = "--offline" if offline else "HF_HUB_OFFLINE"
        raise OfflineError(
            f"{repo}: there is no such folder here; as a repository, {state}, and {word} forbids asking the hub:"
            f" with a connection, run tinyllm pull {repo}"
        )
    report(f"{repo}: {state}: asking the hub")
    try:
        return fetch(repo, revision)
    except GatedRepositoryError:
        raise
    except (ModelNotFoundError, HubError) as error:
        reason = str(error).removeprefix(f"{repo}: ")
        raise type(error)(f"{repo}: there is no such folder here, and {reason}") from error
