"""Grouped-query self-attention with rotary positions."""

from __future__ import annotations

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.kv.cache import LayerCache
from tinyllm.kv.full import TinyKvFullCache
from tinyllm.model.linear import Linear, Projections
from tinyllm.ops.attention import AttentionSpec
from tinyllm.ops.features import ModelFeatures
from tinyllm.ops.norm import rms_norm
from tinyllm.ops.rope import Offset, Rope


class Attention:
    """The attention of the layer that `prefix` ("model.layers.0.self_attn") stands in."""

    def __init__(self, prefix: str, config: Config, weights: WeightStore, features: ModelFeatures) -> None:
        layer = config.layer_at(prefix)
        shape = layer.attention
        self._heads, self._kv_heads, self._head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self._qkv = Projections(tuple(f"{prefix}.{part}_proj" for part in "qkv"), weights, features)
        self._output = Linear((f"{prefix}.o_proj",), weights, features)
        self._rope = Rope(shape.rope, fused=features.fused_rope and not features.rope_tables)
        self._spec = AttentionSpec(
            scale=shape.scale,
            window=shape.window,
            fused=features.fused_attention,
            polynomial_exp=bool(features.polynomial_exp),
            fused_exp=bool(features.fused_activation),
        )
        self._norm = HeadNorm(prefix, config, weights, features) if shape.qk_norm else None

    def __call__(
        self,
        x: mx.array,
        offset: Offset = 0,
        cache: LayerCache | None = None,
        mask: mx.array | None = None,
    ) -> mx.array:
        """Map x (batch, seq, hidden), which starts at position `offset`, to the same shape, through `cache`.

        Attention is causal (and windowed where the layer is) unless `mask`, as `cache.attend` takes it, is given.
        """
        batch, seq, _ = x.shape
        heads = self._qkv(x).reshape(batch, seq, -1, self._head_dim)
        qk, v = mx.split(heads, [self._heads + self._kv_heads], axis=2)
        if self._norm is not None:
            qk = self._norm(qk)
        qk = self._rope(qk.swapaxes(1, 2), offset)
        q, k = mx.split(qk, [self._heads], axis=1)
        attended = (cache or TinyKvFullCache()).attend(q, k, v.swapaxes(1, 2), self._spec, mask)
        return self._output(attended.swapaxes(1, 2).reshape(batch, seq, -1))


class HeadNorm:
    """The norms of q and of k (Qwen 3), as one over the heads of both: each head has its weight in a table."""

    def __init__(self, prefix: str, config: Config, weights: WeightStore, features: ModelFeatures) -> None:
        layer = config.layer_at(prefix)
        counts = {"q_norm": layer.attention.num_heads, "k_norm": layer.attention.num_kv_heads}
        self._weight = mx.concatenate(
            [mx.repeat(weights.tensor(f"{prefix}.{norm}.weight")[None], n, axis=0) for norm, n in counts.items()]
        )
        mx.eval(self._weight)
        self._eps = layer.norm_eps
        self._fused = features.fused_norm

    def __call__(self, x: mx.array) -> mx.array:
        """Map x (batch, seq, heads + kv_heads, head_dim) to the same shape."""
        return rms_norm(x, None, self._eps, fused=self._fused) * self._weight
