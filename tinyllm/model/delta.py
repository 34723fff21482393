"""Linear attention by the gated delta rule (Qwen3-Next)."""

from __future__ import annotations

from collections.abc import Sequence

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.config.layers import DeltaConfig
from tinyllm.errors import ConfigError
from tinyllm.kv.cache import LayerCache, Mask, State
from tinyllm.kv.kinds import state_forms
from tinyllm.model.linear import Linear, Projections
from tinyllm.model.norm import make_norm
from tinyllm.model.state import through_state
from tinyllm.ops.activation import ACTIVATIONS, swiglu
from tinyllm.ops.convolution import causal_convolution
from tinyllm.ops.delta import delta_rule, l2_normalised
from tinyllm.ops.features import ModelFeatures
from tinyllm.ops.rope import Offset


class GatedDelta:
    """The linear attention of the layer `prefix` ("model.layers.0")."""

    def __init__(self, prefix: str, config: Config, weights: WeightStore, features: ModelFeatures) -> None:
        shape = config.layer_at(prefix).attention
        if not isinstance(shape, DeltaConfig):
            raise ConfigError(f"{prefix} has no linear attention, but {type(shape).__name__}")
        prefix = f"{prefix}.linear_attn"
        self._shape = shape
        self._project = Projections(tuple(f"{prefix}.{part}_proj" for part in "qkvz"), weights, features)
        self._gates = Projections(tuple(f"{prefix}.{part}_proj" for part in "ba"), weights, features)
        self._kernel = weights.tensor(f"{prefix}.conv1d.weight")
        self._activate = ACTIVATIONS[shape.activation]
        self._decay = -mx.exp(weights.tensor(f"{prefix}.A_log").astype(mx.float32))
        self._decay_bias = weights.tensor(f"{prefix}.dt_bias").astype(mx.float32)
        mx.eval(self._decay, self._decay_bias)
        self._norm = make_norm(f"{prefix}.norm", shape.norm, weights, features)
        self._output = Linear((f"{prefix}.out_proj",), weights, features)
        self._forms = state_forms(shape)
        self._features = features

    def __call__(
        self,
        x: mx.array,
        offset: Offset,
        cache: LayerCache | None = None,
        mask: Mask = None,
    ) -> mx.array:
        """Map x (batch, seq, hidden) to the same shape, through `cache`. Raises ValueError for a mask of its own."""
        features = self._features
        qkv, z = mx.split(self._project(x), [self._kernel.shape[0]], axis=-1)
        b, a = mx.split(self._gates(x), 2, axis=-1)
        log_decay = self._decay * mx.logaddexp(a.astype(mx.float32) + self._decay_bias, 0)
        rate = mx.sigmoid(b.astype(mx.float32))
        y = through_state(self._advance, (qkv, log_decay, rate), self._forms, cache, mask)
        y = self._norm(y.astype(x.dtype))
        gate = z.reshape(y.shape)
        y = swiglu(gate, y, fused=bool(features.fused_activation), polynomial_exp=bool(features.polynomial_exp))
        return self._output(y.flatten(2))

    def _advance(self, inputs: Sequence[mx.array], state: State) -> tuple[mx.array, State]:
        """Return (batch, seq, value heads, value_dim), float32, for qkv and the logarithms of decays, and rates."""
        shape = self._shape
        qkv, log_decay, rate = inputs
        qkv, last = causal_convolution(qkv, state[0], self._kernel)
        qkv = self._activate(qkv).astype(mx.float32)
        keys = shape.num_key_heads * shape.key_dim
        q, k, v = (
            part.reshape(*part.shape[:2], heads, -1).swapaxes(1, 2)
            for part, heads in zip(
                mx.split(qkv, [keys, 2 * keys], axis=-1),
                (shape.num_key_heads, shape.num_key_heads, shape.num_value_heads),
                strict=True,
            )
        )
        q, k = l2_normalised(q) * shape.key_dim**-0.5, l2_normalised(k)
        served = shape.num_value_heads // shape.num_key_heads
        if served > 1:
            q, k = mx.repeat(q, served, axis=1), mx.repeat(k, served, axis=1)
        by_head = (log_decay.swapaxes(1, 2), rate.swapaxes(1, 2))
        y, matrix = delta_rule(q, k, v, *by_head, state[1], chunked=self._features.chunked_recurrence)
        return y.swapaxes(1, 2), (last, matrix)
