"""Golden checkpoints, written as GGUF files, give the logits of transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import ARCHITECTURES, convert_golden, golden_values
from golden_cases import FOLDERS, GOLDEN, TOLERANCE, difference, expected, feedings, run

from tinyllm._mx import mx
from tinyllm.checkpoint.gguf_architectures import ARCHITECTURES as KNOWN
from tinyllm.checkpoint.gguf_config import config_values
from tinyllm.checkpoint.gguf_header import read_gguf_header
from tinyllm.checkpoint.weights import QuantizedWeight, WeightStore
from tinyllm.errors import TensorMismatchError, TinyllmError, UnsupportedModelError
from tinyllm.model.load import load_model

Type = gguf.GGMLQuantizationType
# What GGUF has no word for, so that no file has it: biases, activations, windows, scales, which layers are of a kind.
UNSPEAKABLE = {
    "gpt2-scales", "gpt2-unscaled", "falcon-alibi", "llama-partial", "llama-partial-yarn", "llama-yarn-mscale",
    "llama-yarn-attention-factor", "llama-yarn-no-truncate", "qwen2-window", "qwen3-window", "qwen3-layer-types",
    "qwen3-moe-window", "qwen3-moe-some-dense", "smollm3", "smollm3-window",
    "olmoe-biased", "mlx-lm-4bit", "mlx-lm-mixed", "llama-yarn-no-factor", "mistral-window-default",
    "olmo3-layer-types",
    "qwen3-moe-defaults", "gemma2-no-caps", "starcoder2-plain",
    "gpt-oss", "gpt-oss-other-layers", "gpt-bigcode-mha", "gpt-neox-sequential", "mpt-clipped", "phi-qk-norm",
    "mlx-lm-mistral3", "dots1", "qwen2-moe-window", "qwen3-next-dense", "qwen3-next-interval",
    "ernie4-5-moe-biased", "lfm2-moe-unbiased", "glm4_moe_lite-kinds", "deepseek_v2-biased",
    "deepseek_v3-half-split", "deepseek_v2-yarn", "deepseek_v3-yarn", "youtu-untied-yarn",
}  # fmt: skip
CASES = [
    name for name in FOLDERS if name not in UNSPEAKABLE and golden_values(name).get("model_type") in ARCHITECTURES
]
IDS = mx.array([[1, 5, 20, 7, 7, 42, 3, 60, 11, 9, 33, 80, 2, 71, 64, 17, 28, 90]])


def test_every_architecture_has_a_case() -> None:
    assert {ARCHITECTURES[golden_values(name)["model_type"]] for name in CASES} == set(KNOWN)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    ids, wanted = expected(name)
    model = load_model(convert_golden(name, tmp_path / "model.gguf"), dtype=mx.float32)
    pieces = feedings(ids.shape[1])["one pass"]
    assert difference(run(model, ids, pieces), wanted) <= TOLERANCE


def _yarn(name: str) -> dict[str, Any]:
    """A checkpoint's rotation, with the one number for both of YaRN's multipliers that a file has."""
    rope = golden_values(name)["rope_parameters"]
    return {"rope_parameters": {**rope, "mscale": rope["mscale_all_dim"]}}


# What published models of a family have in common, where a golden checkpoint has something else.
USUAL: dict[str, dict[str, Any]] = {
    "gpt-oss": {"swiglu_limit": 7.0},
    **{name: _yarn(name) for name in ("deepseek_v2-yarn", "deepseek_v3-yarn", "youtu-untied-yarn")},
}


@pytest.mark.parametrize("name", USUAL)
def test_logits_are_those_of_a_folder_that_says_what_is_usual(name: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / name, tmp_path / "folder")
    config = tmp_path / "folder" / "config.json"
    config.write_text(json.dumps({**golden_values(name), **USUAL[name]}), encoding="utf-8")
    wanted = load_model(tmp_path / "folder", dtype=mx.float32)(IDS)[0]
    model = load_model(convert_golden(name, tmp_path / "model.gguf", values=USUAL[name]), dtype=mx.float32)
    assert difference(model(IDS)[0], wanted) <= TOLERANCE


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_older_files_have_the_keys_and_values_of_latents_in_one_matrix(name: str, tmp_path: Path) -> None:
    ids, wanted = expected(name)
    file = convert_golden(name, tmp_path / "model.gguf", values={"older": True})
    assert "blk.0.attn_kv_b.weight" in read_gguf_header(file).tensors
    assert difference(load_model(file, dtype=mx.float32)(ids)[0], wanted) <= TOLERANCE


def test_widths_that_a_file_does_not_say_are_those_of_its_matrices(tmp_path: Path) -> None:
    ids, wanted = expected("qwen2-moe")
    names = ("expert_feed_forward_length", "expert_shared_feed_forward_length")
    silent = {f"qwen2moe.{name}": None for name in names}
    file = convert_golden("qwen2-moe", tmp_path / "model.gguf", metadata=silent)
    assert difference(load_model(file, dtype=mx.float32)(ids)[0], wanted) <= TOLERANCE


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    ids, wanted = expected("glm4-moe")
    layers = golden_values("glm4-moe")["num_hidden_layers"]
    said = {"glm4moe.block_count": layers + 1, "glm4moe.nextn_predict_layers": 1}
    names = ("attn_norm.weight", "nextn.eh_proj.weight", "nextn.shared_head_head.weight")
    spare = {f"blk.{layers}.{name}": np.ones((32,), np.float32) for name in names}
    file = convert_golden("glm4-moe", tmp_path / "model.gguf", metadata=said, spare=spare)
    assert difference(load_model(file, dtype=mx.float32)(ids)[0], wanted) <= TOLERANCE
    assert config_values(read_gguf_header(file))["num_hidden_layers"] == layers


@pytest.mark.parametrize("kind", [Type.MXFP4, Type.Q8_0], ids=lambda kind: kind.name)
def test_experts_are_packed_as_they_are(kind: Type, tmp_path: Path) -> None:
    packed = {"ffn_gate_exps.weight": kind, "ffn_up_exps.weight": kind}
    file = convert_golden("gpt-oss", tmp_path / "model.gguf", packed=packed)
    store = WeightStore.from_path(file).cast(mx.float32)
    weight = store.linear("model.layers.1.mlp.experts.gate_proj")
    assert isinstance(weight, QuantizedWeight)
    assert weight.form.mode == ("mxfp4" if kind == Type.MXFP4 else "affine")
    dense = store.cast(mx.float32, expand=True).dense("model.layers.1.mlp.experts.gate_proj")
    assert mx.allclose(weight.dequantize().astype(mx.float32), dense, rtol=1e-6, atol=1e-7)
    assert mx.all(mx.isfinite(load_model(file, dtype=mx.float32)(IDS)))


@pytest.mark.parametrize("name", ["mamba", "rwkv6", "plamo"])
def test_an_unknown_architecture_is_refused_by_name_with_those_that_are_known(name: str, tmp_path: Path) -> None:
    file = convert_golden("llama", tmp_path / "model.gguf")
    said = b"\5\0\0\0\0\0\0\0llama"
    file.write_bytes(file.read_bytes().replace(said, said.replace(b"llama", name.encode()), 1))
    with pytest.raises(UnsupportedModelError, match=f"'{name}' are not read by tinyllm .*gpt-oss.*qwen3next"):
        load_model(file)


@pytest.mark.parametrize(("name", "tensor"), [("qwen3-5-text", "blk.1.ssm_out"), ("llama", "blk.0.attn_gate")])
def test_what_is_of_another_kind_of_layer_is_refused_by_name(name: str, tensor: str, tmp_path: Path) -> None:
    spare = {f"{tensor}.weight": np.zeros((32, 24), np.float32)}
    file = convert_golden(name, tmp_path / "model.gguf", spare=spare)
    with pytest.raises(TensorMismatchError, match="surplus 1"):
        WeightStore.from_path(file)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama", {"llama.attention.head_count": 1 << 20, "llama.attention.head_count_kv": 1 << 20}),
        ("ministral3", {"mistral3.attention.head_count": 10**9}),
        ("qwen3-5-text", {"qwen35.ssm.group_count": 3}),
        ("deepseek_v3", {"deepseek2.rope.dimension_count": 1 << 20}),
        ("glm4-moe", {"glm4moe.nextn_predict_layers": 9}),
        ("glm4-moe", {"glm4moe.expert_gating_func": 1}),
        ("lfm2", {"lfm2.attention.head_count_kv": [1, 2, 4, 0]}),
        ("cohere2", {"cohere2.attention.sliding_window_pattern": [True]}),
    ],
)
def test_what_a_file_says_of_itself_wrongly_is_refused_in_one_line(
    name: str, said: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(TinyllmError) as failure:
        WeightStore.from_path(convert_golden(name, tmp_path / "model.gguf", metadata=said))
    assert "model.gguf" in str(failure.value) and str(failure.value).isprintable()
