"""Packed checkpoints give the logits of the dense ones that hold their dequantised weights (fault 05).

The folders mlx-lm-* of golden/ were quantised by mlx-lm, and their logits come from transformers. The others are
packed here, as mlx-community publishes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiny
from golden_cases import FEATURES, FOLDERS, GOLDEN, TOLERANCE, difference, expected, feedings, run

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import DenseWeight, QuantizedWeight, WeightStore
from tinyllm.config.config import Config
from tinyllm.config.quantization import QuantFormat
from tinyllm.errors import TensorMismatchError
from tinyllm.model.load import load_model
from tinyllm.model.transformer import ModelForCausalLM

AFFINE = [QuantFormat(bits, group) for bits, group in product((2, 3, 4, 5, 6, 8), (32, 64, 128))]
FLOATING = [QuantFormat(4, 32, "mxfp4"), QuantFormat(8, 32, "mxfp8"), QuantFormat(4, 16, "nvfp4")]
TIGHT = 2e-5  # of the logits' standard deviation, in float32
IDS = mx.array([[(7 * i * i + 3) % 96 for i in range(24)]])
TEXT = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 256}
WRAPPED = {"model_type": "mistral3", "text_config": tiny.config(**TEXT, model_type="mistral"), "vision_config": {}}

Formats = Mapping[str, QuantFormat | None]


def as_json(form: QuantFormat | None) -> dict[str, Any] | bool:
    """An entry of config.json; older files name no mode, and mean affine."""
    if form is None:
        return False
    sizes = {"group_size": form.group_size, "bits": form.bits}
    return sizes if form.mode == "affine" else {**sizes, "mode": form.mode}


def file_name(name: str, values: Mapping[str, Any]) -> str:
    """A canonical name as the file has it, where a wrapped text model stands under a prefix."""
    return f"language_model.{name}" if "text_config" in values else name


def write_pair(
    folder: Path, values: Mapping[str, Any], default: QuantFormat, overrides: Formats
) -> tuple[Path, Path]:
    """Write a packed checkpoint and the dense one of its dequantised weights: their folders.

    `overrides` are by canonical module name. Scales and norms are bfloat16, as they are published.
    """
    packed: dict[str, mx.array] = {}
    dense: dict[str, mx.array] = {}
    for canonical, drawn in tiny.random_tensors(values).items():
        name, module = file_name(canonical, values), canonical.removesuffix(".weight")
        tensor = mx.array(drawn).astype(mx.bfloat16)
        form = overrides.get(module, default) if tensor.ndim == 2 else None
        if form is None:
            packed[name], dense[name] = tensor, tensor.astype(mx.float32)
            continue
        how = {"group_size": form.group_size, "bits": form.bits, "mode": form.mode}
        parts = dict(zip(("weight", "scales", "biases"), mx.quantize(tensor, **how), strict=False))
        packed |= {name.replace(".weight", f".{part}"): array for part, array in parts.items()}
        wide = [part.astype(mx.float32) if part.dtype == mx.bfloat16 else part for part in parts.values()]
        dense[name] = mx.dequantize(*wide, **how).astype(mx.float32)
    entries = {file_name(module, values): as_json(form) for module, form in overrides.items()}
    said = {**as_json(default), **entries}
    return (
        write(folder / "packed", {**values, "quantization": said, "quantization_config": said}, packed),
        write(folder / "dense", values, dense),
    )


def write(folder: Path, values: Mapping[str, Any], tensors: dict[str, mx.array]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


def load(folder: Path, features: str, *, expand: bool) -> ModelForCausalLM:
    """Load in float32, with packed weights unpacked or kept."""
    config = Config.from_json_file(folder)
    store = WeightStore.from_path(folder, config).cast(mx.float32, expand=expand)
    return ModelForCausalLM(config, store, FEATURES[features])


def assert_same_logits(packed: Path, dense: Path) -> None:
    wanted = load(dense, "reference", expand=False)(IDS)[0]
    off = {
        (features, expand): difference(load(packed, features, expand=expand)(IDS)[0], wanted)
        for features in FEATURES
        for expand in (False, True)
    }
    assert max(off.values()) <= TIGHT, off


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("name", [name for name in FOLDERS if name.startswith("mlx-lm")])
def test_what_mlx_lm_packs_gives_the_logits_of_transformers(name: str, features: str, expand: bool) -> None:
    ids, wanted = expected(name)
    model = load(GOLDEN / name, features, expand=expand)
    off = {how: difference(run(model, ids, pieces), wanted) for how, pieces in feedings(ids.shape[1]).items()}
    assert max(off.values()) <= TOLERANCE, off


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("form", AFFINE + FLOATING, ids=lambda form: f"{form.mode}-{form.bits}-{form.group_size}")
def test_packed_gives_the_logits_of_dequantised(form: QuantFormat, tied: bool, tmp_path: Path) -> None:
    """Every format, the embedding packed too, whether or not it is the output head."""
    packed, dense = write_pair(tmp_path, tiny.config(**TEXT, tie_word_embeddings=tied), form, {})
    assert isinstance(WeightStore.from_path(packed).linear("model.embed_tokens"), QuantizedWeight)
    assert_same_logits(packed, dense)


# Parts that would be one product (q, k, v; gate, up) differ in each way: format, and being packed at all.
OVERRIDES: Formats = {
    "model.embed_tokens": QuantFormat(8, 32),
    "model.layers.0.mlp.down_proj": QuantFormat(8, 32),
    "model.layers.0.mlp.up_proj": QuantFormat(6, 64),
    "model.layers.0.self_attn.v_proj": QuantFormat(8, 64),
    "model.layers.1.self_attn.q_proj": None,
    "model.layers.1.self_attn.k_proj": QuantFormat(4, 32),
    "model.layers.1.mlp.gate_proj": QuantFormat(8, 32, "mxfp8"),
}


def assert_formats(packed: Path, default: QuantFormat, overrides: Formats) -> None:
    """Each module is read in its own format."""
    store = WeightStore.from_path(packed)
    for name in store.names:
        module, _, part = name.rpartition(".")
        if part == "weight" and not module.endswith("norm"):
            weight, form = store.linear(module), overrides.get(module, default)
            assert isinstance(weight, DenseWeight) if form is None else weight.form == form, module


@pytest.mark.parametrize("biased", [False, True], ids=["unbiased", "biased"])
@pytest.mark.parametrize("default", [QuantFormat(4, 64), FLOATING[0]], ids=["affine", "mxfp4"])
def test_overrides_reach_their_layers(default: QuantFormat, biased: bool, tmp_path: Path) -> None:
    """Fault 05: 8 and 6 bits, another mode and `false`, each where config.json has it and nowhere else."""
    values = tiny.config(**TEXT, attention_bias=biased, mlp_bias=biased)
    packed, dense = write_pair(tmp_path, values, default, OVERRIDES)
    assert_formats(packed, default, OVERRIDES)
    assert_same_logits(packed, dense)


@pytest.mark.parametrize("default", [QuantFormat(4, 64), FLOATING[0]], ids=["affine", "mxfp4"])
def test_overrides_reach_layers_that_are_renamed(default: QuantFormat, tmp_path: Path) -> None:
    """Fault 05: under language_model., which the loader takes away."""
    packed, dense = write_pair(tmp_path, WRAPPED, default, OVERRIDES)
    assert "language_model.model.layers.0.mlp.down_proj" in (packed / "config.json").read_text()
    assert_formats(packed, default, OVERRIDES)
    assert_same_logits(packed, dense)


def test_override_that_says_little_means_the_defaults_of_mlx(tmp_path: Path) -> None:
    """`true` is the checkpoint's format; an object without a group size means 64, whatever the checkpoint has."""
    overrides = {"model.layers.0.mlp.down_proj": QuantFormat(8, 64)}
    packed, dense = write_pair(tmp_path, tiny.config(**TEXT), QuantFormat(4, 32), overrides)
    values = json.loads((packed / "config.json").read_text())
    values["quantization"] |= {"model.layers.0.mlp.down_proj": {"bits": 8}, "model.layers.0.mlp.up_proj": True}
    del values["quantization_config"]
    (packed / "config.json").write_text(json.dumps(values))
    assert_formats(packed, QuantFormat(4, 32), overrides)
    assert_same_logits(packed, dense)


