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
    "gpt_oss": "gpt-oss", "qwen2_moe": "qwen2moe", "cohere": "command-r", "cohere2": "cohere2",
    "ministral3": "mistral3", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "glm4_moe_lite": "deepseek2",
    "youtu": "deepseek2", "glm": "chatglm", "glm4": "glm4", "glm4_moe": "glm4moe", "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe", "phi": "phi2", "olmo": "olmo", "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe", "gpt_neox": "gptneox", "bloom": "bloom", "mpt": "mpt",
    "gpt_bigcode": "starcoder", "nemotron": "nemotron", "exaone": "exaone", "exaone4": "exaone4",
    "hunyuan_v1_dense": "hunyuan-dense", "hunyuan_v1_moe": "hunyuan-moe", "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe", "seed_oss": "seed_oss", "arcee": "arcee", "jais2": "jais2", "dots1": "dots1",
    "minimax_m2": "minimax-m2", "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
}  # fmt: skip
# Of the scale of scores a file does not speak; here it is made part of what scales them as well.
_SCALED = {"gemma2": ("q_proj.weight", "q_proj.bias"), "gemma3": ("q_norm.weight",)}
PAIRED = ("llama", "smollm3", "granite", "granitemoe", "mistral3", "arcee", "olmo")
_KEYS = {
    "context_length": ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"),
    "embedding_length": ("hidden_size", "n_embd", "d_model"),
    "block_count": ("num_hidden_layers", "n_layer", "n_layers"),
    "feed_forward_length": ("intermediate_size", "ffn_hidden_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head", "n_heads"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "norm_epsilon", "layer_norm_eps"),
    "use_parallel_residual": ("use_parallel_residual",),
    "attention.sliding_window": ("sliding_window",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k", "moe_topk"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "expert_shared_count": ("n_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "expert_group_count": ("n_group",), "expert_group_used_count": ("topk_group",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "interleave_moe_layer_step": ("moe_layer_interval",),
    "attention.clamp_kqv": ("clip_qkv",),
    "attention.scale": ("attention_multiplier",), "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",), "logit_scale": ("logits_scaling", "logit_scale"),
    "attn_logit_softcapping": ("attn_logit_softcapping",), "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.q_lora_rank": ("q_lora_rank",), "attention.kv_lora_rank": ("kv_lora_rank",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim",), "ssm.state_size": ("linear_key_head_dim",),
    "ssm.group_count": ("linear_num_key_heads",), "ssm.time_step_rank": ("linear_num_value_heads",),
}  # fmt: skip
_FLOATS = ("epsilon", "scale", "softcapping", "clamp_kqv", "max_alibi_bias")
_SHIFTED = ("gemma", "gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe")


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


def split_gguf(path: Path, tensors: int, *, metadata_alone: bool = False) -> list[Path]:
    """Write a file again in parts of so many tensors each, the first with none if asked to, and remove it."""
    reader = gguf.GGUFReader(path)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    architecture = fields.pop("general.architecture").contents()
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors, small_first_shard=metadata_alone)
    for name, field in fields.items():
        writer.add_key_value(
            name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
        )
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    path.unlink()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf"))


def golden_values(name: str) -> dict[str, Any]:
    """Return the config.json of a golden checkpoint, or what it has of the text model."""
    values: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    return {"tie_word_embeddings": values.get("tie_word_embeddings"), **values.get("text_config", values)}


def convert_golden(
    name: str,
    path: Path,
    *,
    tokenizer: bool = False,
    values: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    packed: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    spare: Arrays | None = None,
) -> Path:
    """Write a golden checkpoint as llama.cpp's converter would, in float32; with tiny's `tokenizer`, if asked to.

    Its config.json has other `values`; `metadata` are other ones yet, or left out where they are None; tensors whose
    names have something in them are `packed`. There are `spare` tensors besides.
    """
    said = {**golden_values(name), **(values or {})}
    given = _tiny_tokenizer() if tokenizer else {}
    return _convert(said, _arrays(GOLDEN / name), path, {**given, **(metadata or {})}, packed, spare)


def _arrays(folder: Path) -> Arrays:
    """Return a checkpoint's tensors in float32, by the names in its files."""
    arrays: Arrays = {}
    for file in sorted(folder.glob("model*.safetensors")):
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict)
        arrays |= {key: np.array(value.astype(mx.float32)) for key, value in loaded.items()}
    return arrays


