"""A folder's tensors under canonical names: found by the index, checked before they are read, never held twice."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm._mx import mx
from tinyllm.checkpoint.files import INDEX, SINGLE
from tinyllm.checkpoint.weights import DenseWeight, QuantizedWeight, WeightStore
from tinyllm.config.config import Config
from tinyllm.errors import (
    CheckpointError,
    CorruptFileError,
    MissingFileError,
    TensorMismatchError,
    TinyllmError,
    UnsafePathError,
    UnsupportedQuantizationError,
)
from tinyllm.model.load import load_model

UP = "model.layers.0.mlp.up_proj"
IDS = [[5, 6, 7, 8]]


def logits(folder: Path) -> mx.array:
    return load_model(folder)(mx.array(IDS))


def equal(a: mx.array, b: Any) -> bool:
    return bool(mx.array_equal(a, mx.array(b)).item())


def edit_config(folder: Path, **overrides: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    tiny.write_json(folder / "config.json", {k: v for k, v in {**values, **overrides}.items() if v is not ...})


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_every_tensor_is_read_as_it_was_written(tmp_path: Path, shards: int) -> None:
    store = WeightStore.from_path(tiny.write_checkpoint(tmp_path, shards=shards))
    arrays = tiny.random_tensors(tiny.config())
    assert store.names == arrays.keys()
    for name, array in arrays.items():
        assert store.has(name)
        assert store.shape(name) == array.shape
        assert equal(store.tensor(name), array)
        assert equal(store.tensor(name), array), "and read again"
    assert store.nbytes == sum(array.nbytes for array in arrays.values())
    assert not store.is_quantized


@pytest.mark.parametrize(("dtype", "stored"), [("F32", mx.float32), ("F16", mx.float16), ("BF16", mx.bfloat16)])
def test_tensors_keep_their_type_unless_it_is_cast(tmp_path: Path, dtype: str, stored: mx.Dtype) -> None:
    store = WeightStore.from_path(tiny.write_checkpoint(tmp_path, dtype=dtype))
    assert store.stored_dtype == store.tensor("model.norm.weight").dtype == stored
    cast = store.cast(mx.float16)
    assert cast.tensor("model.norm.weight").dtype == mx.float16
    assert store.tensor("model.norm.weight").dtype == stored


def test_an_unknown_name_is_refused_by_name(tiny_checkpoint: Path) -> None:
    store = WeightStore.from_path(tiny_checkpoint)
    assert not store.has("model.nothing.weight")
    for ask in (store.tensor, store.shape, store.linear):
        with pytest.raises(CheckpointError, match=r"model\.nothing"):
            ask("model.nothing")


def test_several_modules_are_joined_by_their_rows(tmp_path: Path) -> None:
    store = WeightStore.from_path(tiny.write_checkpoint(tmp_path, config_overrides={"attention_bias": True}))
    modules = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
    arrays = tiny.random_tensors(tiny.config(attention_bias=True))
    assert store.joinable(*modules)
    joined = store.linear(*modules)
    assert isinstance(joined, DenseWeight)
    assert joined.bias is not None
    assert equal(joined.weight, np.concatenate([arrays[f"{module}.weight"] for module in modules]))
    assert equal(joined.bias, np.concatenate([arrays[f"{module}.bias"] for module in modules]))


def test_names_of_a_multimodal_file_are_canonical_and_other_parts_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = tiny.config(model_type="mistral", sliding_window=None)
    arrays = tiny.random_tensors(text)
    renamed = {
        name.replace("model.", "language_model.model.", 1)
        if name.startswith("model.")
        else f"language_model.{name}": a
        for name, a in arrays.items()
    }
    tiny.write_json(tmp_path / "config.json", {"model_type": "mistral3", "text_config": text})
    tiny.write_weights(tmp_path, {**renamed, "vision_tower.x": np.ones(2), "multi_modal_projector.y": np.ones(2)})
    store = WeightStore.from_path(tmp_path)
    assert store.names == arrays.keys()
    assert equal(store.tensor(f"{UP}.weight"), arrays[f"{UP}.weight"])
    assert "2 tensors that the text model has no use for" in caplog.text


# Fault 01: the index.


def test_fault_01_a_deleted_shard_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(MissingFileError, match=r"model-00002-of-00002\.safetensors"):
        load_model(folder)


def test_fault_01_a_complete_file_beside_a_stale_index_loads_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny.write_checkpoint(tmp_path)
    expected = logits(folder)
    tiny.write_json(folder / INDEX, {"weight_map": {"model.norm.weight": "model-00001-of-00009.safetensors"}})
    assert equal(logits(folder), expected)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "stale" in caplog.text


def test_fault_01_an_incomplete_file_beside_a_stale_index_is_refused_with_both_reasons(tmp_path: Path) -> None:
    arrays = tiny.random_tensors(tiny.config())
    del arrays["model.norm.weight"]
    folder = tiny.write_checkpoint(tmp_path, tensors=arrays)
    tiny.write_json(folder / INDEX, {"weight_map": {"model.norm.weight": "model-00001-of-00009.safetensors"}})
    with pytest.raises(MissingFileError, match=r"model-00001-of-00009\.safetensors.*missing 1: model\.norm\.weight"):
        load_model(folder)


def test_fault_01_a_tensor_that_stands_in_another_shard_than_the_index_says_is_found(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path, shards=2)
    expected = logits(folder)
    index = json.loads((folder / INDEX).read_text())
    first, second = sorted(set(index["weight_map"].values()))
    swapped = {name: second if file == first else first for name, file in index["weight_map"].items()}
    tiny.write_json(folder / INDEX, {"weight_map": swapped})
    assert equal(logits(folder), expected)


def test_fault_01_an_empty_index_is_refused(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path, shards=2)
    tiny.write_json(folder / INDEX, {"weight_map": {}})
    with pytest.raises(CheckpointError, match="weight_map is empty"):
        load_model(folder)


def test_fault_01_a_tensor_in_two_files_is_refused_with_both(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path, shards=2)
    index = json.loads((folder / INDEX).read_text())
    tiny.write_safetensors(folder / "again.safetensors", {"model.norm.weight": np.ones(32)})
    tiny.write_json(folder / INDEX, {"weight_map": {**index["weight_map"], "extra": "again.safetensors"}})
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' is there twice.*\.safetensors"):
        load_model(folder)


# Fault 02: tying.


def test_fault_02_tied_models_load_with_a_spare_head_or_without_and_score_by_the_embedding(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = tiny.config(tie_word_embeddings=True)
    arrays = tiny.random_tensors(values)
    embedding = arrays["model.embed_tokens.weight"]
    untied = tiny.write_checkpoint(tmp_path / "untied", tensors={**arrays, "lm_head.weight": embedding})
    expected = logits(untied)
    overrides = {"tie_word_embeddings": True}
    without = tiny.write_checkpoint(tmp_path / "without", config_overrides=overrides, tensors=arrays)
    spare = {**arrays, "lm_head.weight": embedding}
    same = tiny.write_checkpoint(tmp_path / "same", config_overrides=overrides, tensors=spare, shards=2)
    assert equal(logits(without), expected)
    assert equal(logits(same), expected)
    assert not caplog.records
    differing = {**arrays, "lm_head.weight": embedding + 1}
    other = tiny.write_checkpoint(tmp_path / "other", config_overrides=overrides, tensors=differing)
    assert equal(logits(other), expected)
    assert "lm_head.weight differs" in caplog.text


@pytest.mark.parametrize("row", [0, 100, 287])
def test_fault_02_a_spare_head_that_differs_in_one_row_of_a_small_model_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, row: int
) -> None:
    arrays = tiny.random_tensors(tiny.config())
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    arrays["lm_head.weight"][row] += 1
    tiny.write_checkpoint(tmp_path, config_overrides={"tie_word_embeddings": True}, tensors=arrays)
    WeightStore.from_path(tmp_path)
    assert "lm_head.weight differs" in caplog.text


# Fault 03 and 04: refused before anything is evaluated.


def test_fault_03_a_file_cut_by_one_byte_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.write_checkpoint(tmp_path)
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[:-1])
    monkeypatch.setattr(mx, "load", lambda *args, **kwargs: pytest.fail("the file was read"))
    with pytest.raises(CorruptFileError, match=r"model\.safetensors: tensor 'lm_head\.weight'"):
        load_model(folder)


def test_fault_04_a_model_behind_a_header_of_more_than_100_mb_loads(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path, dtype="BF16")
    expected = logits(folder)
    content = (folder / SINGLE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    padded = header[:-1] + b', "__metadata__": {"padding": "' + b"x" * 100_000_000 + b'"}}'
    tiny.write_raw_safetensors(folder / SINGLE, padded, [data])
    assert equal(logits(folder), expected)


@pytest.mark.parametrize(
    "extra",
    [
        {"__metadata__": {"format": 1}},
        {"__metadata__": {"half": "\ud800"}},
        {"vision_tower.x": {"dtype": "F8_E5M2", "shape": [0], "data_offsets": [0, 0]}},
    ],
    ids=str,
)
def test_a_sound_file_that_mlx_refuses_is_read_all_the_same(tmp_path: Path, extra: dict[str, Any]) -> None:
    """MLX knows fewer types, and fewer strings, than a file may hold beside the tensors that are needed."""
    text = tiny.config(model_type="mistral", sliding_window=None)
    tiny.write_checkpoint(tmp_path, config_overrides={"model_type": "mistral", "sliding_window": None})
    expected = logits(tmp_path)
    content = (tmp_path / SINGLE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    tiny.write_raw_safetensors(tmp_path / SINGLE, json.dumps({**header, **extra}).encode(), [content[8 + length :]])
    tiny.write_json(tmp_path / "config.json", {"model_type": "mistral3", "text_config": text})
    with pytest.raises(RuntimeError):
        mx.load(str(tmp_path / SINGLE))
    assert equal(logits(tmp_path), expected)


def test_a_file_that_is_an_archive_too_is_read_as_safetensors(tmp_path: Path) -> None:
    """The ending of a file's name, which an index chooses, does not choose another reader."""
    folder = tiny.write_checkpoint(tmp_path)
    expected = logits(folder)
    (folder / SINGLE).rename(folder / "model.npz")
    tiny.write_json(folder / INDEX, {"weight_map": {"model.norm.weight": "model.npz"}})
    assert equal(logits(folder), expected)


