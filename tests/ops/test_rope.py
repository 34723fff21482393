"""Rotary positions: the fused rotation equals its reference, and each scheme stretches as its paper says."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tinyllm._mx import mx
from tinyllm.config.rope import LinearScaling, Llama3Scaling, RopeConfig, RopeScaling, YarnScaling
from tinyllm.ops.rope import Positions, Rope, rope_attention_factor, rope_wavelengths

LLAMA3 = Llama3Scaling(8.0, 1.0, 4.0, 8192)


def yarn(factor: float = 4.0, original: int = 4096, **values: float | bool | None) -> YarnScaling:
    return YarnScaling(factor, original, **values)  # type: ignore[arg-type]


SCALINGS: dict[str, RopeScaling | None] = {
    "default": None,
    "linear": LinearScaling(4.0),
    "llama3": LLAMA3,
    "yarn": yarn(),
    "yarn with mscale": yarn(mscale=1.0, mscale_all_dim=0.8),
}


def close(a: mx.array, b: mx.array, tolerance: float = 1e-4) -> bool:
    return a.shape == b.shape and bool(mx.allclose(a, b, rtol=tolerance, atol=tolerance).item())


def heads(batch: int = 2, seq: int = 5, head_dim: int = 16) -> mx.array:
    return mx.random.normal((batch, 3, seq, head_dim), key=mx.random.key(seq))


def rotation(config: RopeConfig, *, fused: bool = True) -> Callable[[mx.array, int | mx.array], mx.array]:
    """Return a rotation of heads that start at an offset."""
    rope = Rope(config, fused=fused)
    return lambda x, offset: rope(x, Positions(offset, x.shape[2]))


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
@pytest.mark.parametrize("dims", [16, 8, 2])
@pytest.mark.parametrize("offset", [0, 1, 1000])
def test_the_fused_rotation_equals_its_reference(scaling: RopeScaling | None, dims: int, offset: int) -> None:
    config, x = RopeConfig(dims, 10000.0, scaling), heads()
    assert close(rotation(config)(x, offset), rotation(config, fused=False)(x, offset), 1e-3)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_half_precision_stays_half_precision_and_turns_in_single(fused: bool, dtype: mx.Dtype) -> None:
    rope, x = rotation(RopeConfig(16, 10000.0), fused=fused), heads().astype(dtype)
    turned = rope(x, 700)
    assert turned.dtype == dtype
    assert close(turned.astype(mx.float32), rope(x.astype(mx.float32), 700), 5e-2)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("offset", [5, mx.array(5), mx.array([5, 70])], ids=["int", "array", "rows"])
def test_positions_shared_by_layers_are_those_of_the_offset(fused: bool, offset: int | mx.array) -> None:
    positions, x = Positions(offset, 5), heads()
    for config in (RopeConfig(16, 10000.0), RopeConfig(8, 500.0, LLAMA3), RopeConfig(16, 10000.0)):
        shared = Rope(config, fused=fused)(x, positions)
        assert mx.array_equal(shared, rotation(config, fused=fused)(x, offset)).item()


def test_a_table_is_made_once_for_each_kind_of_rotation() -> None:
    positions = Positions(3, 4)
    table = positions.table(RopeConfig(16, 10000.0))
    assert positions.table(RopeConfig(16, 10000.0)) is table
    assert positions.table(RopeConfig(16, 20000.0)) is not table


def test_heads_are_rotated_as_the_views_that_a_layer_has() -> None:
    """The heads of q and k stand side by side in a product, with those of v after them."""
    product = mx.random.normal((2, 5, 4, 16), key=mx.random.key(3))
    view = product[:, :, :3].swapaxes(1, 2)
    for fused in (True, False):
        rope = rotation(RopeConfig(16, 10000.0), fused=fused)
        assert close(rope(view, 9), rope(mx.contiguous(view), 9), 1e-6)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("offsets", [[0, 0], [3, 3], [0, 7], [900, 2]])
def test_an_array_of_offsets_places_each_row(fused: bool, offsets: list[int]) -> None:
    rope, x = rotation(RopeConfig(8, 10000.0), fused=fused), heads()
    rows = [rope(x[i : i + 1], offset) for i, offset in enumerate(offsets)]
    assert close(rope(x, mx.array(offsets)), mx.concatenate(rows))


@pytest.mark.parametrize("fused", [True, False])
def test_an_array_with_one_offset_is_that_offset(fused: bool) -> None:
    rope, x = rotation(RopeConfig(16, 10000.0), fused=fused), heads()
    assert close(rope(x, mx.array(11)), rope(x, 11))


@pytest.mark.parametrize("fused", [True, False])
def test_positions_count_from_the_offset(fused: bool) -> None:
    rope, x = rotation(RopeConfig(16, 10000.0), fused=fused), heads(seq=6)
    assert close(rope(x, 40)[:, :, 2:], rope(x[:, :, 2:], 42))


@pytest.mark.parametrize("fused", [True, False])
def test_position_zero_turns_nothing_and_the_rest_of_a_head_is_never_turned(fused: bool) -> None:
    rope, x = rotation(RopeConfig(8, 10000.0), fused=fused), heads()
    turned = rope(x, 0)
    assert close(turned[:, :, 0], x[:, :, 0])
    assert close(turned[..., 8:], x[..., 8:])
    assert not close(turned[:, :, 1:, :8], x[:, :, 1:, :8])


@pytest.mark.parametrize("fused", [True, False])
def test_products_depend_on_the_distance_alone(fused: bool) -> None:
    rope, q, k = rotation(RopeConfig(16, 10000.0), fused=fused), heads(seq=1), heads(seq=1) * 0.5 + 1

    def score(query: int, key: int) -> mx.array:
        return (rope(q, query) * rope(k, key)).sum(-1)

    assert close(score(9, 4), score(105, 100), 1e-3)
    assert not close(score(9, 4), score(9, 5), 1e-3)


def test_wavelengths_grow_from_one_towards_theta() -> None:
    assert rope_wavelengths(RopeConfig(8, 10000.0)) == pytest.approx([1, 10, 100, 1000])
    assert rope_wavelengths(RopeConfig(8, 10000.0, LinearScaling(4.0))) == pytest.approx([4, 40, 400, 4000])


def test_a_linear_scale_is_positions_divided_by_the_factor() -> None:
    x = heads(seq=1)
    stretched, plain = rotation(RopeConfig(16, 10000.0, LinearScaling(4.0))), rotation(RopeConfig(16, 10000.0))
    assert close(stretched(x, 40), plain(x, 10))


def test_llama3_keeps_short_wavelengths_and_divides_long_ones_by_the_factor() -> None:
    plain = rope_wavelengths(RopeConfig(128, 500000.0))
    stretched = rope_wavelengths(RopeConfig(128, 500000.0, LLAMA3))
    for before, after in zip(plain, stretched, strict=True):
        turns = 8192 / (2 * math.pi * before)
        if turns >= 4:
            assert after == pytest.approx(before)
        elif turns <= 1:
            assert after == pytest.approx(8 * before)
        else:
            assert before < after < 8 * before
    assert stretched == sorted(stretched)
    assert {after / before > 7.9 for before, after in zip(plain, stretched, strict=True)} == {True, False}


def test_llama3_interpolates_frequencies_as_the_release_does() -> None:
    """At 2 turns in the original context: smooth = (2 - 1) / (4 - 1), and the frequencies are blended by it."""
    theta = (8192 / (2 * math.pi * 2)) ** 2  # the second of two pairs turns twice
    [_, stretched] = rope_wavelengths(RopeConfig(4, theta, LLAMA3))
    before = theta**0.5
    assert 1 / stretched == pytest.approx((2 / 3 / 8 + 1 / 3) / before)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones_fully() -> None:
    plain = rope_wavelengths(RopeConfig(128, 10000.0))
    stretched = rope_wavelengths(RopeConfig(128, 10000.0, yarn()))
    for before, after in zip(plain, stretched, strict=True):
        turns = 4096 / (2 * math.pi * before)
        if turns > 40:
            assert after == pytest.approx(before)
        elif turns < 0.8:
            assert after == pytest.approx(4 * before)
        else:
            assert before <= after <= 4 * before * (1 + 1e-9)
    assert stretched == sorted(stretched)


def test_yarn_of_factor_one_changes_nothing() -> None:
    config = RopeConfig(64, 10000.0, yarn(factor=1.0))
    assert rope_wavelengths(config) == pytest.approx(rope_wavelengths(RopeConfig(64, 10000.0)))
    assert rope_attention_factor(config) == 1.0


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, 1.0),
        (LinearScaling(8.0), 1.0),
        (LLAMA3, 1.0),
        (yarn(factor=40.0), 0.1 * math.log(40) + 1),
        (yarn(factor=40.0, attention_factor=0.7), 0.7),
        (yarn(factor=40.0, mscale=1.0, mscale_all_dim=1.0), 1.0),
        (yarn(factor=40.0, mscale=0.707, mscale_all_dim=1.0), (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)),
        (yarn(factor=40.0, mscale=0.707), 0.1 * math.log(40) + 1),
    ],
)
def test_the_attention_factor_is_the_papers(scaling: RopeScaling | None, expected: float) -> None:
    assert rope_attention_factor(RopeConfig(8, 10000.0, scaling)) == pytest.approx(expected)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dims", [16, 8])
def test_the_attention_factor_scales_the_rotated_part_alone(fused: bool, dims: int) -> None:
    x = heads()
    scaled = rotation(RopeConfig(dims, 10000.0, yarn(factor=1.0, attention_factor=1.5)), fused=fused)(x, 3)
    plain = rotation(RopeConfig(dims, 10000.0), fused=fused)(x, 3)
    assert close(scaled[..., :dims], plain[..., :dims] * 1.5)
    assert close(scaled[..., dims:], x[..., dims:])


@pytest.mark.parametrize("theta", [2.0, 1e4, 1e30])
@pytest.mark.parametrize("dims", [2, 64])
@pytest.mark.parametrize("betas", [(32.0, 1.0), (1e-6, 1e-6), (1e30, 1e30), (1.0, 32.0)])
@pytest.mark.parametrize("original", [1, 2**31 - 1])
def test_wavelengths_are_finite_and_positive_at_the_limits_of_what_is_read(
    theta: float, dims: int, betas: tuple[float, float], original: int
) -> None:
    scaling = yarn(factor=1e30, original=original, beta_fast=betas[0], beta_slow=betas[1])
    for one in (scaling, Llama3Scaling(1e30, 0.0, 1e-30, original), LinearScaling(1e30)):
        assert all(0 < w < math.inf for w in rope_wavelengths(RopeConfig(dims, theta, one)))
