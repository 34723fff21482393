"""Pieces of what MLX has packed: fused matrices, experts, and projections that are joined, in every format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
from golden_cases import GOLDEN
from test_golden_quantized import AFFINE, FLOATING, TEXT, TIGHT, as_json, difference, load, write

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import DenseWeight, QuantizedWeight, WeightStore
from tinyllm.config.config import Config
from tinyllm.config.quantization import QuantFormat
from tinyllm.model.linear import Projections
from tinyllm.ops.features import ModelFeatures

FORMS = pytest.mark.parametrize(
    "form", AFFINE + FLOATING, ids=lambda form: f"{form.mode}-{form.bits}-{form.group_size}"
)
IDS = mx.array([[(7 * i * i + 3) % 96 for i in range(70)]])  # pairs of a token and an expert that are worth sorting
Arrays = dict[str, mx.array]


def packed(name: str, matrix: mx.array, form: QuantFormat) -> tuple[Arrays, mx.array]:
    """Pack a matrix, with scales of bfloat16 where they are numbers: the parts by name, and what they stand for."""
    how: dict[str, Any] = {"group_size": form.group_size, "bits": form.bits, "mode": form.mode}
    parts = mx.quantize(matrix.astype(mx.bfloat16), **how)
    wide = [part.astype(mx.float32) if part.dtype == mx.bfloat16 else part for part in parts]
    leaves = zip(("weight", "scales", "biases"), parts, strict=False)
    return {f"{name}.{leaf}": part for leaf, part in leaves}, mx.dequantize(*wide, **how).astype(mx.float32)


FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def write_fused(
    folder: Path, values: Mapping[str, Any], default: QuantFormat, overrides: Mapping[str, QuantFormat | None]
) -> tuple[Path, Path]:
    """Write Phi-3's matrices fused and packed, and the dense ones that they stand for."""
    drawn = {name: mx.array(array) for name, array in tiny.random_tensors(values).items()}
    for layer in range(2):
        for whole, parts in FUSED.items():
            names = [f"model.layers.{layer}.{part}.weight" for part in parts]
            drawn[f"model.layers.{layer}.{whole}.weight"] = mx.concatenate([drawn.pop(name) for name in names])
    found: Arrays = {}
    dense: Arrays = {}
    for name, array in drawn.items():
        module = name.removesuffix(".weight")
        form = overrides.get(module, default) if module.endswith("_proj") else None
        if form is None:
            found[name] = dense[name] = array
        else:
            parts_of, dense[name] = packed(module, array, form)
            found |= parts_of
    said = {**as_json(default), **{module: as_json(form) for module, form in overrides.items()}}
    return write(folder / "packed", {**values, "quantization": said}, found), write(folder / "dense", values, dense)


PHI3 = tiny.config(**TEXT, model_type="phi3", pad_token_id=0)


@FORMS
def test_fused_matrices_are_taken_apart(form: QuantFormat, tmp_path: Path) -> None:
    """Rows are rows of whole words, whatever number of bits they are of."""
    folder, dense = write_fused(tmp_path, PHI3, form, {})
    store, wanted = (WeightStore.from_path(path).cast(mx.float32) for path in (folder, dense))
    for parts in FUSED.values():
        for module in (f"model.layers.1.{part}" for part in parts):
            weight = store.linear(module)
            assert isinstance(weight, QuantizedWeight) and weight.form == form
            assert mx.array_equal(store.dense(module), wanted.dense(module)), module
        assert store.joinable(*(f"model.layers.1.{part}" for part in parts))
    logits = load(dense, "reference", expand=False)(IDS)[0]
    assert difference(load(folder, "fused", expand=False)(IDS)[0], logits) <= TIGHT


def test_overrides_of_fused_matrices_reach_their_parts(tmp_path: Path) -> None:
    """Fault 05: config.json names what the file has, and the network asks for pieces of it."""
    qkv, gate_up = "model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj"
    overrides = {qkv: QuantFormat(8, 32), gate_up: None}
    folder, dense = write_fused(tmp_path, PHI3, QuantFormat(3, 64), overrides)
    store = WeightStore.from_path(folder)
    found = store.linear("model.layers.0.self_attn.k_proj")
    assert isinstance(found, QuantizedWeight) and found.form == QuantFormat(8, 32)
    assert isinstance(store.linear("model.layers.1.mlp.up_proj"), DenseWeight)
    logits = load(dense, "reference", expand=False)(IDS)[0]
    for features in ("fused", "reference"):
        assert difference(load(folder, features, expand=False)(IDS)[0], logits) <= TIGHT


