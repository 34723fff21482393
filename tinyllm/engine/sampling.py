"""Choosing the next token of each row, on the device."""

from __future__ import annotations

from collections.abc import Sequence

from tinyllm._mx import mx
from tinyllm.engine.request import SamplingParams


def random_keys(params: Sequence[SamplingParams], index: int) -> mx.array:
    """Return the keys (rows, 2) of the `index`-th generated token; never split or advanced, they know no order."""
    return mx.array([[row.seed, index] for row in params], dtype=mx.uint32)


def sample(logits: mx.array, params: Sequence[SamplingParams], index: int) -> mx.array:
    """Choose a token for each row of `logits` (rows, vocab): ids (rows,)."""
    greedy = mx.argmax(logits, axis=-1)
    if all(row.temperature == 0 for row in params):
        return greedy
    temperature = mx.array([row.temperature for row in params], dtype=mx.float32)[:, None]
    # argmax(logits / t + Gumbel noise) is a draw from softmax(logits / t), without a sum or a sort.
    keys = random_keys(params, index)
    noise = mx.stack([mx.random.gumbel(logits.shape[1:], key=keys[i]) for i in range(len(params))])
    scaled = logits.astype(mx.float32) / mx.maximum(temperature, 1e-6)
    drawn = mx.argmax(scaled + noise, axis=-1)
    return mx.where(temperature[:, 0] > 0, drawn, greedy)
