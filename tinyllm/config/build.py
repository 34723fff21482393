"""From a family's row and a config.json to layers. No mlx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tinyllm.config.family import SLIDING, Experts, Family, reach_of, resolve
from tinyllm.config.layers import (
    ACTIVATIONS,
    AttentionConfig,
    DualConfig,
    FeedForward,
    LayerConfig,
    LayerInputs,
    MLPConfig,
    MoeConfig,
    NormConfig,
    QkNorm,
    RouterConfig,
)
from tinyllm.config.reader import ConfigReader
from tinyllm.config.rope import RopeConfig, read_rope
from tinyllm.errors import ConfigError, UnsupportedModelError

XIELU = "xielu"  # has parameters of its own, in every layer
_ALIASES = {
    "swish": "silu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
}  # fmt: skip


def read_model(reader: ConfigReader, family: Family) -> dict[str, Any]:
    """Return the fields of a `Config` that its row says how to read. Raises ConfigError."""
    row = resolve(family, reader)
    reader.refuse(family.refused)
    count = row["num_hidden_layers"]
    kv_heads, head_dim = _read_heads(reader, row)
    row |= {
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "activation": _activation(reader, row["activation"], with_parameters=not (row["gated"] or family.experts)),
        "intermediate_size": row["intermediate_size"] or 4 * row["hidden_size"],
    }
    norm = _norm(row)
    layer_types = family.layer_types(reader, count)
    rotated = family.rope_layers(reader, count) if family.position == "rope" else (False,) * count
    head_dims, kv_heads_of = _read_heads_of_layers(reader, family, row)
    ropes = _read_ropes(reader, family, row, layer_types, head_dims)
    if family.layer_thetas is not None:
        thetas = family.layer_thetas(reader, count)
        ropes = tuple(replace(rope, theta=own or rope.theta) for rope, own in zip(ropes, thetas, strict=True))
    normed, scaled = family.qk_norm_layers(reader, count), family.query_scaling_layers(reader, count)
    scales = family.attention_scale_layers(reader, count)
    equal = family.values_are_keys(reader, count)
    sources = family.sources(reader, count) if family.sources is not None else (None,) * count
    feed_forwards = _feed_forwards(reader, family, row)
    layers = []
    for i, kind in enumerate(layer_types):
        about = {**row, "norm": norm, "rope": ropes[i] if rotated[i] else None, "reach": reach_of(kind, row)}
        about |= {"head_dim": head_dims[i], "num_key_value_heads": kv_heads_of[i]}
        about |= {"source": sources[i], "values_are_keys": equal[i]}
        if kind in family.mixers:
            mixer = family.mixers[kind](reader, about)
        else:
            mixer = _attention(about, normed=normed[i], scaled=scaled[i], scale=scales[i])
        layers.append(
            LayerConfig(
                attention=mixer,
                feed_forward=feed_forwards[i],
                norm=norm,
                placement=row["placement"],
                shared_norm=row["shared_norm"],
                branch_scale=row["branch_scale"],
                scalar=row["layer_scalar"],
            )
        )
    return {
        **{name: row[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
        **{name: row[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")},
        **{name: row[name] for name in ("max_position_embeddings", "tie_word_embeddings", "position_offset")},
        **{name: row[name] for name in ("logit_scale", "logit_softcap", "head_bias", "extra_layers")},
        "rms_norm_eps": norm.eps,
        "rope_theta": ropes[0].theta if ropes else row["rope_theta"],
        "layers": tuple(layers),
        "final_norm": norm if row["final_norm"] else None,
        "embed_norm": norm if row["embed_norm"] else None,
        "embedding_scale": row["hidden_size"] ** 0.5 if row["embedding_scale"] == "root" else row["embedding_scale"],
        "embedding_width": None if row["embedding_width"] == row["hidden_size"] else row["embedding_width"],
        "learned_positions": (
            row["max_position_embeddings"] + row["position_offset"] if family.position == "learned" else None
        ),
        "layer_inputs": (
            LayerInputs(row["layer_input_vocab_size"], row["layer_input_size"], row["activation"])
            if row["layer_input_size"]
            else None
        ),
    }


def _norm(row: Mapping[str, Any]) -> NormConfig:
    return NormConfig(
        eps=row["norm_eps"],
        kind=row["norm"],
        weight=row["norm_weight"],
        bias=row["norm_bias"],
        offset=row["norm_offset"],
    )


def _read_heads(reader: ConfigReader, row: Mapping[str, Any]) -> tuple[int, int]:
    """Return (key/value heads, head_dim), derived where config.json has null or nothing."""
    heads, hidden = row["num_attention_heads"], row["hidden_size"]
    kv_heads = row["num_key_value_heads"] or heads
    if heads % kv_heads:
        raise reader.fail(
            ConfigError,
            f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})",
        )
    if row["head_dim"] is None and hidden % heads:
        raise reader.fail(
            ConfigError,
            f"hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads}), and head_dim is absent",
        )
    return kv_heads, row["head_dim"] or hidden // heads


def _read_heads_of_layers(
    reader: ConfigReader, family: Family, row: Mapping[str, Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return head_dim and the number of key/value heads of each layer."""
    count, heads = row["num_hidden_layers"], row["num_attention_heads"]
    dims = (row["head_dim"],) * count if family.head_dims is None else family.head_dims(reader, count)
    kv_heads = (row["num_key_value_heads"],) * count
    if family.key_value_heads is not None:
        kv_heads = family.key_value_heads(reader, count)
    for each in kv_heads:
        if heads % each:
            raise reader.fail(
                ConfigError, f"num_attention_heads ({heads}) is not a multiple of {each}, as a layer has"
            )
    return dims, kv_heads


