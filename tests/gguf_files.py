"""GGUF files, written with the gguf library: from golden checkpoints as llama.cpp's converter makes them, and others.

Names of tensors come from the library's table (gguf.tensor_mapping), so that it is held against tinyllm's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny
from golden_cases import GOLDEN

from tinyllm._mx import mx

Arrays = dict[str, np.ndarray]
Stored = Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]  # bytes, (rows, bytes of a row), of a type

# How llama.cpp calls the architectures of transformers' model types.
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "smollm3": "smollm3", "granite": "granite",
    "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "olmo2": "olmo2", "olmo3": "olmo2", "olmoe": "olmoe",
    "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3", "starcoder2": "starcoder2",
    "stablelm": "stablelm", "gpt2": "gpt2", "falcon": "falcon",
}  # fmt: skip
# Of the scale of scores a file does not speak; here it is made part of what scales them as well.
_SCALED = {"gemma2": ("q_proj.weight", "q_proj.bias"), "gemma3": ("q_norm.weight",)}
PAIRED = ("llama", "smollm3", "granite")
_KEYS = {
    "max_position_embeddings": "context_length", "n_positions": "context_length",
    "hidden_size": "embedding_length", "n_embd": "embedding_length",
    "num_hidden_layers": "block_count", "n_layer": "block_count",
    "intermediate_size": "feed_forward_length", "ffn_hidden_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "n_head": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon", "norm_epsilon": "attention.layer_norm_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "use_parallel_residual": "use_parallel_residual",
    "sliding_window": "attention.sliding_window",
    "num_local_experts": "expert_count", "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "clip_qkv": "attention.clamp_kqv",
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip


def write_gguf(path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Stored) -> Path:
    """Write a file; metadata are whole names with Python's values, `float` as float32, `list` as an array."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in metadata.items():
        add: Callable[[str, Any], None] = {
            bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
            list: writer.add_array,
        }[type(value)]  # fmt: skip
        add(name, value)
    for name, (data, kind) in tensors.items():
        dense = kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
        writer.add_tensor(name, data, raw_dtype=None if dense else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def golden_values(name: str) -> dict[str, Any]:
    """Return the config.json of a golden checkpoint."""
    values: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    return values


def convert_golden(name: str, path: Path, *, tokenizer: bool = False) -> Path:
    """Write a golden checkpoint as llama.cpp's converter would, in float32; with tiny's `tokenizer`, if asked to."""
    return _convert(golden_values(name), _arrays(GOLDEN / name), path, _tiny_tokenizer() if tokenizer else None)


def _arrays(folder: Path) -> Arrays:
    """Return a checkpoint's tensors in float32, by the names in its files."""
    arrays: Arrays = {}
    for file in sorted(folder.glob("model*.safetensors")):
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict)
        arrays |= {key: np.array(value.astype(mx.float32)) for key, value in loaded.items()}
    return arrays


def _convert(
    values: Mapping[str, Any], arrays: Arrays, path: Path, tokenizer: Mapping[str, Any] | None = None
) -> Path:
    architecture = ARCHITECTURES[values["model_type"]]
    tensors, metadata = _renamed(values, architecture, arrays), _metadata(values, architecture)
    tensors |= _rope(values, architecture, metadata)
    stored = {key: (np.ascontiguousarray(a), gguf.GGMLQuantizationType.F32) for key, a in tensors.items()}
    return write_gguf(path, architecture, {**metadata, **(tokenizer or {})}, stored)


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Order the rows of q or k as llama.cpp rotates them."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _heads(values: Mapping[str, Any]) -> tuple[int, int]:
    heads = values.get("num_attention_heads") or values["n_head"]
    if values["model_type"] == "falcon":
        return heads, values["num_kv_heads"] if values["new_decoder_architecture"] else 1
    return heads, values.get("num_key_value_heads") or heads


