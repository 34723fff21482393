"""Layers that remember alike share pages. No mlx."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from tinyllm.config.config import AttentionConfig, Config


class LayerKind(NamedTuple):
    """How many `layers` of a model have so many heads and such a window."""

    kv_heads: int
    head_dim: int
    window: int | None
    layers: int


def layer_kinds(config: Config) -> tuple[tuple[LayerKind, ...], tuple[tuple[int, int], ...]]:
    """Return the kinds of a model's layers, and of each layer its kind and which of that kind's layers it is."""
    forms = [_form(layer.attention) for layer in config.layers]
    counts = Counter(forms)
    kinds = list(counts)
    met: Counter[tuple[int, int, int | None]] = Counter()
    places = []
    for form in forms:
        places.append((kinds.index(form), met[form]))
        met[form] += 1
    return tuple(LayerKind(*form, counts[form]) for form in kinds), tuple(places)


def _form(attention: AttentionConfig) -> tuple[int, int, int | None]:
    return attention.num_kv_heads, attention.head_dim, attention.window
