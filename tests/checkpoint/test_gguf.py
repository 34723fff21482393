"""Every type of a GGUF file's tensors: what is packed stands for the numbers that gguf.quants computes."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import pytest
from gguf_files import DENSE, write_pair

from tinyllm._mx import mx
from tinyllm.checkpoint.contents import read_contents
from tinyllm.checkpoint.gguf_tensors import GROUP
from tinyllm.checkpoint.summary import summarize
from tinyllm.checkpoint.weights import DenseWeight, QuantizedWeight, WeightStore
from tinyllm.model.load import load_model, open_model
from tinyllm.ops.features import ModelFeatures

Type = gguf.GGMLQuantizationType
EXACT = {
    Type.Q4_0: 4, Type.Q4_1: 4, Type.Q5_0: 5, Type.Q5_1: 5, Type.Q8_0: 8, Type.Q4_K: 4, Type.Q5_K: 5,
    Type.MXFP4: 4,
}  # fmt: skip
REPACKED = (
    Type.Q2_K,
    Type.Q3_K,
    Type.Q6_K,
    Type.IQ4_NL,
    Type.IQ4_XS,
    Type.IQ3_S,
    Type.IQ2_XXS,
    Type.IQ1_M,
)


def logits(path: Path, *, expand: bool) -> mx.array:
    opened = open_model(read_contents(path), ModelFeatures.reference(), dtype=mx.float32)
    weights = WeightStore.from_path(path).cast(mx.float32, expand=expand)
    model = type(opened)(opened.config, weights, opened.features, mx.float32).load()
    return model(mx.array([[1, 5, 250, 7, 7, 42, 3]]))[0]


def off(found: mx.array, wanted: mx.array) -> float:
    return float(mx.abs(found - wanted).max() / mx.std(wanted))


@pytest.mark.parametrize("kind", [*EXACT, *REPACKED, *DENSE], ids=lambda kind: kind.name)
def test_matrices_stand_for_the_numbers_of_the_blocks(kind: Type, tmp_path: Path) -> None:
    """Packed or read as dense; what MLX has no equal of is packed anew, in 8 bits."""
    file, folder = write_pair(tmp_path, kind)
    store, wanted = WeightStore.from_path(file).cast(mx.float32), WeightStore.from_path(folder)
    for module in (
        "model.embed_tokens",
        "lm_head",
        "model.layers.1.self_attn.q_proj",
        "model.layers.0.mlp.down_proj",
    ):
        weight, numbers = store.linear(module), wanted.tensor(f"{module}.weight")
        expanded = store.cast(mx.float32, expand=True).linear(module)
        assert isinstance(expanded, DenseWeight)
        assert mx.array_equal(expanded.weight, numbers)
        if kind in DENSE:
            assert isinstance(weight, DenseWeight)
            continue
        assert isinstance(weight, QuantizedWeight)
        assert (weight.form.bits, weight.form.group_size) == (EXACT.get(kind, 8), GROUP)
        difference = mx.abs(weight.dequantize() - numbers).max().item()
        groups = numbers.reshape(-1, GROUP)
        step = ((groups.max(axis=1) - groups.min(axis=1)) / 255).max().item()
        # a sum of a product is rounded once where products are added to as they are made, else twice
        assert difference <= (2e-7 * mx.abs(numbers).max().item() if kind in EXACT else 0.51 * step)


@pytest.mark.parametrize("kind", [*EXACT, Type.Q6_K, *DENSE], ids=lambda kind: kind.name)
def test_logits_are_those_of_the_dequantised_weights(kind: Type, tmp_path: Path) -> None:
    file, folder = write_pair(tmp_path, kind, seed=3)
    wanted = logits(folder, expand=False)
    assert off(logits(file, expand=True), wanted) <= 1e-4
    assert off(logits(file, expand=False), wanted) <= (1e-4 if kind != Type.Q6_K else 0.05)


def test_scales_are_not_shortened_to_the_type_that_is_computed_in(tmp_path: Path) -> None:
    file, _ = write_pair(tmp_path, Type.Q4_K)
    store = WeightStore.from_path(file)
    weight = store.cast(mx.bfloat16).linear("lm_head")
    assert isinstance(weight, QuantizedWeight)
    assert weight.scales.dtype == mx.float32
    assert store.stored_dtype == mx.bfloat16
    assert store.cast(mx.bfloat16).memory_bytes > store.cast(mx.bfloat16).nbytes * 0.99
    model = load_model(file, dtype=mx.bfloat16)
    assert model(mx.array([[1, 2]])).dtype == mx.bfloat16


def test_a_matrix_at_a_time(tmp_path: Path) -> None:
    """What is held while reading is the packed weights and a few matrices as floats, never all of them."""
    file, _ = write_pair(tmp_path, Type.Q6_K)
    store = WeightStore.from_path(file).cast(mx.float32)
    kept = []
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for module in sorted({name.rpartition(".")[0] for name in store.names if name.endswith(".scales")}):
        kept.append(store.linear(module))
    assert not any(store._lazy.values())
    dense = sum(4 * math.prod(shape) for shape in ((300, 256), (300, 256)))
    held = mx.get_active_memory() - before
    assert mx.get_peak_memory() - before <= held + 4 * dense


def test_what_a_file_is_said_to_be(tmp_path: Path) -> None:
    file, folder = write_pair(tmp_path, Type.Q4_0)
    assert read_contents(file).config.quantization is not None
    assert read_contents(file).config.layers == read_contents(folder).config.layers
    with pytest.raises(Exception, match=r"model\.gguf"):
        summarize(read_contents(file.with_name("other") / "model.gguf"))
