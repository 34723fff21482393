"""Checkpoints small enough to write in a test: random ones of any family, and scripted ones with a known answer.

Nothing here imports mlx, and a folder is complete: config.json, weights, tokenizer.json, tokenizer_config.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tinyllm.config.config import Config
from tinyllm.config.tensors import tensor_shapes

ENDOFTEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (ENDOFTEXT, IM_START, IM_END)
BOS, EOS = 0, 2
WORDS = (" the", " one", " two", " three", "the", "Paris")  # tokens of their own, beside the 256 bytes
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 288,  # a few more rows than the tokenizer has tokens, as in many published checkpoints
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}


def config(**overrides: Any) -> dict[str, Any]:
    """Return the default config.json with `overrides`; a value of `...` takes the key away."""
    return {key: value for key, value in {**CONFIG, **overrides}.items() if value is not ...}


def random_tensors(values: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Return every tensor that a config.json asks for, float32; norms and biases are random too."""
    random = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = random.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            return 1 + noise / 5
        return noise if "embed" in name else noise / np.float32(np.sqrt(shape[-1]))

    return {name: draw(name, shape) for name, shape in tensor_shapes(Config.from_dict(values)).items()}


def write_checkpoint(
    folder: Path,
    *,
    config_overrides: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    shards: int = 1,
    dtype: str = "F32",
    chat_template: str | None = None,
    seed: int = 0,
) -> Path:
    """Write a whole checkpoint and return its folder. With `shards` above 1 there is an index, as the hub has it.

    `tensors` replaces the random ones altogether; `dtype` (F32, F16, BF16) is what floating-point ones are stored as.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values = config(**(config_overrides or {}))
    write_json(folder / "config.json", values)
    write_weights(folder, random_tensors(values, seed) if tensors is None else tensors, shards=shards, dtype=dtype)
    write_tokenizer(folder, chat_template=chat_template)
    return folder


def write_scripted_checkpoint(
    folder: Path,
    answer: str | Sequence[int],
    *,
    end: int | None = EOS,
    config_overrides: Mapping[str, Any] | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
) -> Path:
    """Write a model whose greedy answer to any prompt is `answer` (text, or ids), then the token `end`.

    Attention and feed-forward add nothing, so that each token alone decides the next: no token may occur twice in the
    answer, and the prompt's last one must not be in it. With `end` None the answer begins again and never ends.
    """
    ids = token_ids(answer) if isinstance(answer, str) else list(answer)
    if len(set(ids)) != len(ids):
        raise ValueError(f"a token occurs twice in the answer {answer!r}: {ids}")
    vocab = CONFIG["vocab_size"]
    overrides = {"hidden_size": vocab, "head_dim": 8, "num_hidden_layers": 1, **(config_overrides or {})}
    following = np.full(vocab, ids[0])
    following[ids] = [*ids[1:], ids[0] if end is None else end]
    tensors = random_tensors(config(**overrides))
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0
    tensors["model.embed_tokens.weight"] = np.eye(vocab, dtype=np.float32)
    tensors["model.norm.weight"] = np.ones(vocab, dtype=np.float32)
    tensors["lm_head.weight"] = (np.arange(vocab)[:, None] == following).astype(np.float32)
    return write_checkpoint(folder, config_overrides=overrides, tensors=tensors, chat_template=chat_template)


def tokenizer() -> Tokenizer:
    """Return a byte-level BPE: the special tokens from id 0 on, the 256 bytes, `WORDS` and what leads to them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    merges = []
    for word in WORDS:
        left, *letters = word.replace(" ", "Ġ")
        for letter in letters:
            if left + letter not in vocabulary:
                vocabulary[left + letter] = len(vocabulary)
                merges.append((left, letter))
            left += letter
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return bpe


def token_ids(text: str) -> list[int]:
    """Return the ids of `text` in `tokenizer()`."""
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def write_tokenizer(folder: Path, *, chat_template: str | None = None, **settings: Any) -> None:
    """Write tokenizer.json and tokenizer_config.json; `settings` are added to the latter."""
    tokenizer().save(str(folder / "tokenizer.json"))
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": ENDOFTEXT,
        "eos_token": IM_END,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        values["chat_template"] = chat_template
    write_json(folder / "tokenizer_config.json", {**values, **settings})


def write_weights(folder: Path, tensors: Mapping[str, np.ndarray], *, shards: int = 1, dtype: str = "F32") -> None:
    """Write model.safetensors, or `shards` files with an index; tensors are dealt to the files in turn."""
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype=dtype)
        return
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        write_safetensors(folder / file, {name: tensors[name] for name in names[i::shards]}, dtype=dtype)
        weight_map |= dict.fromkeys(names[i::shards], file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], *, dtype: str = "F32") -> None:
    """Write one file: floating-point tensors as `dtype`, uint32 ones as they are."""
    header: dict[str, Any] = {}
    blobs: list[bytes] = []
    position = 0
    for name, array in tensors.items():
        kind, data = ("U32", array.tobytes()) if array.dtype == np.uint32 else (dtype, _encode(array, dtype))
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [position, position + len(data)]}
        position += len(data)
        blobs.append(data)
    write_raw_safetensors(path, json.dumps(header).encode(), blobs)


def write_raw_safetensors(
    path: Path, header: bytes, data: Iterable[bytes] = (), *, length: int | None = None
) -> None:
    """Write a file from its parts, which need not agree; `length` is what the first eight bytes claim."""
    with path.open("wb") as file:
        file.write((len(header) if length is None else length).to_bytes(8, "little"))
        file.write(header)
        file.writelines(data)


def hollow_header(shapes: Mapping[str, Sequence[int]], *, dtype: str = "BF16") -> tuple[bytes, int]:
    """Return a safetensors header for tensors of two bytes an element, and how long the whole file would be."""
    header: dict[str, Any] = {}
    position = 0
    for name, shape in shapes.items():
        end = position + 2 * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    content = json.dumps(header).encode()
    return len(content).to_bytes(8, "little") + content, 8 + len(content) + position


def write_hollow(path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Write a file with tensors of these shapes, and a hole in place of their data, which takes no disk."""
    header, length = hollow_header(shapes)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(length)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON."""
    path.write_text(json.dumps(value), encoding="utf-8")


def _encode(array: np.ndarray, dtype: str) -> bytes:
    if dtype == "F32":
        return array.astype(np.float32).tobytes()
    if dtype == "F16":
        return array.astype(np.float16).tobytes()
    assert dtype == "BF16"
    bits = array.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()  # rounded to even
