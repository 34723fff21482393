"""Which tensors a model of a given `Config` has, and their shapes, before they are packed. No mlx."""

from __future__ import annotations

from tinyllm.config.config import Config, LayerConfig

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return canonical name -> shape of every tensor that the network needs; matrices are (out, in)."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for i, layer in enumerate(config.layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in _layer_shapes(config, layer).items()}
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: Config, layer: LayerConfig) -> dict[str, tuple[int, ...]]:
    attention, mlp, hidden = layer.attention, layer.feed_forward, config.hidden_size
    q_width = attention.num_heads * attention.head_dim
    kv_width = attention.num_kv_heads * attention.head_dim
    linears = {
        "self_attn.q_proj": (q_width, hidden, attention.qkv_bias),
        "self_attn.k_proj": (kv_width, hidden, attention.qkv_bias),
        "self_attn.v_proj": (kv_width, hidden, attention.qkv_bias),
        "self_attn.o_proj": (hidden, q_width, attention.output_bias),
        "mlp.gate_proj": (mlp.intermediate_size, hidden, mlp.bias),
        "mlp.up_proj": (mlp.intermediate_size, hidden, mlp.bias),
        "mlp.down_proj": (hidden, mlp.intermediate_size, mlp.bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, columns, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if attention.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (attention.head_dim,)
    return shapes
