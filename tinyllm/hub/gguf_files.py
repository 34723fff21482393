"""One GGUF file of a repository that has several: OWNER/NAME:Q4_K_M, and which file that means. No mlx."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tinyllm.checkpoint.gguf_header import is_gguf
from tinyllm.errors import ModelNotFoundError, UnsupportedModelError

__all__ = ["choose_file", "split_variant", "variant_of"]

_VARIANT = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
_QUANTIZATION = re.compile(r"(?<![A-Za-z0-9])(?:I?Q\d|TQ\d|MXFP\d|B?F(?:16|32))[A-Za-z0-9_]*", re.IGNORECASE)
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_OTHER = ("mmproj", "imatrix")  # the projector of a vision model, and statistics
_SHOWN = 12


def split_variant(name: str) -> tuple[str, str | None]:
    """Split OWNER/NAME:VARIANT; a variant that none could be stays part of the name."""
    repo, colon, variant = name.partition(":")
    return (repo, variant) if colon and _VARIANT.fullmatch(variant) else (name, None)


def variant_of(file: str) -> str:
    """Return what is to be said after OWNER/NAME for a file: its quantisation, else its name."""
    stem = Path(file).stem
    found = _QUANTIZATION.findall(stem)
    return found[-1] if found else stem


def choose_file(repo: str, names: Iterable[str], variant: str) -> str:
    """Return the GGUF file whose name has `variant` as a word of its own, in letters of either case.

    Raises ModelNotFoundError where there is none or more than one, naming those that there are, and
    UnsupportedModelError for a model in several files.
    """
    files = sorted(name for name in names if is_gguf(Path(name)) and not name.lower().startswith(_OTHER))
    word = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(variant)}(?![A-Za-z0-9_])", re.IGNORECASE)
    found = [name for name in files if word.search(Path(name).stem)]
    if len(found) == 1 and not _PART.search(found[0]):
        return found[0]
    if found and all(map(_PART.search, found)):
        raise UnsupportedModelError(
            f"{repo}: {variant} is in {len(found)} files ({found[0]}, ...), which tinyllm reads as one alone:"
            " choose a smaller one, or join them with llama-gguf-split --merge"
        )
    if found:
        raise ModelNotFoundError(f"{repo}: {variant} may mean {' or '.join(found)}: give more of the name")
    shown = [*map(variant_of, files[:_SHOWN]), *(["..."] if len(files) > _SHOWN else [])]
    there = f"there are {', '.join(shown)}" if shown else "there are no GGUF files in it"
    raise ModelNotFoundError(f"{repo}: none of its files is {variant}: {there}")
