"""Routers choose and weigh as a loop over tokens does that follows the definitions one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tinyllm._mx import mx
from tinyllm.config.layers import RouterConfig
from tinyllm.ops.routing import largest, route

EXPERTS, TOKENS = 8, 40
PLAIN = RouterConfig(num_experts=EXPERTS, top_k=3)
BALANCED = replace(PLAIN, scoring="sigmoid", selection_bias=True, groups=4, top_groups=2, group_score="two best")
ROUTERS = {
    "softmax": PLAIN,
    "renormalised": replace(PLAIN, renormalise=True, scale=1.7),
    "softmax of the chosen": replace(PLAIN, scoring="chosen"),
    "sigmoid": replace(PLAIN, scoring="sigmoid"),
    "all experts": replace(PLAIN, top_k=EXPERTS),
    "balanced": BALANCED,
    "balanced, renormalised": replace(BALANCED, renormalise=True, epsilon=0.1, scale=0.5),
    "best of a group": replace(BALANCED, group_score="best", selection_bias=False, scoring="softmax"),
    "mixed": RouterConfig(EXPERTS, 2, scoring="mixed", jitter=0.25),
}


def softmax(x: np.ndarray) -> np.ndarray:
    exponentials = np.exp(x - x.max())
    return exponentials / exponentials.sum()


def by_hand(logits: np.ndarray, router: RouterConfig, bias: np.ndarray) -> dict[int, float]:
    """Return expert -> weight of one token."""
    if router.scoring == "mixed":
        return mixed_by_hand(logits, router.jitter)
    scores = {"softmax": softmax(logits), "sigmoid": 1 / (1 + np.exp(-logits)), "chosen": logits}[router.scoring]
    preferred = scores + (bias if router.selection_bias else 0)
    members = np.split(np.arange(len(logits)), router.groups)
    count = 1 if router.group_score == "best" else 2
    groups = sorted(members, key=lambda group: -np.sort(preferred[group])[-count:].sum())[: router.top_groups]
    allowed = [i for group in groups for i in group]
    chosen = sorted(allowed, key=lambda i: -preferred[i])[: router.top_k]
    weights = scores[chosen]
    if router.scoring == "chosen":
        weights = softmax(weights)
    if router.renormalise:
        weights = weights / (weights.sum() + router.epsilon)
    return dict(zip(chosen, weights * router.scale, strict=True))


def mixed_by_hand(logits: np.ndarray, jitter: float) -> dict[int, float]:
    weights: dict[int, float] = {}
    while len(weights) < 2:
        left = [i for i in range(len(logits)) if i not in weights]
        best = max(left, key=lambda i: logits[i])
        near = [i for i in left if (logits[best] - logits[i]) / max(abs(logits[i]), logits[best]) <= 2 * jitter]
        weights[best] = np.exp(logits[best]) / sum(np.exp(logits[i]) for i in near)
    return weights


@pytest.mark.parametrize("name", ROUTERS)
def test_experts_and_weights(name: str) -> None:
    random = np.random.default_rng(3)
    logits = random.standard_normal((TOKENS, EXPERTS))
    bias = random.standard_normal(EXPERTS) / 3
    router = ROUTERS[name]
    given = mx.array(bias, dtype=mx.float32) if router.selection_bias else None
    experts, weights = route(mx.array(logits, dtype=mx.float32), router, given)
    assert experts.shape == weights.shape == (TOKENS, router.top_k)
    for token in range(TOKENS):
        wanted = by_hand(logits[token], router, bias)
        found = dict(zip(np.array(experts[token]).tolist(), np.array(weights[token]).tolist(), strict=True))
        assert found.keys() == wanted.keys()
        assert found == pytest.approx(wanted, rel=1e-5)


def test_logits_whose_sigmoid_is_1_are_told_apart() -> None:
    experts, weights = route(mx.array([[30.0, 50.0, 40.0, 20.0]]), RouterConfig(4, 1, scoring="sigmoid"))
    assert (experts.item(), weights.item()) == (1, 1.0)


def test_half_precision_logits_are_weighed_in_float32() -> None:
    logits = mx.random.normal((5, EXPERTS), key=mx.random.key(1)).astype(mx.bfloat16)
    _, weights = route(logits, PLAIN)
    assert weights.dtype == mx.float32


def test_largest_of_as_many_is_all() -> None:
    assert largest(mx.array([[3.0, 1.0, 2.0]]), 3).tolist() == [[0, 1, 2]]
    assert sorted(largest(mx.array([[3.0, 1.0, 2.0, 5.0]]), 2)[0].tolist()) == [0, 3]
