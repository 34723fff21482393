"""Keys and values of a few bits an element, packed as MLX packs matrices, with a scale and a bias for each group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tinyllm._mx import mx
from tinyllm.config.quantization import QuantFormat, cache_format
from tinyllm.ops.quant import dequantize

_WORD_BITS = 32


class PackedHeads(NamedTuple):
    """Keys, or values, (batch, kv_heads, keys, head_dim), of `bits` an element.

    `words` is (..., head_dim * bits / 32); `scales` and `biases` are (..., groups). An element is scale * q + bias.
    """

    words: mx.array
    scales: mx.array
    biases: mx.array
    bits: int

    @property
    def form(self) -> QuantFormat:
        """How they are packed, as the shapes have it."""
        dim = self.words.shape[-1] * _WORD_BITS // self.bits
        return QuantFormat(self.bits, dim // self.scales.shape[-1])

    def unpacked(self) -> mx.array:
        """Return (batch, kv_heads, keys, head_dim), in the dtype that was packed."""
        return dequantize(self.words, self.scales, self.biases, self.form)

    def scores(self, q: mx.array) -> mx.array:
        """Multiply q (batch, kv_heads, rows, head_dim) by the transpose: (batch, kv_heads, rows, keys)."""
        return self._product(q, transpose=True)

    def weighed(self, weights: mx.array) -> mx.array:
        """Multiply weights (batch, kv_heads, rows, keys) by what this is: (batch, kv_heads, rows, head_dim)."""
        return self._product(weights, transpose=False)

    def _product(self, x: mx.array, *, transpose: bool) -> mx.array:
        form = self.form
        return mx.quantized_matmul(
            x,
            self.words,
            self.scales,
            self.biases,
            transpose=transpose,
            group_size=form.group_size,
            bits=form.bits,
            mode=form.mode,
        )


def stored_form(new: Sequence[mx.array], bits: int | None) -> list[mx.array]:
    """Return what a cache keeps of keys and values (..., head_dim): these, or words, scales and biases of each."""
    if bits is None:
        return list(new)
    return [part for each in new for part in _pack(each, cache_format(each.shape[-1], bits))]


def packed_heads(stored: Sequence[mx.array], bits: int) -> list[PackedHeads]:
    """Return as keys and values what `stored_form` made of them."""
    parts = [stored[i::3] for i in range(3)]
    return [PackedHeads(words, scales, biases, bits) for words, scales, biases in zip(*parts, strict=True)]


def _pack(x: mx.array, form: QuantFormat) -> list[mx.array]:
    words, scales, biases = mx.quantize(x, group_size=form.group_size, bits=form.bits, mode=form.mode)
    # The least and the greatest of a group pass over NaN: what is not finite would come back as if it were.
    spoilt = (x.reshape(*scales.shape, form.group_size) * 0).sum(axis=-1)
    return [words, scales, biases + spoilt]
