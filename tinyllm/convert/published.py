"""What a GGUF file's model is in a folder: tensors under Hugging Face's names, and the files beside them. No mlx."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinyllm.checkpoint.gguf_config import config_values, special_ids
from tinyllm.checkpoint.gguf_header import read_gguf_header
from tinyllm.checkpoint.gguf_tokenizer import read_tokenizer
from tinyllm.checkpoint.safetensors_header import TensorInfo
from tinyllm.checkpoint.tensor_table import StoredTensor, tensor_table
from tinyllm.config.config import Config
from tinyllm.config.tensors import stored_shapes

__all__ = ["published", "published_config", "write_beside", "write_json"]

_Rules = tuple[tuple[str, str], ...]
_EXPERTS: _Rules = ((r"\.mlp\.experts\.", ".mlp.experts.{}."),)
_SHARED: _Rules = ((r"\.shared_expert\.", ".shared_experts."),)
_GATE_UP: _Rules = ((r"\.(?:gate|up)_proj\.", ".gate_up_proj."),)
_MIXTRAL: _Rules = (
    (r"\.mlp\.experts\.gate_proj\.", ".mlp.experts.{}.w1."),
    (r"\.mlp\.experts\.up_proj\.", ".mlp.experts.{}.w3."),
    (r"\.mlp\.experts\.down_proj\.", ".mlp.experts.{}.w2."),
    (r"\.mlp\.", ".block_sparse_moe."),
)
_GPT2: _Rules = (
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
)
_BLOOM: _Rules = (
    (r"^model\.layers\.", "transformer.h."),
    (r"^model\.embed_tokens\.", "transformer.word_embeddings."),
    (r"^model\.embed_norm\.", "transformer.word_embeddings_layernorm."),
    (r"^model\.norm\.", "transformer.ln_f."),
    (r"\.self_attn\.[qkv]_proj\.", ".self_attention.query_key_value."),
    (r"\.self_attn\.o_proj\.", ".self_attention.dense."),
    (r"\.up_proj\.", ".dense_h_to_4h."),
    (r"\.down_proj\.", ".dense_4h_to_h."),
)
_GRANITE_MOE: _Rules = (
    (r"\.mlp\.experts\.(?:gate|up)_proj\.", ".block_sparse_moe.input_linear."),
    (r"\.mlp\.experts\.down_proj\.", ".block_sparse_moe.output_linear."),
    (r"\.mlp\.gate\.", ".block_sparse_moe.router.layer."),
    (r"\.mlp\.shared_expert\.(?:gate|up)_proj\.", ".shared_mlp.input_linear."),
    (r"\.mlp\.shared_expert\.down_proj\.", ".shared_mlp.output_linear."),
)
_HUNYUAN: _Rules = ((r"\.q_norm\.", ".query_layernorm."), (r"\.k_norm\.", ".key_layernorm."))
_LFM2: _Rules = (
    (r"^model\.norm\.", "model.embedding_norm."),
    (r"\.input_layernorm\.", ".operator_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.o_proj\.", ".self_attn.out_proj."),
    (r"\.([qk])_norm\.", r".\1_layernorm."),
    (r"\.mlp\.experts\.", ".mlp.experts.{}."),
    (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.expert_bias"),
    (r"\.gate_proj\.", ".w1."),
    (r"\.up_proj\.", ".w3."),
    (r"\.down_proj\.", ".w2."),
    (r"\.mlp\.", ".feed_forward."),
)
_DELTA: _Rules = (
    (r"\.self_attn\.g_proj\.", ".self_attn.q_proj."),
    (r"\.linear_attn\.[qkv]_proj\.", ".linear_attn.in_proj_qkv."),
    (r"\.linear_attn\.([zab])_proj\.", r".linear_attn.in_proj_\1."),
    (r"\.experts\.(?:gate|up)_proj\.weight$", ".experts.gate_up_proj"),
    (r"\.experts\.down_proj\.weight$", ".experts.down_proj"),
)
# From canonical names to those of transformers, where a family of GGUF's architectures has its own; "{}" is the
# number of an expert, or a head.
_RULES: Mapping[str, _Rules] = {
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe"), _EXPERTS),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "dots1", "glm4_moe"), _EXPERTS + _SHARED),
    "mixtral": _MIXTRAL,
    "minimax_m2": ((r"\.mlp\.gate\.e_score", ".mlp.e_score"), *_MIXTRAL),
    "ernie4_5_moe": ((r"\.mlp\.gate\.e_score", ".mlp.moe_statics.e_score"), *_EXPERTS, *_SHARED),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": (
        (r"\.mlp\.gate\.", ".mlp.gate.wg."),
        (r"\.shared_expert\.", ".shared_mlp."),
        *_HUNYUAN,
        *_EXPERTS,
    ),
    **dict.fromkeys(("granitemoe", "granitemoeshared"), _GRANITE_MOE),
    "gpt_oss": (
        (r"\.mlp\.gate\.", ".mlp.router."),
        (r"\.experts\.(?:gate|up)_proj\.", ".experts.gate_up_proj."),
        (r"(\.experts\.\w+_proj)\.weight$", r"\1"),
        (r"(\.experts\.\w+_proj)\.bias$", r"\1_bias"),
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _LFM2),
    "qwen3_next": (
        (r"\.linear_attn\.[qkvz]_proj\.", ".linear_attn.in_proj_qkvz."),
        (r"\.linear_attn\.[ab]_proj\.", ".linear_attn.in_proj_ba."),
        *_EXPERTS,
        *_DELTA,
    ),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _DELTA),
    "phi3": ((r"\.[qkv]_proj\.", ".qkv_proj."), *_GATE_UP),
    "glm": _GATE_UP,
    "glm4": (
        *_GATE_UP,
        (r"\.post_attention_layernorm\.", ".post_self_attn_layernorm."),
        (r"\.pre_feedforward_layernorm\.", ".post_attention_layernorm."),
        (r"\.post_feedforward_layernorm\.", ".post_mlp_layernorm."),
    ),
    "phi": (
        (r"^model\.norm\.", "model.final_layernorm."),
        (r"\.self_attn\.o_proj\.", ".self_attn.dense."),
        (r"\.up_proj\.", ".fc1."),
        (r"\.down_proj\.", ".fc2."),
    ),
    "starcoder2": ((r"\.up_proj\.", ".c_fc."), (r"\.down_proj\.", ".c_proj.")),
    "stablelm": ((r"\.([qk])_norm\.", r".\1_layernorm.norms.{}."),),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), _GPT2),
    **dict.fromkeys(("bloom", "falcon"), _BLOOM),
    "gpt_neox": (
        (r"^model\.layers\.", "gpt_neox.layers."),
        (r"^model\.embed_tokens\.", "gpt_neox.embed_in."),
        (r"^model\.norm\.", "gpt_neox.final_layer_norm."),
        (r"^lm_head\.", "embed_out."),
        (r"\.self_attn\.[qkv]_proj\.", ".attention.query_key_value."),
        (r"\.self_attn\.o_proj\.", ".attention.dense."),
        (r"\.up_proj\.", ".dense_h_to_4h."),
        (r"\.down_proj\.", ".dense_4h_to_h."),
    ),
    "mpt": (
        (r"^model\.layers\.", "transformer.blocks."),
        (r"^model\.embed_tokens\.", "transformer.wte."),
        (r"^model\.norm\.", "transformer.norm_f."),
        (r"\.input_layernorm\.", ".norm_1."),
        (r"\.post_attention_layernorm\.", ".norm_2."),
        (r"\.self_attn\.[qkv]_proj\.", ".attn.Wqkv."),
        (r"\.self_attn\.o_proj\.", ".attn.out_proj."),
        (r"\.mlp\.", ".ffn."),
    ),
    "exaone": (
        (r"^model\.layers\.", "transformer.h."),
        (r"^model\.embed_tokens\.", "transformer.wte."),
        (r"^model\.norm\.", "transformer.ln_f."),
        (r"\.input_layernorm\.", ".ln_1."),
        (r"\.post_attention_layernorm\.", ".ln_2."),
        (r"\.self_attn\.o_proj\.", ".self_attn.out_proj."),
        (r"\.self_attn\.", ".attn.attention."),
        (r"\.gate_proj\.", ".c_fc_0."),
        (r"\.up_proj\.", ".c_fc_1."),
        (r"\.down_proj\.", ".c_proj."),
    ),
}
_FALCON_TWO_NORMS: _Rules = (
    (r"\.input_layernorm\.", ".ln_attn."),
    (r"\.post_attention_layernorm\.", ".ln_mlp."),
)


def published(config: Config, names: Container[str]) -> dict[str, StoredTensor]:
    """Return how each canonical tensor of a model stands in the files that transformers would write, of no data.

    Matrices that a file with these `names` has apart, as mlx-lm does, stay so.
    """
    shapes = stored_shapes(config, names)
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
    if target.flat:
        return (1, *shape)
    if target.depthwise:
        return (shape[0], 1, shape[1])
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