def _convert(
    values: Mapping[str, Any],
    arrays: Arrays,
    path: Path,
    more: Mapping[str, Any] | None = None,
    packed: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    spare: Arrays | None = None,
) -> Path:
    architecture = ARCHITECTURES[values["model_type"]]
    tensors, metadata = _renamed(values, architecture, arrays), _metadata(values, architecture)
    tensors |= _rope(values, architecture, metadata) | (spare or {})
    metadata |= more or {}
    kinds = {key: next((kind for part, kind in (packed or {}).items() if part in key), None) for key in tensors}
    stored = {
        key: (np.ascontiguousarray(array), gguf.GGMLQuantizationType.F32)
        if (kind := kinds[key]) is None
        else (gguf.quants.quantize(array, kind), kind)
        for key, array in tensors.items()
    }
    return write_gguf(path, architecture, {name: v for name, v in metadata.items() if v is not None}, stored)


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Order the rows of q or k as llama.cpp rotates them."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _heads(values: Mapping[str, Any]) -> tuple[int, int]:
    heads = values.get("num_attention_heads") or values.get("n_head") or values["n_heads"]
    if values["model_type"] == "falcon":
        return heads, values["num_kv_heads"] if values["new_decoder_architecture"] else 1
    return heads, values.get("num_key_value_heads") or heads


