"""What distance adds to a score, against plain definitions."""

from __future__ import annotations

import math

import numpy as np
import plain
import pytest

from tinyllm._mx import mx
from tinyllm.config.layers import Alibi, Sandwich
from tinyllm.ops.attention import seen_by, with_bias
from tinyllm.ops.position_bias import PositionBias, alibi_slopes

BIASES: dict[str, Alibi | Sandwich] = {
    "alibi": Alibi(),
    "less steep": Alibi(most=4.0),
    "times a factor": Alibi(factor=0.25),
    "rounded": Alibi(rounded=True, factor=0.5),
    "sandwich": Sandwich(16),
}


def test_slopes_of_a_power_of_two_are_the_papers() -> None:
    assert alibi_slopes(8) == [2**-i for i in range(1, 9)]
    assert alibi_slopes(2) == [2**-4, 2**-8]


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 25, 71])
@pytest.mark.parametrize("most", [8.0, 3.0])
def test_slopes_of_any_number_are_those_of_mpt(heads: int, most: float) -> None:
    """Which says it in its own way: those of the next power of two, of which every second one comes first."""
    n = 2 ** math.ceil(math.log2(heads))
    slopes = [2 ** (-most * (i + 1) / n) for i in range(n)]
    expected = slopes if n == heads else (slopes[1::2] + slopes[::2])[:heads]
    assert alibi_slopes(heads, most) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("heads", [1, 4, 6])
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES.keys())
def test_the_bias_is_its_definition(bias: Alibi | Sandwich, heads: int) -> None:
    query, key = mx.arange(5, 12)[:, None], mx.arange(12)
    added = np.broadcast_to(PositionBias(bias, heads)(query, key), (heads, 7, 12))
    expected = np.empty((heads, 7, 12))
    for h, i, j in np.ndindex(heads, 7, 12):
        expected[h, i, j] = plain.position_bias(bias, h, heads, 5 + i, j)
    assert np.allclose(added, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES.keys())
def test_a_bias_of_rows_is_that_of_each_row(bias: Alibi | Sandwich) -> None:
    """As a step of a batch asks for it: each row has one query and keys of its own."""
    of_four = PositionBias(bias, 4)
    starts, queries = mx.array([3, 0]), mx.array([9, 2])
    keys = starts[:, None] + mx.arange(10)
    together = with_bias(of_four, queries[:, None, None], keys[:, None], mx.array(True), mx.float32)
    for row, (start, query) in enumerate(((3, 9), (0, 2))):
        alone = of_four(mx.array([[query]]), mx.arange(start, start + 10))
        assert mx.allclose(together[row], mx.broadcast_to(alone, (4, 1, 10)), atol=1e-5).item()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_what_is_hidden_stays_finite(dtype: mx.Dtype) -> None:
    query, key = mx.arange(4)[:, None], mx.arange(4)
    seen = seen_by(query, key, None)
    hidden = mx.where(seen, 0, mx.finfo(dtype).min).astype(dtype)
    for shown in (seen, hidden):
        added = with_bias(PositionBias(Alibi(), 2), query, key, shown, dtype)
        assert added.dtype == dtype and added.shape == (2, 4, 4)
        assert mx.isfinite(added).all().item()
        assert mx.array_equal(added[0, 2, :3].astype(mx.float32), mx.array([-0.125, -0.0625, 0])).item()
        assert (added[:, 0, 1:] == mx.finfo(dtype).min).all().item()
