"""The models that are on this machine: in the models folder and in the hub's cache. No mlx, no connection."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tinyllm.checkpoint.contents import read_contents
from tinyllm.checkpoint.gguf_header import is_gguf
from tinyllm.checkpoint.gguf_parts import first_parts, part_names
from tinyllm.checkpoint.summary import Summary, summarize
from tinyllm.errors import TinyllmError
from tinyllm.hub import cache, locate
from tinyllm.hub.gguf_files import gguf_below, variant_of

__all__ = ["Entry", "Place", "inventory", "places"]


@dataclass(frozen=True)
class Place:
    """A folder that is looked in, whether it is there or not."""

    title: str
    folder: Path


@dataclass(frozen=True)
class Entry:
    """A model on disk under the name that `-m` takes: what it is, or why tinyllm cannot run it."""

    name: str
    folder: Path
    place: str
    disk_bytes: int
    summary: Summary | None
    problem: str | None


def places() -> tuple[Place, Place]:
    """Return where models are looked for."""
    return Place("models folder", locate.models_folder()), Place("hub cache", cache.cache_folder())


def inventory() -> list[Entry]:
    """Return every model of every place; a broken one is an entry with its problem, never an error."""
    return [*_own_models(), *_cached_models()]


def _own_models() -> Iterator[Entry]:
    place = places()[0]
    if not place.folder.is_dir():
        return
    for left in sorted(place.folder.glob(".*.converting")):
        left_behind = "a conversion that did not end: the next tinyllm convert into this folder removes it"
        problem = "a conversion is writing it" if _is_locked(left) else left_behind
        yield Entry(left.name, left, place.title, _size(left.rglob("*")), None, problem)
    found = [path for path in place.folder.iterdir() if not path.name.startswith(".")]
    files = first_parts(path for path in found if is_gguf(path) and not path.is_dir())
    for folder in sorted([*files, *(path for path in found if path.is_dir())]):
        yield _entry(folder.name, folder, place.title)


def _cached_models() -> Iterator[Entry]:
    title = places()[1].title
    for cached in cache.cached_models():
        if cached.snapshot is not None:
            files = first_parts(gguf_below(cached.snapshot))
            for file in files:
                yield _entry(cached.named(variant_of(file.name)), file, title)
            if files and not (cached.snapshot / "config.json").exists():
                continue
            yield _entry(cached.name, cached.snapshot, title, again=f"tinyllm pull {cached.repo}")
            continue
        size = _size(path for path in cached.folder.rglob("*") if not path.is_symlink())
        problem = f"the download did not end: tinyllm pull {cached.repo}"
        yield Entry(cached.name, cached.folder, title, size, None, problem)


def _entry(name: str, folder: Path, place: str, again: str | None = None) -> Entry:
    summary = problem = None
    size = 0
    try:
        size = _size(map(folder.with_name, part_names(folder.name)) if is_gguf(folder) else folder.iterdir())
        if not is_gguf(folder):
            cache.check_links(folder)
        summary = summarize(read_contents(folder))
    except (TinyllmError, OSError) as error:
        problem = str(error).replace(f"{folder}/", "").removeprefix(f"{folder}: ").replace(str(folder), "it")
        if again is not None and cache.why_incomplete(folder) is not None:
            problem = f"{problem.partition(';')[0]}: {again}"
    return Entry(name, folder, place, size, summary, problem)


def _is_locked(folder: Path) -> bool:
    """Return whether a process has locked a folder, as a conversion does while it writes."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def _size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())
