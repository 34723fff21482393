"""The hub's cache on this machine, read from its folders: no connection, and of the hub library only its constants.

    models--OWNER--NAME/
        refs/REVISION        the commit that a name such as main stands for
        snapshots/COMMIT/    the files of that commit, links into ../../blobs
        blobs/SUM            their contents; SUM.incomplete while they arrive

The hub library's guide to managing its cache describes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tinyllm.checkpoint.files import check_tokenizer, find_weight_files
from tinyllm.errors import MissingFileError, TinyllmError

__all__ = [
    "MAIN",
    "Cached",
    "cache_folder",
    "cached_models",
    "check_links",
    "commit_of",
    "find_snapshot",
    "hub_address",
    "is_offline",
    "is_repository",
    "is_revision",
    "repository_folder",
    "repository_of",
    "why_incomplete",
]

MAIN = "main"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Cached:
    """A repository at one revision in the cache; `snapshot` is None where a download has not come to its end."""

    repo: str
    revision: str
    folder: Path
    snapshot: Path | None

    @property
    def name(self) -> str:
        """What `-m` takes: OWNER/NAME, with @REVISION unless that is main."""
        return self.named(None)

    def named(self, variant: str | None) -> str:
        """Return what `-m` takes for one of its GGUF files."""
        name = self.repo if variant is None else f"{self.repo}:{variant}"
        return name if self.revision == MAIN else f"{name}@{self.revision}"


def is_repository(name: str) -> bool:
    """Whether `name` is written as OWNER/NAME."""
    return bool(_REPOSITORY.fullmatch(name)) and ".." not in name and "--" not in name


def is_revision(name: str) -> bool:
    """Whether `name` may be a branch, tag or commit, and leads nowhere else as a path."""
    return bool(_REVISION.fullmatch(name)) and ".." not in name


def is_offline() -> bool:
    """Whether the environment forbids connections to the hub (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def hub_address() -> str:
    """Return the hub's address, which HF_ENDPOINT may change."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def cache_folder() -> Path:
    """Return the folder of the cache, which HF_HUB_CACHE and HF_HOME may change."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repository_folder(repo: str) -> Path:
    """Return where a repository is kept, whether it is there or not."""
    return cache_folder() / f"models--{repo.replace('/', '--')}"


def repository_of(snapshot: Path) -> str | None:
    """Return OWNER/NAME for a folder that stands where snapshots do; None for any other."""
    repository = snapshot.parent.parent.name
    if snapshot.parent.name != "snapshots" or not repository.startswith("models--"):
        return None
    return repository.removeprefix("models--").replace("--", "/", 1)


def commit_of(repo: str, revision: str) -> str | None:
    """Return the commit that `revision` stood for when it was downloaded; None where it never was."""
    if _COMMIT.fullmatch(revision):
        return revision
    try:
        return (repository_folder(repo) / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def find_snapshot(repo: str, revision: str = MAIN) -> Path | None:
    """Return the folder of a downloaded revision, whole or not; None where there is none."""
    commit = commit_of(repo, revision)
    if commit is None or not _COMMIT.fullmatch(commit):
        return None
    folder = repository_folder(repo) / "snapshots" / commit
    return folder if folder.is_dir() else None


def cached_models() -> Iterator[Cached]:
    """Yield every model repository of the cache, once for each revision that it has."""
    for folder in sorted(cache_folder().glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        refs = folder / "refs"
        revisions = sorted(str(file.relative_to(refs)) for file in refs.rglob("*") if file.is_file())
        for revision in revisions or [MAIN]:
            yield Cached(repo, revision, folder, find_snapshot(repo, revision))


def check_links(folder: Path) -> None:
    """Raise MissingFileError for links to nothing: in a cache, those of a blob that was removed or never arrived."""
    dangling = sorted(path.name for path in folder.iterdir() if path.is_symlink() and not path.exists())
    if dangling:
        raise MissingFileError(f"{folder}: {', '.join(dangling)} links to nothing; download again")


def why_incomplete(snapshot: Path) -> str | None:
    """Say what a snapshot lacks to be loaded, or None where nothing is missing."""
    try:
        check_links(snapshot)
        if not (snapshot / "config.json").exists():
            raise MissingFileError("there is no config.json")
        find_weight_files(snapshot)
        check_tokenizer(snapshot)
    except TinyllmError as error:
        return str(error).removeprefix(f"{snapshot}: ").replace(str(snapshot), "it")
    return None
