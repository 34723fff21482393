"""The fused root-mean-square norm equals its reference."""

from __future__ import annotations

import pytest

from tinyllm._mx import mx
from tinyllm.ops.norm import rms_norm, rms_norm_reference


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
