"""Products with the weights of a checkpoint, dense or packed alike."""

from __future__ import annotations

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import DenseWeight, LinearWeight, WeightStore
from tinyllm.ops.features import ModelFeatures
from tinyllm.ops.quant import dequantize, quantized_matmul


def linear(x: mx.array, weight: LinearWeight, *, fused: bool = True) -> mx.array:
    """Multiply x (..., in) by the transpose of a weight (out, in) and add its bias: (..., out)."""
    if isinstance(weight, DenseWeight):
        y = x @ weight.weight.T
    else:
        y = quantized_matmul(x, weight.packed, weight.scales, weight.biases, weight.form, fused=fused)
        y = y.astype(x.dtype)
    return y if weight.bias is None else y + weight.bias


class Linear:
    """One projection, or several modules' projections as one with their outputs side by side."""

    def __init__(self, modules: tuple[str, ...], weights: WeightStore, features: ModelFeatures) -> None:
        self._weight = weights.linear(*modules)
        self._fused = features.quantized_matmul

    def __call__(self, x: mx.array) -> mx.array:
        """Map x (..., in) to (..., out)."""
        return linear(x, self._weight, fused=self._fused)


class Projections:
    """Projections of the same x: as one product where `features` and their packing allow, else one after another."""

    def __init__(self, modules: tuple[str, ...], weights: WeightStore, features: ModelFeatures) -> None:
        widths = [weights.shape(f"{module}.weight")[0] for module in modules]
        if features.fused_projections and weights.joinable(*modules):
            self._linears = [Linear(modules, weights, features)]
        else:
            self._linears = [Linear((module,), weights, features) for module in modules]
        self._splits = [sum(widths[: i + 1]) for i in range(len(widths) - 1)]

    def __call__(self, x: mx.array) -> list[mx.array]:
        """Map x (..., in) to one (..., out) a module."""
        if len(self._linears) == 1:
            return list(mx.split(self._linears[0](x), self._splits, axis=-1))
        return [project(x) for project in self._linears]


class Embedding:
    """The token embedding, dense or packed, which is the output head too where the two are tied."""

    def __init__(self, module: str, weights: WeightStore, features: ModelFeatures) -> None:
        self._weight = weights.linear(module)
        self._fused = features.quantized_matmul
        self._dtype = weights.dtype or weights.stored_dtype

    def __call__(self, ids: mx.array) -> mx.array:
        """Look up ids (batch, seq): (batch, seq, hidden)."""
        weight = self._weight
        if isinstance(weight, DenseWeight):
            return weight.weight[ids]
        biases = None if weight.biases is None else weight.biases[ids]
        return dequantize(weight.packed[ids], weight.scales[ids], biases, weight.form).astype(self._dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        """Score x (..., hidden) against every token: (..., vocab)."""
        return linear(x, self._weight, fused=self._fused)
