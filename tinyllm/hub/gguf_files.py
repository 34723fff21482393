"""One GGUF model of a repository that has several: OWNER/NAME:Q4_K_M, and which files that means. No mlx."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tinyllm.checkpoint.gguf_header import is_gguf
from tinyllm.checkpoint.gguf_parts import absent_parts, part_names, without_part
from tinyllm.errors import MissingFileError, ModelNotFoundError

__all__ = ["choose_files", "gguf_below", "split_variant", "variant_of"]

_VARIANT = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
_QUANTIZATION = re.compile(r"(?<![A-Za-z0-9])(?:I?Q\d|TQ\d|MXFP\d|B?F(?:16|32))[A-Za-z0-9_]*", re.IGNORECASE)
_OTHER = ("mmproj", "imatrix")  # the projector of a vision model, and statistics
_SHOWN = 12


def split_variant(name: str) -> tuple[str, str | None]:
    """Split OWNER/NAME:VARIANT; a variant that none could be stays part of the name."""
    repo, colon, variant = name.partition(":")
    return (repo, variant) if colon and _VARIANT.fullmatch(variant) else (name, None)


def variant_of(file: str) -> str:
    """Return what is to be said after OWNER/NAME for a file: its quantisation, else its name."""
    stem = Path(without_part(file)).stem
    found = _QUANTIZATION.findall(stem)
    return found[-1] if found else stem


def gguf_below(folder: Path) -> list[Path]:
    """Return the GGUF files of a snapshot: in it, and in folders in it, where large ones often stand."""
    return sorted(path for pattern in ("*", "*/*") for path in folder.glob(pattern) if is_gguf(path))


def choose_files(repo: str, names: Iterable[str], variant: str) -> tuple[str, ...]:
    """Return the GGUF file whose name has `variant` as a word of its own, in letters of either case, or its parts.

    Raises ModelNotFoundError where there is none or more than one, naming those that there are, and MissingFileError
    for a model of which a part is absent.
    """
    files = sorted(name for name in names if is_gguf(Path(name)) and not Path(name).name.lower().startswith(_OTHER))
    word = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(variant)}(?![A-Za-z0-9_])", re.IGNORECASE)
    found = list(dict.fromkeys(part_names(name)[0] for name in files if word.search(Path(name).stem)))
    if len(found) == 1:
        if absent := absent_parts(found[0], files):
            raise MissingFileError(
                f"{repo}: {variant} is in {len(part_names(found[0])):,} files, without {absent[0]}"
            )
        return part_names(found[0])
    if found:
        raise ModelNotFoundError(f"{repo}: {variant} may mean {' or '.join(found)}: give more of the name")
    files = list(dict.fromkeys(part_names(name)[0] for name in files))
    shown = [*map(variant_of, files[:_SHOWN]), *(["..."] if len(files) > _SHOWN else [])]
    there = f"there are {', '.join(shown)}" if shown else "there are no GGUF files in it"
    raise ModelNotFoundError(f"{repo}: none of its files is {variant}: {there}")
