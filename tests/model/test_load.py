"""From a folder to a model: its type, its device, and numbers that do not fit, told and not decoded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from gguf import GGMLQuantizationType as Type
from gguf_files import write_pair

from tinyllm import hardware
from tinyllm._mx import mx
from tinyllm.checkpoint.contents import read_contents
from tinyllm.checkpoint.weights import DenseWeight, WeightStore
from tinyllm.engine.engine import Engine
from tinyllm.engine.request import Output, Request
from tinyllm.errors import ConfigError, ContextLengthError, CorruptFileError, NonFiniteLogitsError, TokenizerError
from tinyllm.model.linear import linear
from tinyllm.model.load import default_dtype, load_model, open_model
from tinyllm.model.transformer import ModelForCausalLM


def run(model: ModelForCausalLM, **request: Any) -> list[Output]:
    engine = Engine(model)
    engine.add(Request(**{"prompt_ids": (5, 6, 7), "max_tokens": 4, **request}))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
def test_a_cpu_computes_in_float32_and_a_gpu_as_stored_but_in_bfloat16_for_float16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str
) -> None:
    contents = read_contents(tiny.write_checkpoint(tmp_path, dtype=stored))
    on_gpu = mx.float32 if stored == "F32" else mx.bfloat16
    for device, expected in ((mx.cpu, mx.float32), (mx.gpu, on_gpu)):
        monkeypatch.setattr(mx, "default_device", lambda device=device: mx.Device(device))
        assert default_dtype(WeightStore.of(contents)) == open_model(contents).dtype == expected
        assert open_model(contents, dtype=mx.float16).dtype == mx.float16


@pytest.mark.parametrize("kind", [Type.F16, Type.Q4_0, Type.Q8_0, Type.Q4_K], ids=lambda kind: kind.name)
def test_a_gpu_computes_a_gguf_file_in_bfloat16_whatever_its_scales_are(tmp_path: Path, kind: Type) -> None:
    file, _ = write_pair(tmp_path, kind)
    assert open_model(read_contents(file), for_cpu=False).dtype == mx.bfloat16


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_the_type_that_is_asked_for_is_computed_in_throughout(tiny_checkpoint: Path, dtype: mx.Dtype) -> None:
    model = load_model(tiny_checkpoint, dtype=dtype)
    cache = model.create_kv_cache()
    assert model.dtype == model(mx.array([[1, 2, 3]]), 0, cache).dtype == dtype
    assert {array.dtype for layer in cache for array in layer.arrays} == {dtype}


def test_a_config_is_refused_before_the_weights_are_looked_for(tmp_path: Path) -> None:
    tiny.write_json(tmp_path / "config.json", tiny.config(hidden_size=-1))
    with pytest.raises(ConfigError, match="hidden_size"):
        load_model(tmp_path)


@pytest.mark.parametrize(("memory", "expanded"), [(1 << 40, True), (1000, False)])
def test_packed_weights_are_unpacked_on_a_cpu_where_memory_allows_with_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int, expanded: bool
) -> None:
    overrides = {"hidden_size": 64, "intermediate_size": 64, "quantization": {"group_size": 32, "bits": 4}}
    arrays = tiny.random_tensors(tiny.config(**overrides))
    dense = dict(arrays)
    for name in [name for name in arrays if arrays[name].ndim == 2]:
        parts = mx.quantize(mx.array(arrays[name]), group_size=32, bits=4)
        dense[name] = np.array(mx.dequantize(*parts, group_size=32, bits=4))
        module = name.removesuffix(".weight")
        arrays |= {
            f"{module}.{part}": np.array(a) for part, a in zip(("weight", "scales", "biases"), parts, strict=True)
        }
    packed = tiny.write_checkpoint(tmp_path / "packed", config_overrides=overrides, tensors=arrays)
    unpacked = tiny.write_checkpoint(
        tmp_path / "dense", config_overrides={**overrides, "quantization": ...}, tensors=dense
    )
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    monkeypatch.setattr(hardware, "available_memory", lambda: memory)
    model = load_model(packed)
    assert isinstance(model.embedding.table.weight, DenseWeight) is expanded
    ids = mx.array([[5, 6, 7, 8]])
    assert mx.allclose(model(ids), load_model(unpacked)(ids), rtol=1e-3, atol=1e-3).item()


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_weight_multiplies_and_adds(bias: bool) -> None:
    weight = DenseWeight(mx.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), mx.array([1.0, 0.0, -1.0]) if bias else None)
    expected = [[4.0, 7.0, 10.0]] if bias else [[3.0, 7.0, 11.0]]
    assert linear(mx.array([[1.0, 1.0]]), weight).tolist() == expected


# Fault 07: values that pass half precision's 65,504.


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 model whose residual stream stands near 100,000."""
    arrays = tiny.random_tensors(tiny.config())
    arrays["model.embed_tokens.weight"] = arrays["model.embed_tokens.weight"] * 1e5
    return tiny.write_checkpoint(tmp_path_factory.mktemp("loud"), tensors=arrays, dtype="BF16")


