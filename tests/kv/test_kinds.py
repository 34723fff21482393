"""What a kind of layer keeps of a token, packed or not, in bytes and by name."""

from __future__ import annotations

import pytest
import tiny

from tinyllm._mx import mx
from tinyllm.config.config import Config
from tinyllm.config.quantization import QuantFormat, cache_format
from tinyllm.errors import UnsupportedQuantizationError, UsageError
from tinyllm.kv.kinds import LayerKind, layer_kinds
from tinyllm.ops.packed_kv import stored_form


@pytest.mark.parametrize(
    ("dim", "group"), [(32, 32), (64, 64), (96, 32), (128, 128), (160, 32), (192, 64), (256, 128), (576, 64)]
)
@pytest.mark.parametrize("bits", [8, 4])
def test_fault_38_a_head_is_packed_in_the_largest_groups_that_divide_it(dim: int, group: int, bits: int) -> None:
    assert cache_format(dim, bits) == QuantFormat(bits, group)


@pytest.mark.parametrize("dim", [8, 16, 48, 80, 112])
def test_fault_38_a_head_that_no_group_divides_is_refused_by_name(dim: int) -> None:
    with pytest.raises(UnsupportedQuantizationError, match=rf"of {dim} elements.*128, 64, 32.*none divides {dim}"):
        layer_kinds(Config.from_dict(tiny.config(head_dim=dim)), 8)


@pytest.mark.parametrize("bits", [0, 2, 6, 16])
def test_other_bits_are_refused(bits: int) -> None:
    with pytest.raises(UsageError, match=f"8 or 4 bits, not {bits}"):
        layer_kinds(Config.from_dict(tiny.config(head_dim=32)), bits)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (96, 96), (576, 0)])
def test_bytes_and_widths_are_those_of_the_arrays_that_are_kept(
    key_dim: int, value_dim: int, bits: int | None, dtype: mx.Dtype
) -> None:
    kind = LayerKind(kv_heads=3, key_dim=key_dim, value_dim=value_dim, reach=None, layers=5, bits=bits)
    new = [mx.ones((1, 3, 1, dim), dtype=dtype) for dim in (key_dim, value_dim) if dim]
    stored = stored_form(new, bits)
    assert [array.width for array in kind.arrays] == [array.shape[-1] for array in stored]
    assert [array.packed for array in kind.arrays] == [array.dtype == mx.uint32 for array in stored]
    assert [array.slot_bytes(dtype.size) for array in kind.arrays] == [array.nbytes for array in stored]
    assert kind.array_bytes(4, dtype.size) == 4 * max(array.nbytes for array in stored)
    assert kind.token_bytes(dtype.size) == 5 * sum(array.nbytes for array in stored)
    assert kind.page_bytes(4, dtype.size) == 4 * kind.token_bytes(dtype.size)


def test_bytes_of_heads_of_128_in_half_precision() -> None:
    plain, eight, four = (LayerKind(8, 128, 128, None, 1, bits=bits).token_bytes(2) for bits in (None, 8, 4))
    assert (plain, eight, four) == (4096, 2 * 8 * (128 + 4), 2 * 8 * (64 + 4))
