"""Which files of a folder are the checkpoint: read by name inside the folder, and never outside it. No mlx."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinyllm.checkpoint.gguf_header import is_gguf
from tinyllm.checkpoint.safetensors_header import read_safetensors_header
from tinyllm.config.reader import check_link, is_there, read_json_object
from tinyllm.errors import CheckpointError, ConfigError, MissingFileError, TokenizerError, UnsafePathError

logger = logging.getLogger("tinyllm")

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
    """Return `folder`/`name`, a name that a file of the model gives; nothing is opened.

    Raises UnsafePathError for a name that leads out of the folder, and as `check_link`.
    """
    if not name or Path(name).is_absolute() or ".." in Path(name).parts or "\\" in name:
        raise UnsafePathError(f"{folder}: the file name {name!r} leads out of the folder, and is not followed")
    path = folder / name
    check_link(path)
    return path


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
    if is_gguf(folder) or is_there(folder / "tokenizer.json"):
        return
    others = [name for name in _OTHER_TOKENIZERS if (folder / name).exists()]
    hint = f", only {' and '.join(others)}, which tinyllm does not read" if others else ""
    raise TokenizerError(f"{folder} has no tokenizer.json{hint}; use a copy of the model that has one")


def _from_index(folder: Path) -> WeightFiles:
    try:
        weight_map = _read_weight_map(folder)
    except (CheckpointError, ConfigError) as error:
        if isinstance(error, UnsafePathError) or not _exists(folder / SINGLE):
            raise
        logger.warning("%s (%s is read instead)", error, SINGLE)
        return WeightFiles((checked_file(folder, SINGLE),))
    names = sorted(set(weight_map.values()))
    paths = {name: checked_file(folder, name) for name in names}
    absent = tuple(name for name in names if not _exists(paths[name]))
    if not absent and not (SINGLE not in names and _exists(folder / SINGLE) and _is_stale(weight_map, paths)):
        return WeightFiles(tuple(paths.values()))
    if _exists(folder / SINGLE):
        if not absent:
            logger.warning("%s: its files lack tensors that it names (%s is read instead)", folder / INDEX, SINGLE)
        return WeightFiles((checked_file(folder, SINGLE),), absent)
    raise MissingFileError(
        f"{folder}: the index names files that are not there: {', '.join(absent)}; download the model again"
    )


def _is_stale(weight_map: Mapping[str, str], paths: Mapping[str, Path]) -> bool:
    """Whether a file lacks a tensor that the index has it hold."""
    held = {name: read_safetensors_header(path).keys() for name, path in paths.items()}
    return any(tensor not in held[name] for tensor, name in weight_map.items())


def _read_weight_map(folder: Path) -> dict[str, str]:
    weight_map = read_json_object(checked_file(folder, INDEX), _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{folder / INDEX}: has no weight_map from tensor names to file names")
    if not weight_map:
        raise CheckpointError(f"{folder / INDEX}: its weight_map is empty")
    return weight_map


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long, a folder that may not be entered
        return False
