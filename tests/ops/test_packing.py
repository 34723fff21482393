"""Packing is MLX's, but that what was unpacked is packed as it was."""

from __future__ import annotations

from itertools import product

import pytest

from tinyllm._mx import mx
from tinyllm.config.quantization import QuantFormat
from tinyllm.ops.packing import pack
from tinyllm.ops.quant import dequantize

AFFINE = [QuantFormat(bits, group) for bits, group in product((2, 3, 4, 5, 6, 8), (32, 64, 128))]
FLOATING = [QuantFormat(4, 32, "mxfp4"), QuantFormat(8, 32, "mxfp8"), QuantFormat(4, 16, "nvfp4")]
NAMES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def drawn(shape: tuple[int, ...], dtype: mx.Dtype, shift: float = 0.0) -> mx.array:
    return (mx.random.normal(shape, key=mx.random.key(3)) / 20 + shift).astype(dtype)


@pytest.mark.parametrize("form", AFFINE + FLOATING, ids=lambda form: f"{form.mode}-{form.bits}-{form.group_size}")
def test_a_matrix_is_packed_as_mlx_packs_it(form: QuantFormat) -> None:
    dense = drawn((3, 40, 256), mx.bfloat16)
    wanted = mx.quantize(dense, group_size=form.group_size, bits=form.bits, mode=form.mode)
    found = [part for part in pack(dense, form) if part is not None]
    assert len(found) == len(wanted)
    assert all(mx.array_equal(a, b).item() for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("shift", [0.0, 0.02])
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("form", AFFINE + FLOATING, ids=lambda form: f"{form.mode}-{form.bits}-{form.group_size}")
def test_what_was_unpacked_is_packed_to_the_same_values(form: QuantFormat, dtype: str, shift: float) -> None:
    once = dequantize(*pack(drawn((96, 256), NAMES[dtype], shift), form), form).astype(NAMES[dtype])
    again = dequantize(*pack(once, form), form).astype(NAMES[dtype])
    assert mx.array_equal(once, again).item()


def test_mlx_alone_moves_them() -> None:
    """Why there is more to `pack`: a group's range, after packing, is not what its steps were made of."""
    form = QuantFormat(4, 64)
    once = dequantize(*pack(drawn((96, 256), mx.float32), form), form)
    again = mx.dequantize(*mx.quantize(once, group_size=64, bits=4), group_size=64, bits=4)
    assert not mx.array_equal(once, again).item()


@pytest.mark.parametrize("value", [0.0, -0.75])
def test_a_constant_matrix_stays_what_it_is(value: float) -> None:
    dense = mx.full((8, 64), value)
    assert mx.array_equal(dequantize(*pack(dense, QuantFormat(4, 64)), QuantFormat(4, 64)), dense).item()
