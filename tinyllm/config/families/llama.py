"""Llama, and those that differ from it in few things. No mlx."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tinyllm.config.families import keys
from tinyllm.config.families.experts import GRANITEMOESHARED, HUNYUAN_ABSENT, HUNYUAN_INERT, HUNYUAN_ROPE_INERT
from tinyllm.config.family import (
    FULL,
    SLIDING,
    Family,
    all_but_every,
    all_layers,
    all_sliding,
    every,
    flags,
    listed,
    of,
    read_layer_types,
    scaling_by_position,
    sliding_from_max_window_layers,
    when,
)
from tinyllm.config.fused import Split, stacked_gate_up
from tinyllm.config.reader import ConfigReader, Key
from tinyllm.errors import ConfigError


def _is_falsy(value: Any) -> bool:
    return not value


_MLP_BIAS = Key("mlp_bias", bool, False)
_TIED = keys.tied(True)
_NO_TRAINING = frozenset({"pretraining_tp"})  # keys of the machines that a model was trained on

_LLAMA = Family(
    "llama",
    qkv_bias=keys.ATTENTION_BIAS,
    output_bias=keys.ATTENTION_BIAS,
    mlp_bias=_MLP_BIAS,
    inert=_NO_TRAINING,
)
_MISTRAL = Family(
    "mistral",
    num_key_value_heads=keys.kv_heads(8),
    max_position_embeddings=keys.positions(4096 * 32),
    sliding_window=keys.window(4096),
    layer_types=all_sliding,
)
_QWEN2 = Family(
    "qwen2",
    num_key_value_heads=keys.kv_heads(32),
    max_position_embeddings=keys.positions(32768),
    sliding_window=keys.window(4096),
    layer_types=sliding_from_max_window_layers,
    qkv_bias=True,
)

# ---------------------------------------------------------------- positions in some layers alone

_smollm3_rotates = flags("no_rope_layers", all_but_every(Key("no_rope_layer_interval", int, 4, minimum=1)))


def _smollm3_layers(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    """Windows only if `use_sliding_window`: as `layer_types` says, else where nothing rotates."""
    windowed = reader.read(Key("use_sliding_window", bool, False))
    said = read_layer_types(reader, layers)
    if not windowed and said and SLIDING in said:
        raise reader.fail(ConfigError, f"layer_types lists {SLIDING!r} layers, but use_sliding_window is not true")
    rotates = _smollm3_rotates(reader, layers)
    return said or tuple(SLIDING if windowed and not here else FULL for here in rotates)


_EXAONE4_WINDOW = keys.window(4096)


def _exaone4_layers(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    """As `layer_types` says; where it is absent and there is a window, full in every fourth layer."""
    said = read_layer_types(reader, layers)
    if said is not None or reader.read(_EXAONE4_WINDOW) is None:
        reader.discard(["sliding_window_pattern"])  # a number, or letters, or null
        return said or (FULL,) * layers
    return every(Key("sliding_window_pattern", int, 4, minimum=1))(reader, layers)


def _exaone4_rotates(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Where some layers have a window, these alone rotate."""
    if reader.read(_EXAONE4_WINDOW) is None:
        return all_layers(reader, layers)
    return tuple(kind == SLIDING for kind in _exaone4_layers(reader, layers))


