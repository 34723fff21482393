"""Layers that remember alike share pages. No mlx."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

from tinyllm.config.config import Config
from tinyllm.config.layers import AttentionConfig, ConvConfig, DeltaConfig, LatentAttentionConfig, Mixer, source_of
from tinyllm.config.reach import Reach, State

_FLOAT32_BYTES = 4


class StateForm(NamedTuple):
    """One array of a recurrent layer's state: its `shape`, and whether it is float32 whatever the network is in."""

    shape: tuple[int, ...]
    wide: bool = False

    @property
    def elements(self) -> int:
        """Elements of the array."""
        return math.prod(self.shape)


class LayerKind(NamedTuple):
    """How many `layers` of a model keep as much of each token, and for as long.

    A token leaves `key_dim` elements for each of `kv_heads`, and `value_dim` (0: values are part of the keys).
    Recurrent layers keep `states` instead, of all tokens together, and a page of theirs is one state.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    reach: Reach | None
    layers: int
    states: tuple[StateForm, ...] = ()

    def page_bytes(self, page_size: int, itemsize: int) -> int:
        """Bytes of a page of `page_size` tokens in all layers, `itemsize` an element."""
        return self.layers * sum(self._arrays(page_size, itemsize))

    def array_bytes(self, page_size: int, itemsize: int) -> int:
        """Bytes of a page in the larger of the arrays of one layer."""
        return max(self._arrays(page_size, itemsize))

    def _arrays(self, page_size: int, itemsize: int) -> tuple[int, ...]:
        if self.states:
            return tuple(form.elements * (_FLOAT32_BYTES if form.wide else itemsize) for form in self.states)
        return tuple(page_size * self.kv_heads * dim * itemsize for dim in (self.key_dim, self.value_dim))


def layer_kinds(config: Config) -> tuple[tuple[LayerKind, ...], tuple[tuple[int, int], ...]]:
    """Return the kinds of a model's layers, and of each layer its kind and which of that kind's layers it is.

    Layers without keys and values of their own keep nothing, and are not among them.
    """
    forms = [_form(layer.attention) for layer in config.layers if source_of(layer.attention) is None]
    counts = Counter(forms)
    kinds = list(counts)
    met: Counter[_Form] = Counter()
    places = []
    for form in forms:
        places.append((kinds.index(form), met[form]))
        met[form] += 1
    return tuple(LayerKind(*form[:-1], counts[form], form[-1]) for form in kinds), tuple(places)


def state_forms(mixer: DeltaConfig | ConvConfig) -> tuple[StateForm, ...]:
    """Return the arrays of the state of one sequence in one layer."""
    match mixer:
        case ConvConfig():
            return (StateForm((mixer.kernel - 1, mixer.width)),)
        case DeltaConfig():
            keys, values = mixer.num_key_heads * mixer.key_dim, mixer.num_value_heads * mixer.value_dim
            matrices = StateForm((mixer.num_value_heads, mixer.key_dim, mixer.value_dim), wide=True)
            return StateForm((mixer.kernel - 1, 2 * keys + values)), matrices


_Form = tuple[int, int, int, Reach | None, tuple[StateForm, ...]]


def _form(mixer: Mixer) -> _Form:
    match mixer:
        case AttentionConfig():
            return mixer.num_kv_heads, mixer.head_dim, mixer.head_dim, mixer.reach, ()
        case LatentAttentionConfig():
            return 1, mixer.latent_rank + mixer.rope.dims, 0, mixer.reach, ()
        case DeltaConfig() | ConvConfig():
            return 0, 0, 0, State(), state_forms(mixer)
