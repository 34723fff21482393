"""What a layer may ask of attention, by each of the kernels, against plain numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import plain
import pytest
from attention_cases import ASKED, DIM, HEADS, KERNELS, KV_HEADS, REACHES, Asked, close

from tinyllm._mx import mx
from tinyllm.config.layers import Alibi
from tinyllm.config.reach import Chunk, Reach, Strided, Window
from tinyllm.ops.attention import AttentionSpec, attention, mask_of


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def qkv(seq: int, keys: int, seed: int = 0) -> tuple[mx.array, mx.array, mx.array]:
    return (
        normal(2, HEADS, seq, DIM, seed=seed) * 2,
        normal(2, KV_HEADS, keys, DIM, seed=seed + 1),
        normal(2, KV_HEADS, keys, DIM, seed=seed + 2),
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED.keys())
@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES.keys())
@pytest.mark.parametrize(("seq", "keys"), [(11, 11), (1, 11), (3, 11), (1, 1)], ids=str)
def test_each_kernel_gives_what_the_definition_gives(
    kernel: str, asked: Asked, reach: Reach | None, seq: int, keys: int
) -> None:
    q, k, v = qkv(seq, keys)
    spec = asked.spec(reach=reach, **KERNELS[kernel])
    mask = mask_of(spec, keys - seq, seq, 0, own=None, dtype=q.dtype)
    assert close(attention(q, k, v, spec, mask), asked.expected(q, k, v, reach))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("reach", [Window(4), Chunk(5)], ids=str)
@pytest.mark.parametrize("start", [3, 5, 9, 10])
@pytest.mark.parametrize("seq", [1, 2, 7])
@pytest.mark.parametrize("bias", [None, Alibi()], ids=["", "alibi"])
def test_keys_out_of_reach_need_not_be_there(
    kernel: str, reach: Reach, start: int, seq: int, bias: Alibi | None
) -> None:
    """Of all positions those from the first on that the first query sees, as caches have it."""
    asked, first = Asked(bias=bias), reach.first(start)
    q, k, v = qkv(seq, start + seq)
    spec = asked.spec(reach=reach, **KERNELS[kernel])
    mask = mask_of(spec, start, seq, first, own=None, dtype=q.dtype)
    attended = attention(q, k[:, :, first:], v[:, :, first:], spec, mask)
    assert close(attended, asked.expected(q, k, v, reach))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED.keys())
def test_half_precision_stays_half_precision_and_finite(kernel: str, dtype: mx.Dtype, asked: Asked) -> None:
    q, k, v = (array.astype(dtype) for array in qkv(7, 12))
    spec = replace(asked.spec(**KERNELS[kernel]), reach=Window(5))
    attended = attention(q, k, v, spec, mask_of(spec, 5, 7, 0, own=None, dtype=dtype))
    if kernel != "polynomial":  # which is for float32
        assert attended.dtype == dtype
    assert close(attended, asked.expected(q, k, v, Window(5)), 0.05)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("additive", [False, True], ids=["boolean", "additive"])
def test_a_mask_of_the_callers_has_the_bias_added(kernel: str, additive: bool) -> None:
    q, k, v = qkv(4, 4)
    own = mx.array([[1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1]]).astype(mx.bool_)
    mask = mx.where(own, 0.0, -1e9) if additive else own
    spec = Asked(bias=Alibi()).spec(**KERNELS[kernel])
    attended = attention(q, k, v, spec, mask_of(spec, 0, 4, 0, own=mask, dtype=q.dtype))
    scores = plain.wide(q) @ plain.wide(mx.repeat(k, 3, axis=1)).swapaxes(-1, -2) * 0.6
    for h, i, j in np.ndindex(HEADS, 4, 4):
        scores[:, h, i, j] += plain.position_bias(Alibi(), h, HEADS, i, j) if own[i, j].item() else -1e9
    assert close(attended, plain.softmax(scores) @ plain.wide(mx.repeat(v, 3, axis=1)))


@pytest.mark.parametrize("reach", [None, *REACHES.values()], ids=str)
def test_no_mask_is_made_where_none_is_needed(reach: Reach | None) -> None:
    """What the fused kernel does by itself: one query that sees all that is there, or causality."""
    spec = AttentionSpec(1.0, reach)
    alone, several = (mask_of(spec, 2, seq, 0, own=None, dtype=mx.float32) for seq in (1, 2))
    strided = isinstance(reach, Strided)
    assert (alone is None) == (not strided)
    assert (isinstance(several, str) and several == "causal") == (not strided)


@pytest.mark.parametrize("kernel", KERNELS)
def test_values_may_be_wider_or_narrower_than_keys(kernel: str) -> None:
    q, k, _ = qkv(5, 9)
    for dim in (3, 16):
        v = normal(2, KV_HEADS, 9, dim, seed=8)
        spec = Asked().spec(**KERNELS[kernel])
        attended = attention(q, k, v, spec, mask_of(spec, 4, 5, 0, own=None, dtype=q.dtype))
        assert close(attended, Asked().expected(q, k, v, None))


def test_long_causal_prompts_with_sinks_and_caps_are_taken_in_blocks() -> None:
    """Blocks of the polynomial's give what one product gives."""
    asked = Asked(softcap=2.0, sinks=True)
    q, k, v = qkv(300, 310)
    by_block, at_once = (
        attention(q, k, v, asked.spec(**KERNELS[kernel]), "causal") for kernel in ("polynomial", "reference")
    )
    assert mx.allclose(by_block, at_once, rtol=1e-5, atol=1e-5).item()
