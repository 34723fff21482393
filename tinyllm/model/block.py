"""The blocks of a decoder: attention and feed-forward, and where their norms stand."""

from __future__ import annotations

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.config.layers import (
    AttentionConfig,
    ConvConfig,
    DeltaConfig,
    DualConfig,
    LatentAttentionConfig,
    LayerConfig,
    MLPConfig,
    MoeConfig,
    contradiction,
)
from tinyllm.config.tensors import norm_names
from tinyllm.errors import UnsupportedModelError
from tinyllm.kv.cache import LayerCache, Mask
from tinyllm.model.attention import Attention
from tinyllm.model.conv import ShortConvolution
from tinyllm.model.delta import GatedDelta
from tinyllm.model.latent_attention import LatentAttention
from tinyllm.model.linear import Linear
from tinyllm.model.mlp import MLP
from tinyllm.model.moe import DenseAndExperts, Moe
from tinyllm.model.norm import Norm, make_norm
from tinyllm.ops.activation import gated
from tinyllm.ops.features import ModelFeatures
from tinyllm.ops.rope import Offset


class TransformerBlock:
    """One pre-norm layer: norm, attention, add; norm, feed-forward, add.

    For a layer whose config has its norms elsewhere, or scales its branches, `TransformerBlock(...)` makes a block of
    the class below that computes this. Raises UnsupportedModelError if no block computes it.
    """

    input_layernorm: Norm
    post_attention_layernorm: Norm

    def __new__(
        cls, layer_idx: int, config: Config, weights: WeightStore, features: ModelFeatures
    ) -> TransformerBlock:
        """Return a block of the class that the layer's config asks for."""
        return super().__new__(block_of(config.layers[layer_idx]) if cls is TransformerBlock else cls)

    def __init__(self, layer_idx: int, config: Config, weights: WeightStore, features: ModelFeatures) -> None:
        prefix = f"model.layers.{layer_idx}"
        layer = config.layers[layer_idx]
        for name in norm_names(layer):
            setattr(self, name, make_norm(f"{prefix}.{name}", layer.norm, weights, features))
        self.self_attn = make_mixer(prefix, config, weights, features)
        self.mlp = make_feed_forward(prefix, config, weights, features)
        self._layer = layer

    def __call__(
        self,
        x: mx.array,
        offset: Offset,
        cache: LayerCache | None,
        mask: Mask = None,
    ) -> mx.array:
        """Map x (batch, seq, hidden), whose rows begin at position `offset`, to the same shape, appending to `cache`.

        `mask` is "causal" or None, which mean the same, or an array (seq, keys).
        """
        r = self.self_attn(self.input_layernorm(x), offset, cache, mask)
        h = x + r
        r = self.mlp(self.post_attention_layernorm(h))
        return h + r


class ScaledBlock(TransformerBlock):
    """The same, with each branch times a scale (Granite)."""

    def __call__(self, x: mx.array, offset: Offset, cache: LayerCache | None, mask: Mask = None) -> mx.array:
        """As `TransformerBlock`."""
        scale = self._layer.branch_scale
        x = x + scale * self.self_attn(self.input_layernorm(x), offset, cache, mask)
        return x + scale * self.mlp(self.post_attention_layernorm(x))


class PostNormBlock(TransformerBlock):
    """The original order (arXiv 1706.03762): attention, add, norm; feed-forward, add, norm.

    DeepNorm (arXiv 2203.00555) multiplies the residual by alpha.
    """

    def __call__(self, x: mx.array, offset: Offset, cache: LayerCache | None, mask: Mask = None) -> mx.array:
        """As `TransformerBlock`."""
        alpha = self._layer.residual_scale
        x = self.input_layernorm(alpha * x + self.self_attn(x, offset, cache, mask))
        return self.post_attention_layernorm(alpha * x + self.mlp(x))


class BranchNormBlock(TransformerBlock):
    """Norms of what each branch gives (OLMo 2): attention, norm, add; feed-forward, norm, add."""

    post_feedforward_layernorm: Norm

    def __call__(self, x: mx.array, offset: Offset, cache: LayerCache | None, mask: Mask = None) -> mx.array:
        """As `TransformerBlock`."""
        x = x + self.post_attention_layernorm(self.self_attn(x, offset, cache, mask))
        return x + self.post_feedforward_layernorm(self.mlp(x))


