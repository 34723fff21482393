"""The fused norms equal their references, and these their definitions."""

from __future__ import annotations

import numpy as np
import plain
import pytest

from tinyllm._mx import mx
from tinyllm.ops.norm import layer_norm, layer_norm_reference, rms_norm, rms_norm_reference


def close(a: mx.array, b: mx.array, tolerance: float) -> bool:
    return a.shape == b.shape and bool(mx.allclose(a, b, rtol=tolerance, atol=tolerance).item())


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(mx.float32, 1e-5), (mx.bfloat16, 2e-2), (mx.float16, 2e-3)], ids=str
)
@pytest.mark.parametrize("shape", [(7,), (1, 1, 64), (2, 5, 48), (3, 2, 4, 8)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
def test_the_fused_norm_equals_its_reference(
    shape: tuple[int, ...], dtype: mx.Dtype, tolerance: float, scale: float
) -> None:
    key = mx.random.key(sum(shape))
    x = (mx.random.normal(shape, key=key) * scale).astype(dtype)
    weight = (1 + mx.random.normal(shape[-1:], key=key) / 5).astype(dtype)
    fused = rms_norm(x, weight, 1e-5)
    reference = rms_norm(x, weight, 1e-5, fused=False)
    assert fused.dtype == reference.dtype == dtype
    assert close(fused, reference, tolerance)


def test_the_reference_gives_vectors_of_unit_root_mean_square() -> None:
    x = mx.random.normal((4, 100), key=mx.random.key(1)) * 7 + 3
    square = mx.mean(rms_norm_reference(x, mx.ones(100), 0.0) ** 2, axis=-1)
    assert close(square, mx.ones(4), 1e-5)


def test_eps_keeps_a_vector_of_zeros_finite() -> None:
    for fused in (True, False):
        assert close(rms_norm(mx.zeros((2, 8)), mx.ones(8), 1e-6, fused=fused), mx.zeros((2, 8)), 0)


def test_large_half_precision_values_do_not_overflow_in_the_mean() -> None:
    x = mx.full((1, 64), 60000.0, dtype=mx.float16)
    for fused in (True, False):
        assert close(rms_norm(x, mx.ones(64, dtype=mx.float16), 1e-5, fused=fused), mx.ones((1, 64)), 1e-3)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(mx.float32, 1e-5), (mx.bfloat16, 3e-2), (mx.float16, 4e-3)], ids=str
)
@pytest.mark.parametrize("shape", [(7,), (1, 1, 64), (3, 2, 4, 8)])
@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("has", [(True, True), (True, False), (False, False)], ids=["both", "weight", "neither"])
def test_the_fused_layer_norm_equals_its_reference_and_its_definition(
    shape: tuple[int, ...], dtype: mx.Dtype, tolerance: float, scale: float, has: tuple[bool, bool]
) -> None:
    keys = mx.random.split(mx.random.key(sum(shape)), 3)
    x = ((mx.random.normal(shape, key=keys[0]) + 0.5) * scale).astype(dtype)
    weight, bias = (
        mx.random.normal(shape[-1:], key=key).astype(dtype) if there else None
        for key, there in zip(keys[1:], has, strict=True)
    )
    fused, reference = (layer_norm(x, weight, bias, 1e-5, fused=fused) for fused in (True, False))
    assert fused.dtype == reference.dtype == dtype
    assert close(fused, reference, tolerance)
    wide = plain.wide(x)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    expected = expected * (1 if weight is None else plain.wide(weight)) + (0 if bias is None else plain.wide(bias))
    assert np.allclose(plain.wide(reference), expected, rtol=tolerance, atol=tolerance)


def test_eps_keeps_the_layer_norm_of_equal_numbers_finite() -> None:
    for way in (layer_norm, layer_norm_reference):
        assert close(way(mx.full((2, 8), 3.0), None, mx.ones(8), 1e-6), mx.ones((2, 8)), 1e-6)


def test_a_large_mean_takes_nothing_from_the_variance() -> None:
    x = mx.random.normal((4, 64), key=mx.random.key(1)) + 1000
    for way in (layer_norm, layer_norm_reference):
        assert close(way(x, None, None, 0.0).square().mean(axis=-1), mx.ones(4), 1e-3)