def _metadata(values: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    said = {key: next((values[name] for name in names if name in values), None) for key, names in _KEYS.items()}
    hidden = said["embedding_length"]
    said["feed_forward_length"] = said["feed_forward_length"] or 4 * hidden
    said["attention.head_count_kv"] = _heads(values)[1]
    said["attention.value_length"] = said["attention.key_length"]
    said |= _OWN.get(values["model_type"], lambda values: {})(values)
    known = {f"{architecture}.{name}": value for name, value in said.items() if value is not None}
    known = {name: float(value) if name.endswith(_FLOATS) else value for name, value in known.items()}
    return {**known, **{f"tokenizer.ggml.{key}_token_id": i for key, i in (("bos", 1), ("eos", 2))}}


def _windowed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers have a window: every fourth has none, where nothing is said."""
    if not values.get("sliding_window"):
        return {}
    kinds = values.get("layer_types") or [None] * values["num_hidden_layers"]
    windowed = [kind == "sliding_attention" if kind else (i + 1) % 4 != 0 for i, kind in enumerate(kinds)]
    return {"attention.sliding_window_pattern": windowed}


def _delta(values: Mapping[str, Any]) -> dict[str, Any]:
    inner = values["linear_value_head_dim"] * values["linear_num_value_heads"]
    return {"ssm.inner_size": inner, "full_attention_interval": 4, "rope.dimension_sections": [11, 11, 10, 0]}


def _deepseek(values: Mapping[str, Any]) -> dict[str, Any]:
    rank, turned = values["kv_lora_rank"], values["qk_rope_head_dim"]
    scores = {"deepseek_v2": 1, "deepseek_v3": 2}.get(values["model_type"])
    shape = {"attention.head_count_kv": 1, "attention.key_length": rank + turned, "attention.value_length": rank}
    heads = values["qk_nope_head_dim"] + turned, values["v_head_dim"]
    shape |= {"attention.key_length_mla": heads[0], "attention.value_length_mla": heads[1]}
    if values.get("older"):
        shape = {"attention.key_length": heads[0], "attention.value_length": heads[1]}
    dense = values["num_hidden_layers"] if values["model_type"] == "youtu" else values.get("first_k_dense_replace")
    return {
        **shape,
        "expert_feed_forward_length": values.get("moe_intermediate_size") or values["intermediate_size"],
        "expert_shared_count": values.get("n_shared_experts", 0),
        "expert_weights_norm": True if values.get("norm_topk_prob") else None,
        "expert_gating_func": scores, "leading_dense_block_count": dense,
        "rope.dimension_count": turned,
    }  # fmt: skip


def _normed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"expert_gating_func": 2, "expert_weights_norm": values.get("norm_topk_prob")}


def _lfm2(values: Mapping[str, Any]) -> dict[str, Any]:
    heads = [values["num_key_value_heads"] if kind != "conv" else 0 for kind in values["layer_types"]]
    width = values["intermediate_size"]
    if values.get("block_auto_adjust_ff_dim"):
        width = int(values["block_ffn_dim_multiplier"] * int(2 * width / 3))
        width = -(-width // values["block_multiple_of"]) * values["block_multiple_of"]
    return {"attention.head_count_kv": heads, "feed_forward_length": width}


# What files of a model type say besides.
_OWN: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "olmo3": _windowed, "exaone4": _windowed,
    "olmo": lambda values: {"attention.layer_norm_epsilon": 1e-5},
    "nemotron": lambda values: {
        "attention.layer_norm_epsilon": values["norm_eps"], "attention.layer_norm_rms_epsilon": None,
    },
    "mpt": lambda values: {
        "attention.clamp_kqv": values["attn_config"]["clip_qkv"], "attention.max_alibi_bias": 8.0,
    },
    "bloom": lambda values: {"context_length": 2048},
    "ministral3": lambda values: {
        "attention.temperature_scale": values["rope_parameters"]["llama_4_scaling_beta"],
        "rope.scaling.yarn_log_multiplier": values["rope_parameters"]["mscale_all_dim"],
    },
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), _deepseek),
    "glm4_moe": _normed, "dots1": _normed,
    "gpt_oss": lambda values: {"expert_feed_forward_length": values["intermediate_size"]},
    "minimax_m2": lambda values: {
        "expert_feed_forward_length": values["intermediate_size"], "expert_gating_func": 2,
    },
    "hunyuan_v1_moe": lambda values: {"expert_feed_forward_length": values["intermediate_size"]},
    "ernie4_5_moe": lambda values: {
        "expert_shared_feed_forward_length": values["intermediate_size"] // values["num_key_value_heads"],
    },
    "lfm2": _lfm2, "lfm2_moe": lambda values: {**_lfm2(values), "expert_gating_func": 2},
    "qwen3_next": lambda values: {**_delta(values), "rope.dimension_sections": None},
    "qwen3_5_text": _delta, "qwen3_5_moe_text": _delta,
}  # fmt: skip


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
    if rope.get("rope_type") == "dynamic" and rope.get("alpha"):  # HunYuan's
        rope["rope_theta"] *= rope["alpha"] ** (head_dim / (head_dim - 2))
    metadata[f"{architecture}.rope.freq_base"] = float(rope["rope_theta"])
    dims = metadata.setdefault(
        f"{architecture}.rope.dimension_count", int(head_dim * rope.get("partial_rotary_factor", 1.0))
    )
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
    if kind == "yarn" and architecture == "deepseek2" and "mscale_all_dim" in rope:
        metadata[f"{prefix}.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
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
    layers = next(values[name] for name in _KEYS["block_count"] if name in values)
    names = gguf.get_tensor_name_map(kind, layers)
    heads, kv_heads = _heads(values)
    tensors: Arrays = {}
    for key, array in _prepared(values, architecture, _merged(arrays, layers)).items():
        if key == "lm_head.weight" and values.get("tie_word_embeddings"):
            continue
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        name = "output.weight" if key in ("lm_head.weight", "embed_out.weight") else name
        assert name is not None, key
        part = name.split(".")[-2]
        if architecture in PAIRED and part in ("attn_q", "attn_k"):
            array = permuted(array, heads if part == "attn_q" else kv_heads)
        if architecture in _SHIFTED and key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight"):
            array = array + 1
        if key.endswith(_SCALED.get(architecture, ())):
            array = array * (values["head_dim"] / values["query_pre_attn_scalar"]) ** 0.5
        if architecture == "gpt2" and ".c_" in key and array.ndim == 2:
            array = array.T
        tensors[name] = array
    return tensors


def _prepared(values: Mapping[str, Any], architecture: str, arrays: Arrays) -> Arrays:
    """Take apart, put together and turn what converters do."""
    heads, kv_heads = _heads(values)
    prepared: Arrays = {}
    for key, array in arrays.items():
        key = key.removeprefix("transformer.") if architecture == "bloom" else key
        key = key.replace("model.language_model.", "model.").replace("language_model.", "")
        if any(tower in key for tower in ("vision_tower.", "multi_modal_projector.", "visual.")):
            continue
        if "query_key_value" in key:  # of Falcon, in groups of heads; of GPT-NeoX and BLOOM, head by head
            groups = kv_heads if architecture == "falcon" else heads
            rows = array.reshape(groups, -1, array.shape[0] // _units(heads, groups), *array.shape[1:])
            parts = (rows[:, :-2], rows[:, -2:-1], rows[:, -1:])
            array = np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])
        if key.endswith("kv_b_proj.weight") and not values.get("older"):
            whole = array.reshape(heads, -1, values["kv_lora_rank"])
            plain = values["qk_nope_head_dim"]
            prepared[key.replace("kv_b_proj", "k_b_proj")] = whole[:, :plain].swapaxes(1, 2)
            prepared[key.replace("kv_b_proj", "v_b_proj")] = whole[:, plain:]
        elif architecture == "gpt-oss" and ".experts." in key:
            prepared |= _experts_of_gpt_oss(key, array)
        elif ".input_linear." in key:
            base = "mlp.experts" if "block_sparse_moe" in key else "mlp.shared_expert"
            gate, up = np.split(array, 2, axis=-2)
            before = key.split(".block_sparse_moe")[0].split(".shared_mlp")[0]
            prepared |= {f"{before}.{base}.gate_proj.weight": gate, f"{before}.{base}.up_proj.weight": up}
        elif key.endswith("mlp.experts.gate_up_proj"):
            gate, up = np.split(array, 2, axis=-2)
            base = key.removesuffix("gate_up_proj")
            prepared |= {f"{base}gate_proj.weight": gate, f"{base}up_proj.weight": up}
        elif "linear_attn." in key:
            prepared |= _linear_attention(values, key, array)
        else:
            key = key.replace(".sinks", ".sinks.weight").replace(".expert_bias", ".expert_bias.bias")
            key = key.replace("e_score_correction_bias", "e_score_correction.bias")
            key = f"{key}.weight" if key.endswith("mlp.experts.down_proj") else key
            if key.endswith((".conv.conv.weight", "shared_expert_gate.weight", "e_score_correction.bias")):
                array = array.squeeze()
            prepared[key] = array
    return prepared


def _units(heads: int, groups: int) -> int:
    """How many rows of a head's size a fused q, k and v has: the q of all heads, and a k and a v of each group."""
    return heads + 2 * groups


def _experts_of_gpt_oss(key: str, array: np.ndarray) -> Arrays:
    base, leaf = key.rsplit(".", 1)
    part, kind = (leaf.removesuffix("_bias"), "bias") if leaf.endswith("_bias") else (leaf, "weight")
    array = array if kind == "bias" else array.swapaxes(-1, -2)
    if part == "down_proj":
        return {f"{base}.down_proj.{kind}": array}
    axis = (slice(None), slice(0, None, 2)), (slice(None), slice(1, None, 2))
    return {f"{base}.{name}.{kind}": array[at] for name, at in zip(("gate_proj", "up_proj"), axis, strict=True)}


def _tiled(array: np.ndarray, keys: int, served: int, axis: int = 0) -> np.ndarray:
    """Order value heads as qwen35's converter does: the first of each key head, then the second of each."""
    shape = array.shape
    split = (*shape[:axis], keys, served, shape[axis] // keys // served, *shape[axis + 1 :])
    return array.reshape(split).swapaxes(axis, axis + 1).reshape(shape)


def _linear_attention(values: Mapping[str, Any], key: str, array: np.ndarray) -> Arrays:
    keys, heads = values["linear_num_key_heads"], values["linear_num_value_heads"]
    wide, served = values["linear_key_head_dim"], heads // keys
    base, part = key.split("linear_attn.")
    tiled = values["model_type"].startswith("qwen3_5")
    fix = (lambda array, axis=0: _tiled(array, keys, served, axis)) if tiled else (lambda array, axis=0: array)
    if part == "in_proj_qkvz.weight":
        rows = array.reshape(keys, -1, array.shape[1])
        cuts = np.split(rows, np.cumsum([wide, wide, served * values["linear_value_head_dim"]]), axis=1)
        q, k, v, z = (cut.reshape(-1, array.shape[1]) for cut in cuts)
        named = {"in_proj_qkv.weight": np.concatenate([q, k, v]), "in_proj_z.weight": z}
        return {f"{base}linear_attn.{name}": rows for name, rows in named.items()}
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        array = array.squeeze(1) if array.ndim == 3 else array
        array = np.concatenate([array[: 2 * keys * wide], fix(array[2 * keys * wide :])])
    elif part == "out_proj.weight":
        array = fix(array, 1)
    elif part == "A_log":
        array = -np.exp(fix(array))
    elif part == "dt_bias":
        return {f"{base}linear_attn.dt_proj.bias": fix(array)}
    elif part in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight"):
        array = fix(array)
    return {key: array}


def _merged(arrays: Arrays, layers: int) -> Arrays:
    """Stack what has a tensor for each expert, or each head."""
    merged: dict[str, Any] = {}
    for key, array in arrays.items():
        for before in (".block_sparse_moe.experts.", ".feed_forward.experts.", ".mlp.experts."):
            if before in key and key.split(before)[1][0].isdigit():
                number, leaf = key.split(before)[1].split(".", 1)
                leaf = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(
                    leaf[:2], leaf.removesuffix(".weight")
                )
                merged.setdefault(f"{key.split(before)[0]}.mlp.experts.{leaf}.weight", {})[int(number)] = array
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
