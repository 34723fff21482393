"""Multi-head latent attention (arXiv 2405.04434): heads whose keys and values are products of one small latent.

A few queries are multiplied by the matrix of their head's keys, and what was attended by the matrix of its values; so
all heads share one key, the latent and its rotated part, and one value, the latent alone. A token leaves behind as
much as a single head does. But each score then takes `latent_rank` multiplications in place of `plain_dim`, and so
does each value: 3.4 times the work of attention in DeepSeek's sizes. Many queries at once, of a prompt, have the keys
and values of all heads made for them, and dropped again.
"""

from __future__ import annotations

from dataclasses import replace

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.config.layers import LatentAttentionConfig
from tinyllm.config.tensors import SPLIT_LATENTS
from tinyllm.errors import ConfigError
from tinyllm.kv.cache import LayerCache, Mask
from tinyllm.kv.full import TinyKvFullCache
from tinyllm.model.attention import by_heads, make_rope, make_spec, own_mask, scaled_queries, side_by_side
from tinyllm.model.linear import Linear
from tinyllm.model.norm import Norm, make_norm
from tinyllm.ops.features import ModelFeatures
from tinyllm.ops.rope import Offset, Positions


class LatentAttention:
    """The latent attention of the layer `prefix` ("model.layers.0")."""

    def __init__(self, prefix: str, config: Config, weights: WeightStore, features: ModelFeatures) -> None:
        shape = config.layer_at(prefix).attention
        if not isinstance(shape, LatentAttentionConfig):
            raise ConfigError(f"{prefix} has no latent attention, but {type(shape).__name__}")
        prefix = f"{prefix}.self_attn"
        self._shape = shape
        self._query: list[Linear | Norm]
        if shape.query_rank is None:
            self._query = [Linear((f"{prefix}.q_proj",), weights, features)]
        else:
            self._query = [
                Linear((f"{prefix}.q_a_proj",), weights, features),
                make_norm(f"{prefix}.q_a_layernorm", shape.norm, weights, features),
                Linear((f"{prefix}.q_b_proj",), weights, features),
            ]
        self._latent = Linear((f"{prefix}.kv_a_proj_with_mqa",), weights, features)
        self._latent_norm = make_norm(f"{prefix}.kv_a_layernorm", shape.norm, weights, features)
        self._keys, self._values = _expansions(prefix, shape, weights)
        self._output = Linear((f"{prefix}.o_proj",), weights, features)
        self._rope = make_rope(shape, features)
        self._spec = make_spec(shape, features)
        self._expanding = replace(self._spec, expand=self._expand) if features.expanded_latents else None

    def __call__(
        self,
        x: mx.array,
        offset: Offset,
        cache: LayerCache | None = None,
        mask: Mask = None,
    ) -> mx.array:
        """Map x (batch, seq, hidden), whose rows begin at `offset`, to the same shape, appending to `cache`."""
        shape, seq = self._shape, x.shape[1]
        positions = Positions.of(offset, seq)
        q = x
        for step in self._query:
            q = step(q)
        q = by_heads(q, q.shape[-1] // shape.num_heads)
        plain, turned = mx.split(q, [shape.plain_dim], axis=-1)
        latent, key = mx.split(self._latent(x), [shape.latent_rank], axis=-1)
        latent = self._latent_norm(latent)
        assert self._rope is not None
        turned, key = self._rope(turned, positions), self._rope(by_heads(key, shape.rope.dims), positions)
        expanding = self._expanding if shape.expands(seq) else None
        q = mx.concatenate([plain if expanding else plain @ self._keys, turned], axis=-1)
        if shape.query_scaling is not None:
            q = scaled_queries(q, positions, shape.query_scaling)
        k = mx.concatenate([by_heads(latent, shape.latent_rank), key], axis=-1)
        attended = (cache or TinyKvFullCache()).attend(q, k, None, expanding or self._spec, own_mask(mask))
        values = attended if expanding else attended @ self._values.swapaxes(-1, -2)
        return self._output(side_by_side(values))

    def _expand(self, stored: mx.array) -> tuple[mx.array, mx.array]:
        """Make of latents with their keys (batch, 1, keys, latent_rank + dims) keys and values of all heads."""
        latent, key = mx.split(stored, [self._shape.latent_rank], axis=-1)
        plain = latent @ self._keys.swapaxes(-1, -2)
        turned = mx.broadcast_to(key, (*plain.shape[:-1], key.shape[-1]))
        return mx.concatenate([plain, turned], axis=-1), latent @ self._values.swapaxes(-1, -2)


def _expansions(prefix: str, shape: LatentAttentionConfig, weights: WeightStore) -> tuple[mx.array, mx.array]:
    """Return what makes the keys of each head of latents, and its values: (heads, plain_dim or value_dim, latent)."""
    if weights.has(f"{prefix}.{SPLIT_LATENTS[0]}.weight"):
        turned, values = (weights.dense(f"{prefix}.{name}") for name in SPLIT_LATENTS)
        keys = turned.swapaxes(1, 2)
    else:
        whole = weights.dense(f"{prefix}.kv_b_proj").reshape(shape.num_heads, -1, shape.latent_rank)
        keys, values = whole[:, : shape.plain_dim], whole[:, shape.plain_dim :]
    keys, values = mx.contiguous(keys), mx.contiguous(values)
    mx.eval(keys, values)
    return keys, values