@pytest.mark.parametrize("module", OVERRIDES)
def test_override_that_is_lost_is_an_error(module: str, tmp_path: Path) -> None:
    """Fault 05: what would be computed with the wrong bits is refused, by name."""
    packed, _ = write_pair(tmp_path, tiny.config(**TEXT), QuantFormat(4, 64), OVERRIDES)
    values = json.loads((packed / "config.json").read_text())
    del values["quantization"][module]
    del values["quantization_config"]
    (packed / "config.json").write_text(json.dumps(values))
    if OVERRIDES[module] is None:  # the weights themselves say that it is dense
        assert isinstance(WeightStore.from_path(packed).linear(module), DenseWeight)
        return
    with pytest.raises(TensorMismatchError, match=module.rpartition(".")[2]):
        WeightStore.from_path(packed)


def test_learned_positions_may_be_packed(tmp_path: Path) -> None:
    """As mlx-lm does with GPT-2's."""
    source, module = GOLDEN / "gpt2", "transformer.wpe"
    arrays = mx.load(str(source / "model.safetensors"))
    weight, *others = mx.quantize(arrays[f"{module}.weight"], group_size=32, bits=4)
    scales, biases = (each.astype(mx.float32) for each in others)
    packed = {f"{module}.weight": weight, f"{module}.scales": scales, f"{module}.biases": biases}
    dense = {f"{module}.weight": mx.dequantize(weight, scales, biases, group_size=32, bits=4)}
    config = json.loads((source / "config.json").read_text()) | {"quantization": {"group_size": 32, "bits": 4}}
    logits = [load_model(source, dtype=mx.float32)(IDS)[0]]
    for name, changed in (("packed", packed), ("dense", dense)):
        folder = tmp_path / name
        folder.mkdir()
        mx.save_safetensors(str(folder / "model.safetensors"), {**arrays, **changed})
        tiny.write_json(folder / "config.json", config)
        logits.append(load_model(folder, dtype=mx.float32)(IDS)[0])
    assert difference(logits[1], logits[2]) <= TIGHT
    assert difference(logits[0], logits[2]) > 100 * TIGHT