class SandwichBlock(BranchNormBlock):
    """Norms before and after each branch (Gemma 2)."""

    pre_feedforward_layernorm: Norm

    def __call__(self, x: mx.array, offset: Offset, cache: LayerCache | None, mask: Mask = None) -> mx.array:
        """As `TransformerBlock`."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), offset, cache, mask))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class ScaledSandwichBlock(SandwichBlock):
    """The same, with each branch times a scale (HyperCLOVA X)."""

    def __call__(self, x: mx.array, offset: Offset, cache: LayerCache | None, mask: Mask = None) -> mx.array:
        """As `TransformerBlock`."""
        scale = self._layer.branch_scale
        x = x + scale * self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), offset, cache, mask))
        return x + scale * self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class DualBlock(BranchNormBlock):
    """The same as Gemma 2's, with a feed-forward that has all norms but the last inside (Gemma 4's experts)."""

    def __call__(self, x: mx.array, offset: Offset, cache: LayerCache | None, mask: Mask = None) -> mx.array:
        """As `TransformerBlock`."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), offset, cache, mask))
        return x + self.post_feedforward_layernorm(self.mlp(x))


class ParallelBlock(TransformerBlock):
    """Both branches of the same x (GPT-J), each with its norm or both with one."""

    def __call__(self, x: mx.array, offset: Offset, cache: LayerCache | None, mask: Mask = None) -> mx.array:
        """As `TransformerBlock`."""
        normal = self.input_layernorm(x)
        other = normal if self._layer.shared_norm else self.post_attention_layernorm(x)
        return x + self.self_attn(normal, offset, cache, mask) + self.mlp(other)


_BLOCKS: dict[str, type[TransformerBlock]] = {
    "pre": TransformerBlock,
    "post": PostNormBlock,
    "branch": BranchNormBlock,
    "sandwich": SandwichBlock,
    "parallel": ParallelBlock,
}
_SCALED_BLOCKS: dict[str, type[TransformerBlock]] = {"pre": ScaledBlock, "sandwich": ScaledSandwichBlock}


def block_of(layer: LayerConfig) -> type[TransformerBlock]:
    """Return the class of a layer's block. Raises UnsupportedModelError for what no block computes."""
    problem = contradiction(layer)
    if problem is not None:
        raise UnsupportedModelError(problem)
    if isinstance(layer.feed_forward, DualConfig):
        return DualBlock
    return (_BLOCKS if layer.branch_scale == 1 else _SCALED_BLOCKS)[layer.placement]


def make_feed_forward(
    prefix: str, config: Config, weights: WeightStore, features: ModelFeatures
) -> MLP | Moe | DenseAndExperts:
    """Return the feed-forward of the layer that `prefix` ("model.layers.0") stands for."""
    match config.layer_at(prefix).feed_forward:
        case MLPConfig():
            return MLP(f"{prefix}.mlp", config, weights, features)
        case MoeConfig():
            return Moe(f"{prefix}.mlp", config, weights, features)
        case DualConfig():
            return DenseAndExperts(prefix, config, weights, features)


class Tail:
    """What is done to what a block gives, if anything: the layer's own input of each token, and a last factor."""

    def __init__(self, layer_idx: int, config: Config, weights: WeightStore, features: ModelFeatures) -> None:
        prefix, layer = f"model.layers.{layer_idx}", config.layers[layer_idx]
        self._index = layer_idx
        self._scalar = weights.tensor(f"{prefix}.layer_scalar") if layer.scalar else None
        inputs = config.layer_inputs
        if inputs is not None:
            self._gate = Linear((f"{prefix}.per_layer_input_gate",), weights, features)
            self._activate = gated(inputs.activation)
            self._project = Linear((f"{prefix}.per_layer_projection",), weights, features)
            self._norm = make_norm(f"{prefix}.post_per_layer_input_norm", layer.norm, weights, features)

    def __call__(self, x: mx.array, inputs: mx.array | None) -> mx.array:
        """Map x (batch, seq, hidden) to the same shape; `inputs` are of all layers, (batch, seq, layers, width)."""
        if inputs is not None:
            x = x + self._norm(self._project(self._activate(self._gate(x), inputs[:, :, self._index])))
        return x if self._scalar is None else x * self._scalar


Mixer = Attention | LatentAttention | GatedDelta | ShortConvolution


def make_mixer(prefix: str, config: Config, weights: WeightStore, features: ModelFeatures) -> Mixer:
    """Return what mixes the positions in the layer that `prefix` ("model.layers.0") stands for."""
    match config.layer_at(prefix).attention:
        case AttentionConfig():
            return Attention(prefix, config, weights, features)
        case LatentAttentionConfig():
            return LatentAttention(prefix, config, weights, features)
        case DeltaConfig():
            return GatedDelta(prefix, config, weights, features)
        case ConvConfig():
            return ShortConvolution(prefix, config, weights, features)
