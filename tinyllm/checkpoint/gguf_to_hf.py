"""A Llama in a GGUF file, written as the folder that Hugging Face would have published.

What differs between the two: names, the order of the rows of q and k, where the tokenizer's parts are kept,
and the float32 that GGUF stores config values in.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tinyllm.checkpoint.gguf_header import shortest
from tinyllm.checkpoint.gguf_tensors import LAYER_NAMES, WHOLE_NAMES

__all__ = ["convert"]

# Hugging Face's names of the special tokens, and GGUF's.
_SPECIAL_TOKENS = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))


def convert(gguf_file: Path, folder: Path) -> None:
    """Make `folder`, which must not exist, from `gguf_file`.

    Weights are dequantised to float32 and rounded to bfloat16, one tensor at a time.
    """
    reader = gguf.GGUFReader(gguf_file)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    folder.mkdir()
    _write_json(folder / "config.json", _config(facts, {tensor.name for tensor in reader.tensors}))
    _write_json(folder / "generation_config.json", _special_ids(facts))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(facts))
    (folder / "tokenizer.json").write_text(_tokenizer(facts).to_str(pretty=True), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(facts["tokenizer.chat_template"], encoding="utf-8")
    heads = {"q": facts["llama.attention.head_count"], "k": facts["llama.attention.head_count_kv"]}
    _write_weights(folder / "model.safetensors", reader.tensors, heads)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _special_ids(facts: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}_token_id": facts[f"tokenizer.ggml.{key}_token_id"] for name, key in _SPECIAL_TOKENS}


def _config(facts: dict[str, Any], tensors: set[str]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "max_position_embeddings": facts["llama.context_length"],
        "vocab_size": facts["llama.vocab_size"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": shortest(facts["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": shortest(facts["llama.rope.freq_base"]),
        "rope_scaling": None,
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": "bfloat16",
        **_special_ids(facts),
    }


def _tokenizer(facts: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE that GGUF calls "smollm": GPT-2's, with every digit on its own."""
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _tokenizer_config(facts: dict[str, Any]) -> dict[str, Any]:
    tokens = facts["tokenizer.ggml.tokens"]
    names = (*_SPECIAL_TOKENS, ("unk", "unknown"))
    return {
        # transformers rebuilds a "GPT2Tokenizer" without the splitting of digits that tokenizer.json asks for
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": facts["llama.context_length"],
        **{f"{name}_token": tokens[facts[f"tokenizer.ggml.{key}_token_id"]] for name, key in names},
    }


def _canonical_name(name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    module, _, leaf = name.rpartition(".")
    if module in WHOLE_NAMES:
        return f"{WHOLE_NAMES[module]}.{leaf}"
    _, layer, part = module.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{leaf}"


def _write_weights(path: Path, tensors: list[gguf.ReaderTensor], heads: dict[str, int]) -> None:
    """Write a safetensors file of bfloat16: the header's length, the header, then each tensor in turn.

    safetensors' own `serialize_file` would want all of them in memory at once.
    """
    ordered = sorted(tensors, key=lambda tensor: _canonical_name(tensor.name))
    with path.open("wb") as file:
        file.write(_safetensors_header(ordered))
        for tensor in ordered:
            weight = dequantize(tensor.data, tensor.tensor_type)
            if part := re.search(r"attn_([qk])\.", tensor.name):
                weight = _undo_rope_permutation(weight, heads[part[1]])
            file.write(_to_bfloat16(weight).tobytes())


def _safetensors_header(tensors: list[gguf.ReaderTensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF names the fastest dimension first
        begin, end = end, end + 2 * math.prod(shape)
        header[_canonical_name(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _undo_rope_permutation(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of q or k, (heads * head_dim, hidden), from llama.cpp's order to Hugging Face's.

    llama.cpp rotates neighbouring rows of a head, Hugging Face row i with row i + head_dim / 2, so GGUF
    files hold each head's two halves interleaved.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    halves: npt.NDArray[np.float32] = pairs.swapaxes(1, 2).reshape(weight.shape)
    return halves


def _to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of finite `values` in bfloat16, rounded to the nearest, ties to even; the same shape."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = (bits >> 16) & 1
    return ((bits + 0x7FFF + odd) >> 16).astype("<u2")
