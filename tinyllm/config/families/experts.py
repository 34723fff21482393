"""Mixtures of experts. No mlx."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tinyllm.config.families import keys
from tinyllm.config.family import (
    CHUNKED,
    FULL,
    SLIDING,
    Experts,
    Family,
    Found,
    LayerRule,
    all_but_every,
    all_full,
    all_layers,
    all_sliding,
    every,
    flags,
    listed,
    mlp_kinds,
    of,
    when,
)
from tinyllm.config.fused import Split, paired_gate_up, stacked_gate_up
from tinyllm.config.layers import QueryScaling
from tinyllm.config.reader import ConfigReader, Key
from tinyllm.errors import ConfigError, UnsupportedModelError

# ---------------------------------------------------------------- keys of theirs, and rules


def _count(name: str, default: int, *also: str) -> Key:
    return Key(name, int, default, minimum=1, also=also)


_MLP_SIZE = Key("intermediate_size", int, minimum=1)
_TRAINING = frozenset({"router_aux_loss_coef", "router_jitter_noise"})


def _window_where_used(reader: ConfigReader) -> int | None:
    """Read Qwen's window, which is there (or zero) in files that do not use it."""
    used = reader.read(Key("use_sliding_window", bool, False))
    window = reader.read(Key("sliding_window", int, 4096, nullable=True, minimum=0))
    return window or None if used else None


# ---------------------------------------------------------------- which layers have experts


