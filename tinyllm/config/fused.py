"""Tensors that hold several canonical ones, or one of them in another order. No mlx.

What is fused is always the output axis. Seen as `groups` of so many `units`, a part is some of the units of each
group: with q, k and v one below the other there is one group, of heads; with a q head, its k and its v together there
is a group for each; with gate and up in turns, one for each element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tinyllm.config.layers import AttentionConfig, DeltaConfig, DualConfig, LayerConfig, MLPConfig
from tinyllm.errors import ConfigError


@dataclass(frozen=True)
class Piece:
    """The units from `start` to `stop` of each of `groups` groups of `units`, of `size` elements each."""

    groups: int
    units: int
    start: int
    stop: int
    size: int

    @property
    def whole(self) -> int:
        """Elements of the whole axis."""
        return self.groups * self.units * self.size

    @property
    def length(self) -> int:
        """Elements of the part."""
        return self.groups * (self.stop - self.start) * self.size


@dataclass(frozen=True)
class Split:
    """The module whose name ends in `module` holds those beside it that `pieces` names for its layer."""

    module: str
    pieces: Callable[[LayerConfig, str], dict[str, Piece]]


def _pieces(names: tuple[str, ...], counts: tuple[int, ...], *, groups: int, size: int) -> dict[str, Piece]:
    """Return the parts, that have so many units of each group, in their order."""
    pieces, start, units = {}, 0, sum(counts)
    for name, count in zip(names, counts, strict=True):
        pieces[name] = Piece(groups, units, start, start + count, size)
        start += count
    return pieces


_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")


def stacked_qkv(layer: LayerConfig, module: str) -> dict[str, Piece]:
    """All of q, then all of k, then all of v."""
    shape = _attention(layer)
    counts = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    return _pieces(_QKV, counts, groups=1, size=shape.head_dim)


def grouped_qkv(layer: LayerConfig, module: str) -> dict[str, Piece]:
    """The q heads that share a k and a v, then these two, group after group."""
    shape = _attention(layer)
    counts = (shape.num_heads // shape.num_kv_heads, 1, 1)
    return _pieces(_QKV, counts, groups=shape.num_kv_heads, size=shape.head_dim)


def quartered_qvk(layer: LayerConfig, module: str) -> dict[str, Piece]:
    """A quarter of q, of v and of k, then the next of each (CodeGen)."""
    shape = _attention(layer)
    width = shape.num_heads * shape.head_dim // 4
    return _pieces(("q_proj", "v_proj", "k_proj"), (width,) * 3, groups=4, size=1)


def query_and_gate(layer: LayerConfig, module: str) -> dict[str, Piece]:
    """Each q head, then its gate."""
    shape = _attention(layer)
    return _pieces(("q_proj", "g_proj"), (1, 1), groups=shape.num_heads, size=shape.head_dim)


def stacked_delta(layer: LayerConfig, module: str) -> dict[str, Piece]:
    """All of q, then all of k, then all of v, of linear attention."""
    shape = _delta(layer)
    keys, values = shape.num_key_heads * shape.key_dim, shape.num_value_heads * shape.value_dim
    return _pieces(_QKV, (keys, keys, values), groups=1, size=1)


def grouped_delta(layer: LayerConfig, module: str) -> dict[str, Piece]:
    """A key head's q, its k, and the v and then the z of the value heads that it serves, group after group."""
    shape = _delta(layer)
    values = shape.num_value_heads // shape.num_key_heads * shape.value_dim
    counts = (shape.key_dim, shape.key_dim, values, values)
    return _pieces((*_QKV, "z_proj"), counts, groups=shape.num_key_heads, size=1)


def grouped_delta_gates(layer: LayerConfig, module: str) -> dict[str, Piece]:
    """The b and then the a of the value heads that a key head serves, group after group."""
    shape = _delta(layer)
    served = shape.num_value_heads // shape.num_key_heads
    return _pieces(("b_proj", "a_proj"), (served, served), groups=shape.num_key_heads, size=1)


def stacked_gate_up(layer: LayerConfig, module: str) -> dict[str, Piece]:
    """All of gate, then all of up."""
    return _pieces(_GATE_UP, (1, 1), groups=1, size=_mlp(layer, module).intermediate_size)


def paired_gate_up(layer: LayerConfig, module: str) -> dict[str, Piece]:
    """Gate and up in turns."""
    return _pieces(_GATE_UP, (1, 1), groups=_mlp(layer, module).intermediate_size, size=1)


def _attention(layer: LayerConfig) -> AttentionConfig:
    if not isinstance(layer.attention, AttentionConfig):
        raise ConfigError("a fused q, k and v stands in a layer that has other attention")
    return layer.attention


def _delta(layer: LayerConfig) -> DeltaConfig:
    if not isinstance(layer.attention, DeltaConfig):
        raise ConfigError("the projections of linear attention stand in a layer that has other attention")
    return layer.attention


def _mlp(layer: LayerConfig, module: str) -> MLPConfig:
    """Return the network that a module of a layer is of: an expert, what is shared beside them, or the only one."""
    network = layer.feed_forward
    if isinstance(network, DualConfig):
        network = network.experts if ".experts" in module else network.dense
    if isinstance(network, MLPConfig):
        return network
    return network.shared if network.shared is not None and ".shared_expert" in module else network.expert
