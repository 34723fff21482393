"""What a GGUF file's model is in a folder: tensors under Hugging Face's names, and the files beside them. No mlx."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinyllm.checkpoint.gguf_config import config_values, special_ids
from tinyllm.checkpoint.gguf_header import read_gguf_header
from tinyllm.checkpoint.gguf_tokenizer import read_tokenizer
from tinyllm.checkpoint.safetensors_header import TensorInfo
from tinyllm.checkpoint.tensor_table import StoredTensor, tensor_table
from tinyllm.config.config import Config
from tinyllm.config.tensors import tensor_shapes

__all__ = ["published", "published_config", "write_beside", "write_json"]

_Rules = tuple[tuple[str, str], ...]
_EXPERTS: _Rules = ((r"\.mlp\.experts\.", ".mlp.experts.{}."),)
# From canonical names to those of transformers, where a family of GGUF's architectures has its own; "{}" is the
# number of an expert, or a head.
_RULES: Mapping[str, _Rules] = {
    "qwen3_moe": _EXPERTS,
    "olmoe": _EXPERTS,
    "mixtral": (
        (r"\.mlp\.experts\.gate_proj\.", ".mlp.experts.{}.w1."),
        (r"\.mlp\.experts\.up_proj\.", ".mlp.experts.{}.w3."),
        (r"\.mlp\.experts\.down_proj\.", ".mlp.experts.{}.w2."),
        (r"\.mlp\.", ".block_sparse_moe."),
    ),
    "phi3": ((r"\.[qkv]_proj\.", ".qkv_proj."), (r"\.(?:gate|up)_proj\.", ".gate_up_proj.")),
    "starcoder2": ((r"\.up_proj\.", ".c_fc."), (r"\.down_proj\.", ".c_proj.")),
    "stablelm": ((r"\.([qk])_norm\.", r".\1_layernorm.norms.{}."),),
    "gpt2": (
        (r"^model\.layers\.", "transformer.h."),
        (r"^model\.embed_tokens\.", "transformer.wte."),
        (r"^model\.embed_positions\.", "transformer.wpe."),
        (r"^model\.norm\.", "transformer.ln_f."),
        (r"\.input_layernorm\.", ".ln_1."),
        (r"\.post_attention_layernorm\.", ".ln_2."),
        (r"\.self_attn\.[qkv]_proj\.", ".attn.c_attn."),
        (r"\.self_attn\.o_proj\.", ".attn.c_proj."),
        (r"\.up_proj\.", ".c_fc."),
        (r"\.down_proj\.", ".c_proj."),
    ),
    "falcon": (
        (r"^model\.layers\.", "transformer.h."),
        (r"^model\.embed_tokens\.", "transformer.word_embeddings."),
        (r"^model\.norm\.", "transformer.ln_f."),
        (r"\.self_attn\.[qkv]_proj\.", ".self_attention.query_key_value."),
        (r"\.self_attn\.o_proj\.", ".self_attention.dense."),
        (r"\.up_proj\.", ".dense_h_to_4h."),
        (r"\.down_proj\.", ".dense_4h_to_h."),
    ),
}
_FALCON_TWO_NORMS: _Rules = (
    (r"\.input_layernorm\.", ".ln_attn."),
    (r"\.post_attention_layernorm\.", ".ln_mlp."),
)


def published(config: Config) -> dict[str, StoredTensor]:
    """Return how each canonical tensor of a model stands in the files that transformers would write, of no data."""
    shapes = tensor_shapes(config)
    rules = _RULES.get(config.model_type, ())
    if config.model_type == "falcon" and any(".post_attention_layernorm." in name for name in shapes):
        rules += _FALCON_TWO_NORMS
    nowhere = Path()
    infos = {
        filed: TensorInfo(filed, nowhere, "F32", _filed_shape(filed, name, shape, config), 0, 0)
        for name, shape in shapes.items()
        for filed in _filed_names(name, shape, rules)
    }
    return tensor_table({nowhere: infos}, replace(config, quantization=None)).tensors


def _filed_names(name: str, shape: tuple[int, ...], rules: _Rules) -> Iterator[str]:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    yield from (name.replace("{}", str(i)) for i in range(shape[0])) if "{}" in name else (name,)


def _filed_shape(filed: str, name: str, shape: tuple[int, ...], config: Config) -> tuple[int, ...]:
    """Return the shape of the tensor that is called `filed` and holds canonical `name`, of such a shape."""
    target = next(target for target in config.targets(filed) if target.name == name)
    if target.expert is not None:
        shape = shape[1:]
    if target.piece is not None:
        axis = len(shape) - (1 if name.endswith("bias") else 2)
        shape = (*shape[:axis], target.piece.whole, *shape[axis + 1 :])
    return (*shape[:-2], shape[-1], shape[-2]) if target.transposed and len(shape) > 1 else shape


def published_config(file: Path) -> dict[str, Any]:
    """Return the config.json of a GGUF file's model.

    Rotation is said at the top level, where all versions of transformers, and mlx-lm, look for it.
    """
    values = config_values(read_gguf_header(file))
    rope = values.get("rope_parameters", {})
    if "rope_theta" not in rope:
        return values  # none, or one of each kind of layers
    apart = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    scaling = {name: value for name, value in rope.items() if name not in apart}
    others = {name: value for name, value in values.items() if name != "rope_parameters"}
    return {**others, **apart, "rope_scaling": None if scaling["rope_type"] == "default" else scaling}


def write_beside(file: Path, folder: Path, context: int) -> None:
    """Write a GGUF file's tokenizer, its chat templates and the tokens that end an answer into `folder`.

    Raises TokenizerError for a tokenizer that is unknown or damaged.
    """
    metadata = read_gguf_header(file).metadata
    tokenizer = read_tokenizer(metadata, file)
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str(), encoding="utf-8")
    said: dict[str, Any] = {
        # Others are rebuilt by transformers from what their class says, in place of what tokenizer.json does.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        **tokenizer.named,
    }
    if tokenizer.templates.keys() == {"default"}:
        said["chat_template"] = tokenizer.templates["default"]
    elif tokenizer.templates:
        said["chat_template"] = [{"name": name, "template": text} for name, text in tokenizer.templates.items()]
    write_json(folder / "tokenizer_config.json", said)
    write_json(folder / "generation_config.json", special_ids(metadata))


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON object, indented."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
