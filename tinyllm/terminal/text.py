"""Text that others wrote, made safe for a terminal: control characters are shown, not obeyed."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TextIO

__all__ = ["for_stream", "tell", "visible"]

_KEPT = "\t\n"
_VISIBLE = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in _KEPT},  # ␛ and its like
    0x7F: "␡",
    **{code: f"\\u{code:04x}" for code in (0x202D, 0x202E)},  # overrides, which show text in reverse
    **dict.fromkeys(range(0xD800, 0xE000), "\ufffd"),  # lone surrogates: no stream can encode them
    **{code: f"\\x{code:02x}" for code in range(0x80, 0xA0)},  # C1, which some terminals obey as they do ESC [
}


def visible(text: str) -> str:
    """Return a text with its control characters, other than tabs and line breaks, as signs that can be seen."""
    return text.replace("\r\n", "\n").translate(_VISIBLE)


def for_stream(text: str, stream: TextIO) -> str:
    """Return the text as it goes to a stream: `visible` on a terminal, unchanged elsewhere."""
    return visible(text) if stream.isatty() else text


def tell(text: str) -> None:
    """Print to stderr. A stderr that takes nothing, as on a full disk, stops no work: there is nobody to tell."""
    with suppress(OSError):
        print(for_stream(text, sys.stderr), file=sys.stderr, flush=True)