def _activation(reader: ConfigReader, name: str, *, with_parameters: bool) -> str:
    name = _ALIASES.get(name, name)
    if name not in ACTIVATIONS and not (with_parameters and name == XIELU):
        raise reader.fail(
            UnsupportedModelError,
            f"the activation {name!r} is not computed by tinyllm ({', '.join(ACTIVATIONS)})",
        )
    return name


def _read_ropes(
    reader: ConfigReader,
    family: Family,
    row: Mapping[str, Any],
    layer_types: tuple[str, ...],
    head_dims: tuple[int, ...],
) -> tuple[RopeConfig, ...]:
    if family.position != "rope":
        return ()
    by_kind = dict(zip(layer_types, head_dims, strict=True))
    if any(by_kind[kind] != dim for kind, dim in zip(layer_types, head_dims, strict=True)):
        raise reader.fail(UnsupportedModelError, "layers of one kind have heads of different sizes")
    return read_rope(
        reader,
        head_dim=row["head_dim"],
        head_dims=by_kind,
        max_positions=row["max_position_embeddings"],
        original=row["original_max_position_embeddings"],
        layer_types=layer_types,
        default_theta=row["rope_theta"],
        local_theta=row["local_theta"],
        local_kind=SLIDING,
        partial=row["partial_rotary_factor"],
        whole=family.partial_rotary_factor is None,
        dims=row["rotary_dims"],
        interleaved=row["rope_interleaved"],
        absent=family.rope_parameters,
        inert=family.rope_inert,
        alpha=family.rope_alpha,
    )


