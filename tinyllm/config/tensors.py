"""Which tensors a model of a given `Config` has, and their shapes, before they are packed. No mlx."""

from __future__ import annotations

from collections.abc import Container

from tinyllm.config.config import Config
from tinyllm.config.layers import (
    AttentionConfig,
    ConvConfig,
    DeltaConfig,
    DualConfig,
    LatentAttentionConfig,
    LayerConfig,
    MLPConfig,
    MoeConfig,
    NormConfig,
)

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"

# kv_b_proj as mlx-lm has it: (heads, latent, plain_dim), which is turned, and (heads, value_dim, latent).
SPLIT_LATENTS = ("embed_q", "unembed_out")
_WHOLE_LATENTS = ".self_attn.kv_b_proj.weight"

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(config: Config) -> Shapes:
    """Return canonical name -> shape of every tensor that the network needs; matrices are (out, in)."""
    width = config.embedding_width or config.hidden_size
    shapes: Shapes = {EMBEDDING: (config.vocab_size, width)}
    if config.embedding_width is not None:
        shapes |= _linear("model.project_in", config.hidden_size, width)
    if config.learned_positions is not None:
        shapes["model.embed_positions.weight"] = (config.learned_positions, config.hidden_size)
    if config.embed_norm is not None:
        shapes |= _norm("model.embed_norm", config.hidden_size, config.embed_norm)
    for i, layer in enumerate(config.layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer_shapes(config, layer).items()}
    if config.final_norm is not None:
        shapes |= _norm("model.norm", config.hidden_size, config.final_norm)
    if config.embedding_width is not None:
        shapes |= _linear("model.project_out", width, config.hidden_size)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, width)
    if config.head_bias:
        shapes["lm_head.bias"] = (config.vocab_size,)
    if config.layer_inputs is not None:
        joined = config.num_hidden_layers * config.layer_inputs.width
        shapes["model.embed_tokens_per_layer.weight"] = (config.layer_inputs.vocab_size, joined)
        shapes |= _linear("model.per_layer_model_projection", joined, config.hidden_size)
        shapes |= _norm("model.per_layer_projection_norm", config.layer_inputs.width, config.layers[0].norm)
    return shapes


def stored_shapes(config: Config, names: Container[str]) -> Shapes:
    """Return `tensor_shapes`, but of files with these `names`: matrices that they have apart are so here."""
    shapes = tensor_shapes(config)
    for name in [name for name in shapes if name.endswith(_WHOLE_LATENTS)]:
        keys, values = (f"{name.removesuffix('kv_b_proj.weight')}{part}.weight" for part in SPLIT_LATENTS)
        shape = config.layer_at(name).attention
        if keys in names and isinstance(shape, LatentAttentionConfig):
            del shapes[name]
            shapes[keys] = (shape.num_heads, shape.latent_rank, shape.plain_dim)
            shapes[values] = (shape.num_heads, shape.value_dim, shape.latent_rank)
    return shapes


def layer_shapes(config: Config, layer: LayerConfig) -> Shapes:
    """Return the tensors of one layer, by their names within it."""
    hidden = config.hidden_size
    shapes: Shapes = {}
    for name in norm_names(layer):
        shapes |= _norm(name, hidden, layer.norm)
    match layer.attention:
        case AttentionConfig():
            shapes |= _attention(layer.attention, hidden)
        case LatentAttentionConfig():
            shapes |= _latent_attention(layer.attention, hidden)
        case DeltaConfig():
            shapes |= _delta(layer.attention, hidden)
        case ConvConfig():
            shapes |= _conv(layer.attention, hidden)
    if config.layer_inputs is not None:
        shapes |= _linear("per_layer_input_gate", config.layer_inputs.width, hidden)
        shapes |= _linear("per_layer_projection", hidden, config.layer_inputs.width)
        shapes |= _norm("post_per_layer_input_norm", hidden, layer.norm)
    if layer.scalar:
        shapes["layer_scalar"] = (1,)
    match layer.feed_forward:
        case MLPConfig():
            return shapes | _mlp("mlp", layer.feed_forward, hidden)
        case MoeConfig():
            return shapes | _moe("mlp", layer.feed_forward, hidden)
        case DualConfig(dense, experts):
            for name in DUAL_NORMS:
                shapes |= _norm(name, hidden, layer.norm)
            return shapes | _mlp("mlp", dense, hidden) | _moe("moe", experts, hidden)


DUAL_NORMS = (
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "router_norm",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)


