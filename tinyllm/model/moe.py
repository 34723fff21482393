"""Mixtures of experts (arXiv 1701.06538): each token goes through few of many feed-forward networks."""

from __future__ import annotations

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.config.layers import DualConfig, MoeConfig
from tinyllm.config.names import module_of
from tinyllm.config.tensors import DUAL_NORMS
from tinyllm.errors import ConfigError
from tinyllm.model.linear import Linear, expert_linear, linear, linear_of
from tinyllm.model.mlp import MLP, activation_of
from tinyllm.model.norm import make_norm
from tinyllm.ops.features import ModelFeatures
from tinyllm.ops.routing import route

_WORTH_SORTING = 64  # pairs of a token and an expert


class Moe:
    """The experts of the layer, or module, `prefix`, and what they share."""

    def __init__(
        self,
        prefix: str,
        config: Config,
        weights: WeightStore,
        features: ModelFeatures,
        shape: MoeConfig | None = None,
    ) -> None:
        """Read the weights; `shape` is the layer's own where none is given."""
        found = shape or config.layer_at(prefix).feed_forward
        if not isinstance(found, MoeConfig):
            raise ConfigError(f"{prefix} has no experts")
        shape, prefix = found, module_of(prefix, "mlp")
        self._router = shape.router
        self._gate = Linear((f"{prefix}.gate",), weights, features)
        self._bias = None
        if shape.router.selection_bias:
            self._bias = weights.tensor(f"{prefix}.gate.e_score_correction_bias", as_stored=True)
        scaled = shape.router.expert_scale
        self._expert_scale = weights.tensor(f"{prefix}.gate.per_expert_scale") if scaled else None
        self._experts = Experts(f"{prefix}.experts", shape, weights, features)
        self._shared = None
        self._shared_gate = None
        if shape.shared is not None:
            self._shared = MLP(f"{prefix}.shared_expert", config, weights, features, shape.shared)
            if shape.shared_gate:
                self._shared_gate = Linear((f"{prefix}.shared_expert_gate",), weights, features)

    def __call__(self, x: mx.array, routed: mx.array | None = None) -> mx.array:
        """Map x (..., hidden) to the same shape; the router reads `routed` instead of x if it is given."""
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        routed = x if routed is None else routed.reshape(x.shape)
        # A bias that balances the experts decides between scores that are closer than half precision tells apart.
        logits = self._gate(routed if self._bias is None else routed.astype(mx.float32))
        experts, scores = route(logits, self._router, self._bias)
        if self._expert_scale is not None:
            scores = scores * self._expert_scale[experts]
        y = self._experts(x, experts, scores.astype(x.dtype))
        if self._shared is not None:
            shared = self._shared(x)
            y = y + (shared if self._shared_gate is None else shared * mx.sigmoid(self._shared_gate(x)))
        return y.reshape(shape)


class DenseAndExperts:
    """A dense network and experts, side by side, of the layer that `prefix` ("model.layers.0") stands for."""

    def __init__(self, prefix: str, config: Config, weights: WeightStore, features: ModelFeatures) -> None:
        layer = config.layer_at(prefix)
        if not isinstance(layer.feed_forward, DualConfig):
            raise ConfigError(f"{prefix} has no dense network beside experts")
        shape = layer.feed_forward
        self._dense = MLP(f"{prefix}.mlp", config, weights, features, shape.dense)
        self._experts = Moe(f"{prefix}.moe", config, weights, features, shape.experts)
        norms = (make_norm(f"{prefix}.{name}", layer.norm, weights, features) for name in DUAL_NORMS)
        self._before_dense, self._after_dense, self._routed, self._before_experts, self._after_experts = norms
        self._scale = config.hidden_size**-0.5

    def __call__(self, x: mx.array) -> mx.array:
        """Map x (..., hidden), which is not normalised yet, to the same shape."""
        dense = self._after_dense(self._dense(self._before_dense(x)))
        return dense + self._after_experts(self._experts(self._before_experts(x), self._routed(x) * self._scale))


class Experts:
    """The weights of all experts of a layer, stacked."""

    def __init__(self, prefix: str, shape: MoeConfig, weights: WeightStore, features: ModelFeatures) -> None:
        parts = tuple(f"{prefix}.{part}_proj" for part in (("gate", "up") if shape.expert.gated else ("up",)))
        joined = features.fused_projections and weights.joinable(*parts)
        self._up = [weights.linear(*group) for group in ([parts] if joined else [(part,) for part in parts])]
        self._down = weights.linear(f"{prefix}.down_proj")
        self._split = len(parts)
        self._count = shape.router.num_experts
        self._scales_input = shape.router.scales_input
        self._activate = activation_of(shape.expert, features)
        self._gathered = features.gathered_experts
        self._fused = features.quantized_matmul

    def __call__(self, x: mx.array, experts: mx.array, scores: mx.array) -> mx.array:
        """Send x (tokens, hidden) through each token's `experts`, weighed by `scores`, (tokens, top_k) both."""
        return (self._together if self._gathered else self._one_by_one)(x, experts, scores)

    def _together(self, x: mx.array, experts: mx.array, scores: mx.array) -> mx.array:
        """Multiply all (token, expert) pairs at once; many are sorted, so that each expert's rows are one product."""
        tokens, top_k = experts.shape
        numbers, weights = experts.flatten(), scores.flatten()[:, None]
        order = mx.argsort(numbers) if numbers.size >= _WORTH_SORTING else None
        if order is None:
            rows = mx.repeat(x, top_k, axis=0)
        else:
            rows, numbers, weights = x[order // top_k], numbers[order], weights[order]
        if self._scales_input:
            rows = rows * weights
        in_order = order is not None
        up = [expert_linear(rows, weight, numbers, in_order=in_order) for weight in self._up]
        y = expert_linear(self._activated(up), self._down, numbers, in_order=in_order)
        if not self._scales_input:
            y = y * weights
        if order is not None:
            y = y[mx.argsort(order)]
        return y.reshape(tokens, top_k, -1).sum(axis=1)

    def _one_by_one(self, x: mx.array, experts: mx.array, scores: mx.array) -> mx.array:
        """Send all tokens through each expert, with a weight of zero where it is none of theirs."""
        total = mx.zeros_like(x)
        for expert in range(self._count):
            score = mx.where(experts == expert, scores, 0).sum(axis=-1, keepdims=True)
            rows = x * score if self._scales_input else x
            y = self._through(rows, expert)
            total = total + (mx.where(score != 0, y, 0) if self._scales_input else y * score)
        return total

    def _through(self, x: mx.array, expert: int) -> mx.array:
        up = [linear(x, linear_of(weight, expert), fused=self._fused) for weight in self._up]
        return linear(self._activated(up), linear_of(self._down, expert), fused=self._fused)

    def _activated(self, up: list[mx.array]) -> mx.array:
        parts = up if len(up) == self._split else mx.split(up[0], self._split, axis=-1)
        return self._activate(*parts)
