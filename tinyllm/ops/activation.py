"""Activations of feed-forward networks, with the product that gates them (arXiv 2002.05202)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

from tinyllm._mx import mx
from tinyllm.ops.exp import exp

_GELU_TANH = math.sqrt(2 / math.pi)
_CLIPPED_GAIN = 1.702


def silu(x: mx.array) -> mx.array:
    """x sigmoid(x) (arXiv 1702.03118)."""
    return x * mx.sigmoid(x)


def gelu(x: mx.array) -> mx.array:
    """x times the normal distribution function of x (arXiv 1606.08415)."""
    return x * (1 + mx.erf(x / math.sqrt(2))) / 2


def gelu_tanh(x: mx.array) -> mx.array:
    """The approximation of `gelu` by a hyperbolic tangent, which most checkpoints were trained with."""
    return 0.5 * x * (1 + mx.tanh(_GELU_TANH * (x + 0.044715 * x * x * x)))


def relu(x: mx.array) -> mx.array:
    """The positive part of x."""
    return mx.maximum(x, 0)


def relu2(x: mx.array) -> mx.array:
    """The square of the positive part (arXiv 2109.08668)."""
    return mx.square(mx.maximum(x, 0))


def xielu(x: mx.array, above: mx.array, below: mx.array, beta: mx.array, eps: mx.array) -> mx.array:
    """Above 0, `above` x^2 + `beta` x; elsewhere `below` (exp(x) - 1 - x) + `beta` x (arXiv 2411.13010).

    The exponential is of x up to `eps`, which is below 0 and next to it.
    """
    bent = mx.where(x > 0, above * x * x, below * (mx.expm1(mx.minimum(x, eps)) - x))
    return (bent + beta * x).astype(x.dtype)


ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "relu2": relu2,
}


def gated(activation: str) -> Callable[[mx.array, mx.array], mx.array]:
    """Return the function activation(gate) * up, element by element."""
    return partial(_gate, ACTIVATIONS[activation])


def _gate(activation: Callable[[mx.array], mx.array], gate: mx.array, up: mx.array) -> mx.array:
    return activation(gate) * up


def clipped_swiglu(gate: mx.array, up: mx.array, *, limit: float) -> mx.array:
    """Return (up + 1) gate sigmoid(1.702 gate), of gate up to `limit` and up within it (gpt-oss)."""
    gate, up = mx.minimum(gate, limit), mx.clip(up, -limit, limit)
    return (up + 1) * gate * mx.sigmoid(_CLIPPED_GAIN * gate)


def swiglu(gate: mx.array, up: mx.array, *, fused: bool = False, polynomial_exp: bool = False) -> mx.array:
    """Return silu(gate) * up, element by element.

    `fused` compiles it into one kernel; `polynomial_exp` is for float32 on a CPU.
    """
    if polynomial_exp:
        return swiglu_polynomial(gate, up, fused=fused)
    return swiglu_fused(gate, up) if fused else swiglu_reference(gate, up)


def swiglu_polynomial(gate: mx.array, up: mx.array, *, fused: bool = False) -> mx.array:
    """The same with `ops.exp`."""
    return (_gated_fused if fused else _gated)(exp(-gate, fused=fused), gate, up)


def _gated(exponential: mx.array, gate: mx.array, up: mx.array) -> mx.array:
    return gate / (1 + exponential) * up


def swiglu_reference(gate: mx.array, up: mx.array) -> mx.array:
    """The same in plain operations."""
    return silu(gate) * up


swiglu_fused = partial(mx.compile, shapeless=True)(swiglu_reference)
_gated_fused = partial(mx.compile, shapeless=True)(_gated)
