"""Experts are chosen and weighed as a loop over tokens does it."""

from __future__ import annotations

import numpy as np
import plain
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm._mx import mx
from tinyllm.config.layers import RouterConfig
from tinyllm.ops.routing import largest, route

TOKENS = 5


def loop(logits: np.ndarray, config: RouterConfig, bias: np.ndarray) -> dict[int, float]:
    """Return the experts of one token, and their weights."""
    scores = {
        "softmax": plain.softmax(logits),
        "sigmoid": 1 / (1 + np.exp(-logits)),
        "chosen": logits,
    }[config.scoring]
    preferred = scores + bias
    size = config.num_experts // config.groups
    best_of = 1 if config.group_score == "best" else 2
    standing = [sorted(preferred[g * size : (g + 1) * size])[-best_of:] for g in range(config.groups)]
    groups = sorted(range(config.groups), key=lambda g: -sum(standing[g]))[: config.top_groups]
    allowed = [e for e in range(config.num_experts) if e // size in groups]
    chosen = sorted(allowed, key=lambda e: -preferred[e])[: config.top_k]
    weights = scores[chosen]
    if config.scoring == "chosen":
        weights = plain.softmax(weights)
    if config.renormalise:
        weights = weights / (weights.sum() + config.epsilon)
    return dict(zip(chosen, weights * config.scale, strict=True))


@st.composite
def configs(draw: st.DrawFn) -> RouterConfig:
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    size = draw(st.integers(2, 6))
    top_groups = draw(st.integers(1, groups))
    return RouterConfig(
        num_experts=groups * size,
        top_k=draw(st.integers(1, top_groups * size)),
        scoring=draw(st.sampled_from(["softmax", "sigmoid", "chosen"])),
        renormalise=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        groups=groups,
        top_groups=top_groups,
        group_score=draw(st.sampled_from(["best", "two best"])),
        selection_bias=draw(st.booleans()),
        epsilon=draw(st.sampled_from([0.0, 1e-20, 0.125])),
    )


@given(configs(), st.integers(0, 1000))
def test_experts_and_weights_are_those_of_a_loop(config: RouterConfig, seed: int) -> None:
    random = np.random.default_rng(seed)  # numbers drawn from so many do not tie
    logits = random.normal(size=(TOKENS, config.num_experts)) * 2
    bias = random.normal(size=config.num_experts) if config.selection_bias else np.zeros(config.num_experts)
    experts, weights = route(
        mx.array(logits, dtype=mx.float32),
        config,
        mx.array(bias, dtype=mx.float32) if config.selection_bias else None,
    )
    assert experts.shape == weights.shape == (TOKENS, config.top_k)
    assert weights.dtype == mx.float32
    for row in range(TOKENS):
        expected = loop(logits[row], config, bias)
        got = dict(zip(experts[row].tolist(), weights[row].tolist(), strict=True))
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_selection_bias_chooses_and_does_not_weigh() -> None:
    logits, bias = mx.array([[3.0, 2.0, 1.0, 0.0]]), mx.array([-9.0, 0.0, 0.0, 9.0])
    experts, weights = route(logits, RouterConfig(4, 2, scoring="sigmoid", selection_bias=True), bias)
    assert dict(zip(experts[0].tolist(), weights[0].tolist(), strict=True)) == pytest.approx(
        {3: 0.5, 1: 1 / (1 + np.exp(-2))}
    )


def test_groups_keep_out_the_best_expert_of_a_worse_group() -> None:
    """Of two groups by their two best: one has a single good expert."""
    logits = mx.array([[5.0, -5.0, -5.0, 3.0, 2.9, -5.0]])
    by_two = RouterConfig(6, 2, scoring="chosen", groups=2, top_groups=1, group_score="two best")
    assert sorted(route(logits, by_two)[0][0].tolist()) == [3, 4]
    by_best = RouterConfig(6, 2, scoring="chosen", groups=2, top_groups=1)
    assert 0 in route(logits, by_best)[0][0].tolist()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_precision_is_weighed_in_float32(dtype: mx.Dtype) -> None:
    logits = mx.array([[0.5, 2.0, -1.0, 1.0]], dtype=dtype)
    experts, weights = route(logits, RouterConfig(4, 2, renormalise=True))
    wide_experts, wide = route(logits.astype(mx.float32), RouterConfig(4, 2, renormalise=True))
    assert weights.dtype == mx.float32
    assert mx.array_equal(experts, wide_experts).item() and mx.array_equal(weights, wide).item()


@given(st.integers(1, 9), st.integers(0, 99))
def test_the_largest_are_the_largest(count: int, seed: int) -> None:
    scores = np.random.default_rng(seed).permutation(9).astype(np.float32)[None]
    found = largest(mx.array(scores), count)
    assert sorted(scores[0, found[0].tolist()], reverse=True) == list(range(8, 8 - count, -1))
