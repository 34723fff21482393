"""How many parameters a model has, all of them and those that a token meets, by part and by block. No mlx."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tinyllm.config.config import Config
from tinyllm.config.layers import AttentionConfig, LatentAttentionConfig, LayerConfig, MLPConfig, MoeConfig
from tinyllm.config.tensors import layer_shapes, tensor_shapes

__all__ = [
    "BlockKind",
    "Parameters",
    "block_kinds",
    "block_parameters",
    "experts_of",
    "feed_forward_width",
    "model_parameters",
    "networks_of",
    "part_of",
    "parts",
    "ungrouped_elements",
]

_PARTS = {
    "self_attn": "attention", "linear_attn": "attention", "conv": "attention",
    "mlp": "feed-forward", "moe": "feed-forward",
}  # fmt: skip
_EXPERTS = ".experts."


@dataclass(frozen=True)
class Parameters:
    """`total` is all that is stored, a tied head once; `active` leaves out the experts that are not chosen."""

    total: int
    active: int

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.total + other.total, self.active + other.active)


@dataclass(frozen=True)
class BlockKind:
    """Layers, by their `numbers`, that compute the same."""

    layer: LayerConfig
    numbers: tuple[int, ...]


def block_kinds(config: Config) -> tuple[BlockKind, ...]:
    """Return the kinds of a model's blocks, in the order in which they are met."""
    numbers: dict[LayerConfig, list[int]] = defaultdict(list)
    for i, layer in enumerate(config.layers):
        numbers[layer].append(i)
    return tuple(BlockKind(layer, tuple(found)) for layer, found in numbers.items())


def block_parameters(config: Config, layer: LayerConfig) -> Parameters:
    """Count the parameters of one block."""
    counts = {name: math.prod(shape) for name, shape in layer_shapes(config, layer).items()}
    total, experts = sum(counts.values()), sum(count for name, count in counts.items() if _EXPERTS in name)
    mixture = experts_of(layer.feed_forward)
    if mixture is None:
        return Parameters(total, total)
    return Parameters(total, total - experts + experts * mixture.router.top_k // mixture.router.num_experts)


def model_parameters(config: Config) -> Parameters:
    """Count the parameters of all blocks, and of what stands before and after them."""
    outside = sum(math.prod(shape) for name, shape in tensor_shapes(config).items() if ".layers." not in name)
    counted = Parameters(outside, outside)
    for kind in block_kinds(config):
        block = block_parameters(config, kind.layer)
        counted += Parameters(len(kind.numbers) * block.total, len(kind.numbers) * block.active)
    return counted


def part_of(name: str) -> str:
    """Return which part of a block a tensor is of, by its name within the layer."""
    first = name.partition(".")[0]
    return "norms" if "norm" in first else _PARTS.get(first, "others")


def parts(config: Config) -> Mapping[str, int]:
    """Count parameters by what they are for."""
    counts: dict[str, int] = dict.fromkeys(("embedding", "attention", "feed-forward", "norms", "others", "head"), 0)
    for kind in block_kinds(config):
        for name, shape in layer_shapes(config, kind.layer).items():
            counts[part_of(name)] += len(kind.numbers) * math.prod(shape)
    for name, shape in tensor_shapes(config).items():
        if ".layers." not in name:
            part = "head" if name.startswith("lm_head.") else "norms" if "norm" in name else "embedding"
            counts[part] += math.prod(shape)
    return counts


def experts_of(network: object) -> MoeConfig | None:
    """Return the mixture of experts that a feed-forward network is, or has."""
    return next((part for part in (network, *vars(network).values()) if isinstance(part, MoeConfig)), None)


def networks_of(network: object) -> Iterator[tuple[MLPConfig, int]]:
    """Yield the networks that a feed-forward network is made of, and how many alike a token goes through."""
    match network:
        case MLPConfig():
            yield network, 1
        case MoeConfig():
            yield network.expert, network.router.top_k
            yield from () if network.shared is None else ((network.shared, 1),)
        case _:
            for part in vars(network).values():
                yield from networks_of(part)


def feed_forward_width(layer: LayerConfig) -> int:
    """Return how wide the feed-forward network is for a token: that of all experts that it goes to, together."""
    return sum(count * network.intermediate_size for network, count in networks_of(layer.feed_forward))


def ungrouped_elements(config: Config) -> int:
    """Elements that a token would leave behind if each head of each layer had keys and values of its own."""
    count = 0
    for layer in config.layers:
        match layer.attention:
            case AttentionConfig() as mixer:
                count += 2 * mixer.num_heads * mixer.head_dim
            case LatentAttentionConfig() as mixer:
                count += mixer.num_heads * (mixer.plain_dim + mixer.rope.dims + mixer.value_dim)
    return count
