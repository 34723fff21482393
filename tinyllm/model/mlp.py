"""Feed-forward networks, gated (arXiv 2002.05202) or plain."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.config.layers import MLPConfig
from tinyllm.config.names import module_of
from tinyllm.errors import ConfigError
from tinyllm.model.linear import Linear, Projections
from tinyllm.ops.activation import ACTIVATIONS, clipped_swiglu, gated, swiglu, xielu
from tinyllm.ops.features import ModelFeatures


class MLP:
    """down(activation(gate(x)) * up(x)) of the layer, or module, `prefix`."""

    def __init__(
        self,
        prefix: str,
        config: Config,
        weights: WeightStore,
        features: ModelFeatures,
        shape: MLPConfig | None = None,
    ) -> None:
        """Read the weights; `shape` is the layer's own where none is given."""
        found = shape or config.layer_at(prefix).feed_forward
        if not isinstance(found, MLPConfig):
            raise ConfigError(f"{prefix} is a mixture of experts")
        prefix = module_of(prefix, "mlp")
        self._gated = found.gated
        own = found.activation == "xielu"
        self._activate = read_xielu(f"{prefix}.act_fn", weights) if own else activation_of(found, features)
        parts = ("gate", "up") if found.gated else ("up",)
        self._up = Projections(tuple(f"{prefix}.{part}_proj" for part in parts), weights, features)
        self._down = Linear((f"{prefix}.down_proj",), weights, features)

    def __call__(self, x: mx.array) -> mx.array:
        """Map x (..., hidden) to the same shape."""
        return self._down(self._activate(*mx.split(self._up(x), 2 if self._gated else 1, axis=-1)))


def read_xielu(module: str, weights: WeightStore) -> Callable[[mx.array], mx.array]:
    """Return the activation with the layer's own parameters, which files hold as the inverse of softplus."""
    names = ("alpha_p", "alpha_n", "beta", "eps")
    above, below, beta, eps = (weights.tensor(f"{module}.{name}").astype(mx.float32) for name in names)
    above, below = mx.logaddexp(above, 0), beta + mx.logaddexp(below, 0)
    mx.eval(above, below)
    return partial(xielu, above=above, below=below, beta=beta, eps=eps)


def activation_of(shape: MLPConfig, features: ModelFeatures) -> Callable[..., mx.array]:
    """Return what is between the projections: a function of (gate, up), or of up alone where nothing is gated."""
    if not shape.gated:
        return ACTIVATIONS[shape.activation]
    if shape.limit is not None:
        return partial(clipped_swiglu, limit=shape.limit)
    if shape.activation == "silu":
        return partial(swiglu, fused=bool(features.fused_activation), polynomial_exp=bool(features.polynomial_exp))
    return gated(shape.activation)
