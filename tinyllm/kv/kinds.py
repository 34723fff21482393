"""Layers that remember alike share pages. No mlx."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from tinyllm.config.config import Config
from tinyllm.config.layers import AttentionConfig, LatentAttentionConfig, Mixer, source_of
from tinyllm.config.reach import Reach


class LayerKind(NamedTuple):
    """How many `layers` of a model keep as much of each token, and for as long.

    A token leaves `key_dim` elements for each of `kv_heads`, and `value_dim` (0: values are part of the keys).
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    reach: Reach | None
    layers: int

    @property
    def elements(self) -> int:
        """Elements that a token leaves in one layer."""
        return self.kv_heads * (self.key_dim + self.value_dim)

    @property
    def widest(self) -> int:
        """Elements that a token leaves in the larger of the arrays of one layer."""
        return self.kv_heads * max(self.key_dim, self.value_dim)


def layer_kinds(config: Config) -> tuple[tuple[LayerKind, ...], tuple[tuple[int, int], ...]]:
    """Return the kinds of a model's layers, and of each layer its kind and which of that kind's layers it is.

    Layers without keys and values of their own keep nothing, and are not among them.
    """
    forms = [_form(layer.attention) for layer in config.layers if source_of(layer.attention) is None]
    counts = Counter(forms)
    kinds = list(counts)
    met: Counter[tuple[int, int, int, Reach | None]] = Counter()
    places = []
    for form in forms:
        places.append((kinds.index(form), met[form]))
        met[form] += 1
    return tuple(LayerKind(*form, counts[form]) for form in kinds), tuple(places)


def _form(mixer: Mixer) -> tuple[int, int, int, Reach | None]:
    match mixer:
        case AttentionConfig():
            return mixer.num_kv_heads, mixer.head_dim, mixer.head_dim, mixer.reach
        case LatentAttentionConfig():
            return 1, mixer.latent_rank + mixer.rope.dims, 0, mixer.reach
        case _:
            raise TypeError(f"{type(mixer).__name__} keeps no keys")
