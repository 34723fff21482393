"""The gated feed-forward network (arXiv 2002.05202)."""

from __future__ import annotations

from functools import partial

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.model.linear import Linear, Projections
from tinyllm.ops.activation import swiglu
from tinyllm.ops.features import ModelFeatures

_GATES = {"silu": swiglu}  # by the activation of the gate


class MLP:
    """down(activation(gate(x)) * up(x)) of the layer that `prefix` ("model.layers.0.mlp") stands in."""

    def __init__(self, prefix: str, config: Config, weights: WeightStore, features: ModelFeatures) -> None:
        self._gated = partial(
            _GATES[config.layer_at(prefix).feed_forward.activation],
            fused=bool(features.fused_activation),
            polynomial_exp=bool(features.polynomial_exp),
        )
        self._gate_up = Projections((f"{prefix}.gate_proj", f"{prefix}.up_proj"), weights, features)
        self._down = Linear((f"{prefix}.down_proj",), weights, features)

    def __call__(self, x: mx.array) -> mx.array:
        """Map x (batch, seq, hidden) to the same shape."""
        gate, up = mx.split(self._gate_up(x), 2, axis=-1)
        return self._down(self._gated(gate, up))
