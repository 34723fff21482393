"""Gemma's relatives, and others with Gemma's ways. No mlx."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tinyllm.config.families import keys
from tinyllm.config.family import FULL, SLIDING, Experts, Family, all_sliding, every, listed, of, when
from tinyllm.config.fused import Split, stacked_gate_up, stacked_qkv
from tinyllm.config.reader import REQUIRED, ConfigReader, Key
from tinyllm.errors import ConfigError

_LEAST_CAP = 1e-6


def _falsy(value: Any) -> bool:
    return not value


def _is_tanh_gelu(value: Any) -> bool:
    return value in (None, "gelu", "gelu_pytorch_tanh")


def _gelu_means_tanh(name: str) -> str:
    """The first Gemma's files say "gelu", and mean the approximation that it was trained with."""
    return "gelu_tanh" if name == "gelu" else name


def _inverse_root(value: float) -> float:
    return float(value**-0.5)


_GEMMA = Family(
    "gemma",
    num_key_value_heads=keys.kv_heads(16),
    head_dim=keys.head_dim(256),
    max_position_embeddings=keys.positions(8192),
    tie_word_embeddings=keys.tied(True),
    qkv_bias=keys.ATTENTION_BIAS,
    output_bias=keys.ATTENTION_BIAS,
    activation=of(_gelu_means_tanh, Key("hidden_act", str, "gelu_pytorch_tanh")),
    norm_offset=1.0,
    embedding_scale="root",
    # `hidden_activation` is what transformers 4 read in the place of `hidden_act`, to the same end.
    refused={"use_bidirectional_attention": _falsy, "hidden_activation": _is_tanh_gelu},
)
_GEMMA2 = replace(
    _GEMMA,
    model_type="gemma2",
    num_key_value_heads=keys.kv_heads(4),
    layer_types=listed(every(2)),
    sliding_window=keys.window(4096),
    attention_scale=of(_inverse_root, Key("query_pre_attn_scalar", float, 256, minimum=1e-6)),
    softcap=Key("attn_logit_softcapping", float, 50.0, nullable=True, minimum=_LEAST_CAP),
    logit_softcap=Key("final_logit_softcapping", float, 30.0, nullable=True, minimum=_LEAST_CAP),
    activation=Key("hidden_activation", str, "gelu_pytorch_tanh"),
    placement="sandwich",
    inert=frozenset({"sliding_window_size"}),
    refused={"use_bidirectional_attention": _falsy, "hidden_act": _is_tanh_gelu},
)
_GEMMA3 = replace(
    _GEMMA2,
    model_type="gemma3_text",
    # Files of the larger ones leave out even these.
    vocab_size=Key("vocab_size", int, 262_208, minimum=1),
    num_attention_heads=Key("num_attention_heads", int, 8, minimum=1),
    max_position_embeddings=keys.positions(131_072),
    layer_types=listed(every(Key("sliding_window_pattern", int, 6, minimum=1))),
    qk_norm="head",
    softcap=None,
    logit_softcap=Key("final_logit_softcapping", float, None, nullable=True, minimum=_LEAST_CAP),
    rope_theta=1e6,
    local_theta=Key("rope_local_base_freq", float, 10000.0, minimum=2),
    inert=frozenset({"_sliding_window_pattern"}),
    refused={"use_bidirectional_attention": _falsy, "hidden_act": _is_tanh_gelu, "attn_logit_softcapping": _falsy},
)

_PHI3 = Family(
    "phi3",
    max_position_embeddings=keys.positions(4096),
    original_max_position_embeddings=Key("original_max_position_embeddings", int, 4096, minimum=1),
    sliding_window=keys.window(None),
    layer_types=all_sliding,
    partial_rotary_factor=keys.rotated(1.0),
    norm_eps=keys.eps(1e-5),
    splits=(Split(".qkv_proj", stacked_qkv), Split(".gate_up_proj", stacked_gate_up)),
    refused={
        "attention_bias": _falsy,
        "mlp_bias": _falsy,
        "lm_head_bias": _falsy,
        "full_attn_mod": lambda value: value == 1,
        "interpolate_factor": lambda value: value == 1,
    },
)
_PHI = Family(
    "phi",
    qkv_bias=True,
    output_bias=True,
    qk_norm=when("qk_layernorm", "head"),
    partial_rotary_factor=keys.rotated(0.5),
    activation=Key("hidden_act", str, "gelu_new"),
    gated=False,
    mlp_bias=True,
    norm="layer",
    norm_bias=True,
    norm_eps=keys.eps(1e-5, "layer_norm_eps"),
    placement="parallel",
    shared_norm=True,
    head_bias=True,
    renames=(
        (r"\.self_attn\.dense\b", ".self_attn.o_proj"),
        (r"\.self_attn\.([qk])_layernorm\b", r".self_attn.\1_norm"),
        (r"\.mlp\.fc1\b", ".mlp.up_proj"),
        (r"\.mlp\.fc2\b", ".mlp.down_proj"),
        (r"^model\.final_layernorm\b", "model.norm"),
    ),
)

