"""Which experts a token goes to, and with what weight."""

from __future__ import annotations

import math

from tinyllm._mx import mx
from tinyllm.config.layers import RouterConfig


def route(logits: mx.array, config: RouterConfig, bias: mx.array | None = None) -> tuple[mx.array, mx.array]:
    """Choose experts by logits (tokens, experts): their numbers and weights, (tokens, top_k) each, in no order.

    `bias` (experts,) is added to the scores for the choice alone. Computed in float32; see `RouterConfig`.
    """
    logits = logits.astype(mx.float32)
    experts, weights = (_mixed if config.scoring == "mixed" else _best)(logits, config, bias)
    if config.renormalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + config.epsilon)
    return experts, weights * config.scale


def _best(logits: mx.array, config: RouterConfig, bias: mx.array | None) -> tuple[mx.array, mx.array]:
    """Choose the best experts, of the best groups."""
    match config.scoring:
        case "softmax":
            scores = mx.softmax(logits, axis=-1)
        case "sigmoid":
            scores = mx.sigmoid(logits)
        case _:
            scores = logits
    preferred = scores if bias is None else scores + bias.astype(mx.float32)
    if config.groups > 1:
        preferred = _of_best_groups(preferred, config)
    elif bias is None:
        preferred = logits  # of which the largest do not all have a sigmoid of 1
    experts = largest(preferred, config.top_k)
    weights = mx.take_along_axis(scores, experts, axis=-1)
    return experts, mx.softmax(weights, axis=-1) if config.scoring == "chosen" else weights


def _mixed(logits: mx.array, config: RouterConfig, bias: mx.array | None) -> tuple[mx.array, mx.array]:
    """Choose the best expert, and then the best of the others, as SparseMixer does (arXiv 2409.12136).

    Each has the softmax over itself and those not chosen before whose logit is within 2 `jitter` of its own, as a
    part of the larger magnitude.
    """
    experts, weights, left = [], [], logits
    for _ in range(config.top_k):
        most = left.max(axis=-1, keepdims=True)
        far = (most - logits) / mx.maximum(mx.abs(logits), most) > 2 * config.jitter
        experts.append(left.argmax(axis=-1, keepdims=True))
        weights.append(1 / mx.where(far, 0, mx.exp(left - most)).sum(axis=-1, keepdims=True))
        left = mx.where(mx.arange(left.shape[-1]) == experts[-1], -math.inf, left)
    return mx.concatenate(experts, axis=-1), mx.concatenate(weights, axis=-1)


def _of_best_groups(scores: mx.array, config: RouterConfig) -> mx.array:
    """Put all scores (tokens, experts) but those of the best groups below all others."""
    by_group = scores.reshape(scores.shape[0], config.groups, -1)
    standing = mx.topk(by_group, 1 if config.group_score == "best" else 2, axis=-1).sum(axis=-1)
    chosen = largest(standing, config.top_groups)
    allowed = (mx.arange(config.groups) == chosen[..., None]).any(axis=1)
    return mx.where(allowed[..., None], by_group, mx.finfo(mx.float32).min).reshape(scores.shape)


def largest(scores: mx.array, count: int) -> mx.array:
    """Return the indices of the `count` largest along the last axis, in no order."""
    if count == scores.shape[-1]:
        return mx.broadcast_to(mx.arange(count, dtype=mx.uint32), scores.shape)
    return mx.argpartition(-scores, count - 1, axis=-1)[..., :count]