def _every_step_but_listed(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`-th layer (Qwen) but those of `mlp_only_layers`, if there are experts at all."""
    step = reader.read(Key("decoder_sparse_step", int, 1, minimum=1))
    dense = _layer_numbers(reader, "mlp_only_layers") or ()
    any_experts = not reader.has("num_experts") or reader.read(_QWEN_EXPERTS) > 0
    return tuple(any_experts and (i + 1) % step == 0 and i not in dense for i in range(layers))


def _listed_or_interleaved(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Those of `moe_layers` (Llama 4), or every `interleave_moe_layer_step`-th."""
    step = reader.read(_count("interleave_moe_layer_step", 1))
    said = _layer_numbers(reader, "moe_layers")
    return tuple((i + 1) % step == 0 if said is None else i in said for i in range(layers))


def _after_the_first_dense(default: int) -> LayerRule:
    """All but the first `first_k_dense_replace`."""

    def rule(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
        first = reader.read(Key("first_k_dense_replace", int, default, minimum=0))
        return tuple(i >= first for i in range(layers))

    return rule


def _within(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Every `moe_layer_interval`-th from a first to a last layer (Ernie), which is the last of all where it is -1."""
    first = reader.read(Key("moe_layer_start_index", int, 1, minimum=0))
    last = reader.read(Key("moe_layer_end_index", int, -1, minimum=-1))
    interval = reader.read(_count("moe_layer_interval", 1))
    last = layers - 1 if last == -1 else last
    return tuple((i + 1) % interval == 0 and first <= i <= last for i in range(layers))


def _layer_numbers(reader: ConfigReader, name: str) -> Sequence[int] | None:
    said: list[Any] | None = reader.read(Key(name, list, None, nullable=True))
    if said is not None and not all(isinstance(i, int) and not isinstance(i, bool) for i in said):
        raise reader.fail(ConfigError, f"{name!r} must be a list of numbers of layers")
    return said


# ---------------------------------------------------------------- names of tensors

_SWITCH = (r"\.switch_mlp\.", ".experts.")  # as mlx-lm has all experts in one tensor
_FUSED = (r"\.experts\.(gate_up_proj|down_proj)$", r".experts.\1.weight")  # as transformers 5 has them in memory
_STACKED = (_SWITCH, _FUSED)
_TRANSPOSED = (r"\.experts\.(gate_up_proj|down_proj)$", r".experts.\1.transposed")
_MIXTRAL_NAMES = (
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w3\.", ".up_proj."),
    (r"\.w2\.", ".down_proj."),
    *_STACKED,
)
_ROUTER = (r"\.router\.", ".gate.")
_SHARED = (r"\.shared_experts\.", ".shared_expert.")
_SPLITS = (Split(".experts.gate_up_proj", stacked_gate_up),)

# ---------------------------------------------------------------- Qwen

_QWEN_EXPERTS = Key("num_experts", int, 128, minimum=0, also=("num_local_experts",))

_QWEN3_MOE = Family(
    "qwen3_moe",
    num_key_value_heads=keys.kv_heads(4),
    max_position_embeddings=keys.positions(32768),
    layer_types=all_sliding,
    sliding_window=Found(_window_where_used),
    qkv_bias=keys.ATTENTION_BIAS,
    output_bias=keys.ATTENTION_BIAS,
    qk_norm="head",
    experts=Experts(
        layers=_every_step_but_listed,
        num_experts=_QWEN_EXPERTS,
        top_k=_count("num_experts_per_tok", 8),
        intermediate_size=_count("moe_intermediate_size", 768),
        renormalise=Key("norm_topk_prob", bool, False),
    ),
    inert=_TRAINING,
    refused={"use_qk_norm": lambda value: value is True},
    renames=_STACKED,
    splits=_SPLITS,
)


def _every_other_before_max_window_layers(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    """Qwen 2's rule where it has experts, which is not the one that it has without."""
    used = reader.read(Key("use_sliding_window", bool, False))
    last = reader.read(Key("max_window_layers", int, 28, minimum=0))
    return tuple(SLIDING if used and i % 2 == 0 and i < last else FULL for i in range(layers))


_QWEN2_MOE = replace(
    _QWEN3_MOE,
    model_type="qwen2_moe",
    refused={},
    num_key_value_heads=keys.kv_heads(16),
    layer_types=listed(_every_other_before_max_window_layers),
    qkv_bias=Key("qkv_bias", bool, True),
    output_bias=False,
    qk_norm=None,
    experts=Experts(
        layers=_every_step_but_listed,
        num_experts=replace(_QWEN_EXPERTS, default=60),
        top_k=_count("num_experts_per_tok", 4),
        intermediate_size=_count("moe_intermediate_size", 1408),
        renormalise=Key("norm_topk_prob", bool, False),
        shared_size=_count("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    ),
)

_MELLUM = replace(
    _QWEN3_MOE,
    model_type="mellum",
    head_dim=keys.head_dim(128),
    max_position_embeddings=keys.positions(131072),
    layer_types=listed(all_full),
    sliding_window=keys.window(1024),
    rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    experts=Experts(
        layers=mlp_kinds(all_layers),
        num_experts=_count("num_experts", 64, "num_local_experts"),
        top_k=_count("num_experts_per_tok", 8),
        intermediate_size=_count("moe_intermediate_size", 896),
        renormalise=Key("norm_topk_prob", bool, True),
    ),
    inert=_TRAINING
    | {"mtp_layer_types", "mtp_mlp_layer_types", "num_mtp_layers", "num_nextn_predict_layers"},  # of what is skipped
    skipped=r"^mtp\.",
)

# ---------------------------------------------------------------- Mixtral, and those that name tensors as it does

_MIXTRAL = Family(
    "mixtral",
    num_key_value_heads=keys.kv_heads(8),
    max_position_embeddings=keys.positions(4096 * 32),
    layer_types=all_sliding,
    sliding_window=keys.window(None),
    rope_theta=1e6,
    experts=Experts(
        num_experts=_count("num_local_experts", 8, "num_experts"),
        top_k=_count("num_experts_per_tok", 2),
        intermediate_size=_MLP_SIZE,
    ),
    norm_eps=keys.eps(1e-5),
    inert=_TRAINING,
    renames=_MIXTRAL_NAMES,
    splits=_SPLITS,
)

_MINIMAX_M2 = replace(
    _MIXTRAL,
    model_type="minimax_m2",
    head_dim=keys.head_dim(128),
    max_position_embeddings=keys.positions(196608),
    layer_types=Family.layer_types,
    sliding_window=None,
    qk_norm="whole",
    rope_theta=5e6,
    rotary_dims=Key("rotary_dim", int, None, nullable=True, minimum=2),
    partial_rotary_factor=Key("partial_rotary_factor", float, 1.0, nullable=True, minimum=0),
    experts=Experts(
        num_experts=_count("num_local_experts", 256, "num_experts"),
        top_k=_count("num_experts_per_tok", 8),
        intermediate_size=_MLP_SIZE,
        scoring="sigmoid",
        selection_bias=True,
    ),
    norm_eps=keys.eps(1e-6),
    inert=_TRAINING | {"use_mtp", "num_mtp_modules", "mtp_transformer_layers", "shared_moe_mode"},
    refused={
        "attn_type_list": lambda value: isinstance(value, list) and set(map(str, value)) <= {"1"},
        "qk_norm_type": lambda value: value == "per_layer",
        "scoring_func": lambda value: value == "sigmoid",
        "shared_intermediate_size": lambda value: not value,
        "use_qk_norm": bool,
        "use_routing_bias": bool,
    },
    renames=(*_MIXTRAL_NAMES, (r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias")),
)

_PHIMOE = replace(
    _MIXTRAL,
    model_type="phimoe",
    qkv_bias=keys.ATTENTION_BIAS,
    output_bias=keys.ATTENTION_BIAS,
    original_max_position_embeddings=Key("original_max_position_embeddings", int, None, nullable=True, minimum=1),
    experts=Experts(
        num_experts=_count("num_local_experts", 16, "num_experts"),
        top_k=_count("num_experts_per_tok", 2),
        intermediate_size=_MLP_SIZE,
        scoring="mixed",
        renormalise=False,
        jitter=Key("router_jitter_noise", float, 0.01, minimum=0),
    ),
    norm="layer",
    norm_bias=True,
    head_bias=Key("lm_head_bias", bool, False),
    inert=frozenset({"router_aux_loss_coef", "input_jitter_noise"}),
    refused={"num_experts_per_tok": lambda value: value == 2},
    renames=(*_MIXTRAL_NAMES, _ROUTER),
)

# ---------------------------------------------------------------- gpt-oss

_GPT_OSS = Family(
    "gpt_oss",
    num_key_value_heads=keys.kv_heads(8),
    head_dim=keys.head_dim(64),
    max_position_embeddings=keys.positions(131072),
    layer_types=listed(every(2)),
    sliding_window=keys.window(128),
    qkv_bias=Key("attention_bias", bool, True),
    output_bias=Key("attention_bias", bool, True),
    sinks=True,
    rope_theta=150000.0,
    rope_parameters={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    limit=Key("swiglu_limit", float, 7.0, minimum=0),
    experts=Experts(
        num_experts=_count("num_local_experts", 128, "num_experts"),
        top_k=_count("num_experts_per_tok", 4, "experts_per_token"),
        intermediate_size=_MLP_SIZE,
        scoring="chosen",
        renormalise=False,
        router_bias=True,
        bias=True,
    ),
    norm_eps=keys.eps(1e-5),
    inert=_TRAINING | {"initial_context_length"},
    refused={"hidden_act": lambda value: value == "silu", "swiglu_alpha": lambda value: value == 1.702},
    renames=(_ROUTER, _TRANSPOSED, (r"\.experts\.(gate_up_proj|down_proj)_bias$", r".experts.\1.bias")),
    splits=(Split(".experts.gate_up_proj", paired_gate_up),),
)

# ---------------------------------------------------------------- Llama 4

_rotated = flags("no_rope_layers", all_but_every(_count("no_rope_layer_interval", 4)))


def _chunked_where_rotated(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    return tuple(CHUNKED if rotated else FULL for rotated in _rotated(reader, layers))


def _tuned_where_not_rotated(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    tuned = reader.take("attn_temperature_tuning", True)  # in the first files a number, 4
    if not isinstance(tuned, int):
        raise reader.fail(ConfigError, "'attn_temperature_tuning' must be true or false")
    return tuple(bool(tuned) and not rotated for rotated in _rotated(reader, layers))


def _temperature(reader: ConfigReader) -> QueryScaling:
    beta = reader.read(Key("attn_scale", float, 0.1, minimum=0))
    return QueryScaling(beta, reader.read(_count("floor_scale", 8192)), shift=1)


_LLAMA4_TEXT = Family(
    "llama4_text",
    num_key_value_heads=keys.kv_heads(8),
    head_dim=keys.head_dim(128),
    intermediate_size=_count("intermediate_size_mlp", 16384),
    max_position_embeddings=keys.positions(4096 * 32),
    layer_types=listed(_chunked_where_rotated, (FULL, CHUNKED)),
    attention_chunk_size=Key("attention_chunk_size", int, 8192, nullable=True, minimum=1),
    qkv_bias=keys.ATTENTION_BIAS,
    output_bias=keys.ATTENTION_BIAS,
    qk_norm=when("use_qk_norm", "head", default=True),
    qk_norm_weight=False,
    qk_norm_after_rope=True,
    qk_norm_layers=_rotated,
    query_scaling=Found(_temperature),
    query_scaling_layers=_tuned_where_not_rotated,
    rope_layers=_rotated,
    rope_theta=500000.0,
    rope_interleaved=True,
    experts=Experts(
        layers=_listed_or_interleaved,
        num_experts=_count("num_local_experts", 16),
        top_k=_count("num_experts_per_tok", 1),
        intermediate_size=_MLP_SIZE,
        scoring="sigmoid",
        renormalise=False,
        scales_input=True,
        shared_size=_MLP_SIZE,
    ),
    norm_eps=keys.eps(1e-5),
    inert=_TRAINING | {"cache_implementation", "for_llm_compressor"},
    renames=((r"\.feed_forward\.", ".mlp."), _ROUTER, _TRANSPOSED),
    splits=_SPLITS,
)

# ---------------------------------------------------------------- OLMoE and FlexOlmo

_OLMOE = Family(
    "olmoe",
    max_position_embeddings=keys.positions(4096),
    qkv_bias=keys.ATTENTION_BIAS,
    output_bias=keys.ATTENTION_BIAS,
    qk_norm="whole",
    clip=Key("clip_qkv", float, None, nullable=True, minimum=0),
    experts=Experts(
        num_experts=_count("num_experts", 64, "num_local_experts"),
        top_k=_count("num_experts_per_tok", 8),
        intermediate_size=_MLP_SIZE,
        renormalise=Key("norm_topk_prob", bool, False),
    ),
    norm_eps=keys.eps(1e-5),
    inert=_TRAINING,
    renames=_STACKED,
    splits=_SPLITS,
)

_FLEX_OLMO = replace(
    _OLMOE,
    model_type="flex_olmo",
    clip=None,
    rope_theta=500000.0,
    experts=Experts(
        num_experts=_count("num_experts", 7, "num_local_experts"),
        top_k=_count("num_experts_per_tok", 5),
        intermediate_size=_MLP_SIZE,
        renormalise=Key("norm_topk_prob", bool, False),
    ),
    norm_eps=keys.eps(1e-6),
    placement="branch",
)

# ---------------------------------------------------------------- Granite

_GRANITEMOE = Family(
    "granitemoe",
    qkv_bias=keys.ATTENTION_BIAS,
    output_bias=keys.ATTENTION_BIAS,
    attention_scale=Key("attention_multiplier", float, 1.0),
    experts=Experts(
        num_experts=_count("num_local_experts", 8),
        top_k=_count("num_experts_per_tok", 2),
        intermediate_size=_MLP_SIZE,
        scoring="chosen",
        renormalise=False,
    ),
    branch_scale=Key("residual_multiplier", float, 1.0),
    embedding_scale=Key("embedding_multiplier", float, 1.0),
    logit_scale=of(lambda divisor: 1 / divisor, Key("logits_scaling", float, 1.0, minimum=1e-6)),
    inert=_TRAINING,
    renames=(
        (r"\.shared_mlp\.", ".mlp.shared_expert."),
        (r"\.router\.layer\.", ".router."),
        _ROUTER,
        (r"\.block_sparse_moe\.(input|output)_linear\.", r".mlp.experts.\1_linear."),
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.input_linear\.", ".gate_up_proj."),
        (r"\.output_linear\.", ".down_proj."),
        *_STACKED,
    ),
    splits=(*_SPLITS, Split(".shared_expert.gate_up_proj", stacked_gate_up)),
)
assert _GRANITEMOE.experts is not None

GRANITEMOESHARED = replace(
    _GRANITEMOE,
    model_type="granitemoeshared",
    experts=replace(_GRANITEMOE.experts, shared_size=Key("shared_intermediate_size", int, 0, minimum=0)),
)

# ---------------------------------------------------------------- scores of a sigmoid, balanced by a bias

_BALANCED = Experts(
    top_k=_count("num_experts_per_tok", 8),
    intermediate_size=_count("moe_intermediate_size", 1408),
    scoring="sigmoid",
    renormalise=Key("norm_topk_prob", bool, True),
    scale=Key("routed_scaling_factor", float, 1.0),
    groups=_count("n_group", 1),
    top_groups=_count("topk_group", 1),
    group_score="two best",
    selection_bias=True,
    epsilon=1e-20,
)

_GLM4_MOE = Family(
    "glm4_moe",
    num_key_value_heads=keys.kv_heads(8),
    max_position_embeddings=keys.positions(131072),
    qkv_bias=keys.ATTENTION_BIAS,
    qk_norm=when("use_qk_norm", "head"),
    partial_rotary_factor=keys.rotated(0.5),
    experts=replace(
        _BALANCED,
        layers=_after_the_first_dense(1),
        num_experts=_count("n_routed_experts", 128, "num_local_experts"),
        shared_experts=_count("n_shared_experts", 1),
    ),
    norm_eps=keys.eps(1e-5),
    extra_layers=Key("num_nextn_predict_layers", int, 1, minimum=0, also=("num_mtp_layers",)),
    renames=(*_STACKED, _SHARED),
    splits=_SPLITS,
)
_SOLAR_OPEN = replace(
    _GLM4_MOE,
    model_type="solar_open",
    head_dim=Key("head_dim", int, 128, nullable=True, minimum=1),
    intermediate_size=_count("moe_intermediate_size", 1280),
    qk_norm=None,
    partial_rotary_factor=None,
    rope_theta=1e6,
    experts=replace(
        _BALANCED,
        num_experts=_count("n_routed_experts", 128, "num_local_experts"),
        intermediate_size=_count("moe_intermediate_size", 1280),
        shared_experts=_count("n_shared_experts", 1),
    ),
    extra_layers=0,
    inert=frozenset({"intermediate_size"}),  # no layer is dense
    refused={"first_k_dense_replace": lambda value: not value, "use_qk_norm": lambda value: not value},
)


def _sliding_from_max_window_layers(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    first = reader.read(Key("max_window_layers", int, 62, minimum=0))
    return tuple(SLIDING if i >= first else FULL for i in range(layers))


_DOTS1 = replace(
    _GLM4_MOE,
    model_type="dots1",
    num_key_value_heads=keys.kv_heads(32),
    max_position_embeddings=keys.positions(2048),
    layer_types=listed(_sliding_from_max_window_layers),
    sliding_window=keys.window(4096),
    output_bias=keys.ATTENTION_BIAS,
    qk_norm="head",
    partial_rotary_factor=None,
    experts=replace(
        _BALANCED,
        layers=_after_the_first_dense(0),
        num_experts=Key("n_routed_experts", int, minimum=1, also=("num_local_experts",)),
        top_k=Key("num_experts_per_tok", int, minimum=1),
        renormalise=Key("norm_topk_prob", bool, False),
        shared_experts=Key("n_shared_experts", int, minimum=1),
    ),
    norm_eps=keys.eps(1e-6),
    extra_layers=0,
    inert=frozenset({"aux_loss_alpha", "ep_size", "pretraining_tp", "seq_aux"}),
    refused={
        "moe_layer_freq": lambda value: value == 1,
        "scoring_func": lambda value: value in ("noaux_tc", "sigmoid"),
        "topk_method": lambda value: value == "noaux_tc",
    },
)

# ---------------------------------------------------------------- Ernie 4.5

_ERNIE_BIAS = Key("use_bias", bool, False)

_ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    num_key_value_heads=keys.kv_heads(4),
    max_position_embeddings=keys.positions(131072),
    tie_word_embeddings=keys.tied(True),
    qkv_bias=_ERNIE_BIAS,
    output_bias=_ERNIE_BIAS,
    mlp_bias=_ERNIE_BIAS,
    head_bias=_ERNIE_BIAS,
    rope_theta=500000.0,
    rope_interleaved=True,
    experts=Experts(
        layers=_within,
        num_experts=_count("moe_num_experts", 64, "num_experts"),
        top_k=_count("moe_k", 6, "num_experts_per_tok"),
        intermediate_size=_count("moe_intermediate_size", 1536),
        selection_bias=True,
        # The reference divides by this at least, which so small a number is as good as added to.
        epsilon=Key("moe_norm_min", float, 1e-12, minimum=0, maximum=1e-9),
        shared_experts=Key("moe_num_shared_experts", int, 2, minimum=0),
    ),
    norm_eps=keys.eps(1e-5),
    inert=_TRAINING | {"attention_probs_dropout_prob", "moe_capacity", "num_nextn_predict_layers"},
    refused={
        "moe_gate": lambda value: value == "topk",
        "moe_use_aux_free": bool,
        "use_rmsnorm": bool,
    },
    renames=(*_STACKED, _SHARED, (r"\.mlp\.(gate\.)?moe_statics\.", ".mlp.gate.")),
    flattened=r"\.moe_statics\.",
    skipped=r"(^|\.)mtp_",
    splits=_SPLITS,
)

# ---------------------------------------------------------------- Hunyuan


def _one_for_all(name: str, default: int) -> Found:
    """Read a number, or a list of one for each layer, which must be the same."""

    def read(reader: ConfigReader) -> int:
        said = reader.take(name, default)
        numbers = said if isinstance(said, list) and said else [said]
        if not all(isinstance(n, int) and not isinstance(n, bool) and 0 < n < 1 << 31 for n in numbers):
            raise reader.fail(ConfigError, f"{name!r} must be a whole number above 0, or a list of them")
        if len(set(numbers)) > 1:
            raise reader.fail(UnsupportedModelError, f"{name!r} differs from layer to layer, which is not computed")
        return int(numbers[0])

    return Found(read)


# Of the images and the classifier that a relative has, and of training. Experts are as wide as `intermediate_size`.
HUNYUAN_INERT = frozenset(
    """
    cla_share_factor class_num dense_list eod_token_id im_end_id im_newline_id im_start_id mask_init_id
    moe_drop_tokens moe_intermediate_size moe_random_routing_dropped_token pad_id pool_type pretraining_tp text_end_id
    text_start_id video_end_id video_start_id vit_path
    """.split()
)
# Among the rotary parameters, beside an alpha that does without them.
HUNYUAN_ROPE_INERT = frozenset({"beta_fast", "beta_slow", "mscale", "mscale_all_dim"})
HUNYUAN_ABSENT = """
    add_classification_head group_limited_greedy kv_lora_rank mlp_bias moe_layer_num_skipped n_group
    position_embedding_xdrope q_lora_rank qk_nope_head_dim qk_rope_head_dim routed_scaling_factor topk_group use_cla
    v_head_dim
    """.split()


def _all_one(value: Any) -> bool:
    return set(map(str, value if isinstance(value, list) else [value])) <= {"1"}


_HUNYUAN_V1_MOE = Family(
    "hunyuan_v1_moe",
    head_dim=Key("head_dim", int, None, nullable=True, minimum=1, also=("attention_head_dim",)),
    qkv_bias=keys.ATTENTION_BIAS,
    output_bias=keys.ATTENTION_BIAS,
    qk_norm="head",
    qk_norm_after_rope=True,
    rope_alpha=True,
    rope_inert=HUNYUAN_ROPE_INERT,
    experts=Experts(
        num_experts=_count("num_experts", 1, "num_local_experts"),
        top_k=_one_for_all("moe_topk", 1),
        intermediate_size=_MLP_SIZE,
        shared_size=_MLP_SIZE,
    ),
    norm_eps=keys.eps(1e-5),
    inert=_TRAINING | HUNYUAN_INERT,
    refused={
        **{name: lambda value: not value for name in HUNYUAN_ABSENT},
        "norm_topk_prob": bool,
        "norm_type": lambda value: value == "rms",
        "num_shared_expert": _all_one,
        "use_mixed_mlp_moe": bool,
        "use_qk_norm": bool,
        "use_rotary_pos_emb": bool,
    },
    renames=(
        (r"\.mlp\.gate\.wg\.", ".mlp.gate."),
        (r"\.shared_mlp\.", ".shared_expert."),
        (r"\.query_layernorm\.", ".q_norm."),
        (r"\.key_layernorm\.", ".k_norm."),
        *_STACKED,
    ),
    splits=_SPLITS,
)

ROWS: tuple[Family, ...] = (
    _QWEN3_MOE,
    _QWEN2_MOE,
    _MELLUM,
    _MIXTRAL,
    _MINIMAX_M2,
    _PHIMOE,
    _GPT_OSS,
    _LLAMA4_TEXT,
    _OLMOE,
    _FLEX_OLMO,
    _GRANITEMOE,
    GRANITEMOESHARED,
    _GLM4_MOE,
    _SOLAR_OPEN,
    _DOTS1,
    _ERNIE4_5_MOE,
    _HUNYUAN_V1_MOE,
)
