"""Activations against their definitions; each way of computing SwiGLU, alone and inside of a compiled function."""

from __future__ import annotations

import pytest

from tinyllm._mx import mx
from tinyllm.ops.activation import swiglu, xielu

GATE, UP = mx.array([-100.0, -1.0, 0.0, 1.0, 100.0]), mx.array([3.0, 1.0, 5.0, -2.0, 0.5])
WAYS = {
    "plain": {},
    "fused": {"fused": True},
    "with its own exponential": {"polynomial_exp": True},
    "with both": {"fused": True, "polynomial_exp": True},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=list(WAYS))
def test_it_is_the_gate_times_its_sigmoid_times_up(options: dict[str, bool]) -> None:
    expected = mx.array([0.0, -0.26894143, 0.0, -1.46211716, 50.0])
    assert mx.allclose(swiglu(GATE, UP, **options), expected, atol=1e-6).item()
    compiled = mx.compile(lambda gate, up: swiglu(gate, up, **options))
    assert mx.allclose(compiled(GATE, UP), expected, atol=1e-6).item()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 3, 6)])
def test_the_fused_kernel_takes_halves_of_a_product_of_any_shape(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    gate, up = mx.split(mx.random.normal(shape, key=mx.random.key(1)).astype(dtype), 2, axis=-1)
    fused, plain = swiglu(gate, up, fused=True), swiglu(gate, up)
    assert fused.dtype == plain.dtype == dtype
    assert mx.allclose(fused, plain, rtol=1e-2, atol=1e-2).item()


def test_xielu_is_a_parabola_above_zero_and_bends_below() -> None:
    """By hand: 2 x^2 + x / 2 above; 3 (exp(x) - 1 - x) + x / 2 below, the exponential of no more than -1/4."""
    x = mx.array([[2.0, 0.0, -0.125, -1.0]])
    parameters = {"above": 2.0, "below": 3.0, "beta": 0.5, "eps": -0.25}
    expected = mx.array([[9.0, -0.66359765, -0.35109765, 0.60363832]])
    actual = xielu(x, **{name: mx.array(value) for name, value in parameters.items()})
    assert mx.allclose(actual, expected, atol=1e-6).item()