@pytest.mark.parametrize("dtype", ["I64", "F64", "BOOL"])
def test_a_tensor_of_a_type_that_no_weight_has_is_named(tmp_path: Path, dtype: str) -> None:
    folder = tiny.write_checkpoint(tmp_path)
    header = {"model.norm.weight": {"dtype": dtype, "shape": [0], "data_offsets": [0, 0]}}
    tiny.write_raw_safetensors(folder / SINGLE, json.dumps(header).encode())
    with pytest.raises(
        CheckpointError, match=rf"model\.safetensors: tensor 'model\.norm\.weight' is of type {dtype}"
    ):
        load_model(folder)


# Fault 05: layers packed in their own ways, under names that loading changes.

FORMATS: dict[str, dict[str, Any]] = {
    UP: {"bits": 6, "group_size": 64},
    "model.layers.1.mlp.down_proj": {"bits": 8, "group_size": 32},
    "model.layers.0.self_attn.q_proj": {"bits": 4, "group_size": 32},
}


def packed(arrays: dict[str, np.ndarray], formats: dict[str, dict[str, Any]]) -> dict[str, np.ndarray]:
    """Pack some modules of a checkpoint as MLX does."""
    result = dict(arrays)
    for module, form in formats.items():
        parts = mx.quantize(mx.array(arrays[f"{module}.weight"]), **form)
        result |= {
            f"{module}.{part}": np.array(a) for part, a in zip(("weight", "scales", "biases"), parts, strict=True)
        }
    return result


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
def test_fault_05_each_layer_is_unpacked_in_its_own_way_under_any_prefix(tmp_path: Path, prefix: str) -> None:
    text = tiny.config(model_type="mistral", sliding_window=None, hidden_size=64, intermediate_size=64)
    arrays = packed(tiny.random_tensors(text), FORMATS)

    def rename(name: str) -> str:
        return name.replace("model.", prefix, 1) if name.startswith("model.") else name

    quantization: dict[str, Any] = {"group_size": 64, "bits": 2, **{rename(m): form for m, form in FORMATS.items()}}
    tiny.write_json(
        tmp_path / "config.json", {"model_type": "mistral3", "text_config": text, "quantization": quantization}
    )
    tiny.write_weights(tmp_path, {rename(name): array for name, array in arrays.items()})
    store = WeightStore.from_path(tmp_path)
    assert store.is_quantized
    for module, form in FORMATS.items():
        weight = store.linear(module)
        assert isinstance(weight, QuantizedWeight)
        assert (weight.form.bits, weight.form.group_size) == (form["bits"], form["group_size"])
        parts = (mx.array(arrays[f"{module}.{part}"]) for part in ("weight", "scales", "biases"))
        expected = mx.dequantize(*parts, **form)
        assert equal(weight.dequantize(), expected)
        expanded = store.cast(mx.float32, expand=True).linear(module)
        assert isinstance(expanded, DenseWeight)
        assert equal(expanded.weight, expected)
    assert isinstance(store.linear("model.layers.1.mlp.up_proj"), DenseWeight)


