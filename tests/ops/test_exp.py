"""The exponential for a CPU under Linux, and what is built on it, against plain definitions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from golden_cases import difference, rounding

from tinyllm._mx import mx
from tinyllm.config.reach import Window
from tinyllm.model.load import load_model
from tinyllm.ops.activation import swiglu
from tinyllm.ops.attention import _BLOCK, AttentionSpec, Mask, attention_polynomial, attention_reference, causal_mask
from tinyllm.ops.exp import LEAST_FUSED_SIZE, LEAST_SIZE, exp, polynomial_exp
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


@pytest.mark.parametrize("size", [1, 1000, LEAST_FUSED_SIZE, LEAST_SIZE])
def test_either_way_is_the_exponential(size: int) -> None:
    x = np.linspace(-80, 80, size).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    for fused in (False, True):
        assert (np.abs(np.array(exp(mx.array(x), fused=fused)) / exact - 1) < 2e-7 * (1 + np.abs(x))).all()


@pytest.mark.parametrize("size", [100, LEAST_FUSED_SIZE, LEAST_SIZE])
def test_swiglu_equals_its_definition_where_it_is_steep_and_where_it_is_flat(size: int) -> None:
    gate = mx.concatenate([normal(size) * 10, mx.array([-1e4, -100.0, 0.0, 100.0, 1e4])])
    up = normal(size + 5, seed=1)
    for fused in (False, True):
        ours = swiglu(gate, up, polynomial_exp=True, fused=fused)
        assert mx.allclose(ours, swiglu(gate, up), rtol=2e-5, atol=1e-6).item()


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("mask", ["causal", "window", "additive", None])
def test_attention_equals_the_reference(heads: tuple[int, int], mask: str | None) -> None:
    q, k, v = normal(2, heads[0], 30, 16), normal(2, heads[1], 50, 16, seed=1), normal(2, heads[1], 50, 16, seed=2)
    masks: dict[str | None, Mask] = {
        "causal": "causal",
        "window": causal_mask(30, 50, Window(7)),
        "additive": normal(30, 50, seed=3) * 4,
        None: None,
    }
    ways = [way(q, k, v, AttentionSpec(0.4), masks[mask]) for way in (attention_polynomial, attention_reference)]
    assert mx.allclose(*ways, rtol=1e-5, atol=2e-6).item()


@pytest.mark.parametrize("seq", [_BLOCK, _BLOCK + 1, 2 * _BLOCK, 2 * _BLOCK + 40])
@pytest.mark.parametrize("past", [0, 70])
def test_blocks_of_causal_queries_see_what_the_whole_sees(seq: int, past: int) -> None:
    q, k, v = normal(1, 4, seq, 8), normal(1, 2, past + seq, 8, seed=1), normal(1, 2, past + seq, 8, seed=2)
    ways = [way(q, k, v, AttentionSpec(0.4), "causal") for way in (attention_polynomial, attention_reference)]
    assert mx.allclose(*ways, rtol=1e-5, atol=2e-6).item()


def test_one_query_with_a_mask_a_row_sees_what_its_row_shows() -> None:
    q, k, v = normal(3, 6, 1, 16), normal(3, 2, 40, 16, seed=1), normal(3, 2, 40, 16, seed=2)
    lengths = [1, 17, 40]
    mask = (mx.arange(40) < mx.array(lengths)[:, None])[:, None, None]
    rows = [attention_reference(q[i : i + 1], k[i : i + 1, :, :n], v[i : i + 1, :, :n], AttentionSpec(0.3), None)
            for i, n in enumerate(lengths)]  # fmt: skip
    masked = attention_polynomial(q, k, v, AttentionSpec(0.3), mask)
    assert mx.allclose(masked, mx.concatenate(rows), rtol=1e-5, atol=2e-6).item()


def test_a_prompt_has_the_same_logits_with_it_and_without(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path, config_overrides={"intermediate_size": 256})
    prompt = mx.array([[40 + i % 90 for i in range(200)]])  # long enough for a polynomial, and for two blocks
    with_it, without = (load_model(folder, replace(ModelFeatures(), polynomial_exp=use)) for use in (True, False))
    logits = without(prompt)
    assert difference(with_it(prompt)[0], logits[0]) < rounding(without.config)
    assert not mx.array_equal(with_it(prompt), logits).item(), "it was used"
