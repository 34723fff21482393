"""Digests of a checkpoint, which tell whether a model is the same as before. No mlx."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from tinyllm.checkpoint.files import find_weight_files
from tinyllm.checkpoint.gguf_header import is_gguf
from tinyllm.checkpoint.gguf_parts import read_gguf_parts
from tinyllm.checkpoint.safetensors_header import read_safetensors_header

__all__ = ["model_digest", "weights_digest"]

_SAMPLE = 4096  # bytes
_TEXTS = (".json", ".jinja", ".model")  # config, tokenizer, template, sampling defaults


def weights_digest(folder: Path) -> str:
    """Return a digest of a checkpoint: names, types and shapes of all tensors, and samples of their data.

    Of each tensor the first, middle and last 4 KiB: gigabytes are not read. Training changes a tensor everywhere; a
    change made by hand may lie between the samples. How tensors are dealt to files makes no difference.
    """
    total = sha256()
    for about, path, first, end in sorted(_stored_tensors(folder)):
        total.update(repr(about).encode())
        last = max(first, end - _SAMPLE)
        with path.open("rb") as file:
            for start in sorted({first, (first + last) // 2, last}):
                file.seek(start)
                total.update(file.read(min(_SAMPLE, end - start)))
    return total.hexdigest()[:16]


def model_digest(path: Path) -> str:
    """Return a digest of everything in a folder or GGUF file that its answers depend on: weights, config, tokenizer.

    Raises CheckpointError for weights that cannot be read.
    """
    total = sha256(weights_digest(path).encode())
    if is_gguf(path):
        header = min(start for _, file, start, _ in _stored_tensors(path) if file == path)
        with path.open("rb") as file:
            total.update(file.read(header))
    else:
        for text in sorted(each for each in path.iterdir() if each.suffix in _TEXTS and each.is_file()):
            total.update(text.name.encode() + b"\0" + sha256(text.read_bytes()).digest())
    return total.hexdigest()[:16]


def _stored_tensors(path: Path) -> list[tuple[tuple[str, str, tuple[int, ...]], Path, int, int]]:
    """Return (name, type, shape), and file, first byte and end, of each tensor as the files have it."""
    if is_gguf(path):
        stored = read_gguf_parts(path).tensors.values()
        return [((info.name, info.type.name, info.shape), info.file, info.start, info.end) for info in stored]
    tensors = [info for file in find_weight_files(path).files for info in read_safetensors_header(file).values()]
    return [((info.name, info.dtype, info.shape), info.file, info.start, info.end) for info in tensors]
