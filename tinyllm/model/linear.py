"""Products with the weights of a checkpoint, dense or packed alike."""

from __future__ import annotations

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import DenseWeight, LinearWeight, QuantizedWeight, WeightStore
from tinyllm.ops.features import ModelFeatures
from tinyllm.ops.quant import dequantize, gather_quantized_matmul, quantized_matmul


def linear(x: mx.array, weight: LinearWeight | mx.array, *, fused: bool = True) -> mx.array:
    """Multiply x (..., in) by the transpose of a weight (out, in) and add its bias: (..., out)."""
    if isinstance(weight, mx.array):
        return x @ weight.T
    if isinstance(weight, DenseWeight):
        y = x @ weight.transposed
    else:
        y = quantized_matmul(x, weight.packed, weight.scales, weight.biases, weight.form, fused=fused)
        y = y.astype(x.dtype)
    return y if weight.bias is None else y + weight.bias


def expert_linear(x: mx.array, weight: LinearWeight, experts: mx.array, *, in_order: bool = False) -> mx.array:
    """Multiply each row of x (rows, in) by the matrix (of experts, out, in) of its own of `experts` (rows,).

    `in_order` says that these are sorted. Returns (rows, out).
    """
    rows = x[:, None]
    if isinstance(weight, DenseWeight):
        y = mx.gather_mm(rows, weight.transposed, rhs_indices=experts, sorted_indices=in_order)
    else:
        y = gather_quantized_matmul(
            rows, weight.packed, weight.scales, weight.biases, weight.form, experts, in_order=in_order
        ).astype(x.dtype)
    return y[:, 0] if weight.bias is None else y[:, 0] + weight.bias[experts]


def linear_of(weight: LinearWeight, expert: int) -> LinearWeight:
    """Return the weight of one of several experts."""
    bias = None if weight.bias is None else weight.bias[expert]
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.weight[expert], bias)
    biases = None if weight.biases is None else weight.biases[expert]
    return QuantizedWeight(weight.packed[expert], weight.scales[expert], biases, weight.form, bias)


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
        joined = features.fused_projections and weights.joinable(*modules)
        groups = [modules] if joined else [(module,) for module in modules]
        self._linears = [Linear(group, weights, features) for group in groups]

    def __call__(self, x: mx.array) -> mx.array:
        """Map x (..., in) to the outputs of all, side by side: (..., out + out + ...)."""
        outputs = [project(x) for project in self._linears]
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=-1)


class Embedding:
    """The embedding of `vocab_size` tokens, dense or quantized, whose matrix also scores tokens if the head is tied.

    Vectors are multiplied by `scale`, and quantized ones have the type `dtype` (that of their scales by default).
    Raises ValueError for a weight that is not (vocab_size, embedding_dim).
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_dim: int,
        weight: LinearWeight | mx.array,
        *,
        scale: float = 1.0,
        dtype: mx.Dtype | None = None,
        fused: bool = True,
    ) -> None:
        weight = DenseWeight(weight) if isinstance(weight, mx.array) else weight
        if weight.shape != (vocab_size, embedding_dim):
            raise ValueError(f"an embedding ({vocab_size}, {embedding_dim}) cannot have a weight {weight.shape}")
        self.weight = weight
        self._scale = scale
        self._dtype = dtype
        self._fused = fused

    def __call__(self, ids: mx.array) -> mx.array:
        """Look up ids (batch, seq): (batch, seq, embedding_dim)."""
        weight = self.weight
        if isinstance(weight, DenseWeight):
            x = weight.weight[ids]
        else:
            biases = None if weight.biases is None else weight.biases[ids]
            x = dequantize(weight.packed[ids], weight.scales[ids], biases, weight.form)
            x = x if self._dtype is None else x.astype(self._dtype)
        return x if self._scale == 1 else x * mx.array(self._scale, dtype=x.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        """Score x (..., embedding_dim) against every token: (..., vocab_size)."""
        return linear(x, self.weight, fused=self._fused)


def make_embedding(module: str, weights: WeightStore, features: ModelFeatures, scale: float = 1.0) -> Embedding:
    """Return the embedding `module` ("model.embed_tokens") of a checkpoint."""
    weight = weights.linear(module)
    dtype = weights.dtype or weights.stored_dtype
    vocab_size, embedding_dim = weight.shape
    return Embedding(
        vocab_size, embedding_dim, weight, scale=scale, dtype=dtype, fused=bool(features.quantized_matmul)
    )
