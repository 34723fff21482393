"""The delta rule and the short convolution, however many positions are taken at once."""

from __future__ import annotations

import numpy as np
import pytest

from tinyllm._mx import mx
from tinyllm.ops.convolution import causal_convolution
from tinyllm.ops.delta import (
    delta_rule,
    delta_rule_chunked,
    delta_rule_reference,
    delta_rule_step,
    l2_normalised,
    unit_lower_inverse,
)

HEADS, KEY_DIM, VALUE_DIM = 3, 16, 8


def inputs(seq: int, *, alike: float = 0.0, forget: float = 0.1) -> list[mx.array]:
    """Draw q, k, v, decays, rates and a state; keys are `alike`, up to 1, and a step forgets about so much."""
    mx.random.seed(seq)
    q, k = (l2_normalised(mx.random.normal((2, HEADS, seq, KEY_DIM))) for _ in "qk")
    k = l2_normalised((1 - alike) * k + alike * k[:, :, :1])
    v = mx.random.normal((2, HEADS, seq, VALUE_DIM))
    log_decay = -forget * mx.exp(mx.random.normal((2, HEADS, seq)))
    rate = mx.sigmoid(2 * mx.random.normal((2, HEADS, seq)) + 2)
    return [q, k, v, log_decay, rate, mx.random.normal((2, HEADS, KEY_DIM, VALUE_DIM))]


def off(found: tuple[mx.array, mx.array], wanted: tuple[mx.array, mx.array]) -> float:
    return max((mx.abs(a - b).max() / mx.abs(b).max()).item() for a, b in zip(found, wanted, strict=True))


def test_reference_is_the_formula() -> None:
    drawn = inputs(5)
    q, k, v, log_decay, rate, state = (np.array(array, dtype=np.float64) for array in drawn)
    outputs = np.zeros(v.shape)
    for batch in range(2):
        for head in range(HEADS):
            s = state[batch, head]
            for t in range(5):
                at = batch, head, t
                s = np.exp(log_decay[at]) * s
                s = s + np.outer(k[at], rate[at] * (v[at] - k[at] @ s))
                outputs[at] = q[at] @ s
            state[batch, head] = s
    found = delta_rule_reference(*drawn)
    np.testing.assert_allclose(np.array(found[0]), outputs, atol=1e-5)
    np.testing.assert_allclose(np.array(found[1]), state, atol=1e-5)


@pytest.mark.parametrize("forget", [0.001, 0.1, 3.0])
@pytest.mark.parametrize("alike", [0.0, 0.99, 1.0])
@pytest.mark.parametrize("seq", [2, 63, 64, 65, 150])
def test_chunks_give_what_single_positions_do(seq: int, alike: float, forget: float) -> None:
    """Also where the same token comes again and again, whose keys are all alike."""
    drawn = inputs(seq, alike=alike, forget=forget)
    assert off(delta_rule_chunked(*drawn), delta_rule_reference(*drawn)) < 1e-5


def test_a_step_gives_what_the_reference_does() -> None:
    drawn = inputs(1)
    assert off(delta_rule_step(*drawn), delta_rule_reference(*drawn)) < 1e-5


def test_pieces_give_what_all_positions_at_once_do() -> None:
    *drawn, state = inputs(100)
    outputs = []
    for start, end in ((0, 1), (1, 70), (70, 71), (71, 100)):
        y, state = delta_rule(*(x[:, :, start:end] for x in drawn), state)
        outputs.append(y)
    wanted = delta_rule(*inputs(100), chunked=False)
    assert off((mx.concatenate(outputs, axis=2), state), wanted) < 1e-5


@pytest.mark.parametrize("n", [1, 2, 5, 37, 64])
def test_inverse_is_that_of_the_matrix(n: int) -> None:
    mx.random.seed(n)
    lower = mx.tril(mx.random.uniform(-1, 1, (2, n, n)), -1) / max(1, n / 8)
    product = (mx.eye(n) + lower) @ unit_lower_inverse(lower)
    assert mx.abs(product - mx.eye(n)).max().item() < 1e-5


def test_inverse_stays_exact_where_powers_of_the_matrix_are_huge() -> None:
    """Of ones below the diagonal: powers reach 1e17, the inverse is of ones and minus ones."""
    found = unit_lower_inverse(mx.tril(mx.ones((64, 64)), -1))
    assert mx.array_equal(found, mx.eye(64) - mx.eye(64, k=-1)).item()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("pieces", [[9], [1] * 9, [2, 1, 6]])
def test_convolution_is_causal_in_each_channel(pieces: list[int], bias: bool) -> None:
    mx.random.seed(0)
    x, weight = mx.random.normal((2, 9, 5)), mx.random.normal((5, 4))
    added = mx.random.normal((5,)) if bias else None
    before, found, start = mx.zeros((2, 3, 5)), [], 0
    for length in pieces:
        y, before = causal_convolution(x[:, start : start + length], before, weight, added)
        found.append(y)
        start += length
    padded = np.pad(np.array(x), ((0, 0), (3, 0), (0, 0)))
    wanted = sum(padded[:, k : k + 9] * np.array(weight)[:, k] for k in range(4))
    np.testing.assert_allclose(mx.concatenate(found, axis=1), wanted + (np.array(added) if bias else 0), atol=1e-5)
    assert mx.array_equal(before, x[:, -3:]).item()
