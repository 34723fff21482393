"""Models of the Hugging Face Hub: looked at from a distance, then fetched into the hub library's cache. No mlx.

    pull   the list of files -> config.json and headers -> refused or told -> fetched -> the revision points to it

Nothing large is asked for before the small files say that the model runs here. `huggingface_hub` takes most of a
second to import, so that it is imported when it is needed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tinyllm import hardware
from tinyllm.checkpoint.contents import read_contents
from tinyllm.checkpoint.files import INDEX
from tinyllm.checkpoint.summary import Summary, summarize
from tinyllm.errors import DoesNotFitError, HubError, ModelNotFoundError, TinyllmError
from tinyllm.hub import cache
from tinyllm.hub.blob import LARGEST_OVER_HTTP, arrived_of, fetch_blob
from tinyllm.hub.cache import MAIN
from tinyllm.hub.failures import told
from tinyllm.hub.gguf_files import choose_files, split_variant
from tinyllm.hub.hollow import TIMEOUT_S, HollowCopy
from tinyllm.hub.sizes import disk_size, memory_size

__all__ = ["RemoteFile", "RemoteModel", "Report", "hollow", "inspect", "pull"]

Report = Callable[[str], None]

_SMALL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", INDEX,
)  # fmt: skip
_TOP_LEVEL = re.compile(r"\w[\w.+-]{0,199}", re.ASCII)
_GGUF = re.compile(r"(\w[\w.+-]{0,199}/)?\w[\w.+-]{0,199}\.gguf", re.ASCII | re.IGNORECASE)
_EXTRA_TEMPLATE = re.compile(r"additional_chat_templates/\w[\w.+-]{0,199}\.jinja", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository; `sha256` is known of the large ones, which are kept outside of git."""

    name: str
    size: int
    sha256: str | None


@dataclass(frozen=True)
class RemoteModel:
    """A repository at one commit, found to run here: the files that are needed, the large ones last."""

    repo: str
    revision: str
    commit: str
    files: tuple[RemoteFile, ...]
    summary: Summary
    variant: str | None = None

    @property
    def path(self) -> Path:
        """What is loaded: the snapshot, or the GGUF file of a `variant`, the first of its parts."""
        return self.snapshot if self.variant is None else self.snapshot / self.files[0].name

    @property
    def snapshot(self) -> Path:
        """Where the files stand when they are here."""
        return cache.repository_folder(self.repo) / "snapshots" / self.commit

    @property
    def absent(self) -> tuple[RemoteFile, ...]:
        """The files that are still to be downloaded."""
        return tuple(file for file in self.files if not (self.snapshot / file.name).exists())

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def remaining(self) -> int:
        """Bytes that are still to arrive."""
        return sum(file.size - min(file.size, arrived_of(self.blob(file))) for file in self.absent)

    def blob(self, file: RemoteFile) -> Path:
        """Where the content of a large file stands in the cache."""
        return cache.repository_folder(self.repo) / "blobs" / (file.sha256 or file.name)


def pull(repo: str, revision: str | None = None, *, force: bool = False, report: Report) -> Path:
    """Fetch what is needed of a repository, and return its folder in the cache. What is there already is kept.

    Of OWNER/NAME:VARIANT that is one GGUF file or its parts, and the path of the first is returned.

    `report` gets a line with the sizes before anything large is downloaded. Raises HubError, ModelNotFoundError or
    OfflineError where the hub does not give it; what loading would raise, where tinyllm cannot run it; and
    DoesNotFitError where the disk cannot hold it, or the memory cannot and `force` is false.
    """
    revision = _checked_revision(repo, revision)
    with told(split_variant(repo)[0]):
        model = inspect(repo, revision)
        free = _free_disk(model.snapshot)
        report(_plan(model, free))
        _check_fit(model, free, force)
        _download(model)
    return model.path


def inspect(repo: str, revision: str = MAIN) -> RemoteModel:
    """Read a repository's list of files, its config and its headers, and check them as if it was being loaded.

    Raises the hub library's errors, and those of `summarize` with the repository's name in place of a folder's.
    """
    repo, variant = split_variant(repo)
    commit, listed = _list_files(repo, revision)
    if variant is not None:
        names = choose_files(repo, _gguf_names(listed), variant)
        with TemporaryDirectory(prefix="tinyllm-") as folder, _named(folder, repo):
            summary = summarize(read_contents(_hollow_copy(repo, commit, listed, Path(folder)).fill_gguf(names)))
        wanted = tuple(file for name in names for file in listed if file.name == name)
        return RemoteModel(repo, revision, commit, wanted, summary, variant)
    with TemporaryDirectory(prefix="tinyllm-") as folder, _named(folder, repo):
        weights = _hollow_copy(repo, commit, listed, Path(folder)).fill()
        summary = summarize(read_contents(folder))
    files = {file.name: file for file in listed if _TOP_LEVEL.fullmatch(file.name)}
    small = [files[name] for name in _SMALL_FILES if name in files]
    templates = [file for file in listed if _EXTRA_TEMPLATE.fullmatch(file.name)]
    return RemoteModel(repo, revision, commit, (*small, *templates, *(files[name] for name in weights)), summary)


