"""Products with packed matrices equal products with what they unpack to."""

from __future__ import annotations

import pytest

from tinyllm._mx import mx
from tinyllm.config.quantization import QuantFormat
from tinyllm.ops.quant import dequantize, quantized_matmul

AFFINE = [QuantFormat(bits, group_size) for bits in (2, 3, 4, 5, 6, 8) for group_size in (32, 64, 128)]
FLOATING = [QuantFormat(4, 32, "mxfp4"), QuantFormat(8, 32, "mxfp8"), QuantFormat(4, 16, "nvfp4")]


def pack(form: QuantFormat) -> tuple[mx.array, tuple[mx.array, mx.array, mx.array | None]]:
    weight = mx.random.normal((24, 256), key=mx.random.key(form.bits))
    packed, scales, *biases = mx.quantize(weight, group_size=form.group_size, bits=form.bits, mode=form.mode)
    return weight, (packed, scales, biases[0] if biases else None)


@pytest.mark.parametrize("form", [*AFFINE, *FLOATING], ids=lambda form: f"{form.mode}-{form.bits}-{form.group_size}")
def test_the_packed_product_equals_its_reference(form: QuantFormat) -> None:
    weight, parts = pack(form)
    x = mx.random.normal((2, 3, 256), key=mx.random.key(1))
    fused = quantized_matmul(x, *parts, form)
    reference = quantized_matmul(x, *parts, form, fused=False)
    assert fused.shape == reference.shape == (2, 3, 24)
    assert mx.allclose(fused, reference, rtol=1e-3, atol=1e-2).item()
    error = mx.abs(dequantize(*parts, form).astype(mx.float32) - weight).mean().item()
    assert error < 1.5 * 2.0 ** (1 - min(form.bits, 4))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_an_affine_matrix_unpacks_to_the_type_of_its_scales(dtype: mx.Dtype) -> None:
    form = QuantFormat(4, 64)
    _, (packed, scales, biases) = pack(form)
    assert biases is not None
    assert dequantize(packed, scales.astype(dtype), biases.astype(dtype), form).dtype == dtype
