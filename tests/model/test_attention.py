"""Attention with q and k side by side: one rotation, one norm, the same logits as apart; and what is shared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from golden_cases import difference, rounding

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.config.layers import AttentionConfig
from tinyllm.model.attention import Attention, HeadNorm
from tinyllm.model.linear import Projections
from tinyllm.model.load import load_model
from tinyllm.ops.features import ModelFeatures
from tinyllm.ops.norm import rms_norm

LAYER = "model.layers.0"
ATTENTION = f"{LAYER}.self_attn"
QWEN3 = {"model_type": "qwen3", "head_dim": 8}
PLAIN_CPU = replace(ModelFeatures(), rope_tables=True, polynomial_exp=True)  # what is chosen for float32 under Linux


def stored(folder: Path, overrides: dict[str, Any]) -> tuple[Config, WeightStore]:
    path = tiny.write_checkpoint(folder, config_overrides=overrides)
    return Config.from_json_file(path), WeightStore.from_path(path).cast(mx.float32)


def close(a: mx.array, b: mx.array, tolerance: float = 1e-5) -> bool:
    return a.shape == b.shape and bool(mx.allclose(a, b, rtol=tolerance, atol=tolerance).item())


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape)))


@pytest.mark.parametrize("fused", [True, False])
def test_the_norm_of_all_heads_is_that_of_q_and_that_of_k(tmp_path: Path, fused: bool) -> None:
    config, weights = stored(tmp_path, QWEN3)
    shape, eps = config.layers[0].attention, config.layers[0].norm.eps
    assert isinstance(shape, AttentionConfig) and shape.qk_norm is not None
    x = normal(2, shape.num_heads + shape.num_kv_heads, 3, 8)
    q, k = mx.split(x, [shape.num_heads], axis=1)
    apart = [
        rms_norm(heads, weights.tensor(f"{ATTENTION}.{name}.weight"), eps, fused=fused)
        for heads, name in ((q, "q_norm"), (k, "k_norm"))
    ]
    together = HeadNorm(ATTENTION, shape, shape.qk_norm, weights, replace(ModelFeatures(), fused_norm=fused))(x)
    assert close(together, mx.concatenate(apart, axis=1), 1e-6)


def test_projections_are_the_same_as_one_product_and_one_after_another(tmp_path: Path) -> None:
    _, weights = stored(tmp_path, {"attention_bias": True})
    modules = tuple(f"{ATTENTION}.{part}_proj" for part in "qkv")
    one, each = (
        Projections(modules, weights, replace(ModelFeatures(), fused_projections=fused)) for fused in (True, False)
    )
    x = normal(2, 5, 32)
    assert close(one(x), each(x))


@pytest.mark.parametrize("overrides", [{}, QWEN3, {"partial_rotary_factor": 0.5}], ids=["llama", "normed", "partial"])
@pytest.mark.parametrize("offset", [0, 7, mx.array([7, 40])], ids=["start", "later", "rows"])
def test_every_way_to_compute_attention_gives_what_the_reference_gives(
    tmp_path: Path, overrides: dict[str, Any], offset: int | mx.array
) -> None:
    """Two rows of five tokens together, and each row alone."""
    config, weights = stored(tmp_path, overrides)
    x = normal(2, 5, 32)
    reference = Attention(LAYER, config, weights, ModelFeatures.reference())(x, offset)
    for features in (ModelFeatures(), PLAIN_CPU):
        attend = Attention(LAYER, config, weights, features)
        assert close(attend(x, offset), reference)
        for n in range(2):
            own = offset if isinstance(offset, int) else offset[n : n + 1]
            assert close(attend(x[n : n + 1], own), reference[n : n + 1])


@pytest.mark.parametrize("overrides", [{}, QWEN3], ids=["llama", "normed"])
def test_what_a_cpu_runs_has_the_logits_of_the_reference(tmp_path: Path, overrides: dict[str, Any]) -> None:
    folder = tiny.write_checkpoint(tmp_path, config_overrides=overrides)
    ids = mx.array([[3 + i * 7 % 250 for i in range(150)]])
    reference = load_model(folder, ModelFeatures.reference(), dtype=mx.float32)
    logits = load_model(folder, PLAIN_CPU, dtype=mx.float32)(ids)[0]
    assert difference(logits, reference(ids)[0]) < rounding(reference.config)
