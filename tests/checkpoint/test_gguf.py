"""Every type of a GGUF file's tensors: what is packed stands for the numbers that gguf.quants computes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
from gguf_files import permuted, write_gguf

from tinyllm._mx import mx
from tinyllm.checkpoint.contents import read_config
from tinyllm.checkpoint.gguf_tensors import GROUP
from tinyllm.checkpoint.summary import summarize
from tinyllm.checkpoint.weights import DenseWeight, QuantizedWeight, WeightStore
from tinyllm.model.load import load_model, open_model
from tinyllm.ops.features import ModelFeatures

Type = gguf.GGMLQuantizationType
EXACT = {
    Type.Q4_0: 4, Type.Q4_1: 4, Type.Q5_0: 5, Type.Q5_1: 5, Type.Q8_0: 8, Type.Q4_K: 4, Type.Q5_K: 5,
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
    Type.MXFP4,
)
DENSE = (Type.F32, Type.F16, Type.BF16)
# Where the float16 scales of a block are, which random bytes would make anything.
SCALES_AT = {
    Type.Q4_0: (0,), Type.Q4_1: (0, 2), Type.Q5_0: (0,), Type.Q5_1: (0, 2), Type.Q8_0: (0,), Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2), Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q6_K: (208,), Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
    Type.IQ3_S: (0,), Type.IQ2_XXS: (0,), Type.IQ1_M: (), Type.MXFP4: (),
}  # fmt: skip
HEADS, KV_HEADS = 8, 4
CONFIG = tiny.config(
    hidden_size=256, intermediate_size=256, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, vocab_size=300
)
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
METADATA: dict[str, Any] = {
    "llama.embedding_length": 256, "llama.feed_forward_length": 256, "llama.block_count": 2,
    "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": KV_HEADS, "llama.context_length": 256,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 10000.0, "llama.rope.dimension_count": 32,
}  # fmt: skip


def random_blocks(kind: Type, rows: int, columns: int, seed: int) -> np.ndarray:
    """Return bytes (rows, bytes of a row) of any elements, with scales that make numbers of a weight's size."""
    random = np.random.default_rng(seed)
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (rows * columns // block, nbytes), np.uint8)
    for at in SCALES_AT[kind]:
        size = {Type.Q6_K: 1 << 15, Type.Q3_K: 1 << 13}.get(kind, 1 << 11 if block == 256 else 100)
        scales = random.uniform(0.5, 1, len(data)) / size * (-1) ** (at > 0)
        data[:, at : at + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
    if kind == Type.IQ1_M:  # its scale is dealt out to the upper halves of four numbers
        data[:, 49:56:2] = (data[:, 49:56:2] & 15) | np.array([0x00, 0x00, 0x00, 0x20], np.uint8)
    if kind == Type.MXFP4:
        data[:, 0] = random.integers(120, 124, len(data))
    return data.reshape(rows, -1)


def write_pair(folder: Path, kind: Type, seed: int = 0) -> tuple[Path, Path]:
    """Write a model's matrices as blocks in a GGUF file, and the numbers that these stand for in safetensors."""
    stored: dict[str, Any] = {}
    dense: dict[str, np.ndarray] = {}
    for number, (name, array) in enumerate(tiny.random_tensors(CONFIG, seed).items()):
        module = name.removesuffix(".weight")
        layer, part = module.split(".", 3)[2:] if ".layers." in module else ("", module)
        target = f"blk.{layer}.{NAMES[part]}.weight" if layer else f"{NAMES[part]}.weight"
        if array.ndim == 1:
            stored[target], dense[name] = (array, Type.F32), array
            continue
        if kind in DENSE:
            rows = gguf.quants.quantize(array, kind)
        else:
            rows = random_blocks(kind, *array.shape, seed + number)
        values = gguf.quants.dequantize(rows, kind)
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(NAMES[part])
        if heads:
            order = np.argsort(permuted(np.arange(len(values)), heads))
            values = values[order]
        stored[target], dense[name] = (rows, kind), values
    return (
        write_gguf(folder / "model.gguf", "llama", METADATA, stored),
        tiny.write_checkpoint(folder / "dense", config_overrides=CONFIG, tensors=dense),
    )


def logits(path: Path, *, expand: bool) -> mx.array:
    opened = open_model(path, ModelFeatures.reference(), dtype=mx.float32)
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
    assert read_config(file).quantization is not None
    assert read_config(file).layers == read_config(folder).layers
    with pytest.raises(Exception, match=r"model\.gguf"):
        summarize(file.with_name("other") / "model.gguf")
