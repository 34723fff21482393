"""Activations of feed-forward networks, with the product that gates them."""

from __future__ import annotations

from functools import partial

from tinyllm._mx import mx
from tinyllm.ops.exp import exp


def swiglu(gate: mx.array, up: mx.array, *, fused: bool = False, polynomial_exp: bool = False) -> mx.array:
    """Return silu(gate) * up, element by element (arXiv 2002.05202).

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
    """The same in plain operations: silu(x) is x * sigmoid(x) (arXiv 1702.03118)."""
    return gate * mx.sigmoid(gate) * up


swiglu_fused = partial(mx.compile, shapeless=True)(swiglu_reference)
_gated_fused = partial(mx.compile, shapeless=True)(_gated)
