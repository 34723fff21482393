"""Normalisation layers."""

from __future__ import annotations

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.ops.features import ModelFeatures
from tinyllm.ops.norm import rms_norm


class RMSNorm:
    """Root-mean-square normalisation over the last axis, with the weight of `module`."""

    def __init__(self, module: str, eps: float, weights: WeightStore, features: ModelFeatures) -> None:
        self._weight = weights.tensor(f"{module}.weight")
        self._eps = eps
        self._fused = features.fused_norm

    def __call__(self, x: mx.array) -> mx.array:
        """Map x (..., hidden) to the same shape."""
        return rms_norm(x, self._weight, self._eps, fused=self._fused)
