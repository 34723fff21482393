"""What converted tensors are called in files: as the source has them, so that other programs know them. No mlx."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tinyllm.checkpoint.tensor_table import StoredTensor
from tinyllm.config.config import Config
from tinyllm.config.fused import Piece
from tinyllm.config.names import Target
from tinyllm.errors import CheckpointError

__all__ = ["FileTensor", "file_names", "is_known"]


@dataclass(frozen=True)
class FileTensor:
    """A module of a file, and the canonical ones that it is: one, or `pieces` of its rows."""

    name: str
    modules: tuple[str, ...]
    pieces: tuple[Piece | None, ...]


def is_known(name: str, canonical: Iterable[str], config: Config) -> bool:
    """Whether a tensor of that name in a file would be read as these canonical ones, and no others."""
    return {target.name for target in config.targets(name)} == set(canonical)


def file_names(
    modules: Sequence[str], stored: Sequence[StoredTensor], leaves: Sequence[str], config: Config
) -> tuple[FileTensor, ...]:
    """Name `modules` (canonical), which are one tensor of the source, for `leaves` in their canonical form.

    Packed matrices are (out, in), and those of all experts one: where `stored` has them otherwise, they get canonical
    names. Raises CheckpointError where these would not be read back.
    """
    for files in _candidates(modules, stored):
        if all(_is_read_back(file, leaves, config) for file in files):
            return files
    raise CheckpointError(
        f"there is no name by which {', '.join(modules)} is read packed: leave it dense, by --recipe NAME=false"
    )


def _candidates(modules: Sequence[str], stored: Sequence[StoredTensor]) -> Iterator[tuple[FileTensor, ...]]:
    source, first = stored[0].parts[0].name, stored[0]
    module = re.sub(r"\.(weight|bias)$", "", source)
    if module != source and not first.stacked and not first.transposed:
        yield (FileTensor(module, tuple(modules), tuple(each.piece for each in stored)),)
    yield tuple(FileTensor(each, (each,), (None,)) for each in modules)


def _is_read_back(file: FileTensor, leaves: Sequence[str], config: Config) -> bool:
    """Whether the tensors would be read as they are meant."""
    for leaf in leaves:
        meant = {Target(f"{module}.{leaf}", piece) for module, piece in zip(file.modules, file.pieces, strict=True)}
        if set(config.targets(f"{file.name}.{leaf}")) != meant:
            return False
    return True
