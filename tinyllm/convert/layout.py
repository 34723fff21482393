"""How files have a model's tensors: as they are published, and as mlx-lm's converted ones are. No mlx.

Dense checkpoints are published under transformers' names, which mlx-lm reads, too. What it changes in them when it
loads (stacks experts, splits, transposes, renames) it leaves alone where they are packed, which they must have then.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from tinyllm.checkpoint.safetensors_header import TensorInfo
from tinyllm.checkpoint.tensor_table import StoredTensor, tensor_table
from tinyllm.config.config import Config
from tinyllm.config.tensors import stored_shapes

__all__ = ["Layout", "as_mlx_lm", "as_published", "gguf_layout"]

Layout = Mapping[str, StoredTensor]  # canonical name -> how it stands
_Rules = tuple[tuple[str, str], ...]

_ALL = r"\.(?:switch_mlp|experts)\."  # the experts of a layer as one, in mlx-lm's files or by canonical names
_APART: _Rules = ((_ALL + r"(gate|up|down)_proj\.", r".experts.{}.\1_proj."),)
_LETTERS: _Rules = (
    (_ALL + r"gate_proj\.", ".experts.{}.w1."),
    (_ALL + r"up_proj\.", ".experts.{}.w3."),
    (_ALL + r"down_proj\.", ".experts.{}.w2."),
)
_TOGETHER: _Rules = (
    (r"\.experts\.switch_glu\.", ".experts."),
    (_ALL + r"(?:gate|up|gate_up)_proj\.weight$", ".experts.gate_up_proj"),
    (_ALL + r"(?:gate|up|gate_up)_proj\.bias$", ".experts.gate_up_proj_bias"),
    (_ALL + r"down_proj\.weight$", ".experts.down_proj"),
    (_ALL + r"down_proj\.bias$", ".experts.down_proj_bias"),
)
_GRANITE: _Rules = ((_ALL + r"(?:gate|up)_proj\.", ".input_linear."), (_ALL + r"down_proj\.", ".output_linear."))
# From names of mlx-lm, and those of experts that are canonical, to transformers'. Those that are transformers' stay;
# "{}" is the number of an expert, or of a head.
_PUBLISHED: Mapping[str, _Rules] = {
    "mixtral": _LETTERS,
    "minimax_m2": _LETTERS,
    "phimoe": _LETTERS,
    "lfm2_moe": (
        *_LETTERS,
        (r"\.feed_forward\.gate_proj\.", ".feed_forward.w1."),
        (r"\.feed_forward\.up_proj\.", ".feed_forward.w3."),
        (r"\.feed_forward\.down_proj\.", ".feed_forward.w2."),
    ),
    "gpt_oss": _TOGETHER,
    "llama4_text": _TOGETHER,
    "mistral4": _TOGETHER,
    "gemma4_text": _TOGETHER,
    "granitemoe_swa": _TOGETHER,
    **dict.fromkeys(("granitemoe", "granitemoeshared"), _GRANITE),
    "gpt2": ((r"^model\.(?=(?:h|wte|wpe|ln_f)\.)", "transformer."),),
    "gptj": ((r"^model\.(?=(?:h|wte|ln_f)\.)", "transformer."),),
}
_NUMBERED: _Rules = ((r"\.mlp\.experts\.", ".mlp.experts.{}."),)
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
_OF_GGUF: Mapping[str, _Rules] = {
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe"), _NUMBERED),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "dots1", "glm4_moe"), _NUMBERED + _SHARED),
    "mixtral": _MIXTRAL,
    "minimax_m2": ((r"\.mlp\.gate\.e_score", ".mlp.e_score"), *_MIXTRAL),
    "ernie4_5_moe": ((r"\.mlp\.gate\.e_score", ".mlp.moe_statics.e_score"), *_NUMBERED, *_SHARED),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": (
        (r"\.mlp\.gate\.", ".mlp.gate.wg."),
        (r"\.shared_expert\.", ".shared_mlp."),
        *_HUNYUAN,
        *_NUMBERED,
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
        *_NUMBERED,
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
# From names of transformers to those that mlx-lm gives them as it loads, beside the experts'.
_MLX_LM: Mapping[str, _Rules] = {
    "gpt2": ((r"^transformer\.", "model."), (r"^(?=h\.|wte\.|wpe\.|ln_f\.)", "model.")),
    "lfm2_moe": (
        (r"\.feed_forward\.w1\.", ".feed_forward.gate_proj."),
        (r"\.feed_forward\.w3\.", ".feed_forward.up_proj."),
        (r"\.feed_forward\.w2\.", ".feed_forward.down_proj."),
    ),
}
# What mlx-lm calls a layer's experts, in place of switch_mlp.
_SWITCHES: Mapping[str, str] = {
    "dots1": "experts",
    "gpt_oss": "experts",
    "llama4_text": "experts",
    "gemma4_text": "experts.switch_glu",
}
_IN_EXPERTS = re.compile(r"\.experts\.(.+)$")
_SWITCH = re.compile(r"\.(?:experts|switch_mlp)\.")


def gguf_layout(config: Config, names: Container[str]) -> Layout:
    """Return how each canonical tensor of a model stands in the files that transformers would write, of no data.

    Matrices that a file with these `names` has apart, as mlx-lm does, stay so.
    """
    shapes = stored_shapes(config, names)
    rules = _OF_GGUF.get(config.model_type, ())
    if config.model_type == "falcon" and any(".post_attention_layernorm." in name for name in shapes):
        rules += _FALCON_TWO_NORMS
    return _filed({name: _apply(rules, name) for name in shapes}, config)


def as_published(layout: Layout, config: Config) -> Layout:
    """Return how transformers would write what stands as in `layout`."""
    rules = _PUBLISHED.get(config.model_type, _APART)
    return _renamed(layout, {name: _apply(rules, _name(stored)) for name, stored in layout.items()}, config)


def as_mlx_lm(layout: Layout, config: Config) -> Layout:
    """Return how mlx-lm would write what stands as in `layout` once some of it is packed."""
    rules = _MLX_LM.get(config.model_type, ())
    switch = _SWITCHES.get(config.model_type, "switch_mlp")
    names: dict[str, str] = {}
    for name, stored in layout.items():
        found, filed = _IN_EXPERTS.search(name), _name(stored)
        if found is None:
            names[name] = _apply(rules, filed)
            continue
        inside = _SWITCH.search(filed)
        before = filed[: inside.start()] if inside else re.sub(r"\.[^.]+\.(?:weight|bias)$", "", filed)
        names[name] = f"{before}.{switch}.{found[1]}"
    return _renamed(layout, names, config)


def _name(stored: StoredTensor) -> str:
    return stored.parts[0].name


def _apply(rules: _Rules, name: str) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def _renamed(layout: Layout, names: Mapping[str, str], config: Config) -> Layout:
    """Return `layout` with other names, but where these would not be read as what they are."""
    changed: dict[str, str] = {}
    for name, filed in names.items():
        targets = {target.name for target in config.targets(filed.replace("{}", "0"))}
        together = {other for other in targets if names.get(other) == filed}
        if filed != _name(layout[name]) and name in targets == together:
            changed[name] = filed
    return {**layout, **_filed(changed, config)}


def _filed(names: Mapping[str, str], config: Config) -> Layout:
    """Return how canonical tensors stand in files, of no data, that call them so; "{}" is a number."""
    nowhere, shapes = Path(), stored_shapes(config, names)
    infos = {
        filed: TensorInfo(filed, nowhere, "F32", _shape(filed, name, shapes[name], config), 0, 0)
        for name, base in names.items()
        for filed in _numbered(base, shapes[name])
    }
    return tensor_table({nowhere: infos}, replace(config, quantization=None)).tensors


def _numbered(base: str, shape: tuple[int, ...]) -> Iterator[str]:
    yield from (base.replace("{}", str(i)) for i in range(shape[0])) if "{}" in base else (base,)


def _shape(filed: str, name: str, shape: tuple[int, ...], config: Config) -> tuple[int, ...]:
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
