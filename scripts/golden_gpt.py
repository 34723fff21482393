"""Golden checkpoints: the families that came before Llama."""

from __future__ import annotations

from typing import Any

from golden_case import YARN, Case

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_GPT = {**_SIZES, "layer_norm_epsilon": 0.2}
_GPT_NEOX = {**_SIZES, "num_attention_heads": 2, "layer_norm_eps": 0.2, "intermediate_size": 48}
_BLOOM = {name: value for name, value in _GPT.items() if name != "max_position_embeddings"}
_MPT = {**_BLOOM, "max_seq_len": 128}
_OPT = {**_SIZES, "ffn_dim": 48}
_BIOGPT = {**_SIZES, "intermediate_size": 48}
_TIED = {"wte|word_embeddings.weight|embed_tokens|embed_in": (0.0, 0.4)}
_SMALL = {"embed_tokens": (0.0, 0.1)}
# Of so small a variance that the epsilon of the first norm shows, which is 1e-5 whatever config.json says.
_TINY = {"embed_": (0.0, 0.01), r"(decoder.final_layer|biogpt.layer)_norm.weight": (12.0, 4.0)}
_TWELVE = {"hidden_size": 24, "num_attention_heads": 12}  # whose slopes are no powers of two
_LOCAL = {"num_hidden_layers": 3, "window_size": 11, "attention_types": [[["global", "local"], 1], [["local"], 1]]}
_RW = {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}
_ROTATED = {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5}}


def _as_gpt2(config: dict[str, Any]) -> None:
    """As GPT-2's own file has it."""
    config |= {"n_ctx": config["n_positions"], "summary_type": "cls_index", "task_specific_params": {}}
    for name in ("n_inner", "scale_attn_weights", "tie_word_embeddings", "reorder_and_upcast_attn"):
        del config[name]


def _in_common_names(config: dict[str, Any]) -> None:
    """Under the names that all classes of transformers understand."""
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    for own, common in {**names, "n_positions": "max_position_embeddings"}.items():
        if own in config:
            config[common] = config.pop(own)


def _as_bloom(config: dict[str, Any]) -> None:
    """As BLOOM's own files have it."""
    config["n_embed"] = config.pop("hidden_size")
    config["num_attention_heads"] = config["n_head"]
    config |= {"seq_length": 2048, "n_inner": None, "offset_alibi": 100, "masked_softmax_fusion": True}
    config |= {"bias_dropout_fusion": True, "skip_bias_add": True, "skip_bias_add_qkv": False}


def _as_neox(config: dict[str, Any]) -> None:
    """As Pythia's files have it."""
    rope = config.pop("rope_parameters")
    config |= {"rotary_emb_base": rope.pop("rope_theta"), "rotary_pct": rope.pop("partial_rotary_factor")}
    if rope.pop("rope_type") != "default":
        config["rope_scaling"] = {"type": "linear", **rope}


def _as_gptj(config: dict[str, Any]) -> None:
    """As GPT-J's own file has it."""
    config |= {"rotary": True, "scale_attn_weights": True, "n_inner": None, "summary_use_proj": True}


def _as_mpt(config: dict[str, Any]) -> None:
    """As MPT's own files have it."""
    keys = ("alibi", "alibi_bias_max", "attn_impl", "attn_pdrop", "attn_type", "attn_uses_sequence_id")
    keys += ("clip_qkv", "prefix_lm", "qk_ln", "softmax_scale")
    config["attn_config"] = {key: config["attn_config"][key] for key in keys}
    config |= {"verbose": 0, "tokenizer_name": "EleutherAI/gpt-neox-20b", "init_config": {"name": "kaiming_normal_"}}


def _case(name: str, family: str, settings: dict[str, Any], **more: Any) -> Case:
    return Case(name, family, settings, sparse=True, **more)


def _gpt2(name: str, settings: dict[str, Any], **more: Any) -> Case:
    return _case(name, "GPT2", settings, base=_GPT, classes=("GPT2Config", "GPT2LMHeadModel"), **more)


