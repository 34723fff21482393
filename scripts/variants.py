"""What decoders differ in, value by value, and how each is seen in a `Config`: docs/MODELS.md says what proves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tinyllm.anatomy.counts import experts_of, networks_of
from tinyllm.config.config import Config
from tinyllm.config.layers import (
    Alibi,
    AttentionConfig,
    ConvConfig,
    DeltaConfig,
    DualConfig,
    LatentAttentionConfig,
    LayerConfig,
    MLPConfig,
    MoeConfig,
    NormConfig,
    RouterConfig,
    Sandwich,
    rope_of,
)
from tinyllm.config.reach import Chunk, Pattern, Strided, Window
from tinyllm.config.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeConfig,
    YarnScaling,
)

Shown = Callable[[Config], bool]


class Variant(NamedTuple):
    """One value of an axis, and whether a config has it."""

    axis: str
    value: str
    shown: Shown


def _heads(config: Config) -> Iterator[AttentionConfig]:
    return (layer.attention for layer in config.layers if isinstance(layer.attention, AttentionConfig))


def _reaches(config: Config) -> Iterator[Pattern | None]:
    for layer in config.layers:
        if isinstance(layer.attention, AttentionConfig | LatentAttentionConfig):
            yield layer.attention.reach


def _ropes(config: Config) -> Iterator[RopeConfig]:
    return filter(None, (rope_of(layer.attention) for layer in config.layers))


def _networks(config: Config) -> Iterator[MLPConfig]:
    return (network for layer in config.layers for network, _ in networks_of(layer.feed_forward))


def _routers(config: Config) -> Iterator[RouterConfig]:
    mixtures = (experts_of(layer.feed_forward) for layer in config.layers)
    return (mixture.router for mixture in mixtures if mixture is not None)


def _any(found: Callable[[Config], Iterator[Any]], what: Callable[[Any], bool]) -> Shown:
    return lambda config: any(map(what, found(config)))


def _layers(what: Callable[[LayerConfig], bool]) -> Shown:
    return lambda config: any(map(what, config.layers))


def _scaled(cls: type) -> Shown:
    return _any(_ropes, lambda rope: isinstance(rope.scaling, cls))


def _activation(name: str, *, gated: bool) -> Shown:
    return _any(
        _networks, lambda network: network.activation == name and network.gated == gated and not network.limit
    )


def _norm(what: Callable[[NormConfig], bool]) -> Shown:
    return _layers(lambda layer: what(layer.norm))


def _reach(cls: type) -> Shown:
    return _any(_reaches, lambda reach: isinstance(reach, cls))


def _shared(what: Callable[[Any], bool]) -> Shown:
    return _layers(lambda layer: (mixture := experts_of(layer.feed_forward)) is not None and what(mixture))


def _some_without_rope(config: Config) -> bool:
    rotated = {heads.rope is not None for heads in _heads(config)}
    return rotated == {True, False}


def _sparse(config: Config) -> list[bool]:
    return [isinstance(layer.feed_forward, MoeConfig) for layer in config.layers]


def _qk_norm(over: str) -> Shown:
    return _any(_heads, lambda heads: heads.qk_norm is not None and heads.qk_norm.over == over)


_ATTENTION: dict[str, Shown] = {
    "MHA": _any(_heads, lambda heads: heads.num_kv_heads == heads.num_heads > 1),
    "GQA": _any(_heads, lambda heads: 1 < heads.num_kv_heads < heads.num_heads),
    "MQA": _any(_heads, lambda heads: heads.num_kv_heads == 1 < heads.num_heads),
    "sliding window": _reach(Window),
    "windows in alternation with none": lambda config: {None} < set(_reaches(config)),
    "chunked": _reach(Chunk),
    "sparse: strided and local": _reach(Strided),
    "MLA": _layers(lambda layer: isinstance(layer.attention, LatentAttentionConfig)),
    "MLA with a query of low rank": _layers(
        lambda layer: isinstance(layer.attention, LatentAttentionConfig) and layer.attention.query_rank is not None
    ),
    "sinks": _any(_heads, lambda heads: heads.sinks),
    "softcap": _any(_heads, lambda heads: heads.softcap is not None),
    "q/k norm of each head": _any(_heads, lambda heads: heads.qk_norm is not None and heads.qk_norm.over != "whole"),
    "q/k norm, a weight for each head": _qk_norm("heads"),
    "q/k norm over the whole width": _qk_norm("whole"),
    "clip_qkv": _any(_heads, lambda heads: heads.clip is not None),
    "output gate": _any(_heads, lambda heads: heads.gate),
    "values that are the keys": _any(_heads, lambda heads: heads.values_are_keys),
    "keys and values of another layer": _any(_heads, lambda heads: heads.source is not None),
    "linear attention (gated delta rule)": _layers(lambda layer: isinstance(layer.attention, DeltaConfig)),
    "short convolution": _layers(lambda layer: isinstance(layer.attention, ConvConfig)),
}
_POSITION: dict[str, Shown] = {
    "RoPE, half-split": _any(_ropes, lambda rope: not rope.interleaved),
    "RoPE, interleaved": _any(_ropes, lambda rope: rope.interleaved),
    "RoPE, partial": _any(_heads, lambda heads: heads.rope is not None and heads.rope.dims < heads.head_dim),
    "linear": _scaled(LinearScaling),
    "dynamic": _scaled(DynamicScaling),
    "llama3": _scaled(Llama3Scaling),
    "yarn": _scaled(YarnScaling),
    "longrope": _scaled(LongRopeScaling),
    "proportional": _scaled(ProportionalScaling),
    "two thetas, by the type of layer": lambda config: len({rope.theta for rope in _ropes(config)}) > 1,
    "NoPE by layer": _some_without_rope,
    "iRoPE with temperature tuning": lambda config: (
        _some_without_rope(config) and any(heads.query_scaling is not None for heads in _heads(config))
    ),
    "ALiBi": _any(_heads, lambda heads: isinstance(heads.bias, Alibi)),
    "learned": lambda config: config.learned_positions is not None and not config.position_offset,
    "learned, with OPT's offset": lambda config: config.learned_positions is not None and config.position_offset > 0,
    "Sandwich": _any(_heads, lambda heads: isinstance(heads.bias, Sandwich)),
}
_ACTIVATION: dict[str, Shown] = {
    "SwiGLU": _activation("silu", gated=True),
    "GeGLU, exact": _activation("gelu", gated=True),
    "GeGLU, tanh": _activation("gelu_tanh", gated=True),
    "ReGLU": _activation("relu", gated=True),
    "squared ReLU, gated": _activation("relu2", gated=True),
    "gpt-oss's clamped one": _any(_networks, lambda network: network.limit is not None),
    "SiLU, plain": _activation("silu", gated=False),
    "GELU, exact, plain": _activation("gelu", gated=False),
    "GELU, tanh, plain": _activation("gelu_tanh", gated=False),
    "ReLU, plain": _activation("relu", gated=False),
    "squared ReLU, plain": _activation("relu2", gated=False),
    "xIELU, plain": _activation("xielu", gated=False),
}
_FEED_FORWARD: dict[str, Shown] = {
    "dense": lambda config: not all(_sparse(config)),
    "router: softmax over all": _any(_routers, lambda router: router.scoring == "softmax"),
    "router: softmax over the chosen": _any(_routers, lambda router: router.scoring == "chosen"),
    "router: sigmoid": _any(_routers, lambda router: router.scoring == "sigmoid"),
    "router: SparseMixer": _any(_routers, lambda router: router.scoring == "mixed"),
    "selection bias": _any(_routers, lambda router: router.selection_bias),
    "groups, by their best": _any(_routers, lambda router: router.groups > 1 and router.group_score == "best"),
    "groups, by their two best": _any(_routers, lambda router: router.groups > 1 and router.group_score != "best"),
    "renormalised": _any(_routers, lambda router: router.renormalise),
    "not renormalised": _any(_routers, lambda router: router.scoring == "softmax" and not router.renormalise),
    "scaled": _any(_routers, lambda router: router.scale != 1),
    "a scale of each expert": _any(_routers, lambda router: router.expert_scale),
    "shared experts": _shared(lambda mixture: mixture.shared is not None and not mixture.shared_gate),
    "shared experts, gated": _shared(lambda mixture: mixture.shared_gate),
    "dense layers first": lambda config: _sparse(config) == sorted(_sparse(config)) and len(set(_sparse(config))) > 1,
    "experts in every n-th layer": lambda config: _sparse(config) != sorted(_sparse(config)),
    "experts beside a dense network": _layers(lambda layer: isinstance(layer.feed_forward, DualConfig)),
    "expert input scaling": _any(_routers, lambda router: router.scales_input),
}
_NORM: dict[str, Shown] = {
    "RMSNorm": _norm(lambda norm: norm.kind == "rms" and norm.weight and not norm.offset),
    "RMSNorm times 1 + w": _norm(lambda norm: norm.kind == "rms" and norm.offset == 1),
    "RMSNorm, weightless": _norm(lambda norm: norm.kind == "rms" and not norm.weight),
    "LayerNorm": _norm(lambda norm: norm.kind == "layer" and norm.bias),
    "LayerNorm without bias": _norm(lambda norm: norm.kind == "layer" and norm.weight and not norm.bias),
    "LayerNorm, weightless": lambda config: any(
        norm.kind == "layer" and not norm.weight
        for norm in (*(layer.norm for layer in config.layers), config.final_norm)
        if norm is not None
    ),
    **{
        name: _layers(lambda layer, placement=placement: layer.placement == placement)  # type: ignore[misc]
        for name, placement in {
            "pre": "pre",
            "post": "post",
            "of what branches give": "branch",
            "before and after": "sandwich",
        }.items()
    },
    "parallel, a norm each": _layers(lambda layer: layer.placement == "parallel" and not layer.shared_norm),
    "parallel, one norm": _layers(lambda layer: layer.placement == "parallel" and layer.shared_norm),
    "DeepNorm": _layers(lambda layer: layer.placement == "post" and layer.residual_scale != 1),
    "of the embeddings": lambda config: config.embed_norm is not None,
    "none at the end": lambda config: config.final_norm is None,
}
_SCALES: dict[str, Shown] = {
    "embedding": lambda config: config.embedding_scale != 1,
    "attention": _any(_heads, lambda heads: abs(heads.scale * heads.head_dim**0.5 - 1) > 1e-6),
    "residual": _layers(lambda layer: layer.branch_scale != 1),
    "logit": lambda config: config.logit_scale != 1,
    "logit softcap": lambda config: config.logit_softcap is not None,
    "a number of each layer": _layers(lambda layer: layer.scalar),
}
_WHOLE: dict[str, Shown] = {
    "tied head": lambda config: config.tie_word_embeddings,
    "bias of the head": lambda config: config.head_bias,
    "narrower embeddings": lambda config: config.embedding_width is not None,
    "inputs of each layer": lambda config: config.layer_inputs is not None,
}

VARIANTS: tuple[Variant, ...] = tuple(
    Variant(axis, value, shown)
    for axis, values in {
        "attention": _ATTENTION,
        "position": _POSITION,
        "activation": _ACTIVATION,
        "feed-forward": _FEED_FORWARD,
        "norm": _NORM,
        "scales": _SCALES,
        "the whole": _WHOLE,
    }.items()
    for value, shown in values.items()
)
