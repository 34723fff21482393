"""GGUF files become folders as Hugging Face has them: names, numbers, config and tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import tiny
from gguf_files import convert_golden, convert_tiny, write_pair
from golden_cases import GOLDEN, TOLERANCE, difference, expected
from process import tinyllm

from tinyllm._mx import mx
from tinyllm.checkpoint.contents import read_contents
from tinyllm.checkpoint.files import find_weight_files
from tinyllm.checkpoint.safetensors_header import read_safetensors_header
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.quantization import QuantFormat
from tinyllm.convert.convert import convert
from tinyllm.convert.recipe import Recipe
from tinyllm.errors import TokenizerError
from tinyllm.llm import LLM
from tinyllm.model.load import load_model
from tinyllm.text.tokenizer import Tokenizer

Type = gguf.GGMLQuantizationType
IDS = mx.array([[1, 5, 20, 7, 7, 42, 3]])
ANSWER = " one two three"
TEXT = "the one 12 <|im_start|>two"
# A family each that has names, pieces, transposed matrices or experts of its own, and those that are Llama's.
NAMED = [
    "llama", "llama-llama3", "gemma2", "qwen3", "olmo2", "gpt2", "falcon", "falcon-new", "falcon-new-one-norm",
    "mixtral", "qwen3-moe", "olmoe", "phi3", "phi3-longrope-short", "starcoder2", "stablelm",
    "gpt-oss-defaults", "glm4", "glm4-moe", "lfm2-moe", "phi", "granitemoeshared", "gpt-neox", "bloom", "mpt",
    "gpt-bigcode", "exaone", "hunyuan-v1-moe", "ernie4-5-moe", "minimax-m2", "qwen3-next", "qwen3-5-text", "cohere2",
]  # fmt: skip


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    headers = map(read_safetensors_header, find_weight_files(folder).files)
    return {name: info.shape for header in headers for name, info in header.items()}


def logits(path: Path) -> mx.array:
    return load_model(path, dtype=mx.float32)(IDS)[0]


def json_of(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", NAMED)
def test_names_shapes_and_logits_are_those_that_were_published(name: str, tmp_path: Path) -> None:
    file = convert_golden(name, tmp_path / "model.gguf", tokenizer=True)
    convert(file, tmp_path / "folder")
    config = read_contents(file).config
    assert replace(read_contents(tmp_path / "folder").config, dtype=None) == config
    tied = config.tie_word_embeddings
    wanted = {key: shape for key, shape in shapes(GOLDEN / name).items() if not (tied and key == "lm_head.weight")}
    assert shapes(tmp_path / "folder") == wanted
    ids, numbers = expected(name)
    found = load_model(tmp_path / "folder", dtype=mx.float32)(ids)[0]
    assert difference(found, numbers) <= TOLERANCE


def test_latents_that_a_file_has_apart_stay_so_as_in_folders_of_mlx_lm(tmp_path: Path) -> None:
    file = convert_golden("deepseek_v3", tmp_path / "model.gguf", tokenizer=True)
    convert(file, tmp_path / "folder")
    names = shapes(tmp_path / "folder")
    assert names["model.layers.0.self_attn.embed_q.weight"] == (4, 12, 8)
    assert names["model.layers.0.self_attn.unembed_out.weight"] == (4, 10, 12)
    assert "model.layers.0.self_attn.kv_b_proj.weight" not in names
    ids, numbers = expected("deepseek_v3")
    assert difference(load_model(tmp_path / "folder", dtype=mx.float32)(ids)[0], numbers) <= TOLERANCE


@pytest.mark.parametrize("name", ["gpt2", "falcon-new", "mixtral", "phi3"])
def test_every_naming_is_packed(name: str, tmp_path: Path) -> None:
    file = convert_golden(name, tmp_path / "model.gguf", tokenizer=True)
    done = convert(file, tmp_path / "folder", recipe=Recipe(QuantFormat(8, 32)), dtype=mx.float32)
    convert(GOLDEN / name, tmp_path / "wanted", recipe=Recipe(QuantFormat(8, 32)), dtype=mx.float32)
    assert done.packed
    assert shapes(tmp_path / "folder") == shapes(tmp_path / "wanted")
    assert mx.array_equal(logits(tmp_path / "folder"), logits(tmp_path / "wanted"))


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0, Type.Q4_K, Type.Q5_K, Type.Q6_K])
def test_what_is_packed_stays_so_to_the_bit(kind: Type, tmp_path: Path) -> None:
    file, _ = write_pair(tmp_path, kind, tokenizer=True)
    convert(file, tmp_path / "folder")
    source, copy = WeightStore.from_path(file), WeightStore.from_path(tmp_path / "folder")
    assert copy.names == source.names and copy.is_quantized
    assert copy.stored_dtype == source.stored_dtype
    for name in source.names:
        assert copy.tensor(name).dtype == source.tensor(name).dtype
        assert mx.array_equal(copy.tensor(name), source.tensor(name)), name
    if kind != Type.Q6_K:  # of which a file, on a CPU, is read from its blocks
        assert mx.array_equal(logits(tmp_path / "folder"), logits(file))


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_K, Type.Q6_K])
def test_what_is_unpacked_has_the_numbers_of_the_blocks(kind: Type, tmp_path: Path) -> None:
    file, dense = write_pair(tmp_path, kind, tokenizer=True)
    convert(file, tmp_path / "folder", dequantize=True, dtype=mx.float32)
    assert not WeightStore.from_path(tmp_path / "folder").is_quantized
    assert mx.array_equal(logits(tmp_path / "folder"), logits(dense))
    convert(file, tmp_path / "half", dequantize=True)
    assert WeightStore.from_path(tmp_path / "half").stored_dtype == WeightStore.from_path(file).stored_dtype


def test_what_is_packed_otherwise_is_packed_from_the_numbers_of_the_blocks(tmp_path: Path) -> None:
    form = QuantFormat(4, 64)
    file, dense = write_pair(tmp_path, Type.Q6_K, tokenizer=True)
    convert(file, tmp_path / "folder", recipe=Recipe(form), dtype=mx.float32)
    convert(dense, tmp_path / "wanted", recipe=Recipe(form), dtype=mx.float32)
    assert mx.array_equal(logits(tmp_path / "folder"), logits(tmp_path / "wanted"))
    assert json_of(tmp_path / "folder", "config.json")["quantization"]["bits"] == 4


def test_the_folder_reads_writes_and_answers_as_the_file(tmp_path: Path) -> None:
    scripted = tiny.write_scripted_checkpoint(tmp_path / "0", ANSWER, chat_template=tiny.CHAT_TEMPLATE)
    file = convert_tiny(scripted, tmp_path / "Tiny-F32.gguf")
    done = tinyllm("convert", file, tmp_path / "folder")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'folder'}\n".encode()), done.stderr
    source, copy = (Tokenizer.of(read_contents(path)) for path in (file, tmp_path / "folder"))
    for special in (False, True):
        ids = source.encode(TEXT, parse_special=special)
        assert copy.encode(TEXT, parse_special=special) == ids
        assert copy.decode(ids) == source.decode(ids)
    chat = [{"role": "user", "content": TEXT}]
    assert copy.encode_chat(chat) == source.encode_chat(chat)
    assert (copy.bos_id, copy.eos_ids, copy.special_ids) == (source.bos_id, source.eos_ids, source.special_ids)
    assert json_of(tmp_path / "folder", "generation_config.json")["eos_token_id"] == [tiny.EOS, 0]
    with LLM(file) as of_file, LLM(tmp_path / "folder") as of_folder:
        assert of_file.stop_ids == of_folder.stop_ids
    answered = tinyllm("generate", "count", "-m", tmp_path / "folder")
    assert answered.stdout == f"{ANSWER}\n".encode()


def test_what_is_refused_leaves_nothing(tmp_path: Path) -> None:
    file = convert_golden("llama", tmp_path / "bare.gguf")
    with pytest.raises(TokenizerError):
        convert(file, tmp_path / "folder")
    other = tmp_path / "other.gguf"
    other.write_bytes(file.read_bytes().replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0mamba", 1))
    done = tinyllm("convert", other, tmp_path / "folder")
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (1, b"", 1)
    assert b"'mamba'" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare.gguf", "other.gguf"]
