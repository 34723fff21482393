"""What stands before the first block and after the last: token embeddings with positions, and the output head."""

from __future__ import annotations

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.config.layers import LayerInputs
from tinyllm.model.linear import Linear, linear, make_embedding
from tinyllm.model.norm import make_norm
from tinyllm.ops.features import ModelFeatures
from tinyllm.ops.rope import Offset, Positions


class TokenEmbedding:
    """The embedding of tokens as the first layer gets it.

    That is the table's vectors times their scale, through a projection and a norm if the model has them, plus learned
    positions.
    """

    def __init__(self, config: Config, weights: WeightStore, features: ModelFeatures) -> None:
        self.table = make_embedding("model.embed_tokens", weights, features, config.embedding_scale)
        self._project = None if config.embedding_width is None else Linear(("model.project_in",), weights, features)
        self._norm = (
            make_norm("model.embed_norm", config.embed_norm, weights, features) if config.embed_norm else None
        )
        learned = config.learned_positions is not None
        self._positions = make_embedding("model.embed_positions", weights, features) if learned else None
        self._offset = config.position_offset

    def __call__(self, ids: mx.array, offset: Offset = 0) -> mx.array:
        """Look up ids (batch, seq), whose rows begin at position `offset`: (batch, seq, hidden)."""
        x = self.table(ids)
        if self._project is not None:
            x = self._project(x)
        if self._norm is not None:
            x = self._norm(x)
        if self._positions is None:
            return x
        return x + self._positions(Positions.of(offset, ids.shape[1]).array + self._offset)

    def as_linear(self, x: mx.array) -> mx.array:
        """Score x (..., hidden) against every token, as a tied head does: (..., vocab)."""
        return self.table.as_linear(x)


class TokenInputs:
    """What each layer gets of a token by itself: see `LayerInputs`."""

    def __init__(self, inputs: LayerInputs, config: Config, weights: WeightStore, features: ModelFeatures) -> None:
        self._embedding = make_embedding("model.embed_tokens_per_layer", weights, features)
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
    """Logits of all tokens, times their scale, and within a soft cap if the model has one.

    `w_lm_head` is the matrix of the head, None where the embedding is used (tied).
    """

    def __init__(
        self, embedding: TokenEmbedding, config: Config, weights: WeightStore, features: ModelFeatures
    ) -> None:
        self._project = None if config.embedding_width is None else Linear(("model.project_out",), weights, features)
        tied = config.tie_word_embeddings
        self.w_lm_head = None if tied else weights.linear("lm_head")
        self._embedding = embedding
        self._fused = bool(features.quantized_matmul)
        self._bias = weights.tensor("lm_head.bias") if tied and config.head_bias else None
        self._scale = config.logit_scale
        self._softcap = config.logit_softcap

    def __call__(self, x: mx.array) -> mx.array:
        """Map x (batch, seq, hidden) to logits (batch, seq, vocab)."""
        x = x if self._project is None else self._project(x)
        if self.w_lm_head is None:
            logits = self._embedding.as_linear(x)
        else:
            logits = linear(x, self.w_lm_head, fused=self._fused)
        if self._bias is not None:
            logits = logits + self._bias
        if self._scale != 1:
            logits = logits * self._scale
        return logits if self._softcap is None else mx.tanh(logits / self._softcap) * self._softcap
