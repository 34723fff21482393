"""The families that came before Llama. No mlx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, islice, repeat
from typing import Any

from tinyllm.config.families import keys
from tinyllm.config.family import FULL, SLIDING, Family, Found, LayerRule, alike, of
from tinyllm.config.fused import Split, grouped_qkv, quartered_qvk, stacked_qkv
from tinyllm.config.inert import GENERATION, HARMLESS, INERT
from tinyllm.config.layers import Alibi, AttentionConfig
from tinyllm.config.reader import ConfigReader, Key
from tinyllm.errors import ConfigError

_SUMMARY = frozenset(f"summary_{what}" for what in ("use_proj", "activation", "proj_to_labels", "first_dropout"))
# What transformers 4 and 5 and the files themselves call one thing.
_HIDDEN = Key("hidden_size", int, minimum=1, also=("n_embed", "n_embd"))
_HEADS = Key("num_attention_heads", int, minimum=1, also=("n_head",))
_LAYERS = Key("num_hidden_layers", int, minimum=1, maximum=10_000, also=("n_layer",))
_TIED = keys.tied(True)


def _flag(name: str, default: bool) -> Key:
    return Key(name, bool, default)


def _optional(name: str) -> Key:
    return Key(name, int, None, nullable=True, minimum=1)


def _positions(default: int) -> Key:
    return Key("n_positions", int, default, minimum=1, also=("max_position_embeddings",))


def by_layer(flag: Key) -> LayerRule:
    """One over the number of a layer, counted from 1, where the flag is set."""

    def rule(reader: ConfigReader, layers: int) -> tuple[float, ...]:
        return tuple(1 / (i + 1) for i in range(layers)) if reader.read(flag) else (1.0,) * layers

    return rule


# ---------------------------------------------------------------- GPT-2 and those with its names

_GPT2_NAMES = (
    (r"^(transformer|model)\.", ""),
    (r"^wte\b", "model.embed_tokens"),
    (r"^wpe\b", "model.embed_positions"),
    (r"^ln_f\b", "model.norm"),
    (r"^h\.", "model.layers."),
    (r"\.ln_1\b", ".input_layernorm"),
    (r"\.ln_2\b", ".post_attention_layernorm"),
    (r"\.attn\.(attention\.)?", ".self_attn."),
    (r"\.self_attn\.(c_attn|qkv_proj)\b", ".self_attn.qkv_proj"),
    (r"\.self_attn\.(c_proj|out_proj)\b", ".self_attn.o_proj"),
    (r"\.mlp\.(c_fc|fc_in)\b", ".mlp.up_proj"),
    (r"\.mlp\.(c_proj|fc_out)\b", ".mlp.down_proj"),
)
# Matrices of GPT-2 stand as (in, out), but not in mlx-lm's conversions, whose names begin with "model.".
_CONV1D = (r"^(?:transformer\.)?(h\.\d+\.\w+\.c_\w+)\.weight$", r"\1.transposed")
_MASKS = r"(^|\.self_attn\.)(bias|masked_bias|causal_mask)$"

_GPT2 = Family(
    "gpt2",
    hidden_size=_HIDDEN,
    num_hidden_layers=_LAYERS,
    num_attention_heads=_HEADS,
    num_key_value_heads=None,
    head_dim=None,
    intermediate_size=_optional("n_inner"),
    max_position_embeddings=_positions(1024),
    tie_word_embeddings=_TIED,
    qkv_bias=True,
    output_bias=True,
    attention_scale=of(lambda scaled: None if scaled else 1.0, _flag("scale_attn_weights", True)),
    attention_scale_layers=by_layer(_flag("scale_attn_by_inverse_layer_idx", False)),
    position="learned",
    activation=Key("activation_function", str, "gelu_new"),
    gated=False,
    mlp_bias=True,
    norm="layer",
    norm_eps=Key("layer_norm_epsilon", float, 1e-5, minimum=0),
    norm_bias=True,
    inert=_SUMMARY | {"n_ctx", "predict_special_tokens", "reorder_and_upcast_attn"},
    renames=(_CONV1D, *_GPT2_NAMES),
    splits=(Split("self_attn.qkv_proj", stacked_qkv),),
    skipped=_MASKS,
)
_GPT_BIGCODE = replace(
    _GPT2,
    model_type="gpt_bigcode",
    num_key_value_heads=of(lambda shared: 1 if shared else None, _flag("multi_query", True)),
    attention_scale_layers=alike,
    activation=Key("activation_function", str, "gelu_pytorch_tanh"),
    inert=_SUMMARY
    | set(
        """
        n_ctx num_key_value_heads attention_softmax_in_fp32 scale_attention_softmax_in_fp32 inference_runner
        max_batch_size pad_key_length pre_allocate_kv_cache runner_max_sequence_length validate_runner_input
        """.split()
    ),
    renames=_GPT2_NAMES,
    splits=(Split("self_attn.qkv_proj", grouped_qkv),),
)
_BASE = 10000.0


def _is_plain_rope(value: Any) -> bool:
    said = value if isinstance(value, dict) else {}
    return not value or (said.get("rope_type", "default"), said.get("rope_theta", _BASE)) == ("default", _BASE)


# The reference rotates with this base, and reads none of these.
_ROTATED = {
    "rope_parameters": _is_plain_rope,
    "rope_scaling": lambda value: not value,
    "rope_theta": lambda value: value in (None, _BASE),
}
_GPTJ = replace(
    _GPT2,
    model_type="gptj",
    max_position_embeddings=_positions(2048),
    tie_word_embeddings=_flag("tie_word_embeddings", False),
    qkv_bias=False,
    output_bias=False,
    attention_scale=None,
    attention_scale_layers=alike,
    position="rope",
    rope_interleaved=True,
    rope_theta=_BASE,
    rotary_dims=Key("rotary_dim", int, 64, minimum=1),
    partial_rotary_factor=1.0,
    placement="parallel",
    shared_norm=True,
    head_bias=True,
    inert=_SUMMARY | {"n_ctx"},
    refused={**_ROTATED, **dict.fromkeys(("rotary", "scale_attn_weights"), lambda value: value is True)},
    renames=_GPT2_NAMES,
    splits=(),
)
_CODEGEN = replace(_GPTJ, model_type="codegen", splits=(Split("self_attn.qkv_proj", quartered_qvk),))


def _global_and_local(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    """As `attention_types` lists: pairs of some kinds in turn, and how often they are repeated."""
    said = reader.read(Key("attention_types", list, None, nullable=True)) or [[["global", "local"], 12]]
    kinds = {"global": FULL, "local": SLIDING}
    for item in said:
        match item:
            case [[_, *_] as names, int(count)] if all(name in tuple(kinds) for name in names) and count > 0:
                continue
        raise reader.fail(
            ConfigError, "'attention_types' must be pairs of a list of 'global' and 'local', and a number"
        )
    names = chain.from_iterable(chain.from_iterable(repeat(names, count)) for names, count in said)
    listed = tuple(kinds[name] for name in islice(names, layers + 1))
    if len(listed) != layers:
        raise reader.fail(ConfigError, f"'attention_types' lists other than the {layers} layers that there are")
    return listed


_GPT_NEO = replace(
    _GPT2,
    model_type="gpt_neo",
    num_hidden_layers=replace(_LAYERS, name="num_layers", also=("num_hidden_layers",)),
    num_attention_heads=replace(_HEADS, name="num_heads", also=("num_attention_heads",)),
    intermediate_size=_optional("intermediate_size"),
    max_position_embeddings=keys.positions(2048),
    layer_types=_global_and_local,
    sliding_window=Key("window_size", int, 256, minimum=1),
    qkv_bias=False,
    attention_scale=1.0,
    attention_scale_layers=alike,
    inert=_SUMMARY | {"attention_layers", "embed_dropout", "resid_dropout"},
    renames=_GPT2_NAMES,
    splits=(),
)

# ---------------------------------------------------------------- BLOOM and those with its names

_BLOOM_NAMES = (
    (r"^(transformer|gpt_neox|model)\.", ""),
    (r"^(word_embeddings|embed_in)\b", "model.embed_tokens"),
    (r"^word_embeddings_layernorm\b", "model.embed_norm"),
    (r"^(ln_f|final_layer_norm)\b", "model.norm"),
    (r"^embed_out\b", "lm_head"),
    (r"^(h|layers)\.", "model.layers."),
    (r"\.(self_attention|attention)\.", ".self_attn."),
    (r"\.self_attn\.query_key_value\b", ".self_attn.qkv_proj"),
    (r"\.self_attn\.dense\b", ".self_attn.o_proj"),
    (r"\.dense_h_to_4h\b", ".up_proj"),
    (r"\.dense_4h_to_h\b", ".down_proj"),
    (r"\.ln_attn\b", ".input_layernorm"),
    (r"\.ln_mlp\b", ".post_attention_layernorm"),
)
_BLOOM = Family(
    "bloom",
    hidden_size=_HIDDEN,
    num_hidden_layers=_LAYERS,
    num_attention_heads=_HEADS,
    num_key_value_heads=None,
    head_dim=None,
    intermediate_size=_optional("n_inner"),
    max_position_embeddings=Key("seq_length", int, 2048, minimum=1),
    tie_word_embeddings=_TIED,
    qkv_bias=True,
    output_bias=True,
    position="alibi",
    alibi=Alibi(),
    activation="gelu_tanh",
    gated=False,
    mlp_bias=True,
    norm="layer",
    norm_eps=Key("layer_norm_epsilon", float, 1e-5, minimum=0),
    norm_bias=True,
    embed_norm=True,
    inert=frozenset(
        """
        attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi pretraining_tp skip_bias_add
        skip_bias_add_qkv slow_but_exact
        """.split()
    ),
    refused={"apply_residual_connection_post_layernorm": lambda value: not value},
    renames=_BLOOM_NAMES,
    splits=(Split("self_attn.qkv_proj", grouped_qkv),),
)

_NEW = _flag("new_decoder_architecture", False)
_PARALLEL = _flag("parallel_attn", True)
_ALIBI = _flag("alibi", False)


def _falcon_kv_heads(new: bool, multi_query: bool, said: int | None) -> int | None:
    return said if new else 1 if multi_query else None


def _falcon_shares_norm(new: bool, parallel: bool, norms: int | None) -> bool:
    return norms == 1 if new else parallel


def _falcon_alibi(there: bool, hidden: int, heads: int) -> Alibi | None:
    return Alibi(factor=(hidden // heads) ** -0.5, rounded=True) if there else None


def _unless_alibi(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    return (not reader.read(_ALIBI),) * layers


_FALCON = replace(
    _BLOOM,
    model_type="falcon",
    num_key_value_heads=of(_falcon_kv_heads, _NEW, _flag("multi_query", True), _optional("num_kv_heads")),
    intermediate_size=_optional("ffn_hidden_size"),
    max_position_embeddings=keys.positions(2048),
    qkv_bias=_flag("bias", False),
    output_bias=_flag("bias", False),
    position="rope",
    rope_layers=_unless_alibi,
    alibi=of(_falcon_alibi, _ALIBI, _HIDDEN, _HEADS),
    activation=Key("activation", str, "gelu"),
    mlp_bias=_flag("bias", False),
    placement=of(lambda new, parallel: "parallel" if new or parallel else "pre", _NEW, _PARALLEL),
    shared_norm=of(
        _falcon_shares_norm,
        _NEW,
        _PARALLEL,
        Key("num_ln_in_parallel_attn", int, None, nullable=True, minimum=1, maximum=2),
    ),
    embed_norm=False,
    inert=frozenset(),
    refused={**_BLOOM.refused, **dict.fromkeys(("ff_factor", "ffn_factor"), lambda value: value in (None, 4))},
)


def _repeated_as(key: Key, other: str) -> Found:
    """Read a key that files repeat under a name at which the reference looks among the rotary parameters alone."""

    def read(reader: ConfigReader) -> float:
        said: float = reader.read(key)
        repeated = reader.read(replace(key, name=other, default=said))
        inside = reader.object("rope_parameters")
        if repeated != said and (inside is None or not inside.has(other)):
            raise reader.fail(ConfigError, f"{other!r} is {repeated:g}, but {key.name!r}, which counts, is {said:g}")
        return said

    return Found(read)


_GPT_NEOX = replace(
    _BLOOM,
    model_type="gpt_neox",
    intermediate_size=Key("intermediate_size", int, minimum=1),
    max_position_embeddings=keys.positions(2048),
    tie_word_embeddings=_flag("tie_word_embeddings", False),
    qkv_bias=_flag("attention_bias", True),
    output_bias=_flag("attention_bias", True),
    position="rope",
    rope_theta=_repeated_as(Key("rotary_emb_base", float, 10000.0, minimum=2), "rope_theta"),
    partial_rotary_factor=_repeated_as(Key("rotary_pct", float, 0.25, minimum=0), "partial_rotary_factor"),
    alibi=None,
    activation=Key("hidden_act", str, "gelu"),
    placement=of(lambda parallel: "parallel" if parallel else "pre", _flag("use_parallel_residual", True)),
    norm_eps=keys.eps(1e-5, "layer_norm_eps"),
    embed_norm=False,
    inert=frozenset({"attention_probs_dropout_prob"}),
    refused={},
    skipped=_MASKS,
)

# ---------------------------------------------------------------- OPT and BioGPT

_OPT_NAMES = (
    (r"^((model\.)?decoder|biogpt)\.", "model."),
    (r"^model\.(final_layer_norm|layer_norm)\b", "model.norm"),
    (r"^output_projection\b", "lm_head"),
    (r"\.self_attn_layer_norm\b", ".input_layernorm"),
    (r"\.final_layer_norm\b", ".post_attention_layernorm"),
    (r"\.out_proj\b", ".o_proj"),
    (r"\.fc1\b", ".mlp.up_proj"),
    (r"\.fc2\b", ".mlp.down_proj"),
)
_BEFORE = _flag("do_layer_norm_before", True)
_OPT = Family(
    "opt",
    num_key_value_heads=None,
    head_dim=None,
    intermediate_size=Key("ffn_dim", int, minimum=1),
    tie_word_embeddings=_TIED,
    qkv_bias=_flag("enable_bias", True),
    output_bias=_flag("enable_bias", True),
    position="learned",
    position_offset=2,
    activation=Key("activation_function", str, "relu"),
    gated=False,
    mlp_bias=_flag("enable_bias", True),
    norm="layer",
    norm_eps=1e-5,
    norm_weight=_flag("layer_norm_elementwise_affine", True),
    norm_bias=_flag("layer_norm_elementwise_affine", True),
    placement=of(lambda before: "pre" if before else "post", _BEFORE),
    final_norm=of(lambda before, no: before and not no, _BEFORE, _flag("_remove_final_layer_norm", False)),
    embedding_width=_optional("word_embed_proj_dim"),
    inert=frozenset({"activation_dropout", "dropout", "init_std", "layerdrop"}),
    # Galactica's
    refused={"learned_embeddings": lambda value: value is True, "scale_embeddings": lambda value: not value},
    renames=_OPT_NAMES,
)
_BIOGPT = replace(
    _OPT,
    model_type="biogpt",
    intermediate_size=Key("intermediate_size", int, minimum=1),
    max_position_embeddings=keys.positions(1024),
    qkv_bias=True,
    output_bias=True,
    activation=Key("hidden_act", str, "gelu"),
    mlp_bias=True,
    norm_weight=True,
    norm_bias=True,
    placement="pre",
    final_norm=True,
    embedding_scale=of(lambda scaled: "root" if scaled else 1.0, _flag("scale_embedding", True)),
    embedding_width=None,
    # Its norms have an epsilon of their own, whatever `layer_norm_eps` says.
    inert=frozenset({"activation_dropout", "attention_probs_dropout_prob", "layer_norm_eps", "layerdrop"}),
    refused={},
)

# ---------------------------------------------------------------- MPT

# What the reference does not read, at the values that it computes.
_MPT_ATTENTION = {
    "alibi": lambda value: value is True,
    "alibi_bias_max": lambda value: value == 8,
    "attn_type": lambda value: value == "multihead_attention",
    "attn_uses_sequence_id": lambda value: not value,
    "prefix_lm": lambda value: not value,
    "qk_ln": lambda value: not value,
}


def _mpt_attention(reader: ConfigReader, row: Mapping[str, Any]) -> AttentionConfig:
    said = reader.object("attn_config") or ConfigReader({}, reader.source, "attn_config")
    said.refuse(_MPT_ATTENTION)
    scale = said.read(Key("softmax_scale", float, None, nullable=True))
    clip = said.read(Key("clip_qkv", float, None, nullable=True, minimum=0))
    said.discard(INERT | GENERATION | {"attn_impl", "attn_pdrop", "dtype", "torch_dtype"})
    said.discard_where(HARMLESS)
    said.finish()
    return AttentionConfig(
        num_heads=row["num_attention_heads"],
        num_kv_heads=row["num_attention_heads"],
        head_dim=row["head_dim"],
        scale=row["head_dim"] ** -0.5 if scale is None else scale,
        rope=None,
        bias=row["alibi"],
        clip=clip or None,
    )


_MPT = Family(
    "mpt",
    hidden_size=replace(_HIDDEN, name="d_model", also=("hidden_size",)),
    num_hidden_layers=replace(_LAYERS, name="n_layers", also=("num_hidden_layers",)),
    num_attention_heads=replace(_HEADS, name="n_heads", also=("num_attention_heads",)),
    num_key_value_heads=None,
    head_dim=None,
    intermediate_size=None,
    max_position_embeddings=Key("max_seq_len", int, 2048, minimum=1),
    tie_word_embeddings=_TIED,
    mixers={FULL: _mpt_attention},
    position="alibi",
    alibi=Alibi(),
    activation="gelu",
    gated=False,
    norm="layer",
    norm_eps=Key("layer_norm_epsilon", float, 1e-5, minimum=0),
    inert=frozenset(
        """
        emb_pdrop embedding_fraction init_config init_device learned_pos_emb tokenizer_name verbose
        """.split()
    ),
    refused={
        "expansion_ratio": lambda value: value == 4,
        "logit_scale": lambda value: value is None,
        "no_bias": lambda value: value is True,
        "norm_type": lambda value: value in ("low_precision_layernorm", "layernorm"),
    },
    renames=(
        (r"^transformer\.", ""),
        (r"^wte\b", "model.embed_tokens"),
        (r"^norm_f\b", "model.norm"),
        (r"^blocks\.", "model.layers."),
        (r"\.norm_1\b", ".input_layernorm"),
        (r"\.norm_2\b", ".post_attention_layernorm"),
        (r"\.attn\.Wqkv\b", ".self_attn.qkv_proj"),
        (r"\.attn\.out_proj\b", ".self_attn.o_proj"),
        (r"\.ffn\.", ".mlp."),
    ),
    splits=(Split("self_attn.qkv_proj", stacked_qkv),),
)

ROWS: tuple[Family, ...] = (
    _GPT2,
    _GPT_BIGCODE,
    _GPTJ,
    _CODEGEN,
    _GPT_NEO,
    _BLOOM,
    _FALCON,
    _GPT_NEOX,
    _OPT,
    _BIOGPT,
    _MPT,
)
