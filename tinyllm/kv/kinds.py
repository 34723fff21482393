"""Layers that remember alike share pages. No mlx."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

from tinyllm.config.config import Config
from tinyllm.config.layers import AttentionConfig, ConvConfig, DeltaConfig, LatentAttentionConfig, Mixer, source_of
from tinyllm.config.quantization import cache_format
from tinyllm.config.reach import Reach, State

_WORD_BITS = 32  # packed elements are stored in such words
_WIDE_BYTES = 4  # of such a word, and of a float32


class StateForm(NamedTuple):
    """One array of a recurrent layer's state: its `shape`, and whether it is float32 whatever the network is in."""

    shape: tuple[int, ...]
    wide: bool = False

    @property
    def elements(self) -> int:
        """Elements of the array."""
        return math.prod(self.shape)


class StoredArray(NamedTuple):
    """An array of a layer's cache: `width` elements for each of `heads` in a slot, which is a token's, or a state's.

    What is `packed` is 32-bit words, what is `wide` is float32 whatever the network is in.
    """

    name: str
    heads: int
    width: int
    packed: bool = False
    wide: bool = False

    def slot_bytes(self, itemsize: int) -> int:
        """Bytes of a slot, `itemsize` an element of what is neither packed nor wide."""
        return self.heads * self.width * (_WIDE_BYTES if self.packed or self.wide else itemsize)


class LayerKind(NamedTuple):
    """How many `layers` of a model keep as much of each token, and for as long.

    A token leaves `key_dim` elements for each of `kv_heads`, and `value_dim` (0: values are part of the keys), packed
    to so many `bits` if these are given. Recurrent layers keep `states` instead, of all tokens together, and a page
    of theirs is one state.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    reach: Reach | None
    layers: int
    states: tuple[StateForm, ...] = ()
    bits: int | None = None

    @property
    def arrays(self) -> list[StoredArray]:
        """The arrays of one layer."""
        found = [StoredArray(f"state{i}", 1, form.elements, wide=form.wide) for i, form in enumerate(self.states)]
        for name, dim in (("keys", self.key_dim), ("values", self.value_dim)):
            if dim and self.bits is None:
                found.append(StoredArray(name, self.kv_heads, dim))
            elif dim and self.bits is not None:
                groups = dim // cache_format(dim, self.bits).group_size
                found.append(StoredArray(name, self.kv_heads, dim * self.bits // _WORD_BITS, packed=True))
                found += [StoredArray(f"{name}.{part}", self.kv_heads, groups) for part in ("scales", "biases")]
        return found

    def token_bytes(self, itemsize: int) -> int:
        """Bytes that a token leaves in all layers, `itemsize` an element: none in recurrent ones."""
        return 0 if self.states else self.page_bytes(1, itemsize)

    def page_bytes(self, page_size: int, itemsize: int) -> int:
        """Bytes of a page of `page_size` tokens in all layers, `itemsize` an element that is not packed."""
        return self.layers * sum(self._arrays(page_size, itemsize))

    def array_bytes(self, page_size: int, itemsize: int) -> int:
        """Bytes of a page in the largest of the arrays of one layer."""
        return max(self._arrays(page_size, itemsize))

    def _arrays(self, page_size: int, itemsize: int) -> list[int]:
        slots = 1 if self.states else page_size
        return [slots * array.slot_bytes(itemsize) for array in self.arrays]


def layer_kinds(
    config: Config, kv_bits: int | None = None
) -> tuple[tuple[LayerKind, ...], tuple[tuple[int, int], ...]]:
    """Return the kinds of a model's layers, and of each layer its kind and which of that kind's layers it is.

    Layers without keys and values of their own keep nothing, and are not among them. With `kv_bits` keys and values
    are packed; raises as `cache_format` does where they cannot be.
    """
    forms = [_form(layer.attention) for layer in config.layers if source_of(layer.attention) is None]
    counts = Counter(forms)
    kinds = list(counts)
    met: Counter[_Form] = Counter()
    places = []
    for form in forms:
        places.append((kinds.index(form), met[form]))
        met[form] += 1
    found = tuple(
        LayerKind(*form[:-1], counts[form], states=form[-1], bits=None if form[-1] else kv_bits) for form in kinds
    )
    if kv_bits is not None:
        for dim in (dim for kind in found for dim in (kind.key_dim, kind.value_dim) if dim):
            cache_format(dim, kv_bits)
    return found, tuple(places)


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
