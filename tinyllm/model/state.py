"""Layers that keep a state of fixed size in place of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tinyllm._mx import mx
from tinyllm.kv.cache import LayerCache, Mask, State
from tinyllm.kv.full import TinyKvFullCache
from tinyllm.kv.kinds import StateForm

Advance = Callable[[Sequence[mx.array], State], tuple[mx.array, State]]


def through_state(
    advance: Advance,
    inputs: Sequence[mx.array],
    forms: Sequence[StateForm],
    cache: LayerCache | None,
    mask: Mask,
) -> mx.array:
    """Take inputs, (batch, seq, ...) each, through a layer's state, in as large pieces as its cache can have.

    `advance` makes of a piece, and of the state before it, what the layer gives and the state after it. Raises
    ValueError for a mask of its own: a state is of all positions before.
    """
    if mask is not None and not isinstance(mask, str):
        raise ValueError("a layer with a state sees all positions before: it takes no mask")
    cache = TinyKvFullCache() if cache is None else cache
    batch, seq = inputs[0].shape[:2]
    outputs, start = [], 0
    for length in cache.pieces(seq):
        piece = inputs if length == seq else [x[:, start : start + length] for x in inputs]
        state = cache.read_state() or _zeros(forms, batch, inputs[0].dtype)
        y, state = advance(piece, state)
        cache.write_state(state, length)
        outputs.append(y)
        start += length
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)


def _zeros(forms: Sequence[StateForm], batch: int, dtype: mx.Dtype) -> State:
    """Return the state before the first position."""
    return tuple(mx.zeros((batch, *form.shape), dtype=mx.float32 if form.wide else dtype) for form in forms)
