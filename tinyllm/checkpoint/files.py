"""Which files of a folder are the checkpoint: read by name inside the folder, and never outside it. No mlx."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tinyllm.checkpoint.gguf_header import is_gguf
from tinyllm.config.reader import read_json_object
from tinyllm.errors import CheckpointError, MissingFileError, TokenizerError, UnsafePathError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_INDEX_BYTES = 1 << 28
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_OTHER_TOKENIZERS = ("tokenizer.model", "tiktoken.model", "tokenizer.bpe", "tekken.json", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files to read. `absent` are shards that a stale index names, though others may hold it all."""

    files: tuple[Path, ...]
    absent: tuple[str, ...] = ()


def checked_file(folder: Path, name: str) -> Path:
    """Return `folder`/`name` if it is inside the folder; raises UnsafePathError before anything is opened.

    A link may lead out of the folder in one case only: as the hub's cache has it, where snapshots/REVISION/NAME
    links to blobs/HASH of the same repository; so does a NAME in a folder below REVISION.
    """
    if not name or Path(name).is_absolute() or ".." in Path(name).parts or "\\" in name:
        raise UnsafePathError(f"{folder}: the file name {name!r} leads out of the folder, and is not followed")
    path = folder / name
    try:
        real, home = path.resolve(), folder.resolve()
    except (OSError, ValueError, RuntimeError):  # a link that leads to itself, a name that no file can have
        raise UnsafePathError(f"{folder}: the file name {name!r} leads nowhere, and is not followed") from None
    if real.is_relative_to(home) or _is_hub_blob(real, home):
        return path
    raise UnsafePathError(f"{path}: a link that leads out of the folder, and is not followed")


def _is_hub_blob(real: Path, home: Path) -> bool:
    snapshots = (folder.parent for folder in (home, home.parent) if folder.parent.name == "snapshots")
    return any(real.parent == folder.parent / "blobs" for folder in snapshots)


def find_weight_files(folder: Path) -> WeightFiles:
    """Choose the safetensors files: those that the index names, else the single one, else all but duplicates.

    Raises MissingFileError when there are none (pickled weights are never read), or when a shard is absent and no
    complete `model.safetensors` stands beside the index; UnsafePathError for an index that leads out of the folder.
    """
    if _exists(folder / INDEX):
        return _from_index(folder)
    if _exists(folder / SINGLE):
        return WeightFiles((checked_file(folder, SINGLE),))
    names = sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if names:
        return WeightFiles(tuple(checked_file(folder, name) for name in names))
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        raise MissingFileError(
            f"{folder}: holds only pickled weights ({pickled[0]}), which can run code when they are opened and are"
            " never read; look for a version of the model in safetensors"
        )
    raise MissingFileError(f"{folder}: there are no weights in it (no model.safetensors, nor its index)")


def check_tokenizer(folder: Path) -> None:
    """Raise TokenizerError where there is no tokenizer.json, nor a GGUF file that holds its own."""
    if is_gguf(folder) or (folder / "tokenizer.json").exists():
        return
    others = [name for name in _OTHER_TOKENIZERS if (folder / name).exists()]
    hint = f", only {' and '.join(others)}, which tinyllm does not read" if others else ""
    raise TokenizerError(f"{folder} has no tokenizer.json{hint}; use a copy of the model that has one")


def _from_index(folder: Path) -> WeightFiles:
    index = read_json_object(checked_file(folder, INDEX), _MAX_INDEX_BYTES)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{folder / INDEX}: has no weight_map from tensor names to file names")
    names = sorted(set(weight_map.values()))
    paths = {name: checked_file(folder, name) for name in names}
    absent = tuple(name for name in names if not _exists(paths[name]))
    if not absent:
        return WeightFiles(tuple(paths.values()))
    if _exists(folder / SINGLE):
        return WeightFiles((checked_file(folder, SINGLE),), absent)
    raise MissingFileError(
        f"{folder}: the index names files that are not there: {', '.join(absent)}; download the model again"
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long, a folder that may not be entered
        return False