def _metadata(values: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    said = {f"{architecture}.{_KEYS[key]}": value for key, value in values.items() if key in _KEYS}
    known = {name: value for name, value in said.items() if value is not None}
    _, kv_heads = _heads(values)
    hidden = values.get("hidden_size") or values["n_embd"]
    known.setdefault(f"{architecture}.feed_forward_length", 4 * hidden)
    known[f"{architecture}.attention.head_count_kv"] = kv_heads
    if f"{architecture}.attention.key_length" in known:
        known[f"{architecture}.attention.value_length"] = known[f"{architecture}.attention.key_length"]
    floats = ("epsilon", "scale", "softcapping", "clamp_kqv")
    known = {name: float(value) if name.endswith(floats) else value for name, value in known.items()}
    if values["model_type"] == "olmo3":
        kinds = values.get("layer_types") or [None] * values["num_hidden_layers"]
        windowed = [kind == "sliding_attention" if kind else (i + 1) % 4 != 0 for i, kind in enumerate(kinds)]
        known["olmo2.attention.sliding_window_pattern"] = windowed
    return {**known, **{f"tokenizer.ggml.{key}_token_id": i for key, i in (("bos", 1), ("eos", 2))}}


def _rope(values: Mapping[str, Any], architecture: str, metadata: dict[str, Any]) -> Arrays:
    """Add what is said of rotation; return the tensors of factors."""
    rope = dict(values.get("rope_parameters") or {})
    if "rope_theta" in values:
        rope["rope_theta"] = values["rope_theta"]
    nested = {kind: parameters for kind, parameters in rope.items() if isinstance(parameters, dict)}
    if nested:
        rope = nested["full_attention"]
        if architecture == "gemma3":
            metadata["gemma3.rope.freq_base_swa"] = float(nested["sliding_attention"]["rope_theta"])
    if "rope_theta" not in rope:
        return {}
    head_dim = values.get("head_dim") or values["hidden_size"] // _heads(values)[0]
    metadata[f"{architecture}.rope.freq_base"] = float(rope["rope_theta"])
    dims = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    metadata[f"{architecture}.rope.dimension_count"] = dims
    prefix, kind = f"{architecture}.rope.scaling", rope.get("rope_type")
    original = rope.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
    if kind in ("linear", "yarn"):
        metadata |= {f"{prefix}.type": kind, f"{prefix}.factor": float(rope["factor"])}
    if kind in ("yarn", "longrope") or architecture == "phi3":
        metadata[f"{prefix}.original_context_length"] = original or values["max_position_embeddings"]
    if kind == "yarn":
        metadata |= {
            f"{prefix}.yarn_{name}": float(rope[name]) for name in ("beta_fast", "beta_slow") if rope.get(name)
        }
    if kind == "longrope":
        stretch = values["max_position_embeddings"] / original
        metadata[f"{prefix}.attn_factor"] = (
            math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
        )
        return {
            f"rope_factors_{part}.weight": np.array(rope[f"{part}_factor"], np.float32) for part in ("long", "short")
        }
    return {"rope_freqs.weight": _llama3_factors(rope, dims)} if kind == "llama3" else {}


def _llama3_factors(rope: Mapping[str, Any], dims: int) -> np.ndarray:
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dims, 2) / dims)
    turns = rope["original_max_position_embeddings"] / wavelengths
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def _renamed(values: Mapping[str, Any], architecture: str, arrays: Arrays) -> Arrays:
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    layers = values.get("num_hidden_layers") or values["n_layer"]
    names = gguf.get_tensor_name_map(kind, layers)
    heads, kv_heads = _heads(values)
    tensors: Arrays = {}
    for key, array in _merged(arrays, layers).items():
        if key == "lm_head.weight" and values.get("tie_word_embeddings"):
            continue
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        name = "output.weight" if key == "lm_head.weight" else name
        assert name is not None, key
        part = name.split(".")[-2]
        if architecture in PAIRED and part in ("attn_q", "attn_k"):
            array = permuted(array, heads if part == "attn_q" else kv_heads)
        if architecture.startswith("gemma") and key.endswith("norm.weight"):
            array = array + 1
        if key.endswith(_SCALED.get(architecture, ())):
            array = array * (values["head_dim"] / values["query_pre_attn_scalar"]) ** 0.5
        if architecture == "gpt2" and ".c_" in key and array.ndim == 2:
            array = array.T
        if architecture == "falcon" and "query_key_value" in key:
            groups = array.reshape(kv_heads, heads // kv_heads + 2, -1, *array.shape[1:])
            parts = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
            array = np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])
        tensors[name] = array
    return tensors


def _merged(arrays: Arrays, layers: int) -> Arrays:
    """Stack what has a tensor for each expert, or each head."""
    merged: dict[str, Any] = {}
    for key, array in arrays.items():
        for before, after in ((".block_sparse_moe.experts.", ".mlp.experts."), (".mlp.experts.", ".mlp.experts.")):
            if before in key and key.split(before)[1][0].isdigit():
                number, leaf = key.split(before)[1].split(".", 1)
                leaf = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(
                    leaf[:2], leaf.removesuffix(".weight")
                )
                merged.setdefault(f"{key.split(before)[0]}{after}{leaf}.weight", {})[int(number)] = array
                break
        else:
            if ".norms." in key:
                before, number = key.removesuffix(".weight").split(".norms.")
                merged.setdefault(f"{before}.weight", {})[int(number)] = array
            else:
                merged[key] = array
    return {
        key: np.stack([value[i] for i in range(len(value))]) if isinstance(value, dict) else value
        for key, value in merged.items()
    }


def convert_tiny(folder: Path, path: Path) -> Path:
    """Write one of tiny's checkpoints, with its tokenizer and its template."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return _convert(values, _arrays(folder), path, _tiny_tokenizer())


def _tiny_tokenizer() -> dict[str, Any]:
    spec = json.loads(tiny.tokenizer().to_str())
    tokens = dict(spec["model"]["vocab"]) | {token["content"]: token["id"] for token in spec["added_tokens"]}
    special = {token["content"] for token in spec["added_tokens"]}
    ordered = sorted(tokens, key=tokens.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ordered,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in ordered],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tiny.BOS,
        "tokenizer.ggml.eos_token_id": tiny.EOS,
        "tokenizer.chat_template": tiny.CHAT_TEMPLATE,
    }


Type = gguf.GGMLQuantizationType
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


def write_pair(folder: Path, kind: Type, seed: int = 0, *, tokenizer: bool = False) -> tuple[Path, Path]:
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
        write_gguf(folder / "model.gguf", "llama", {**METADATA, **(_tiny_tokenizer() if tokenizer else {})}, stored),
        tiny.write_checkpoint(folder / "dense", config_overrides=CONFIG, tensors=dense),
    )
