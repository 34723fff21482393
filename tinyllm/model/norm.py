"""Normalisation layers."""

from __future__ import annotations

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.layers import NormConfig
from tinyllm.ops.features import ModelFeatures
from tinyllm.ops.norm import layer_norm, rms_norm


class RMSNorm:
    """Root-mean-square normalization (arXiv 1910.07467) of the last axis, times a weight (dim,) if there is one.

    Raises ValueError for a weight of another shape.
    """

    def __init__(self, dim: int, weight: mx.array | None, eps: float = 1e-6, *, fused: bool = True) -> None:
        _check_shape(weight, dim)
        self.weight = weight
        self.eps = eps
        self._fused = fused

    def __call__(self, x: mx.array) -> mx.array:
        """Map x (..., dim) to the same shape."""
        return rms_norm(x, self.weight, self.eps, fused=self._fused).astype(x.dtype)


class LayerNorm:
    """Layer normalization (arXiv 1607.06450) of the last axis, with a weight and a bias (dim,) if there are any.

    Raises ValueError for a weight or a bias of another shape.
    """

    def __init__(
        self,
        dim: int,
        weight: mx.array | None,
        bias: mx.array | None = None,
        eps: float = 1e-5,
        *,
        fused: bool = True,
    ) -> None:
        _check_shape(weight, dim)
        _check_shape(bias, dim)
        self.weight = weight
        self.bias = bias
        self.eps = eps
        self._fused = fused

    def __call__(self, x: mx.array) -> mx.array:
        """Map x (..., dim) to the same shape."""
        return layer_norm(x, self.weight, self.bias, self.eps, fused=self._fused).astype(x.dtype)


Norm = RMSNorm | LayerNorm


def _check_shape(weight: mx.array | None, dim: int) -> None:
    if weight is not None and weight.shape != (dim,):
        raise ValueError(f"a norm over {dim} elements cannot have a weight of shape {weight.shape}")


def make_norm(module: str, config: NormConfig, weights: WeightStore, features: ModelFeatures) -> Norm:
    """Return the norm `module` ("model.norm") of a layer's config."""
    weight = read_weight(module, config, weights)
    bias = weights.tensor(f"{module}.bias") if config.bias else None
    read = next((each for each in (weight, bias) if each is not None), None)
    dim = weights.config.hidden_size if read is None else read.size
    if config.kind == "rms":
        return RMSNorm(dim, weight, eps=config.eps, fused=bool(features.fused_norm))
    return LayerNorm(dim, weight, bias, eps=config.eps, fused=bool(features.fused_norm))


def read_weight(module: str, config: NormConfig, weights: WeightStore) -> mx.array | None:
    """Return what a norm multiplies by: in float32 where there is something to be added to the weight."""
    if not config.weight:
        return None
    weight = weights.tensor(f"{module}.weight")
    if not config.offset or weights.offsets_added:
        return weight
    weight = weight.astype(mx.float32) + config.offset
    mx.eval(weight)
    return weight