def _full_from_first(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    """Every fourth layer is full, the first among them."""
    return tuple(SLIDING if i % 4 else FULL for i in range(layers))


_NOPE = (
    replace(
        _LLAMA,
        model_type="smollm3",
        num_key_value_heads=keys.kv_heads(4),
        max_position_embeddings=keys.positions(32768),
        tie_word_embeddings=_TIED,
        layer_types=_smollm3_layers,
        sliding_window=keys.window(None),
        rope_layers=_smollm3_rotates,
        rope_theta=2e6,
    ),
    Family(
        "exaone4",
        num_key_value_heads=keys.kv_heads(32),
        layer_types=_exaone4_layers,
        sliding_window=_EXAONE4_WINDOW,
        rope_layers=_exaone4_rotates,
        qk_norm="head",
        norm_eps=keys.eps(1e-5),
        placement="branch",
    ),
)

# ---------------------------------------------------------------- OLMo

_CLIP = Key("clip_qkv", float, None, nullable=True, minimum=1e-6)
_OLMO = Family(
    "olmo",
    qkv_bias=keys.ATTENTION_BIAS,
    output_bias=keys.ATTENTION_BIAS,
    clip=_CLIP,
    norm="layer",
    norm_eps=1e-5,
    norm_weight=False,
    inert=_NO_TRAINING,
)
_OLMO2 = replace(
    _OLMO,
    model_type="olmo2",
    clip=None,
    qk_norm="whole",
    norm="rms",
    norm_eps=keys.eps(1e-5),
    norm_weight=True,
    placement="branch",
)
_OLMO3 = replace(
    _OLMO2,
    model_type="olmo3",
    sliding_window=keys.window(4096),
    layer_types=listed(every(4)),
    rope_theta=500000.0,
    local_theta=500000.0,  # a theta or a scaling that is said for the whole model is that of the full layers
)

# ---------------------------------------------------------------- multipliers

_GRANITE = replace(
    _LLAMA,
    model_type="granite",
    attention_scale=Key("attention_multiplier", float, 1.0),
    branch_scale=Key("residual_multiplier", float, 1.0),
    embedding_scale=Key("embedding_multiplier", float, 1.0),
    logit_scale=of(lambda divisor: 1 / divisor, Key("logits_scaling", float, 1.0, minimum=1e-6)),
)


def _granite_swa_thetas(reader: ConfigReader, layers: int) -> tuple[float, ...]:
    """Return the theta of each layer; 0 rotates nothing."""
    said = reader.read(Key("layer_rope_theta", list, None, nullable=True))
    if said is None:
        return (0.0,) * layers
    thetas = [0 if theta is None else theta for theta in said]
    numbers = all(isinstance(theta, (int, float)) and not isinstance(theta, bool) for theta in thetas)
    if len(said) != layers or not numbers or not all(theta == 0 or 2 <= theta <= 1e30 for theta in thetas):
        raise reader.fail(ConfigError, f"layer_rope_theta must be {layers} numbers above 2, or 0 for no rotation")
    return tuple(map(float, thetas))


def _granite_swa_rotates(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    if not reader.has("layer_rope_theta"):
        return all_layers(reader, layers)
    return tuple(theta != 0 for theta in _granite_swa_thetas(reader, layers))


_GRANITE_SWA = replace(
    _GRANITE,
    model_type="granite_swa",
    num_key_value_heads=keys.kv_heads(4),
    max_position_embeddings=keys.positions(8192),
    tie_word_embeddings=_TIED,
    layer_types=listed(_full_from_first),
    sliding_window=keys.window(128),
    sinks=True,
    rope_layers=_granite_swa_rotates,
    layer_thetas=_granite_swa_thetas,
    norm_eps=keys.eps(1e-5),
)
_GRANITEMOE_SWA = replace(
    GRANITEMOESHARED,
    model_type="granitemoe_swa",
    layer_types=_GRANITE_SWA.layer_types,
    sliding_window=_GRANITE_SWA.sliding_window,
    sinks=True,
    rope_layers=_granite_swa_rotates,
    layer_thetas=_granite_swa_thetas,
)
_HYPERCLOVAX = replace(
    _GRANITE,
    model_type="hyperclovax",
    attention_scale=Key("attention_multiplier", float, None, nullable=True),
    logit_scale=Key("logits_scaling", float, 1.0),
    placement="sandwich",
    refused={"use_post_norm": bool},
    renames=(
        (r"\.post_attention_layernorm\b", ".pre_feedforward_layernorm"),
        (r"\.post_norm1\b", ".post_attention_layernorm"),
        (r"\.post_norm2\b", ".post_feedforward_layernorm"),
    ),
)

# ---------------------------------------------------------------- interleaved rotation

_GLM = Family(
    "glm",
    num_key_value_heads=keys.kv_heads(2),
    head_dim=keys.head_dim(128),
    max_position_embeddings=keys.positions(131072),
    qkv_bias=Key("attention_bias", bool, True),
    rope_interleaved=True,
    partial_rotary_factor=keys.rotated(0.5),
    norm_eps=keys.eps(1.5625e-07),
    splits=(Split(".gate_up_proj", stacked_gate_up),),
)
_USE_BIAS = of(bool, Key("use_bias", bool, False, nullable=True))

_INTERLEAVED = (
    Family(
        "ernie4_5",
        num_key_value_heads=keys.kv_heads(2),
        head_dim=keys.head_dim(128),
        max_position_embeddings=keys.positions(131072),
        tie_word_embeddings=_TIED,
        qkv_bias=_USE_BIAS,
        output_bias=_USE_BIAS,
        mlp_bias=_USE_BIAS,
        rope_theta=500000.0,
        rope_interleaved=True,
        norm_eps=keys.eps(1e-5),
    ),
    Family(
        "helium",
        num_key_value_heads=keys.kv_heads(20),
        head_dim=keys.head_dim(128),
        max_position_embeddings=keys.positions(4096),
        qkv_bias=keys.ATTENTION_BIAS,
        mlp_bias=_MLP_BIAS,
        rope_theta=100000.0,
        rope_interleaved=True,
        norm_eps=keys.eps(1e-8),
    ),
    _GLM,
    replace(
        _GLM,
        model_type="glm4",
        placement="sandwich",
        renames=(
            (r"\.post_attention_layernorm\b", ".pre_feedforward_layernorm"),
            (r"\.post_self_attn_layernorm\b", ".post_attention_layernorm"),
            (r"\.post_mlp_layernorm\b", ".post_feedforward_layernorm"),
        ),
    ),
)

# ---------------------------------------------------------------- Ministral

_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_MINISTRAL3_CONTEXT = keys.positions(262144)
_MINISTRAL3 = replace(
    _MISTRAL,
    model_type="ministral3",
    head_dim=keys.head_dim(128),
    max_position_embeddings=_MINISTRAL3_CONTEXT,
    sliding_window=keys.window(None),
    query_scaling=scaling_by_position(_MINISTRAL3_ROPE, _MINISTRAL3_CONTEXT),
    rope_parameters=_MINISTRAL3_ROPE,
    rope_inert=frozenset({"llama_4_scaling_beta", "max_position_embeddings"}),
    norm_eps=keys.eps(1e-5),
)

# ---------------------------------------------------------------- LayerNorm, or networks that are not gated

_STARCODER2_BIAS = Key("use_bias", bool, True)
_STARCODER2 = Family(
    "starcoder2",
    num_key_value_heads=keys.kv_heads(2),
    max_position_embeddings=keys.positions(4096),
    tie_word_embeddings=_TIED,
    layer_types=all_sliding,
    sliding_window=keys.window(None),
    qkv_bias=_STARCODER2_BIAS,
    output_bias=_STARCODER2_BIAS,
    activation=Key("hidden_act", str, "gelu_pytorch_tanh"),
    gated=False,
    mlp_bias=_STARCODER2_BIAS,
    norm="layer",
    norm_eps=keys.eps(1e-5, "norm_epsilon"),
    norm_bias=True,
    inert=frozenset(
        "activation_function attention_softmax_in_fp32 layer_norm_epsilon scale_attention_softmax_in_fp32".split()
    ),
    refused={
        "mlp_type": lambda value: value == "default",
        "norm_type": lambda value: value == "layer_norm",
        "scale_attn_weights": lambda value: value is True,
    },
    renames=((r"\.mlp\.c_fc\b", ".mlp.up_proj"), (r"\.mlp\.c_proj\b", ".mlp.down_proj")),
)
_STABLELM = Family(
    "stablelm",
    num_key_value_heads=keys.kv_heads(32),
    head_dim=None,
    max_position_embeddings=keys.positions(4096),
    qkv_bias=Key("use_qkv_bias", bool, False),
    qk_norm=when("qk_layernorm", "heads"),
    qk_norm_bias=False,
    partial_rotary_factor=keys.rotated(0.25),
    norm="layer",
    norm_eps=keys.eps(1e-5, "layer_norm_eps"),
    norm_bias=True,
    placement=of(lambda parallel: "parallel" if parallel else "pre", Key("use_parallel_residual", bool, False)),
    shared_norm=Key("use_parallel_residual", bool, False),
    renames=((r"\.self_attn\.([qk])_layernorm\.norms\.", r".self_attn.\1_norm."),),
)
_NEMOTRON = replace(
    _LLAMA,
    model_type="nemotron",
    max_position_embeddings=keys.positions(4096),
    partial_rotary_factor=keys.rotated(0.5),
    activation=Key("hidden_act", str, "relu2"),
    gated=False,
    norm="layer",
    norm_eps=keys.eps(1e-5, "norm_eps"),
    norm_bias=True,
    norm_offset=1.0,
    inert=_NO_TRAINING | {"kv_channels"},
)
_JAIS2_ATTENTION_BIAS = Key("attention_bias", bool, True)
_JAIS2 = replace(
    _NEMOTRON,
    model_type="jais2",
    max_position_embeddings=keys.positions(8192),
    qkv_bias=_JAIS2_ATTENTION_BIAS,
    output_bias=_JAIS2_ATTENTION_BIAS,
    partial_rotary_factor=None,
    mlp_bias=Key("mlp_bias", bool, True),
    norm_eps=keys.eps(1e-5, "layer_norm_eps"),
    norm_offset=0.0,
)
_ARCEE = replace(
    _LLAMA,
    model_type="arcee",
    max_position_embeddings=keys.positions(4096),
    activation=Key("hidden_act", str, "relu2"),
    gated=False,
    norm_eps=keys.eps(1e-5),
)
_APERTUS = Family(
    "apertus",
    max_position_embeddings=keys.positions(65536),
    qkv_bias=keys.ATTENTION_BIAS,
    output_bias=keys.ATTENTION_BIAS,
    qk_norm="head",
    rope_theta=12e6,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 12e6,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    activation=Key("hidden_act", str, "xielu"),
    gated=False,
    norm_eps=keys.eps(1e-5),
    refused={"mlp_bias": _is_falsy, "post_norm": _is_falsy, "qk_norm": bool},
    renames=(
        (r"\.attention_layernorm\b", ".input_layernorm"),
        (r"\.feedforward_layernorm\b", ".post_attention_layernorm"),
    ),
)

# ---------------------------------------------------------------- Llama under other names

_INTERNLM3_BIAS = Key("mlp_bias", bool, False, also=("bias",))

_RENAMED = (
    replace(
        _LLAMA,
        model_type="seed_oss",
        num_key_value_heads=keys.kv_heads(8),
        head_dim=keys.head_dim(128),
        max_position_embeddings=keys.positions(524288),
        qkv_bias=Key("attention_bias", bool, True),
        output_bias=Key("attention_out_bias", bool, False),
        inert=_NO_TRAINING | {"residual_dropout"},
    ),
    replace(
        _LLAMA,
        model_type="cwm",
        num_key_value_heads=keys.kv_heads(8),
        head_dim=keys.head_dim(128),
        max_position_embeddings=keys.positions(131072),
        layer_types=listed(_full_from_first),
        sliding_window=of(lambda window: window or None, Key("sliding_window", int, 8192, nullable=True, minimum=0)),
        qkv_bias=False,
        output_bias=False,
        rope_theta=1e6,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        norm_eps=keys.eps(1e-5),
        refused={"attention_bias": _is_falsy},
    ),
    replace(
        _LLAMA,
        model_type="internlm3",
        num_key_value_heads=keys.kv_heads(2),
        head_dim=keys.head_dim(128),
        max_position_embeddings=keys.positions(32768),
        qkv_bias=Key("attention_bias", bool, False, also=("qkv_bias",)),
        output_bias=_INTERNLM3_BIAS,
        mlp_bias=_INTERNLM3_BIAS,
        norm_eps=keys.eps(1e-5),
    ),
    replace(
        _LLAMA,
        model_type="iquestcoder",
        num_key_value_heads=keys.kv_heads(8),
        head_dim=keys.head_dim(128),
        max_position_embeddings=keys.positions(131072),
        norm_eps=keys.eps(1e-5),
        refused={"clip_qkv": _is_falsy},
    ),
    replace(
        _LLAMA,
        model_type="exaone",
        num_hidden_layers=replace(_LLAMA.num_hidden_layers, also=("num_layers",)),
        num_key_value_heads=keys.kv_heads(8),
        max_position_embeddings=keys.positions(4096),
        rope_theta=500000.0,
        activation=replace(_LLAMA.activation, also=("activation_function",)),
        norm_eps=replace(keys.eps(1e-5), also=("layer_norm_epsilon",)),
        inert=_NO_TRAINING | {"embed_dropout"},
        renames=(
            (r"^transformer\.wte\b", "model.embed_tokens"),
            (r"^transformer\.h\.", "model.layers."),
            (r"^transformer\.ln_f\b", "model.norm"),
            (r"\.attn\.attention\.", ".self_attn."),
            (r"\.self_attn\.out_proj\b", ".self_attn.o_proj"),
            (r"\.ln_1\b", ".input_layernorm"),
            (r"\.ln_2\b", ".post_attention_layernorm"),
            (r"\.mlp\.c_fc_0\b", ".mlp.gate_proj"),
            (r"\.mlp\.c_fc_1\b", ".mlp.up_proj"),
            (r"\.mlp\.c_proj\b", ".mlp.down_proj"),
        ),
    ),
)
_HUNYUAN = replace(
    _LLAMA,
    model_type="hunyuan_v1_dense",
    head_dim=replace(_LLAMA.head_dim, also=("attention_head_dim",)),
    qk_norm="head",
    qk_norm_after_rope=True,
    rope_alpha=True,
    rope_inert=HUNYUAN_ROPE_INERT,
    mlp_bias=False,
    norm_eps=keys.eps(1e-5),
    inert=HUNYUAN_INERT | {"org_vocab_size", "xdrope_section"},
    refused={
        **dict.fromkeys((*HUNYUAN_ABSENT, "use_mla"), _is_falsy),
        **{name: lambda value: value == 1 for name in ("num_experts", "num_shared_expert", "moe_topk")},
        "norm_type": lambda value: value in ("rms", "hf_rms"),
        "use_qk_norm": bool,
        "use_rotary_pos_emb": bool,
    },
    renames=((r"\.query_layernorm\b", ".q_norm"), (r"\.key_layernorm\b", ".k_norm")),
)

ROWS = (
    # The reference ignores the factor here too, but there are files with it, which mean what it means in Phi-3.
    replace(_LLAMA, partial_rotary_factor=keys.rotated(1.0)),
    _MISTRAL,
    _QWEN2,
    replace(
        _QWEN2,
        model_type="qwen3",
        head_dim=keys.head_dim(128),
        qkv_bias=keys.ATTENTION_BIAS,
        output_bias=keys.ATTENTION_BIAS,
        qk_norm="head",
    ),
    *_NOPE,
    _OLMO,
    _OLMO2,
    _OLMO3,
    _GRANITE,
    _GRANITE_SWA,
    _GRANITEMOE_SWA,
    _HYPERCLOVAX,
    *_INTERLEAVED,
    replace(_MISTRAL, model_type="ministral", layer_types=listed(all_sliding)),
    _MINISTRAL3,
    _STARCODER2,
    _STABLELM,
    _NEMOTRON,
    _JAIS2,
    _ARCEE,
    _APERTUS,
    *_RENAMED,
    _HUNYUAN,
)
