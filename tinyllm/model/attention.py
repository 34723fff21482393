"""Grouped-query self-attention with rotary positions."""

from __future__ import annotations

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.kv.full import TinyKvFullCache
from tinyllm.model.linear import Linear, Projections
from tinyllm.model.norm import RMSNorm
from tinyllm.ops.attention import AttentionSpec
from tinyllm.ops.features import ModelFeatures
from tinyllm.ops.rope import Rope


class Attention:
    """The attention of the layer that `prefix` ("model.layers.0.self_attn") stands in."""

    def __init__(self, prefix: str, config: Config, weights: WeightStore, features: ModelFeatures) -> None:
        layer = config.layer_at(prefix)
        shape = layer.attention
        self._heads, self._kv_heads, self._head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self._qkv = Projections(tuple(f"{prefix}.{part}_proj" for part in "qkv"), weights, features)
        self._output = Linear((f"{prefix}.o_proj",), weights, features)
        self._rope = Rope(shape.rope, fused=features.fused_rope)
        self._spec = AttentionSpec(
            scale=shape.scale,
            window=shape.window,
            fused=features.fused_attention,
            polynomial_exp=bool(features.polynomial_exp),
        )
        self._q_norm = self._k_norm = None
        if shape.qk_norm:
            self._q_norm = RMSNorm(f"{prefix}.q_norm", layer.norm_eps, weights, features)
            self._k_norm = RMSNorm(f"{prefix}.k_norm", layer.norm_eps, weights, features)

    def __call__(
        self,
        x: mx.array,
        offset: int | mx.array = 0,
        cache: TinyKvFullCache | None = None,
        mask: mx.array | None = None,
    ) -> mx.array:
        """Map x (batch, seq, hidden), which starts at position `offset`, to the same shape, through `cache`.

        Attention is causal (and windowed where the layer is) unless `mask`, as `cache.attend` takes it, is given.
        """
        q, k, v = self._qkv(x)
        q, k, v = self._split(q, self._heads), self._split(k, self._kv_heads), self._split(v, self._kv_heads)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q), self._k_norm(k)
        q, k = self._rope(q, offset), self._rope(k, offset)
        attended = (cache or TinyKvFullCache()).attend(q, k, v, self._spec, mask)
        batch, seq, _ = x.shape
        return self._output(attended.swapaxes(1, 2).reshape(batch, seq, -1))

    def _split(self, x: mx.array, heads: int) -> mx.array:
        """Give each head its slice: (batch, seq, heads * head_dim) -> (batch, heads, seq, head_dim)."""
        batch, seq, _ = x.shape
        return x.reshape(batch, seq, heads, self._head_dim).swapaxes(1, 2)
