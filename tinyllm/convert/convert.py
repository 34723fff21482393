"""From one checkpoint to another in other forms: a folder that is there whole, or not at all."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tinyllm._mx import dtype_name, mx
from tinyllm.checkpoint.contents import read_contents
from tinyllm.checkpoint.files import checked_file
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.reader import read_json_object
from tinyllm.convert.plan import Conversion, as_stored
from tinyllm.convert.published import in_older_words, published_config, write_beside, write_json
from tinyllm.convert.recipe import Choice, Recipe, choose
from tinyllm.convert.shards import SHARD_BYTES, ShardWriter
from tinyllm.errors import DoesNotFitError, UsageError
from tinyllm.hub.sizes import disk_size

__all__ = ["Converted", "convert"]

# Data of tokenizers and templates, and licences: nothing that anybody runs or unpickles.
_COPIED = re.compile(
    r"(tokenizer|special_tokens_map|added_tokens|chat_template|generation_config|vocab|merges|tekken)[\w.-]*"
    r"\.(json|txt|jinja|model(\.v\d+)?)|[\w.-]+\.tiktoken|(LICEN[CS]E|NOTICE)[\w-]*(\.(txt|md))?"
    r"|additional_chat_templates/[\w.+-]+\.jinja",
    re.ASCII,
)
_DTYPE_KEYS = ("dtype", "torch_dtype")
CONVERTING = ".converting"  # what the name of a folder ends with while it is written
_QUANTIZATION_KEYS = ("quantization", "quantization_config")

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Converted:
    """What was written: how many bytes of weights, and why modules stay dense that were to be packed.

    Of the matrices that are `packed`, some were so already: `kept` as they were, and `repacked` from what is named.
    """

    nbytes: int
    bits_per_weight: float
    packed: int
    dense: dict[str, str]
    kept: int
    repacked: dict[str, int]


def convert(
    source: Path,
    target: Path,
    *,
    recipe: Recipe | None = None,
    dequantize: bool = False,
    dtype: mx.Dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Write the checkpoint in `source`, a folder or a GGUF file, as `target`, a folder that is not there yet.

    Matrices are packed as `recipe` says, unpacked with `dequantize`, else left as they are; floating-point numbers
    become `dtype` before they are packed. Tensors are read, packed and written one after another. `progress` gets the
    bytes that are written and all that will be. What is not whole yet stands beside `target`, and goes when this ends
    early. Raises UsageError for a target that is there and a recipe that does not fit, DoesNotFitError where the disk
    has no room, and what loading the source would raise.
    """
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target}: is there already, and is never overwritten: name a new folder")
    contents = read_contents(source)
    store = WeightStore.of(contents).cast(dtype)
    conversion = Conversion(store, _choose(store, recipe, dequantize), of_gguf=contents.header is not None)
    with _folder_to_be(target, conversion.nbytes) as folder:
        if contents.header is None:
            _copy_beside(source, folder)
            said = read_json_object(source / "config.json")
        else:
            write_beside(contents.header, folder, store.config.max_position_embeddings)
            said = published_config(contents.header) | {"torch_dtype": dtype_name(store.stored_dtype)}
        write_json(folder / "config.json", _config(said, conversion.quantization(), dtype))
        _write(conversion, folder, shard_bytes, progress)
    return Converted(
        nbytes=conversion.nbytes,
        bits_per_weight=conversion.bits_per_weight,
        packed=len(conversion.forms),
        dense=dict(conversion.dense),
        kept=conversion.kept,
        repacked=dict(conversion.repacked),
    )


def _choose(store: WeightStore, recipe: Recipe | None, dequantize: bool) -> Choice:
    if dequantize:
        return Choice({}, {})
    return as_stored(store) if recipe is None else choose(store.config, recipe, store.names)


def _write(conversion: Conversion, folder: Path, shard_bytes: int, progress: Progress) -> None:
    done, total = 0, conversion.nbytes
    metadata = {"format": "mlx" if conversion.forms else "pt"}  # what transformers wants to see of dense ones
    with ShardWriter(folder, conversion.tensors, metadata, shard_bytes) as writer:
        for step in conversion.steps:
            made = step.make()
            while made:
                name, array = made.pop(0)
                writer.write(name, _bytes(array))
                done += array.nbytes
                progress(done, total)
            mx.clear_cache()


def _bytes(array: mx.array) -> memoryview:
    """Return an array's data, which is not copied."""
    return np.array(mx.contiguous(array).reshape(-1).view(mx.uint8), copy=False).data


def _copy_beside(source: Path, folder: Path) -> None:
    for name in sorted(_relative_files(source)):
        if _COPIED.fullmatch(name):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(checked_file(source, name), folder / name)


def _relative_files(folder: Path) -> Iterator[str]:
    for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix()


def _config(values: dict[str, Any], quantization: dict[str, object] | None, dtype: mx.Dtype | None) -> dict[str, Any]:
    """Return config.json with other forms: under both keys, of which mlx-lm reads one, and the hub the other.

    It is mlx-lm that reads packed ones, which knows the words of transformers 4.
    """
    inner = values.get("text_config")
    for object_ in (values, inner) if isinstance(inner, dict) else (values,):
        for key in _QUANTIZATION_KEYS:
            object_.pop(key, None)
        if dtype is not None:
            object_.update({key: dtype_name(dtype) for key in _DTYPE_KEYS if key in object_})
    if quantization is None:
        return values
    return {**in_older_words(values), **dict.fromkeys(_QUANTIZATION_KEYS, quantization)}


@contextmanager
def _folder_to_be(target: Path, nbytes: int) -> Iterator[Path]:
    """Give a folder beside `target` which becomes it at the end, or goes."""
    parent = target.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"{target}: there is no folder {parent}")
    _clear_abandoned(parent)
    folder = parent / f".{target.name}{CONVERTING}"
    folder.mkdir(exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{target}: is being written by another conversion") from None
        try:
            _clear(folder)  # what one left behind that was killed
            free = shutil.disk_usage(folder).free
            if nbytes > free:
                raise DoesNotFitError(
                    f"{target}: its weights take {disk_size(nbytes)}, and {disk_size(free)} of disk are free there"
                )
            yield folder
            folder.rename(target)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    finally:
        os.close(handle)


def _clear_abandoned(parent: Path) -> None:
    """Remove what conversions that were killed have left in a folder."""
    for folder in parent.glob(f".*{CONVERTING}"):
        with suppress(OSError):  # another conversion is writing it, or it is somebody else's
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(handle)


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
