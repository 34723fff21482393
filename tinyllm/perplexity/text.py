"""The text that models are measured on, and its tokens. No mlx."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tinyllm.checkpoint.contents import Contents
from tinyllm.errors import UsageError
from tinyllm.text.tokenizer import Tokenizer

__all__ = ["DEFAULT_TEXT", "common_tokens"]

DEFAULT_TEXT = Path(__file__).parents[1] / "data" / "news_from_nowhere.txt"


def common_tokens(text: str, models: Sequence[Contents], limit: int | None) -> list[int]:
    """Return the first `limit` tokens of a text, the beginning-of-text token among them where the tokenizer adds it.

    Raises UsageError where the tokenizers of two models split it otherwise.
    """
    first, *others = (Tokenizer.of(model).encode(text) for model in models)
    if any(other != first for other in others):
        names = " and ".join(model.path.name for model in models)
        raise UsageError(f"{names} split the text into other tokens, whose distributions cannot be compared")
    return first[:limit]
