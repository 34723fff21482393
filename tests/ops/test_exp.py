"""The exponential of prompts on a CPU under Linux, and what is built on it, against plain definitions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny

from tinyllm._mx import mx
from tinyllm.model.load import load_model
from tinyllm.ops.activation import silu
from tinyllm.ops.attention import Mask, attention_polynomial, attention_reference, causal_mask
from tinyllm.ops.exp import LEAST_SIZE, polynomial_exp
from tinyllm.ops.features import ModelFeatures


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.array([0, seed], dtype=mx.uint32))


def test_its_relative_error_is_what_it_says_over_the_whole_range() -> None:
    x = np.linspace(-86, 87, 400_001).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    error = np.abs(np.array(polynomial_exp(mx.array(x))) / exact - 1)
    assert (error < 2e-7 * (1 + np.abs(x))).all()


@pytest.mark.parametrize("x", [-np.inf, -3e38, -1e4, 1e4, np.inf])
def test_out_of_range_it_is_held_and_stays_finite(x: float) -> None:
    value = polynomial_exp(mx.array([x], dtype=mx.float32)).item()
    assert (value < 1e-37) if x < 0 else (1e37 < value < np.inf)


def test_nan_stays_nan() -> None:
    assert np.isnan(polynomial_exp(mx.array([np.nan], dtype=mx.float32)).item())


def test_silu_equals_its_definition_where_it_is_steep_and_where_it_is_flat() -> None:
    x = mx.concatenate([normal(LEAST_SIZE) * 10, mx.array([-1e4, -100.0, 0.0, 100.0, 1e4])])
    assert mx.allclose(silu(x, polynomial=True), silu(x), rtol=2e-5, atol=1e-6).item()


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("mask", ["causal", "window", "additive", None])
def test_attention_equals_the_reference(heads: tuple[int, int], mask: str | None) -> None:
    q, k, v = normal(2, heads[0], 30, 16), normal(2, heads[1], 50, 16, seed=1), normal(2, heads[1], 50, 16, seed=2)
    masks: dict[str | None, Mask] = {
        "causal": "causal",
        "window": causal_mask(30, 50, 7),
        "additive": normal(30, 50, seed=3) * 4,
        None: None,
    }
    ways = [way(q, k, v, scale=0.4, mask=masks[mask]) for way in (attention_polynomial, attention_reference)]
    assert mx.allclose(*ways, rtol=1e-5, atol=2e-6).item()


def test_a_prompt_has_the_same_logits_with_it_and_without(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path, config_overrides={"intermediate_size": 256})
    prompt = mx.array([[40 + i % 90 for i in range(200)]])  # long enough for both of its uses
    with_it, without = (load_model(folder, replace(ModelFeatures(), polynomial_exp=use)) for use in (True, False))
    logits = without(prompt)
    assert mx.abs(with_it(prompt) - logits).max().item() < 1e-4 * mx.std(logits).item()
    assert not mx.array_equal(with_it(prompt), logits).item(), "it was used"
