"""Checkpoints in other forms compute what they should, keep their names, and are there whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
from golden_cases import FOLDERS, GOLDEN, difference, expected, rounding

from tinyllm._mx import mx
from tinyllm.checkpoint.files import INDEX, find_weight_files
from tinyllm.checkpoint.safetensors_header import TensorInfo, read_safetensors_header
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.config.quantization import QuantFormat
from tinyllm.convert.convert import convert
from tinyllm.convert.published import in_older_words
from tinyllm.convert.recipe import Recipe, read_recipe
from tinyllm.errors import DoesNotFitError, UsageError
from tinyllm.model.load import load_model
from tinyllm.model.transformer import ModelForCausalLM

EIGHT = QuantFormat(8, 32)
IDS = mx.array([[(7 * i * i + 3) % 96 for i in range(24)]])
SIZES = {"hidden_size": 128, "intermediate_size": 256}
EXPERTS = {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2, "vocab_size": 96, **SIZES}


def headers(folder: Path) -> dict[str, TensorInfo]:
    files = find_weight_files(folder).files
    return {name: info for file in files for name, info in read_safetensors_header(file).items()}


def data(info: TensorInfo) -> bytes:
    with info.file.open("rb") as file:
        file.seek(info.start)
        return file.read(info.nbytes)


def assert_same_tensors(a: Path, b: Path) -> None:
    left, right = headers(a), headers(b)
    assert left.keys() == right.keys()
    for name, info in left.items():
        assert (info.dtype, info.shape) == (right[name].dtype, right[name].shape), name
        assert data(info) == data(right[name]), name


def unpacked(folder: Path) -> ModelForCausalLM:
    store = WeightStore.from_path(folder)
    return ModelForCausalLM(store.config, store.cast(mx.float32, expand=True))


def forms(folder: Path) -> dict[str, QuantFormat]:
    store = WeightStore.from_path(folder)
    modules = {name.rpartition(".")[0] for name in store.names}
    return {module: form for module in modules if (form := store.form(module)) is not None}


def config_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


# ---------------------------------------------------------------- what is in the files


@pytest.mark.parametrize("name", FOLDERS)
def test_a_copy_has_the_bytes_of_every_tensor(name: str, tmp_path: Path) -> None:
    convert(GOLDEN / name, tmp_path / "copy")
    source, copy = headers(GOLDEN / name), headers(tmp_path / "copy")
    assert copy.keys() <= source.keys()
    left_out = [
        name
        for name in source.keys() - copy.keys()
        if not re.search(r"lm_head|inv_freq|masked|bias$|vision|visual|multi_modal", name)
    ]
    assert not left_out, "all but what no text model reads"
    assert all((info.dtype, info.shape) == (source[name].dtype, source[name].shape) for name, info in copy.items())
    assert all(data(info) == data(source[name]) for name, info in copy.items())
    said, known = config_of(tmp_path / "copy"), config_of(GOLDEN / name)
    assert said == (in_older_words(known) if "quantization" in known else known)
    assert Config.from_dict(said) == Config.from_dict(known)


@pytest.mark.parametrize("name", [name for name in FOLDERS if not name.startswith("mlx-lm")])
def test_packed_computes_what_it_does_unpacked(name: str, tmp_path: Path) -> None:
    """Every family, whatever its files fuse, stack or transpose: read packed, and after it was unpacked again."""
    ids = expected(name)[0][:, :24]
    done = convert(GOLDEN / name, tmp_path / "packed", recipe=Recipe(EIGHT), dtype=mx.float32)
    assert done.packed and set(forms(tmp_path / "packed").values()) == {EIGHT}
    convert(tmp_path / "packed", tmp_path / "dense", dequantize=True)
    assert not forms(tmp_path / "dense")
    model = unpacked(tmp_path / "packed")
    dense = load_model(tmp_path / "dense", dtype=mx.float32)(ids)[0]
    assert difference(model(ids)[0], dense) <= rounding(model.config)
    published, back = headers(GOLDEN / name), headers(tmp_path / "dense")
    assert back.keys() <= published.keys(), "under the names that transformers reads"
    assert all(info.shape == published[key].shape for key, info in back.items())


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(
    "form", [QuantFormat(8, 64), QuantFormat(4, 64), QuantFormat(3, 32), QuantFormat(4, 32, "mxfp4")]
)
def test_packed_unpacked_and_packed_again_is_the_same(form: QuantFormat, dtype: str, tmp_path: Path) -> None:
    tiny.write_checkpoint(tmp_path / "0", config_overrides=SIZES, dtype=dtype)
    convert(tmp_path / "0", tmp_path / "q", recipe=Recipe(form))
    convert(tmp_path / "q", tmp_path / "d", dequantize=True)
    convert(tmp_path / "d", tmp_path / "again", recipe=Recipe(form))
    convert(tmp_path / "again", tmp_path / "d2", dequantize=True)
    assert_same_tensors(tmp_path / "d", tmp_path / "d2")
    assert forms(tmp_path / "again") == forms(tmp_path / "q") != {}


def test_what_is_packed_in_that_form_already_is_copied(tmp_path: Path) -> None:
    recipe = Recipe(EIGHT)
    convert(
        tiny.write_checkpoint(tmp_path / "0", config_overrides=SIZES, dtype="BF16"), tmp_path / "1", recipe=recipe
    )
    convert(tmp_path / "1", tmp_path / "2", recipe=recipe)
    assert convert(tmp_path / "1", tmp_path / "3").kept == 16
    assert_same_tensors(tmp_path / "1", tmp_path / "2")
    assert_same_tensors(tmp_path / "1", tmp_path / "3")
    assert config_of(tmp_path / "1") == config_of(tmp_path / "3")


def test_what_is_packed_anew_is_told_with_what_it_was(tmp_path: Path) -> None:
    convert(tiny.write_checkpoint(tmp_path / "0", config_overrides=SIZES), tmp_path / "1", recipe=Recipe(EIGHT))
    done = convert(tmp_path / "1", tmp_path / "2", recipe=read_recipe("lm_head=8,*=4", QuantFormat(4, 32)))
    assert (done.kept, done.repacked) == (1, {"8 bits": done.packed - 1})


def test_numbers_are_cast_before_they_are_packed(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "0", config_overrides=SIZES)
    convert(source, tmp_path / "1", recipe=Recipe(EIGHT), dtype=mx.bfloat16)
    assert {info.dtype for info in headers(tmp_path / "1").values()} == {"U32", "BF16"}
    assert config_of(tmp_path / "1")["torch_dtype"] == "bfloat16"


def test_what_decides_between_near_scores_keeps_its_digits(tmp_path: Path) -> None:
    convert(GOLDEN / "deepseek_v3", tmp_path / "half", dtype=mx.float16)
    source, half = headers(GOLDEN / "deepseek_v3"), headers(tmp_path / "half")
    kept = {name for name in half if name.endswith("e_score_correction_bias")}
    assert kept and all(half[name].dtype == source[name].dtype for name in kept)
    assert {half[name].dtype for name in half.keys() - kept} == {"F16"}


# ---------------------------------------------------------------- names and config.json, as mlx-lm reads them


def test_forms_stand_in_the_config_under_both_keys(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "0", config_overrides=SIZES)
    convert(source, tmp_path / "1", recipe=read_recipe("lm_head=8,layers.0.mlp.down=mxfp4,*=4", QuantFormat(4, 64)))
    said = config_of(tmp_path / "1")
    assert said["quantization"] == said["quantization_config"]
    assert said["quantization"] == {
        "group_size": 64,
        "bits": 4,
        "mode": "affine",
        "lm_head": {"group_size": 64, "bits": 8, "mode": "affine"},
        "model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    }
    assert config_of(source).items() <= said.items()


def test_experts_that_are_packed_stand_as_mlx_lm_has_them(tmp_path: Path) -> None:
    """Stacked under switch_mlp, dense ones beside packed ones too; others keep the names of their family."""
    values = tiny.config(**EXPERTS)
    tensors: dict[str, Any] = {}
    for name, array in tiny.random_tensors(values).items():
        if ".mlp.experts." not in name:
            tensors[name.replace(".mlp.", ".block_sparse_moe.")] = array
            continue
        before, _, after = name.partition(".mlp.experts.")
        w = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[after.removesuffix(".weight")]
        tensors |= {f"{before}.block_sparse_moe.experts.{i}.{w}.weight": part for i, part in enumerate(array)}
    source = tiny.write_checkpoint(tmp_path / "0", config_overrides=EXPERTS, tensors=tensors)
    convert(source, tmp_path / "1", recipe=read_recipe("*.experts.down=false,*.experts.gate=6,*=8", EIGHT))
    moe = "model.layers.0.block_sparse_moe"
    assert {name for name in headers(tmp_path / "1") if name.startswith(moe)} == {
        f"{moe}.gate.weight",
        f"{moe}.switch_mlp.down_proj.weight",
        *(
            f"{moe}.switch_mlp.{part}_proj.{leaf}"
            for part in ("gate", "up")
            for leaf in ("weight", "scales", "biases")
        ),
    }
    assert config_of(tmp_path / "1")["quantization"][f"{moe}.switch_mlp.gate_proj"]["bits"] == 6
    convert(source, tmp_path / "2")
    assert headers(tmp_path / "2").keys() == tensors.keys()


# Names that mlx-lm 0.32 has, of families that it loads by others than it has them by.
OF_MLX_LM = {
    "gpt2": ("model.h.0.attn.c_attn", "model.h.0.ln_1", "model.wte"),
    "lfm2-moe": ("model.layers.0.feed_forward.gate_proj", "model.layers.1.feed_forward.switch_mlp.down_proj"),
    "granitemoe": ("model.layers.0.block_sparse_moe.switch_mlp.up_proj",),
    "gpt-oss": ("model.layers.0.mlp.experts.gate_proj", "model.layers.0.self_attn.sinks"),
    "dots1": ("model.layers.1.mlp.experts.up_proj", "model.layers.1.mlp.shared_experts.up_proj"),
    "llama4": ("model.layers.1.feed_forward.experts.down_proj",),
    "gemma4_text-experts": ("model.layers.0.experts.switch_glu.gate_proj",),
}


@pytest.mark.parametrize("name", OF_MLX_LM)
def test_what_is_packed_has_the_names_of_mlx_lm(name: str, tmp_path: Path) -> None:
    """Dense ones beside packed ones, too: experts whose group divides nothing, and norms."""
    convert(GOLDEN / name, tmp_path / "packed", recipe=Recipe(EIGHT))
    found = headers(tmp_path / "packed")
    modules = {key.rpartition(".")[0] for key in found} | found.keys()
    assert set(OF_MLX_LM[name]) <= modules
    assert not any(re.search(r"\.experts\.\d|^transformer\.|gate_up_proj$", key) for key in found)


def test_rotation_is_said_as_mlx_lm_reads_it(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    source = tiny.write_checkpoint(tmp_path / "0", config_overrides={**SIZES, "rope_parameters": rope})
    convert(source, tmp_path / "1", recipe=Recipe(EIGHT))
    said = config_of(tmp_path / "1")
    assert (said["rope_theta"], said["rope_scaling"]) == (5000.0, {"rope_type": "linear", "factor": 2.0})
    assert "rope_parameters" not in said
    convert(source, tmp_path / "2")
    assert config_of(tmp_path / "2") == config_of(source)


def test_rotation_of_kinds_of_layers_that_differ_stays_as_it_is() -> None:
    kinds = {"full_attention": {"rope_theta": 1e6, "rope_type": "default"},
             "sliding_attention": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}}  # fmt: skip
    values = {**config_of(GOLDEN / "gemma3_text"), "rope_parameters": kinds}
    assert in_older_words(values) == values
    plain = {**kinds, "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"}}
    said = in_older_words({**values, "rope_parameters": plain})
    assert (said["rope_theta"], said["rope_local_base_freq"]) == (1e6, 2e4)


def test_what_the_files_fuse_gets_the_most_bits_of_its_parts(tmp_path: Path) -> None:
    recipe = read_recipe("layers.*.self_attn.v=8,*=6", QuantFormat(6, 32))
    convert(GOLDEN / "gpt-neox", tmp_path / "1", recipe=recipe)
    found = forms(tmp_path / "1")
    assert {found[f"model.layers.0.self_attn.{part}_proj"] for part in "qkv"} == {QuantFormat(8, 32)}
    assert found["model.layers.0.self_attn.o_proj"] == QuantFormat(6, 32)
    fused = [name for name in headers(tmp_path / "1") if "query_key_value.weight" in name]
    assert fused and set(fused) <= headers(GOLDEN / "gpt-neox").keys()


# ---------------------------------------------------------------- the folder


def test_shards_have_an_index_and_hold_the_same(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "0")
    convert(source, tmp_path / "1", shard_bytes=20_000)
    assert len(list((tmp_path / "1").glob("model-*-of-*.safetensors"))) > 3 and (tmp_path / "1" / INDEX).exists()
    assert_same_tensors(source, tmp_path / "1")


def test_what_text_needs_is_copied_and_nothing_else(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "0", chat_template=tiny.CHAT_TEMPLATE)
    extra = (
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.model",
        "additional_chat_templates/a.jinja",
        "LICENSE",
    )
    (source / "additional_chat_templates").mkdir()
    for name in (
        *extra,
        "pytorch_model.bin",
        "modeling.py",
        "tokenizer.py",
        "vocab.pkl",
        "merges.so",
        "tokenizer.json.bak",
    ):
        (source / name).write_text("{}")
    convert(source, tmp_path / "1")
    copied = {path.relative_to(tmp_path / "1").as_posix() for path in (tmp_path / "1").rglob("*") if path.is_file()}
    assert copied == {*extra, "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    source, target = tiny.write_checkpoint(tmp_path / "0"), tmp_path / "1"
    target.mkdir()
    with pytest.raises(UsageError, match="never overwritten"):
        convert(source, target)
    assert not list(target.iterdir())
    target.rmdir()
    target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="never overwritten"):
        convert(source, target)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_one_that_ends_early_leaves_nothing(error: type[BaseException], tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "0")

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise error

    with pytest.raises(error):
        convert(source, tmp_path / "1", progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    convert(source, tmp_path / "1")
    assert_same_tensors(source, tmp_path / "1")


def test_what_one_left_behind_that_was_killed_goes(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "0")
    remains = tmp_path / ".1.converting"
    (remains / "additional_chat_templates").mkdir(parents=True)
    (remains / "model-00001-of-00002.safetensors").write_bytes(b"half of it")
    convert(source, tmp_path / "1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    assert not list((tmp_path / "1").glob("model-*"))


def test_a_folder_within_the_source_is_one_as_well(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "0")
    convert(source, source / "copy")
    assert_same_tensors(source, source / "copy")
    assert {path.name for path in source.iterdir() if path.is_dir()} == {"copy"}


def test_two_do_not_write_the_same_folder(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "0")

    def another(done: int, total: int) -> None:
        if done == total:
            with pytest.raises(UsageError, match="by another conversion"):
                convert(source, tmp_path / "1")

    convert(source, tmp_path / "1", progress=another)
    assert_same_tensors(source, tmp_path / "1")


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.write_checkpoint(tmp_path / "0")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(DoesNotFitError, match=r"its weights take .* 1\.0 kB of disk are free"):
        convert(source, tmp_path / "1")
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


# ---------------------------------------------------------------- memory


def peak_of(source: Path, target: Path, recipe: Recipe) -> int:
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    convert(source, target, recipe=recipe)
    return mx.get_peak_memory() - before


def test_no_more_is_held_than_some_of_one_layer(tmp_path: Path) -> None:
    sizes: Mapping[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 300}
    peaks = []
    for layers in (2, 12):
        source = tiny.write_checkpoint(
            tmp_path / f"{layers}", config_overrides={**sizes, "num_hidden_layers": layers}, dtype="F32"
        )
        peaks.append(peak_of(source, tmp_path / f"{layers}-4", Recipe(QuantFormat(4, 64))))
    matrix = 4 * 256 * 1024
    assert peaks[1] <= peaks[0] * 1.1
    assert peaks[1] <= 5 * matrix < WeightStore.from_path(tmp_path / "12").nbytes / 8


def test_what_a_killed_conversion_left_is_removed_by_the_next_one_of_another_name(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "source")
    left, busy = tmp_path / ".gone.converting", tmp_path / ".busy.converting"
    for folder in (left, busy):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    handle = os.open(busy, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    convert(source, tmp_path / "new")
    os.close(handle)
    assert not left.exists() and busy.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".busy.converting", "new", "source"]
