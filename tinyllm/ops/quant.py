"""Products with packed matrices, as MLX packs them: `bits` an element, a scale (and bias) for each group of a row."""

from __future__ import annotations

from tinyllm._mx import mx
from tinyllm.config.quantization import QuantFormat


def dequantize(packed: mx.array, scales: mx.array, biases: mx.array | None, form: QuantFormat) -> mx.array:
    """Unpack to (rows, columns), in the dtype of `scales` (bfloat16 for the floating-point modes)."""
    return mx.dequantize(packed, scales, biases, group_size=form.group_size, bits=form.bits, mode=form.mode)


def quantized_matmul(
    x: mx.array, packed: mx.array, scales: mx.array, biases: mx.array | None, form: QuantFormat, *, fused: bool = True
) -> mx.array:
    """Multiply x (..., columns) by the transpose of a packed matrix (rows, columns): (..., rows)."""
    if fused:
        return mx.quantized_matmul(
            x, packed, scales, biases, transpose=True, group_size=form.group_size, bits=form.bits, mode=form.mode
        )
    return x @ dequantize(packed, scales, biases, form).astype(x.dtype).T


def gather_quantized_matmul(
    x: mx.array,
    packed: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    form: QuantFormat,
    experts: mx.array,
    *,
    in_order: bool,
) -> mx.array:
    """Multiply each x (rows, 1, columns) by the transpose of its own of the matrices: (rows, 1, out)."""
    return mx.gather_qmm(
        x,
        packed,
        scales,
        biases,
        rhs_indices=experts,
        transpose=True,
        group_size=form.group_size,
        bits=form.bits,
        mode=form.mode,
        sorted_indices=in_order,
    )
