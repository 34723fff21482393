"""A GGUF model in one file or in several, NAME-00001-of-00003.gguf and those beside it, as one header. No mlx.

llama-gguf-split writes them so: the first part has the metadata, each has some of the tensors, and `split.no` (from
zero), `split.count` and `split.tensors.count` (of all parts together) are in every one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tinyllm.checkpoint.files import checked_file
from tinyllm.checkpoint.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from tinyllm.errors import CorruptFileError, MissingFileError

__all__ = ["absent_parts", "first_parts", "part_names", "parts_of", "read_gguf_parts", "without_part"]

_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.ASCII | re.IGNORECASE)
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_OF_A_FILE = (_NUMBER, "general.alignment")  # what parts need not agree on


def part_names(name: str) -> tuple[str, ...]:
    """Return the names of all parts of the model that a file called `name` is of, in order: often it alone."""
    found = _PART.search(name)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        return (name,)
    start, end = found.span(1)
    return tuple(f"{name[:start]}{number:05}{name[end:]}" for number in range(1, int(found[2]) + 1))


def without_part(name: str) -> str:
    """Return a file's name with no word of which part it is."""
    return _PART.sub("", name)


def first_parts(files: Iterable[Path]) -> list[Path]:
    """Return a file for each model among GGUF files: the first part of those that are there."""
    models: dict[Path, Path] = {}
    for file in sorted(files):
        models.setdefault(file.with_name(part_names(file.name)[0]), file)
    return list(models.values())


def absent_parts(name: str, there: Iterable[str]) -> tuple[str, ...]:
    """Return the parts, of the model that a file called `name` is of, which are not among the names `there`."""
    found = frozenset(there)
    return tuple(part for part in part_names(name) if part not in found)


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return all files of the model that `path`, any of its parts, is of: in the same folder, in order.

    Raises MissingFileError, naming the first that is absent, and UnsafePathError for a link out of the folder.
    """
    names = part_names(path.name)
    if len(names) == 1:
        return (path,)
    absent = absent_parts(path.name, (name for name in names if (path.parent / name).is_file()))
    if absent:
        more = f", nor are {len(absent) - 1:,} others" if len(absent) > 1 else ""
        raise MissingFileError(
            f"{path}: {absent[0]}, one of the {len(names):,} parts of the model, is not beside it{more}: download it"
        )
    return tuple(checked_file(path.parent, name) for name in names)


def read_gguf_parts(path: Path) -> GgufHeader:
    """Read the header of the model in `path`: the first part's metadata, and the tensors of all.

    Raises as `read_gguf_header` for each part and as `parts_of`, and CorruptFileError, naming the part, for one of
    another model, at another place than its name says, or with a tensor that an earlier one has.
    """
    headers = [read_gguf_header(part) for part in parts_of(path)]
    first, tensors = headers[0], dict[str, GgufTensor]()
    for number, header in enumerate(headers):
        _check_place(header, number, len(headers))
        for name, value in header.metadata.items():
            if name not in _OF_A_FILE and first.metadata.get(name, value) != value:
                raise CorruptFileError(
                    f"{header.file}: is of another model than {first.file.name}: {name!r} is {value!r:.40}, not"
                    f" {first.metadata[name]!r:.40}"
                )
        twice = tensors.keys() & header.tensors.keys()
        if twice:
            raise CorruptFileError(f"{header.file}: the tensor {min(twice)!r} is in an earlier part as well")
        tensors |= header.tensors
    total = first.metadata.get(_TENSORS, len(tensors))
    if len(headers) > 1 and total != len(tensors):
        raise CorruptFileError(
            f"{first.file}: {_TENSORS} is {total!r:.40}, but there are {len(tensors):,}, all {len(headers):,} parts"
            " together: one is of another model, or the files were not split as llama-gguf-split does"
        )
    return replace(first, tensors=tensors)


def _check_place(header: GgufHeader, number: int, count: int) -> None:
    """Hold what a file says of its place among the parts against its name; one alone need say nothing."""
    said = header.metadata.get(_NUMBER, 0), header.metadata.get(_COUNT, 0)
    if said != (number, count) and not (count == 1 and said[1] in (0, 1)):
        name = f"part {number + 1:,} of {count:,}" if count > 1 else "no part (as NAME-00001-of-00002.gguf is)"
        raise CorruptFileError(
            f"{header.file}: is {name} by its name, but in it {_NUMBER} (from 0) is {said[0]!r:.40} and {_COUNT}"
            f" {said[1]!r:.40}: give it the name that it had, or download it again"
        )
