"""What stands before the first block and after the last: token embeddings with positions, and the output head."""

from __future__ import annotations

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.config.layers import LayerInputs
from tinyllm.model.linear import Embedding, Linear
from tinyllm.model.norm import make_norm
from tinyllm.ops.features import ModelFeatures
from tinyllm.ops.rope import Positions


class EmbeddedTokens:
    """Embeddings times their scale, through a projection and a norm where there are any, plus learned positions."""

    def __init__(self, embedding: Embedding, config: Config, weights: WeightStore, features: ModelFeatures) -> None:
        self._embedding = embedding
        self._scale = config.embedding_scale
        self._project = None if config.embedding_width is None else Linear(("model.project_in",), weights, features)
        self._norm = (
            make_norm("model.embed_norm", config.embed_norm, weights, features) if config.embed_norm else None
        )
        learned = config.learned_positions is not None
        self._positions = Embedding("model.embed_positions", weights, features) if learned else None
        self._offset = config.position_offset

    def __call__(self, ids: mx.array, positions: Positions) -> mx.array:
        """Look up ids (batch, seq): (batch, seq, hidden)."""
        x = self._embedding(ids)
        if self._scale != 1:
            x = x * mx.array(self._scale, dtype=x.dtype)
        if self._project is not None:
            x = self._project(x)
        if self._norm is not None:
            x = self._norm(x)
        return x if self._positions is None else x + self._positions(positions.array + self._offset)


class TokenInputs:
    """What each layer gets of a token by itself: see `LayerInputs`."""

    def __init__(self, inputs: LayerInputs, config: Config, weights: WeightStore, features: ModelFeatures) -> None:
        self._embedding = Embedding("model.embed_tokens_per_layer", weights, features)
        self._project = Linear(("model.per_layer_model_projection",), weights, features)
        self._norm = make_norm("model.per_layer_projection_norm", config.layers[0].norm, weights, features)
        self._form = (config.num_hidden_layers, inputs.width)
        self._scale = config.hidden_size**-0.5

    def __call__(self, ids: mx.array, x: mx.array) -> mx.array:
        """Look up ids (batch, seq), whose embeddings are x (batch, seq, hidden): (batch, seq, layers, width)."""
        form = (*ids.shape, *self._form)
        projected = self._norm((self._project(x) * self._scale).reshape(form))
        own = self._embedding(ids).reshape(form)
        return (projected + own * mx.array(self._form[1] ** 0.5, dtype=own.dtype)) * 2**-0.5


class Head:
    """Logits of all tokens, times their scale, and held within a soft cap where there is one."""

    def __init__(self, embedding: Embedding, config: Config, weights: WeightStore, features: ModelFeatures) -> None:
        self._project = None if config.embedding_width is None else Linear(("model.project_out",), weights, features)
        tied = config.tie_word_embeddings
        self._score = embedding.as_linear if tied else Linear(("lm_head",), weights, features)
        self._bias = weights.tensor("lm_head.bias") if tied and config.head_bias else None
        self._scale = config.logit_scale
        self._softcap = config.logit_softcap

    def __call__(self, x: mx.array) -> mx.array:
        """Map x (batch, seq, hidden) to logits (batch, seq, vocab)."""
        logits = self._score(x if self._project is None else self._project(x))
        if self._bias is not None:
            logits = logits + self._bias
        if self._scale != 1:
            logits = logits * self._scale
        return logits if self._softcap is None else mx.tanh(logits / self._softcap) * self._softcap