def _attention(row: Mapping[str, Any], *, normed: bool, scaled: bool, scale: float) -> AttentionConfig:
    whole = row["head_dim"] ** -0.5 if row["attention_scale"] is None else row["attention_scale"]
    return AttentionConfig(
        num_heads=row["num_attention_heads"],
        num_kv_heads=row["num_key_value_heads"],
        head_dim=row["head_dim"],
        scale=scale * whole,
        rope=row["rope"],
        reach=row["reach"],
        qkv_bias=row["qkv_bias"],
        output_bias=row["output_bias"],
        qk_norm=_qk_norm(row) if normed else None,
        bias=row["alibi"],
        softcap=row["softcap"],
        sinks=row["sinks"],
        clip=row["clip"],
        gate=row["gate"],
        query_scaling=row["query_scaling"] if scaled else None,
        value_norm=_unweighted(row["norm"]) if row["value_norm"] and row["source"] is None else None,
        values_are_keys=row["values_are_keys"] and row["source"] is None,
        source=row["source"],
    )


def _unweighted(norm: NormConfig) -> NormConfig:
    return NormConfig(norm.eps, norm.kind, weight=False)


def _qk_norm(row: Mapping[str, Any]) -> QkNorm | None:
    if row["qk_norm"] is None:
        return None
    norm: NormConfig = row["norm"]
    if not row["qk_norm_weight"]:
        norm = _unweighted(norm)
    norm = replace(norm, bias=norm.bias and row["qk_norm_bias"])
    return QkNorm(norm, row["qk_norm"], row["qk_norm_after_rope"])


def _feed_forwards(reader: ConfigReader, family: Family, row: Mapping[str, Any]) -> Sequence[FeedForward]:
    """Return what each layer has, of which only those with experts read the keys of experts."""
    count = row["num_hidden_layers"]
    widths = (row["intermediate_size"],) * count
    if family.intermediate_sizes is not None:
        widths = family.intermediate_sizes(reader, count)
    dense = [_mlp(row, width, bias=row["mlp_bias"]) for width in widths]
    if family.experts is None:
        return dense
    sparse = family.experts.layers(reader, count)
    if not any(sparse):
        resolve(family.experts, reader)
        return dense
    mixture = _mixture(reader, family.experts, row)
    if family.experts.beside_dense:
        return [DualConfig(each, mixture) if here else each for each, here in zip(dense, sparse, strict=True)]
    return [mixture if here else each for each, here in zip(dense, sparse, strict=True)]


def _mlp(row: Mapping[str, Any], width: int, *, bias: bool) -> MLPConfig:
    return MLPConfig(width, row["activation"], bias=bias, gated=row["gated"], limit=row["limit"])


def _mixture(reader: ConfigReader, experts: Experts, row: Mapping[str, Any]) -> MoeConfig:
    said = resolve(experts, reader)
    names = ("num_experts", "top_k", "scoring", "renormalise", "scale", "groups", "top_groups", "group_score")
    router = RouterConfig(
        **{
            name: said[name]
            for name in (*names, "selection_bias", "scales_input", "epsilon", "jitter", "expert_scale")
        },
        bias=said["router_bias"],
    )
    check_router(reader, router)
    if router.groups == 1:
        router = replace(router, group_score="best")
    width = said["shared_size"]
    if said["shared_experts"] is not None:
        width = said["shared_experts"] * said["intermediate_size"]
    return MoeConfig(
        router=router,
        expert=_mlp(row, said["intermediate_size"], bias=said["bias"]),
        shared=_mlp(row, width, bias=row["mlp_bias"]) if width else None,
        shared_gate=said["shared_gate"],
    )


def check_router(reader: ConfigReader, router: RouterConfig) -> None:
    """Raise ConfigError for numbers of experts that cannot be chosen."""
    if router.num_experts % router.groups or not 0 < router.top_groups <= router.groups:
        raise reader.fail(
            ConfigError,
            f"{router.top_groups} of {router.groups} groups of {router.num_experts} experts make no sense",
        )
    group = router.num_experts // router.groups
    if router.top_k > group * router.top_groups:
        raise reader.fail(
            ConfigError, f"{router.top_k} experts a token are asked for, of {group * router.top_groups}"
        )
    if router.groups > 1 and router.group_score == "two best" and group < 2:
        raise reader.fail(ConfigError, f"{router.groups} groups of one expert each have no two best ones")