def test_fault_05_modules_that_are_packed_differently_are_not_joined(tmp_path: Path) -> None:
    values = tiny.config(hidden_size=64, intermediate_size=64)
    q, k, v = (f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
    formats = {q: {"bits": 4, "group_size": 32}, k: {"bits": 4, "group_size": 32}, v: {"bits": 8, "group_size": 32}}
    quantization = {"group_size": 32, "bits": 4, **formats}
    arrays = packed(tiny.random_tensors(values), formats)
    overrides = {"hidden_size": 64, "intermediate_size": 64, "quantization": quantization}
    store = WeightStore.from_path(tiny.write_checkpoint(tmp_path, config_overrides=overrides, tensors=arrays))
    assert store.joinable(q, k)
    assert not store.joinable(q, k, v)
    assert not store.joinable(v, f"{UP}")
    joined = store.linear(q, k)
    assert isinstance(joined, QuantizedWeight)
    dense = [
        mx.dequantize(*(mx.array(arrays[f"{m}.{p}"]) for p in ("weight", "scales", "biases")), **formats[m])
        for m in (q, k)
    ]
    assert equal(joined.dequantize(), mx.concatenate(dense))


# Fault 06, 52, 53 through the whole loader.


@pytest.mark.parametrize("method", ["hqq", "vptq"])
def test_fault_06_packed_tensors_of_another_library_are_refused_in_one_line(tmp_path: Path, method: str) -> None:
    arrays = tiny.random_tensors(tiny.config())
    for name in [name for name in arrays if name.endswith("_proj.weight")]:
        module = name.removesuffix(".weight")
        del arrays[name]
        arrays |= {f"{module}.{part}": np.ones((4, 4), dtype=np.uint32) for part in ("qweight", "qzeros", "scales")}
    quantization = {"quant_method": method, "bits": 4, "group_size": 128}
    tiny.write_checkpoint(tmp_path, config_overrides={"quantization_config": quantization}, tensors=arrays)
    with pytest.raises(UnsupportedQuantizationError, match=f"'{method}'") as failure:
        load_model(tmp_path)
    assert len(str(failure.value)) < len(str(tmp_path)) + 250
    edit_config(tmp_path, quantization_config=...)
    with pytest.raises(TensorMismatchError, match=r"surplus 28: .*\{0-1\}") as failure:
        load_model(tmp_path)
    assert len(str(failure.value)) < len(str(tmp_path)) + 2000


def test_fault_52_python_in_the_folder_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    folder = tiny.write_checkpoint(tmp_path / "model", config_overrides={"auto_map": {"AutoModel": "modeling.Model"}})
    for name in ("modeling.py", "__init__.py", "conftest.py"):
        (folder / name).write_text(f"open({str(marker)!r}, 'w').close()")
    load_model(folder)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../x.safetensors", "/tmp/x.safetensors"])
def test_fault_53_weights_outside_of_the_folder_are_not_read(tmp_path: Path, name: str) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model")
    (folder / SINGLE).rename(tmp_path / "x.safetensors")
    tiny.write_json(folder / INDEX, {"weight_map": {"model.norm.weight": name}})
    with pytest.raises(UnsafePathError):
        load_model(folder)


def test_fault_08_a_snapshot_of_the_hubs_cache_loads_through_its_links(tmp_path: Path) -> None:
    original = tiny.write_checkpoint(tmp_path / "original", shards=2)
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "0123abc"
    blobs = tmp_path / "models--owner--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(original.iterdir())):
        (blobs / f"{i:064x}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{i:064x}")
    assert equal(logits(snapshot), logits(original))
    (snapshot / "model-00002-of-00002.safetensors").resolve().unlink()
    with pytest.raises(MissingFileError, match=r"model-00002-of-00002\.safetensors.*download"):
        load_model(snapshot)


# Any damage at all.


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = {"vocab_size": 4, "hidden_size": 4, "intermediate_size": 2, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny.write_checkpoint(tmp_path_factory.mktemp("damaged"), config_overrides={**values, **heads})


@settings(max_examples=150)
@given(data=st.data())
def test_any_damage_to_a_header_is_one_line_or_leaves_all_tensors_readable(
    damaged: Path, data: st.DataObject
) -> None:
    whole = (damaged / SINGLE).read_bytes()
    content = bytearray(whole)
    length = int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, 8 + length))
        content[start : start + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    broken = damaged / "broken.safetensors"
    broken.write_bytes(content)
    tiny.write_json(damaged / INDEX, {"weight_map": {"x": broken.name}})
    try:
        store = WeightStore.from_path(damaged)
        shapes = {name: store.tensor(name).shape for name in store.names}
    except TinyllmError as error:
        assert str(error).isprintable()
    else:
        assert all(store.shape(name) == shape for name, shape in shapes.items())


# Memory.

MEASURE = """
import sys
from tinyllm._mx import mx
from tinyllm.model.load import load_model
from tinyllm.ops.features import ModelFeatures

mx.set_default_device(mx.cpu)
model = load_model(sys.argv[1], dtype=getattr(mx, sys.argv[2]))
print(mx.get_active_memory(), mx.get_peak_memory())
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_loading_peaks_at_the_weights_and_twice_the_largest_tensor(tmp_path: Path, dtype: str) -> None:
    """Bytes count in the type that is computed in; joining and casting are part of loading."""
    size = 1024
    overrides = {
        "vocab_size": 4096,
        "hidden_size": size,
        "intermediate_size": 4 * size,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    values = tiny.config(**overrides)
    shapes = {name: array.shape for name, array in tiny.random_tensors(values).items()}
    zeros = {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}
    tiny.write_checkpoint(tmp_path, config_overrides=overrides, tensors=zeros, dtype="BF16")
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), dtype], capture_output=True, text=True, check=True
    )
    active, peak = map(int, run.stdout.split())
    width = 4 if dtype == "float32" else 2
    weights = width * sum(int(np.prod(shape)) for shape in shapes.values())
    largest = width * max(int(np.prod(shape)) for shape in shapes.values())
    slack = 1 << 16  # pages, and the tables of RoPE
    assert weights > 60e6
    assert weights <= active <= weights + slack
    assert peak <= weights + 2 * largest + slack


def test_a_store_keeps_nothing_that_it_has_read(tmp_path: Path) -> None:
    overrides = {"vocab_size": 8192, "hidden_size": 256}
    folder = tiny.write_checkpoint(tmp_path, config_overrides=overrides)
    store = WeightStore.from_path(folder, Config.from_json_file(folder))
    before = mx.get_active_memory()
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.embed_tokens.weight"):
        assert store.tensor(name).nbytes == 8192 * 256 * 4
    assert mx.get_active_memory() - before < 8192 * 256 * 4
