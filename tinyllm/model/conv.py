"""The gated short convolution of LFM2."""

from __future__ import annotations

from collections.abc import Sequence

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.config.layers import ConvConfig
from tinyllm.errors import ConfigError
from tinyllm.kv.cache import LayerCache, Mask, State
from tinyllm.kv.kinds import state_forms
from tinyllm.model.linear import Linear
from tinyllm.model.state import through_state
from tinyllm.ops.convolution import causal_convolution
from tinyllm.ops.features import ModelFeatures
from tinyllm.ops.rope import Offset


class ShortConvolution:
    """out(c * conv(b * x)) for the three parts of in(x), of the layer `prefix` ("model.layers.0")."""

    def __init__(self, prefix: str, config: Config, weights: WeightStore, features: ModelFeatures) -> None:
        shape = config.layer_at(prefix).attention
        if not isinstance(shape, ConvConfig):
            raise ConfigError(f"{prefix} has no convolution, but {type(shape).__name__}")
        prefix = f"{prefix}.conv"
        self._input = Linear((f"{prefix}.in_proj",), weights, features)
        self._kernel = weights.tensor(f"{prefix}.conv.weight")
        self._bias = weights.tensor(f"{prefix}.conv.bias") if shape.biased else None
        self._output = Linear((f"{prefix}.out_proj",), weights, features)
        self._forms = state_forms(shape)

    def __call__(
        self,
        x: mx.array,
        offset: Offset,
        cache: LayerCache | None = None,
        mask: Mask = None,
    ) -> mx.array:
        """Map x (batch, seq, hidden) to the same shape, through `cache`. Raises ValueError for a mask of its own."""
        before, after, inner = mx.split(self._input(x), 3, axis=-1)
        y = through_state(self._advance, [before * inner], self._forms, cache, mask)
        return self._output(after * y)

    def _advance(self, inputs: Sequence[mx.array], state: State) -> tuple[mx.array, State]:
        y, last = causal_convolution(inputs[0], state[0], self._kernel, self._bias)
        return y, (last,)
