"""Text that a person gives, in a file or through a pipe, read no further than anybody can mean. No mlx."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from tinyllm.errors import UsageError

__all__ = ["MOST_BYTES", "decoded", "encodable", "read_text", "read_whole", "too_large"]

MOST_BYTES = 16 << 20  # about four million tokens of English


def read_text(path: Path) -> str:
    """Read a UTF-8 file. Raises UsageError, naming it, for what is none, or goes on for more than `MOST_BYTES`."""
    try:
        with path.open("rb") as file:
            text = decoded(read_whole(file, str(path)), str(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def decoded(content: bytes, name: str) -> str:
    """Return bytes as text. Raises UsageError, with the file's name, if they are not UTF-8 or contain a NUL."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{name}: is not text in UTF-8") from None
    if "\0" in text:
        raise UsageError(f"{name}: is not text: it contains NUL bytes")
    return text


def encodable(text: str) -> str:
    """Return a text that UTF-8 can encode: halves of surrogate pairs that stand alone become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def read_whole(file: IO[bytes], name: str) -> bytes:
    """Read to the end. Raises UsageError, with the file's name, where that is more than `MOST_BYTES` away."""
    content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise too_large(name)
    return content


def too_large(name: str) -> UsageError:
    """Return the error for a text that is larger than `MOST_BYTES`."""
    return UsageError(
        f"{name}: larger than {MOST_BYTES >> 20} MB, the most that is read of one text: give a part of it"
    )
