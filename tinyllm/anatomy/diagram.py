"""A block drawn in text: what it computes in which order, where its norms stand, its dimensions. No mlx."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import wrap
from typing import Any

from tinyllm.anatomy.counts import experts_of, feed_forward_width, networks_of, part_of
from tinyllm.config.config import Config
from tinyllm.config.layers import (
    Alibi,
    AttentionConfig,
    ConvConfig,
    DeltaConfig,
    LatentAttentionConfig,
    LayerConfig,
    MLPConfig,
    NormConfig,
    RouterConfig,
    Sandwich,
)
from tinyllm.config.rope import RopeConfig
from tinyllm.config.tensors import layer_shapes, norm_names

__all__ = ["draw", "rope_words", "shape_words"]

_WIDTH = 69  # of what stands beside the lines of the residual and of branches side by side


def draw(config: Config, layer: LayerConfig) -> list[str]:
    """Draw a block: x goes down the left side, and branches are added to it."""
    hidden = config.hidden_size
    norms = [[f"{_norm_words(layer.norm, hidden)}  ({name})"] for name in norm_names(layer)]
    attention, network = _attention_box(config, layer), _network_box(config, layer)
    scale = "" if layer.branch_scale == 1 else f" times {layer.branch_scale:g}"
    added = f"+◄───┘{scale}"
    kept = "" if layer.residual_scale == 1 else f", the residual times {layer.residual_scale:g}"
    lines = [f"x  {hidden:,}"]
    match layer.placement:
        case "pre":
            lines += [*_branch(norms[0], attention), added, *_branch(norms[1], network), added]
        case "branch":
            lines += [*_branch(attention, norms[0]), added, *_branch(network, norms[1]), added]
        case "sandwich":
            lines += [*_branch(norms[0], attention, norms[1]), added]
            lines += [*_branch(*norms[2:-1], network, norms[-1]), added]
        case "post":
            for branch, norm in ((attention, norms[0]), (network, norms[1])):
                lines += [*_branch(branch), f"{added}{kept}", f"▼ {norm[0]}"]
        case "parallel" if layer.shared_norm:
            lines += [*_branch(norms[0], _side_by_side(attention, network)), f"{added}  both"]
        case "parallel":
            lines += [*_branch(norms[0], attention), *_branch(norms[1], network), f"{added}  both"]
    others = _box("also", [], _others(config, layer))
    return lines if len(others) == 1 else lines + others


def rope_words(rope: RopeConfig, head_dim: int) -> str:
    """Say how queries and keys are rotated."""
    words = [f"RoPE theta {rope.theta:,.10g}"]
    if rope.dims != head_dim:
        words.append(f"{rope.dims} of {head_dim} elements")
    if rope.interleaved:
        words.append("interleaved")
    if rope.scaling is not None:
        values: Mapping[str, Any] = vars(rope.scaling)
        kind = type(rope.scaling).__name__.removesuffix("Scaling").lower()
        factor, original = values.get("factor"), values.get("original_max_position_embeddings")
        stretched = "" if factor in (None, 1) else f" x {factor:g}"
        words.append(f"{kind}{stretched}" + ("" if original is None else f" from {original:,}"))
    return ", ".join(words)


def shape_words(name: str, shape: tuple[int, ...]) -> str:
    """Write a shape as what goes in and what comes out, for a matrix (out, in) or one for each expert."""
    if len(shape) == 2:
        return f"{shape[1]:,} → {shape[0]:,}"
    if len(shape) == 3 and ".experts." in f".{name}":
        return f"{shape[2]:,} → {shape[1]:,}  × {shape[0]:,}"
    return " × ".join(f"{n:,}" for n in shape) or "1"


# ---------------------------------------------------------------- lines


def _part(config: Config, layer: LayerConfig, part: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in layer_shapes(config, layer).items() if part_of(name) == part}


def _others(config: Config, layer: LayerConfig) -> dict[str, tuple[int, ...]]:
    """What has no place in the drawing."""
    drawn = norm_names(layer)
    norms = _part(config, layer, "norms").items()
    inner = {name: shape for name, shape in norms if name.rpartition(".")[0] not in drawn}
    return inner | _part(config, layer, "others")


def _branch(*boxes: list[str]) -> Iterator[str]:
    """A way that leaves the residual and passes through boxes of lines."""
    first, *rest = [line for box in boxes for line in box]
    yield from ("│", f"├──► {first}")
    yield from (f"│    {line}" for line in rest)


def _side_by_side(first: list[str], second: list[str]) -> list[str]:
    """Two boxes that read the same."""
    return [f"├──► {first[0]}", *(f"│    {line}" for line in first[1:]), f"└──► {second[0]}"] + [
        f"     {line}" for line in second[1:]
    ]


def _box(title: str, details: list[str], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """A title, what is to be said of it, and a line for each module."""
    lines = [title, *(f"  {line}" for line in wrap(", ".join(details), _WIDTH - 2))]
    modules: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "bias" and module in modules:
            modules[module].append("bias")
        else:
            modules[module if leaf == "weight" else name] = [shape_words(name, shape)]
    names = {module: module.partition(".")[2] or module for module in modules}
    width = max((len(name) for name in names.values()), default=0)
    return lines + [f"  {names[module]:<{width}}  {', '.join(words)}" for module, words in modules.items()]


def _norm_words(norm: NormConfig, width: int) -> str:
    words = [f"{'RMSNorm' if norm.kind == 'rms' else 'LayerNorm'} {width:,}", f"eps {norm.eps:g}"]
    if not norm.weight:
        words.append("no weight")
    if norm.offset:
        words.append(f"weight + {norm.offset:g}")
    return ", ".join([*words, "bias"] if norm.bias else words)


# ---------------------------------------------------------------- attention


def _attention_box(config: Config, layer: LayerConfig) -> list[str]:
    shapes = _part(config, layer, "attention")
    match layer.attention:
        case AttentionConfig() as mixer:
            group = mixer.num_heads // mixer.num_kv_heads
            shared = "" if group == 1 else f", {mixer.num_kv_heads} for keys and values (groups of {group})"
            title = f"attention, {_heads(mixer.num_heads)} of {mixer.head_dim}{shared}"
            return _box(title, list(_attention_details(mixer)), shapes)
        case LatentAttentionConfig() as mixer:
            rope = rope_words(mixer.rope, mixer.rope.dims)
            seen = [] if mixer.reach is None else [f"sees {mixer.reach.describe()}"]
            keys = f"{mixer.plain_dim} + {mixer.rope.dims} rotated"
            details = [f"a token leaves {mixer.latent_rank} + {mixer.rope.dims}", rope, *seen]
            details.append(f"scores times {mixer.scale:.4g}")
            title = f"latent attention, {_heads(mixer.num_heads)} of {keys}, values of {mixer.value_dim}"
            return _box(title, details, shapes)
        case DeltaConfig() as mixer:
            details = [f"keys {_heads(mixer.num_key_heads)} of {mixer.key_dim}"]
            details += [f"values {_heads(mixer.num_value_heads)} of {mixer.value_dim}"]
            details += [f"a state in place of keys, after a convolution over {mixer.kernel} tokens"]
            return _box("linear attention, gated delta rule", details, shapes)
        case ConvConfig() as mixer:
            return _box(f"gated convolution over {mixer.kernel} tokens", [], shapes)
        case other:
            return _box(type(other).__name__.removesuffix("Config"), [], shapes)


def _attention_details(mixer: AttentionConfig) -> Iterator[str]:
    if mixer.rope is not None:
        yield rope_words(mixer.rope, mixer.head_dim)
    if mixer.bias is None and mixer.rope is None:
        yield "no positions of its own"
    if isinstance(mixer.bias, Alibi):
        yield "ALiBi"
    if isinstance(mixer.bias, Sandwich):
        yield f"Sandwich of {mixer.bias.dims} elements"
    if mixer.reach is not None:
        yield f"sees {mixer.reach.describe()}"
    if mixer.qk_norm is not None:
        over = {"head": "each head", "heads": "each head, its own weight", "whole": "all heads at once"}
        order = "after RoPE" if mixer.qk_norm.after_rope else "before RoPE"
        name = "RMSNorm" if mixer.qk_norm.norm.kind == "rms" else "LayerNorm"
        yield f"q and k: {name} over {over[mixer.qk_norm.over]}" + (f" {order}" if mixer.rope is not None else "")
    if abs(mixer.scale - mixer.head_dim**-0.5) > 1e-9:
        yield f"scores times {mixer.scale:.4g}"
    if mixer.softcap is not None:
        yield f"scores capped at {mixer.softcap:g}"
    if mixer.sinks:
        yield "a sink for each head"
    if mixer.clip is not None:
        yield f"q, k and v clipped at {mixer.clip:g}"
    if mixer.gate:
        yield "gated by a sigmoid"
    if mixer.query_scaling is not None:
        yield f"q grows with the logarithm of the position, every {mixer.query_scaling.every:,}"


def _heads(count: int) -> str:
    return "1 head" if count == 1 else f"{count} heads"


# ---------------------------------------------------------------- feed-forward


def _network_box(config: Config, layer: LayerConfig) -> list[str]:
    shapes = _part(config, layer, "feed-forward")
    ratio = f"{round(feed_forward_width(layer) / config.hidden_size, 2)} times as wide"
    network = next(network for network, _ in networks_of(layer.feed_forward))
    mixture = experts_of(layer.feed_forward)
    if mixture is None:
        return _box(f"feed-forward, {ratio}", [_mlp_words(network)], shapes)
    details = [_mlp_words(network), *_router_words(mixture.router)]
    if mixture.shared is not None:
        details.append("one more, gated, for all tokens" if mixture.shared_gate else "one more for all tokens")
    if mixture is not layer.feed_forward:
        details.append("beside a dense network")
    title = f"{mixture.router.num_experts} experts, {mixture.router.top_k} for each token, together {ratio}"
    return _box(title, details, shapes)


def _mlp_words(network: MLPConfig) -> str:
    words = f"{network.activation}, {'gated' if network.gated else 'not gated'}"
    return words if network.limit is None else f"{words}, clipped at {network.limit:g}"


def _router_words(router: RouterConfig) -> Iterator[str]:
    scores = {"softmax": "softmax", "chosen": "softmax of the chosen", "sigmoid": "sigmoid"}
    yield f"chosen by {scores.get(router.scoring, router.scoring)}"
    if router.renormalise:
        yield "renormalised"
    if router.scale != 1:
        yield f"times {router.scale:g}"
    if router.groups > 1:
        yield f"from {router.top_groups} of {router.groups} groups"
    if router.selection_bias:
        yield "with a bias for the choice"