@pytest.mark.parametrize("dtype", [None, mx.bfloat16, mx.float32], ids=str)
def test_fault_07_large_activations_are_decoded_in_the_stored_and_default_type(
    loud: Path, dtype: mx.Dtype | None
) -> None:
    model = load_model(loud, dtype=dtype)
    assert mx.max(mx.abs(model.embedding(mx.array([[5, 6, 7]])))).item() > 1e5
    outputs = run(model)
    assert [output.finish_reason for output in outputs if output.finish_reason] == ["length"]
    assert not any(output.error for output in outputs)


def test_fault_07_values_that_float16_cannot_hold_are_reported_and_no_token_is_made_of_them(loud: Path) -> None:
    outputs = run(load_model(loud, dtype=mx.float16))
    [error] = [output.error for output in outputs if output.error is not None]
    assert isinstance(error, NonFiniteLogitsError)
    assert "float16" in str(error)
    assert "--dtype" in str(error)
    assert not [output.token_id for output in outputs if output.token_id is not None]


def test_fault_07_a_request_that_ends_so_leaves_the_engine_for_the_next(loud: Path) -> None:
    model = load_model(loud, dtype=mx.float16)
    model.embedding.table.weight = DenseWeight(mx.concatenate([mx.ones((100, 32)), mx.full((188, 32), mx.inf)]))
    engine = Engine(model)
    failing, fine = engine.add(Request((200,), max_tokens=1)), engine.add(Request((5,), max_tokens=1))
    reasons = {}
    while engine.has_work:
        reasons |= {output.request_id: output.finish_reason for output in engine.step() if output.finish_reason}
    assert reasons == {failing: "error", fine: "length"}


# Fault 18: ids without an embedding.


@pytest.mark.parametrize("token", [288, 289, 10**9, 2**31, 2**63, -1])
def test_fault_18_a_token_without_embedding_is_refused_before_the_forward_pass(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, token: int
) -> None:
    model = load_model(tiny_checkpoint)
    monkeypatch.setattr(ModelForCausalLM, "__call__", lambda *args, **kwargs: pytest.fail("the model was run"))
    for prompt in ((token,), (5, token, 6)):
        with pytest.raises(TokenizerError, match=rf"{token}.*288"):
            run(model, prompt_ids=prompt)


def test_fault_18_the_last_row_has_an_embedding_though_the_tokenizer_has_no_token_for_it(
    tiny_checkpoint: Path,
) -> None:
    assert tiny.tokenizer().get_vocab_size() < 288
    assert run(load_model(tiny_checkpoint), prompt_ids=(287, 0))[-1].finish_reason == "length"


# Fault 33: more tokens than the context holds.


@pytest.mark.parametrize("length", [256, 257, 5000])
def test_fault_33_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(
    tiny_checkpoint: Path, length: int
) -> None:
    with pytest.raises(ContextLengthError, match=f"{length:,} tokens.* 256"):
        run(load_model(tiny_checkpoint), prompt_ids=(5,) * length)


def test_fault_33_a_prompt_that_leaves_room_for_one_token_gets_one(tiny_checkpoint: Path) -> None:
    outputs = run(load_model(tiny_checkpoint), prompt_ids=(5,) * 255, max_tokens=None)
    assert [output.token_id is not None for output in outputs if output.finish_reason] == [True]
    assert outputs[-1].finish_reason == "length"


def test_weights_that_are_cut_off_while_they_are_loaded_are_one_error(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    opened = open_model(read_contents(folder))
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CorruptFileError, match="changed while it was loaded"):
        opened.load()
