"""Normalisation layers."""

from __future__ import annotations

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.layers import NormConfig
from tinyllm.ops.features import ModelFeatures
from tinyllm.ops.norm import layer_norm, rms_norm


class RMSNorm:
    """Root-mean-square normalisation over the last axis, with the weight of `module`; times 1 + weight in Gemma."""

    def __init__(self, module: str, config: NormConfig, weights: WeightStore, features: ModelFeatures) -> None:
        self._weight = read_weight(module, config, weights)
        self._eps = config.eps
        self._fused = features.fused_norm

    def __call__(self, x: mx.array) -> mx.array:
        """Map x (..., hidden) to the same shape."""
        return rms_norm(x, self._weight, self._eps, fused=self._fused).astype(x.dtype)


class LayerNorm:
    """Layer normalisation over the last axis, with the weight and the bias that `module` has."""

    def __init__(self, module: str, config: NormConfig, weights: WeightStore, features: ModelFeatures) -> None:
        self._weight = read_weight(module, config, weights)
        self._bias = weights.tensor(f"{module}.bias") if config.bias else None
        self._eps = config.eps
        self._fused = features.fused_norm

    def __call__(self, x: mx.array) -> mx.array:
        """Map x (..., hidden) to the same shape."""
        return layer_norm(x, self._weight, self._bias, self._eps, fused=self._fused).astype(x.dtype)


Norm = RMSNorm | LayerNorm


def make_norm(module: str, config: NormConfig, weights: WeightStore, features: ModelFeatures) -> Norm:
    """Return the norm that a layer's config asks for."""
    return (RMSNorm if config.kind == "rms" else LayerNorm)(module, config, weights, features)


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