@contextmanager
def hollow(repo: str, revision: str | None = None) -> Iterator[Path]:
    """Give a folder, for as long as the block lasts, with a repository's config and headers, and no weights.

    Of OWNER/NAME:VARIANT it gives a GGUF file, the first of its parts.

    Errors of the block, too, call it by the repository's name. Raises HubError, ModelNotFoundError or OfflineError
    where the hub does not give it, and ConfigError where it is not a model that tinyllm knows.
    """
    revision = _checked_revision(repo, revision)
    repo, variant = split_variant(repo)
    with TemporaryDirectory(prefix="tinyllm-") as temporary:
        with told(repo):
            commit, listed = _list_files(repo, revision)
            folder = Path(temporary) / cache.repository_folder(repo).name / "snapshots" / commit
            folder.mkdir(parents=True)
            with _named(str(folder), repo):
                copy, found = _hollow_copy(repo, commit, listed, folder), folder
                if variant is not None:
                    found = copy.fill_gguf(choose_files(repo, _gguf_names(listed), variant))
                else:
                    copy.fill_config()
                    if any(file.name.endswith(".safetensors") for file in listed):
                        copy.fill_headers()
        with _named(str(folder), repo):
            yield found


def _checked_revision(repo: str, revision: str | None) -> str:
    revision = MAIN if revision is None else revision
    if not cache.is_revision(revision):
        raise ModelNotFoundError(f"{repo}: {revision!r} is not the name of a branch, a tag or a commit")
    return revision


def _list_files(repo: str, revision: str) -> tuple[str, list[RemoteFile]]:
    """Ask for the commit that a revision stands for, and its files."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    commit = info.sha or ""
    if not _COMMIT.fullmatch(commit):
        raise HubError(f"{repo}: the hub ({cache.hub_address()}) names no commit of it")
    return commit, [_remote_file(sibling) for sibling in info.siblings or ()]


def _gguf_names(listed: Sequence[RemoteFile]) -> list[str]:
    return [file.name for file in listed if _GGUF.fullmatch(file.name)]


def _hollow_copy(repo: str, commit: str, listed: Sequence[RemoteFile], folder: Path) -> HollowCopy:
    sizes = {f.name: f.size for f in listed if _TOP_LEVEL.fullmatch(f.name) or _GGUF.fullmatch(f.name)}
    return HollowCopy(repo, commit, sizes, folder)


def _remote_file(sibling: Any) -> RemoteFile:
    sha256 = sibling.lfs.sha256 if sibling.lfs else ""
    return RemoteFile(sibling.rfilename, sibling.size or 0, sha256 if _SHA256.fullmatch(sha256) else None)


@contextmanager
def _named(folder: str, repo: str) -> Iterator[None]:
    """Have errors call a hollow copy by the repository's name."""
    try:
        yield
    except TinyllmError as error:
        raise type(error)(str(error).replace(folder, repo)) from error


def _plan(model: RemoteModel, free: int) -> str:
    summary, remaining = model.summary, model.remaining
    to_download = ", all here" if not remaining else f", {disk_size(remaining)} of it to download"
    return (
        f"{model.repo}: {summary.family}, {summary.quantization},"
        f" {disk_size(model.size)}{to_download if remaining < model.size else ''}"
        f" ({disk_size(free)} of disk free); its weights take {memory_size(summary.memory_bytes)} of this machine's"
        f" {memory_size(hardware.total_memory())} of memory: {'fits' if _fits_memory(summary) else 'does not fit'}"
    )


def _check_fit(model: RemoteModel, free: int, force: bool) -> None:
    remaining = model.remaining
    if remaining and not force and not _fits_memory(model.summary):
        raise DoesNotFitError(
            f"{model.repo}: its weights alone take {memory_size(model.summary.memory_bytes)} of memory, and this"
            f" machine has {memory_size(hardware.total_memory())}; tinyllm pull --force downloads it all the same"
        )
    if remaining > free:
        raise DoesNotFitError(
            f"{model.repo}: {disk_size(remaining)} are to be downloaded, and {cache.cache_folder()} has"
            f" {disk_size(free)} of disk free: make room, or set HF_HOME to a folder on a larger disk"
        )


def _fits_memory(summary: Summary) -> bool:
    return summary.memory_bytes <= hardware.total_memory()


def _free_disk(folder: Path) -> int:
    """Bytes free on the disk where `folder` is, or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _download(model: RemoteModel) -> None:
    """Fetch what is absent; the revision is set to the commit at the end, and so never names half a model."""
    for file in model.absent:
        _fetch(model, file)
    if cache.commit_of(model.repo, model.revision) != model.commit:
        reference = cache.repository_folder(model.repo) / "refs" / model.revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(model.commit, encoding="utf-8")


def _fetch(model: RemoteModel, file: RemoteFile) -> None:
    """Fetch the content of a large file, then have the library fetch a small one, or link to what is here now."""
    from huggingface_hub import hf_hub_download, hf_hub_url

    over_http = file.size <= LARGEST_OVER_HTTP
    if file.sha256 is not None and over_http:
        url = hf_hub_url(model.repo, file.name, revision=model.commit)
        fetch_blob(url, model.blob(file), file.size, file.name)
    with _without_bars() if over_http else nullcontext():
        hf_hub_download(model.repo, file.name, revision=model.commit)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Have the library show no progress bars: small files are there before one could be read."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None:  # the environment decides
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