def _gpt_neox(name: str, settings: dict[str, Any], **more: Any) -> Case:
    return _case(name, "GPTNeoX", settings, base=_GPT_NEOX, v4=False, dialects={"v4": _as_neox}, **more)


CASES: tuple[Case, ...] = (
    _gpt2("gpt2", {}, random=_TIED, dialects={"hub": _as_gpt2, "common": _in_common_names}),
    _gpt2(
        "gpt2-scales",
        {
            "scale_attn_by_inverse_layer_idx": True,
            "num_hidden_layers": 3,
            "n_inner": 40,
            "tie_word_embeddings": False,
        },
    ),
    _gpt2(
        "gpt2-unscaled", {"scale_attn_weights": False, "activation_function": "relu"}, random=_TIED, dtype="float16"
    ),
    _case("gpt-bigcode", "GPTBigCode", {}, base=_GPT, random=_TIED, dialects={"common": _in_common_names}),
    _case("gpt-bigcode-mha", "GPTBigCode", {"multi_query": False, "n_inner": 40}, base=_GPT, random=_TIED),
    _case("gptj", "GPTJ", {"rotary_dim": 4}, base=_GPT, dialects={"hub": _as_gptj}),
    _case("codegen", "CodeGen", {"rotary_dim": 6, "n_inner": 40}, base=_GPT),
    _case("codegen-two-heads", "CodeGen", {"rotary_dim": 8, "num_attention_heads": 2}, base=_GPT),
    _case("gpt-neo", "GPTNeo", _LOCAL, base=_GPT, random={"[qk]_proj": (0.0, 0.2), **_TIED}),
    _case("bloom", "Bloom", {}, base=_BLOOM, random=_TIED, dialects={"hub": _as_bloom}),
    _case("bloom-twelve-heads", "Bloom", _TWELVE, base=_BLOOM, random=_TIED),
    _case("falcon", "Falcon", {"ffn_hidden_size": 40}, base=_GPT, random=_TIED),
    _case("falcon-new", "Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, base=_GPT, random=_TIED),
    _case(
        "falcon-new-one-norm",
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "rope_parameters": YARN},
        base=_GPT,
        random=_TIED,
    ),
    _case(
        "falcon-alibi",
        "Falcon",
        {**_RW, **_TWELVE, "tie_word_embeddings": False},
        base={**_GPT, "max_position_embeddings": 512},
        length=300,
        keep=64,
        attention="sdpa",
    ),
    _gpt_neox("gpt-neox", {}),
    _gpt_neox("gpt-neox-sequential", {"use_parallel_residual": False, "hidden_act": "gelu_fast", **_ROTATED}),
    _gpt_neox("gpt-neox-unbiased", {"attention_bias": False, "tie_word_embeddings": True}, random=_TIED),
    _case("opt", "OPT", {}, base=_OPT, random=_TINY),
    _case(
        "opt-post-norm", "OPT", {"do_layer_norm_before": False, "word_embed_proj_dim": 24}, base=_OPT, random=_TIED
    ),
    _case(
        "opt-no-final-norm", "OPT", {"_remove_final_layer_norm": True, "enable_bias": False}, base=_OPT, random=_SMALL
    ),
    _case("opt-plain-norms", "OPT", {"layer_norm_elementwise_affine": False}, base=_OPT, random=_TIED),
    _case("biogpt", "BioGpt", {}, base=_BIOGPT, random=_TIED),
    _case("biogpt-unscaled", "BioGpt", {"scale_embedding": False}, base=_BIOGPT, random=_TINY),
    _case("mpt", "Mpt", {}, base=_MPT, random=_TIED, dialects={"hub": _as_mpt}),
    _case(
        "mpt-clipped",
        "Mpt",
        {**_TWELVE, "attn_config": {"clip_qkv": 0.8, "softmax_scale": 0.7}},
        base=_MPT,
        random=_TIED,
    ),
)