_cohere2_layers = listed(every(Key("sliding_window_pattern", int, 4, minimum=1)))


def _with_a_window(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    """The layers that have a window: Cohere 2 rotates in these alone."""
    windowed = reader.read(_COHERE2_WINDOW) is not None
    return tuple(windowed and kind == SLIDING for kind in _cohere2_layers(reader, layers))


_COHERE2_WINDOW = keys.window(4096)
_COHERE = Family(
    "cohere",
    max_position_embeddings=keys.positions(8192),
    tie_word_embeddings=keys.tied(True),
    qkv_bias=keys.ATTENTION_BIAS,
    output_bias=keys.ATTENTION_BIAS,
    qk_norm=when("use_qk_norm", "heads"),
    rope_theta=500000.0,
    rope_interleaved=True,
    norm="layer",
    norm_eps=keys.eps(1e-5, "layer_norm_eps"),
    placement="parallel",
    shared_norm=True,
    logit_scale=Key("logit_scale", float, 0.0625),
)
_COHERE2 = replace(
    _COHERE,
    model_type="cohere2",
    layer_types=_cohere2_layers,
    sliding_window=_COHERE2_WINDOW,
    qk_norm=None,
    rope_theta=10000.0,
    rope_layers=_with_a_window,
    inert=frozenset({"layer_switch"}),
    refused={
        "order_of_interleaved_layers": lambda value: value == "local_attn_first",
        "position_embedding_type": lambda value: value == "rope_gptj",
        "rotary_pct": lambda value: value == 1,
        "use_embedding_sharing": bool,
        "use_gated_activation": bool,
        "use_parallel_block": bool,
        "use_parallel_embedding": lambda value: True,
        "use_qk_norm": _falsy,
    },
)

# ---------------------------------------------------------------- Gemma 4


_GLOBAL_KV_HEADS = Key("num_global_key_value_heads", int, None, nullable=True, minimum=1)
_KV_HEADS = Key("num_key_value_heads", int, 4, minimum=1)
_HEAD_DIM = Key("head_dim", int, 256, minimum=1)
_EQUAL = Key("attention_k_eq_v", bool, False)


def _gemma4_layers(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    """As listed, or every sixth full; the last layer is full in any case."""
    return (*listed(every(6))(reader, layers)[:-1], FULL)


def _own(reader: ConfigReader, layers: int, key: Key) -> tuple[int | None, ...]:
    """What `per_layer_config`, where transformers 5 keeps what differs, says of each layer."""
    said = reader.object("per_layer_config")
    if said is None:
        return (None,) * layers
    own: list[int | None] = [None] * layers
    for name in said.values:
        layer = said.object(name)
        if layer is None or not name.isdecimal() or not int(name) < layers:
            raise said.fail(ConfigError, f"{name!r} is the number of no layer")
        own[int(name)] = layer.read(replace(key, default=None))
        layer.discard({_HEAD_DIM.name, _KV_HEADS.name})
        layer.finish()
    return tuple(own)


def _gemma4_head_dims(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    """Heads of layers that see everything have a size of their own."""
    usual, of_full = reader.read(_HEAD_DIM), reader.read(Key("global_head_dim", int, 512, minimum=1))
    if reader.has("per_layer_config"):
        of_full = usual
    own = _own(reader, layers, _HEAD_DIM)
    kinds = _gemma4_layers(reader, layers)
    return tuple(each or (of_full if kind == FULL else usual) for each, kind in zip(own, kinds, strict=True))


def _gemma4_kv_heads(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    """Keys that are the values too may be fewer."""
    usual, of_full = reader.read(_KV_HEADS), reader.read(_GLOBAL_KV_HEADS)
    if reader.has("per_layer_config") or not reader.read(_EQUAL):
        of_full = None
    own = _own(reader, layers, _KV_HEADS)
    kinds = _gemma4_layers(reader, layers)
    return tuple(
        each or (of_full if kind == FULL and of_full else usual) for each, kind in zip(own, kinds, strict=True)
    )


def _gemma4_equal(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Layers that see everything may have values that are their keys."""
    equal = reader.read(_EQUAL)
    return tuple(equal and kind == FULL for kind in _gemma4_layers(reader, layers))


def _gemma4_sources(reader: ConfigReader, layers: int) -> tuple[int | None, ...]:
    """The last layers see the keys and values of the last of their kind that has some."""
    kinds = _gemma4_layers(reader, layers)
    first = layers - reader.read(Key("num_kv_shared_layers", int, 0, minimum=0, maximum=layers))
    last = {kind: i for i, kind in enumerate(kinds[:first])}
    if any(kind not in last for kind in kinds):
        raise reader.fail(ConfigError, "num_kv_shared_layers leaves layers of some kind without keys and values")
    return tuple(None if i < first else last[kind] for i, kind in enumerate(kinds))


def _gemma4_widths(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    """Layers without keys and values of their own may have feed-forwards of twice the width."""
    width, double = reader.read(_WIDTH), reader.read(Key("use_double_wide_mlp", bool, False))
    return tuple(2 * width if double and source is not None else width for source in _gemma4_sources(reader, layers))


def _gemma4_experts(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    """All layers have experts, or none, and then their sizes may be null."""
    there = reader.read(Key("enable_moe_block", bool, False))
    for key in _EXPERT_KEYS if there else ():
        reader.read(replace(key, default=REQUIRED, nullable=False))
    return (there,) * layers


_EXPERT_KEYS = (
    Key("num_experts", int, None, nullable=True, minimum=1),
    Key("top_k_experts", int, None, nullable=True, minimum=1),
    Key("moe_intermediate_size", int, None, nullable=True, minimum=1),
)
_WIDTH = Key("intermediate_size", int, minimum=1)
_GEMMA4 = replace(
    _GEMMA3,
    model_type="gemma4_text",
    vocab_size=Key("vocab_size", int, minimum=1),
    num_attention_heads=Key("num_attention_heads", int, minimum=1),
    num_key_value_heads=_KV_HEADS,
    head_dim=_HEAD_DIM,
    intermediate_size=_WIDTH,
    head_dims=_gemma4_head_dims,
    key_value_heads=_gemma4_kv_heads,
    intermediate_sizes=_gemma4_widths,
    layer_types=_gemma4_layers,
    sliding_window=Key("sliding_window", int, 512, minimum=1),
    attention_scale=1.0,
    value_norm=True,
    values_are_keys=_gemma4_equal,
    sources=_gemma4_sources,
    rope_theta=10000.0,
    local_theta=None,
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
    norm_offset=0.0,
    experts=Experts(
        layers=_gemma4_experts,
        num_experts=_EXPERT_KEYS[0],
        top_k=_EXPERT_KEYS[1],
        intermediate_size=_EXPERT_KEYS[2],
        expert_scale=True,
        beside_dense=True,
    ),
    layer_scalar=True,
    layer_input_size=Key("hidden_size_per_layer_input", int, 256, nullable=True, minimum=0),
    layer_input_vocab_size=Key("vocab_size_per_layer_input", int, 262_144, minimum=1),
    renames=(
        (r"\.router\.proj\b", ".moe.gate"),
        (r"\.router\.scale$", ".router_norm.weight"),
        (r"\.router\.per_expert_scale$", ".moe.gate.per_expert_scale"),
        (r"\.experts\.switch_glu\.", ".experts."),
        (r"\.experts\.(gate_up_proj|down_proj)$", r".experts.\1.weight"),
        (r"(\.layers\.\d+)\.experts\.", r"\1.moe.experts."),
    ),
    splits=(Split(".experts.gate_up_proj", stacked_gate_up),),
    inert=frozenset(),
    refused={
        # With "vision" only the tokens of a picture see each other, which there are none of here.
        "use_bidirectional_attention": lambda value: value in (None, "vision"),
    },
)

ROWS = (
    _GEMMA,
    _GEMMA2,
    _GEMMA3,
    _PHI3,
    _COHERE,
    _COHERE2,
    _PHI,
    replace(
        _GEMMA2,
        model_type="vaultgemma",
        placement="pre",
        renames=((r"\.pre_feedforward_layernorm\b", ".post_attention_layernorm"),),
    ),
    _GEMMA4,
)