MIXTRAL = tiny.config(**TEXT, model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
EXPERTS = "block_sparse_moe.switch_mlp"


def write_experts(
    folder: Path, default: QuantFormat, overrides: Mapping[str, QuantFormat | None]
) -> tuple[Path, Path]:
    """Write Mixtral's experts as mlx-lm has them, packed but for the router; `overrides` are by the files' names."""
    found: Arrays = {}
    dense: Arrays = {}
    for canonical, drawn in tiny.random_tensors(MIXTRAL).items():
        name = canonical.replace(".mlp.experts.", f".{EXPERTS}.").replace(".mlp.gate.", ".block_sparse_moe.gate.")
        module, array = name.removesuffix(".weight"), mx.array(drawn)
        form = overrides.get(module, default) if module.endswith("_proj") else None
        if form is None:
            found[name] = dense[name] = array
        else:
            parts, dense[name] = packed(module, array, form)
            found |= parts
    said = {**as_json(default), **{module: as_json(form) for module, form in overrides.items()}}
    return (
        write(folder / "packed", {**MIXTRAL, "quantization": said}, found),
        write(folder / "dense", MIXTRAL, dense),
    )


@FORMS
def test_packed_experts(form: QuantFormat, tmp_path: Path) -> None:
    folder, dense = write_experts(tmp_path, form, {})
    weight = WeightStore.from_path(folder).linear("model.layers.0.mlp.experts.up_proj")
    assert isinstance(weight, QuantizedWeight) and weight.form == form and weight.packed.shape[0] == 4
    logits = load(dense, "reference", expand=False)(IDS)[0]
    off = [difference(load(folder, features, expand=False)(IDS)[0], logits) for features in ("fused", "reference")]
    assert max(off) <= TIGHT


def test_overrides_of_experts_reach_them(tmp_path: Path) -> None:
    """Fault 05: of switch_mlp, where gate and up differ and are two products, and where one of them is dense."""
    overrides = {
        f"model.layers.0.{EXPERTS}.gate_proj": QuantFormat(6, 32),
        f"model.layers.0.{EXPERTS}.down_proj": QuantFormat(8, 32, "mxfp8"),
        f"model.layers.1.{EXPERTS}.up_proj": None,
    }
    folder, dense = write_experts(tmp_path, QuantFormat(4, 64), overrides)
    store = WeightStore.from_path(folder)
    for name, form in overrides.items():
        weight = store.linear(name.replace(EXPERTS, "mlp.experts"))
        assert isinstance(weight, DenseWeight) if form is None else weight.form == form
    logits = load(dense, "reference", expand=False)(IDS)[0]
    for features in ("fused", "reference"):
        for expand in (False, True):
            assert difference(load(folder, features, expand=expand)(IDS)[0], logits) <= TIGHT


@pytest.mark.parametrize(
    ("v_proj", "products"), [(QuantFormat(4, 64), 1), (QuantFormat(8, 64), 3), (None, 3)], ids=repr
)
def test_projections_are_one_product_where_they_are_packed_alike(
    v_proj: QuantFormat | None, products: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = tiny.config(**TEXT)
    modules = tuple(f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
    found: Arrays = {}
    wanted = []
    for name, drawn in tiny.random_tensors(values).items():
        module, array = name.removesuffix(".weight"), mx.array(drawn)
        form = v_proj if module == modules[2] else QuantFormat(4, 64)
        if module not in modules or form is None:
            found[name] = array
        else:
            parts, array = packed(module, array, form)
            found |= parts
        wanted += [array] if module in modules else []
    said = {**as_json(QuantFormat(4, 64)), modules[2]: as_json(v_proj)}
    folder = write(tmp_path / "packed", {**values, "quantization": said}, found)
    store = WeightStore.from_path(folder, Config.from_json_file(folder)).cast(mx.float32)
    read: list[tuple[str, ...]] = []
    linear = WeightStore.linear
    monkeypatch.setattr(
        WeightStore, "linear", lambda self, *names: (read.append(names), linear(self, *names))[1], raising=True
    )
    project = Projections(modules, store, ModelFeatures())
    assert len(read) == products
    x = mx.random.normal((1, 3, 128), key=mx.random.key(0))
    expected = mx.concatenate([x @ array.T for array in wanted], axis=-1)
    assert difference(project(x)[0], expected[0]) <= TIGHT


def test_packed_matrices_are_not_turned(tmp_path: Path) -> None:
    """GPT-2's dense ones stand as (in, out), and whoever packs them packs rows of (out, in)."""
    source = GOLDEN / "gpt2"
    arrays = mx.load(str(source / "model.safetensors"))
    assert isinstance(arrays, dict)
    names = [name for name in arrays if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))]
    found, dense = dict(arrays), dict(arrays)
    for name in names:
        parts, stands_for = packed(name.removesuffix(".weight"), found.pop(name).T, QuantFormat(6, 32))
        found |= parts
        dense[name] = mx.contiguous(stands_for.T)
    values = json.loads((source / "config.json").read_text())
    packed_folder = write(tmp_path / "packed", {**values, "quantization": {"group_size": 32, "bits": 6}}, found)
    logits = load(write(tmp_path / "dense", values, dense), "reference", expand=False)(IDS[:, :24])[0]
    assert len(names) >= 8
    assert difference(load(packed_folder, "fused", expand=False)(IDS[:, :24])[0], logits) <= TIGHT
