"""Self-attention of heads in groups, each token's keys and values in a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.config.layers import AttentionConfig, LatentAttentionConfig, QkNorm, QueryScaling
from tinyllm.errors import ConfigError
from tinyllm.kv.cache import LayerCache, Mask
from tinyllm.kv.full import TinyKvFullCache
from tinyllm.model.linear import Linear, Projections
from tinyllm.model.norm import make_norm, read_weight
from tinyllm.ops.attention import AttentionSpec
from tinyllm.ops.features import ModelFeatures
from tinyllm.ops.norm import layer_norm, rms_norm
from tinyllm.ops.position_bias import PositionBias
from tinyllm.ops.rope import Offset, Positions, Rope


class Attention:
    """The attention of the layer `prefix` ("model.layers.0"): grouped queries, keys and values in a cache."""

    def __init__(self, prefix: str, config: Config, weights: WeightStore, features: ModelFeatures) -> None:
        shape = config.layer_at(prefix).attention
        if not isinstance(shape, AttentionConfig):
            raise ConfigError(f"{prefix} has no attention of this kind, but {type(shape).__name__}")
        prefix = f"{prefix}.self_attn"
        self._heads, self._head_dim = shape.num_heads, shape.head_dim
        parts = shape.projections
        self._project = Projections(tuple(f"{prefix}.{part}_proj" for part in parts), weights, features)
        self._has_keys, self._has_values = "k" in parts, "v" in parts
        qk_heads = shape.num_heads + shape.num_kv_heads * self._has_keys
        self._ends = [qk_heads + shape.num_kv_heads * i for i in range(self._has_values + shape.gate)]
        self._output = Linear((f"{prefix}.o_proj",), weights, features)
        self._clip = shape.clip
        self._rope = make_rope(shape, features)
        self._query_scaling = shape.query_scaling
        self._norm = None if shape.qk_norm is None else make_qk_norm(prefix, shape, shape.qk_norm, weights, features)
        self._normed_last = shape.qk_norm is not None and shape.qk_norm.after_rope
        over = shape.value_norm
        self._value_norm = None if over is None else make_norm(f"{prefix}.v_norm", over, weights, features)
        sinks = weights.tensor(f"{prefix}.sinks") if shape.sinks else None
        self._spec = make_spec(shape, features, sinks)

    def __call__(
        self,
        x: mx.array,
        offset: Offset,
        cache: LayerCache | None = None,
        mask: Mask = None,
    ) -> mx.array:
        """Map x (batch, seq, hidden), whose rows begin at `offset`, to the same shape, appending to `cache`.

        Attention is causal, and limited to the layer's window, unless `mask` is an array.
        """
        positions = Positions.of(offset, x.shape[1])
        qk, *others = mx.split(by_heads(self._project(x), self._head_dim), self._ends, axis=1)
        v = self._values(qk, others)
        if self._norm is not None and not self._normed_last:
            qk = self._norm(qk)
        if self._clip is not None:
            qk = mx.clip(qk, -self._clip, self._clip)
        if self._rope is not None:
            qk = self._rope(qk, positions)
        if self._norm is not None and self._normed_last:
            qk = self._norm(qk)
        q, k = mx.split(qk, [self._heads], axis=1) if self._has_keys else (qk, None)
        if self._query_scaling is not None:
            q = scaled_queries(q, positions, self._query_scaling)
        attended = (cache or TinyKvFullCache()).attend(q, k, v, self._spec, own_mask(mask))
        if others:  # a gate
            attended = attended * mx.sigmoid(others[0])
        return self._output(side_by_side(attended))

    def _values(self, qk: mx.array, others: list[mx.array]) -> mx.array | None:
        """Return the values (batch, kv_heads, seq, head_dim): the first of the `others`, or the keys, or none."""
        if not self._has_keys:
            return None
        v = others.pop(0) if self._has_values else qk[:, self._heads :]
        if self._clip is not None:
            v = mx.clip(v, -self._clip, self._clip)
        return v if self._value_norm is None else self._value_norm(v)


def own_mask(mask: Mask) -> mx.array | None:
    """Return the mask that takes the place of the causal one. Raises ValueError for another name."""
    if isinstance(mask, str):
        if mask != "causal":
            raise ValueError(f'a mask is None, "causal" or an array, not {mask!r}')
        return None
    return mask


def by_heads(x: mx.array, head_dim: int) -> mx.array:
    """Split x (batch, seq, heads * head_dim) into (batch, heads, seq, head_dim)."""
    batch, seq, _ = x.shape
    if seq == 1:  # the same order of numbers: a decode step has one operation less to build
        return x.reshape(batch, -1, 1, head_dim)
    return x.reshape(batch, seq, -1, head_dim).swapaxes(1, 2)


def side_by_side(heads: mx.array) -> mx.array:
    """Join heads (batch, heads, seq, head_dim) to (batch, seq, heads * head_dim)."""
    batch, _, seq, _ = heads.shape
    return (heads if seq == 1 else heads.swapaxes(1, 2)).reshape(batch, seq, -1)


def make_rope(shape: AttentionConfig | LatentAttentionConfig, features: ModelFeatures) -> Rope | None:
    """Return the rotation of a layer, if it has one."""
    if shape.rope is None:
        return None
    return Rope(shape.rope, fused=features.fused_rope and not features.rope_tables)


def make_spec(
    shape: AttentionConfig | LatentAttentionConfig, features: ModelFeatures, sinks: mx.array | None = None
) -> AttentionSpec:
    """Return what a layer asks of its cache."""
    spec = AttentionSpec(
        scale=shape.scale,
        reach=shape.reach,
        fused=features.fused_attention,
        polynomial_exp=bool(features.polynomial_exp),
        fused_exp=bool(features.fused_activation),
        paged_products=bool(features.paged_products),
        packed_rows=features.packed_attention or 0,
    )
    if isinstance(shape, LatentAttentionConfig):
        return replace(spec, latent=shape.latent_rank)
    bias = None if shape.bias is None else PositionBias(shape.bias, shape.num_heads)
    return replace(spec, softcap=shape.softcap, bias=bias, sinks=sinks)


def scaled_queries(q: mx.array, positions: Positions, scaling: QueryScaling) -> mx.array:
    """Multiply q (batch, heads, seq, head_dim), at `positions`, as `QueryScaling` says."""
    shifted = positions.array + scaling.shift
    factor = 1 + scaling.beta * mx.log1p((shifted // scaling.every).astype(mx.float32))
    return (q * factor[:, None, :, None]).astype(q.dtype)


class HeadNorm:
    """The norms of q and of k as one over the heads of both: each head has its weight (and bias) in a table."""

    def __init__(
        self, prefix: str, shape: AttentionConfig, norm: QkNorm, weights: WeightStore, features: ModelFeatures
    ) -> None:
        counts = [("q_norm", shape.num_heads), ("k_norm", shape.num_kv_heads)][: 1 if shape.source is not None else 2]

        def table(read: Callable[[str], mx.array | None]) -> mx.array | None:
            """Return (heads + kv_heads, 1, head_dim), of q and then of k."""
            found = [(read(f"{prefix}.{module}"), heads) for module, heads in counts]
            rows = [mx.broadcast_to(array, (heads, shape.head_dim)) for array, heads in found if array is not None]
            return mx.concatenate(rows)[:, None] if rows else None

        self._weight = table(lambda module: read_weight(module, norm.norm, weights))
        self._bias = table(lambda module: weights.tensor(f"{module}.bias") if norm.norm.bias else None)
        mx.eval(self._weight, self._bias)
        self._layer_norm = norm.norm.kind == "layer"
        self._eps = norm.norm.eps
        self._fused = features.fused_norm

    def __call__(self, x: mx.array) -> mx.array:
        """Map x (batch, heads + kv_heads, seq, head_dim) to the same shape."""
        if self._layer_norm:
            normal = layer_norm(x, None, None, self._eps, fused=self._fused)
        else:
            normal = rms_norm(x, None, self._eps, fused=self._fused)
        if self._weight is not None:
            normal = normal * self._weight
        return (normal if self._bias is None else normal + self._bias).astype(x.dtype)


class WholeNorm:
    """The norms of q and of k over the widths of all of their heads (OLMo 2)."""

    def __init__(
        self, prefix: str, shape: AttentionConfig, norm: QkNorm, weights: WeightStore, features: ModelFeatures
    ) -> None:
        parts = "q" if shape.source is not None else "qk"
        self._norms = [make_norm(f"{prefix}.{part}_norm", norm.norm, weights, features) for part in parts]
        self._heads = shape.num_heads

    def __call__(self, x: mx.array) -> mx.array:
        """Map x (batch, heads + kv_heads, seq, head_dim) to the same shape."""
        parts = mx.split(x, [self._heads][: len(self._norms) - 1], axis=1)
        normal = [norm(side_by_side(part)) for norm, part in zip(self._norms, parts, strict=True)]
        return mx.concatenate([by_heads(part, x.shape[3]) for part in normal], axis=1)


def make_qk_norm(
    prefix: str, shape: AttentionConfig, norm: QkNorm, weights: WeightStore, features: ModelFeatures
) -> HeadNorm | WholeNorm:
    """Return the norms of q and k."""
    return (WholeNorm if norm.over == "whole" else HeadNorm)(prefix, shape, norm, weights, features)
