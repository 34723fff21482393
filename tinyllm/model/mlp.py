"""The gated feed-forward network (arXiv 2002.05202)."""

from __future__ import annotations

from functools import partial

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.model.linear import Linear, Projections
from tinyllm.ops.activation import silu
from tinyllm.ops.features import ModelFeatures

_ACTIVATIONS = {"silu": silu}


class MLP:
    """down(activation(gate(x)) * up(x)) of the layer that `prefix` ("model.layers.0.mlp") stands in."""

    def __init__(self, prefix: str, config: Config, weights: WeightStore, features: ModelFeatures) -> None:
        activation = _ACTIVATIONS[config.layer_at(prefix).feed_forward.activation]
        self._activation = partial(activation, polynomial=bool(features.polynomial_exp))
        self._gate_up = Projections((f"{prefix}.gate_proj", f"{prefix}.up_proj"), weights, features)
        self._down = Linear((f"{prefix}.down_proj",), weights, features)

    def __call__(self, x: mx.array) -> mx.array:
        """Map x (batch, seq, hidden) to the same shape."""
        gate, up = self._gate_up(x)
        return self._down(self._activation(gate) * up)