def norm_names(layer: LayerConfig) -> tuple[str, ...]:
    """Return the modules of a block's norms, in the order in which they are met."""
    match layer.placement:
        case "sandwich" if isinstance(layer.feed_forward, DualConfig):
            return ("input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
        case "parallel" if layer.shared_norm:
            return ("input_layernorm",)
        case "pre" | "post" | "parallel":
            return ("input_layernorm", "post_attention_layernorm")
        case "branch":
            return ("post_attention_layernorm", "post_feedforward_layernorm")
        case "sandwich":
            return (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            )


def _norm(module: str, width: int, norm: NormConfig) -> Shapes:
    parts = [part for part, there in (("weight", norm.weight), ("bias", norm.bias)) if there]
    return {f"{module}.{part}": (width,) for part in parts}


def _linear(module: str, out: int, into: int, *, bias: bool = False) -> Shapes:
    shapes: Shapes = {f"{module}.weight": (out, into)}
    return shapes | ({f"{module}.bias": (out,)} if bias else {})


def _attention(shape: AttentionConfig, hidden: int) -> Shapes:
    heads = {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads, "g": shape.num_heads}
    shapes: Shapes = {}
    for part in shape.projections:
        shapes |= _linear(f"self_attn.{part}_proj", heads[part] * shape.head_dim, hidden, bias=shape.qkv_bias)
    shapes |= _linear("self_attn.o_proj", hidden, shape.num_heads * shape.head_dim, bias=shape.output_bias)
    if shape.value_norm is not None:
        shapes |= _norm("self_attn.v_norm", shape.head_dim, shape.value_norm)
    if shape.qk_norm is not None:
        for part in "q" if shape.source is not None else "qk":
            width = heads[part] * shape.head_dim
            form = {"head": (shape.head_dim,), "heads": (heads[part], shape.head_dim), "whole": (width,)}
            for leaf in _norm(f"self_attn.{part}_norm", width, shape.qk_norm.norm):
                shapes[leaf] = form[shape.qk_norm.over]
    if shape.sinks:
        shapes["self_attn.sinks"] = (shape.num_heads,)
    return shapes


def _latent_attention(shape: LatentAttentionConfig, hidden: int) -> Shapes:
    q_width = shape.num_heads * (shape.plain_dim + shape.rope.dims)
    shapes: Shapes = {}
    if shape.query_rank is None:
        shapes |= _linear("self_attn.q_proj", q_width, hidden)
    else:
        shapes |= _linear("self_attn.q_a_proj", shape.query_rank, hidden, bias=shape.qkv_bias)
        shapes |= _norm("self_attn.q_a_layernorm", shape.query_rank, shape.norm)
        shapes |= _linear("self_attn.q_b_proj", q_width, shape.query_rank)
    shapes |= _linear(
        "self_attn.kv_a_proj_with_mqa", shape.latent_rank + shape.rope.dims, hidden, bias=shape.qkv_bias
    )
    shapes |= _norm("self_attn.kv_a_layernorm", shape.latent_rank, shape.norm)
    expanded = shape.num_heads * (shape.plain_dim + shape.value_dim)
    shapes |= _linear("self_attn.kv_b_proj", expanded, shape.latent_rank)
    values = shape.num_heads * shape.value_dim
    return shapes | _linear("self_attn.o_proj", hidden, values, bias=shape.output_bias)


def _delta(shape: DeltaConfig, hidden: int) -> Shapes:
    keys, values = shape.num_key_heads * shape.key_dim, shape.num_value_heads * shape.value_dim
    shapes: Shapes = {}
    widths = {"q": keys, "k": keys, "v": values, "z": values, "b": shape.num_value_heads, "a": shape.num_value_heads}
    for part, width in widths.items():
        shapes |= _linear(f"linear_attn.{part}_proj", width, hidden)
    shapes |= _linear("linear_attn.out_proj", hidden, values)
    shapes["linear_attn.conv1d.weight"] = (2 * keys + values, shape.kernel)
    shapes["linear_attn.dt_bias"] = shapes["linear_attn.A_log"] = (shape.num_value_heads,)
    return shapes | _norm("linear_attn.norm", shape.value_dim, shape.norm)


def _conv(shape: ConvConfig, hidden: int) -> Shapes:
    shapes = _linear("conv.in_proj", 3 * shape.width, hidden, bias=shape.biased)
    shapes |= _linear("conv.out_proj", hidden, shape.width, bias=shape.biased)
    shapes["conv.conv.weight"] = (shape.width, shape.kernel)
    return shapes | ({"conv.conv.bias": (shape.width,)} if shape.biased else {})


def _mlp(module: str, shape: MLPConfig, hidden: int, experts: tuple[int, ...] = ()) -> Shapes:
    shapes: Shapes = {}
    for part in ("gate", "up") if shape.gated else ("up",):
        shapes |= _linear(f"{module}.{part}_proj", shape.intermediate_size, hidden, bias=shape.bias)
    shapes |= _linear(f"{module}.down_proj", hidden, shape.intermediate_size, bias=shape.bias)
    if shape.activation == "xielu":
        shapes |= {f"{module}.act_fn.{name}": (1,) for name in ("alpha_p", "alpha_n")}
        shapes |= {f"{module}.act_fn.{name}": () for name in ("beta", "eps")}
    return {name: (*experts, *form) for name, form in shapes.items()}


def _moe(module: str, shape: MoeConfig, hidden: int) -> Shapes:
    router = shape.router
    shapes = _linear(f"{module}.gate", router.num_experts, hidden, bias=router.bias)
    if router.selection_bias:
        shapes[f"{module}.gate.e_score_correction_bias"] = (router.num_experts,)
    if router.expert_scale:
        shapes[f"{module}.gate.per_expert_scale"] = (router.num_experts,)
    shapes |= _mlp(f"{module}.experts", shape.expert, hidden, (router.num_experts,))
    if shape.shared is not None:
        shapes |= _mlp(f"{module}.shared_expert", shape.shared, hidden)
        if shape.shared_gate:
            shapes |= _linear(f"{module}.shared_expert_gate", 1, hidden)
    return shapes
