"""What one layer of a decoder computes, as frozen values. No mlx."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tinyllm.config.reach import Pattern
from tinyllm.config.rope import RopeConfig

Placement = Literal["pre", "post", "branch", "sandwich", "parallel"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)


@dataclass(frozen=True)
class NormConfig:
    """RMSNorm or LayerNorm over the last axis, times (`offset` + weight) where it has a weight, plus its bias."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    weight: bool = True
    bias: bool = False
    offset: float = 0.0


@dataclass(frozen=True)
class QkNorm:
    """The norms of q and of k. `over` a head with a weight for all, each of the "heads" with its own, or the "whole".

    `after_rope` says whether positions come first.
    """

    norm: NormConfig
    over: Literal["head", "heads", "whole"] = "head"
    after_rope: bool = False


@dataclass(frozen=True)
class QueryScaling:
    """Queries at position p times 1 + beta log(1 + floor((p + shift) / every)): Llama 4's temperature tuning."""

    beta: float
    every: int
    shift: int = 0


@dataclass(frozen=True)
class Alibi:
    """Scores plus slope * (key - query), the slopes by head (arXiv 2108.12409), times `factor`.

    The least slope is 2 ** -`most`. `rounded` has the products of slope and position in bfloat16, as Falcon was
    trained.
    """

    most: float = 8.0
    factor: float = 1.0
    rounded: bool = False


@dataclass(frozen=True)
class Sandwich:
    """Scores plus the inner product of sinusoidal positions, of `dims` elements, times a head's slope.

    arXiv 2212.10356: position p has sin(p / 10000 ** (2 i / dims)) and the cosine, for i < dims / 2. The slope of
    head h of n, from 1 on, is n / (8 h). Products are less their value at distance 0, which no softmax notices.
    """

    dims: int


@dataclass(frozen=True)
class AttentionConfig:
    """Attention of heads in groups that share keys and values (arXiv 2305.13245); `rope` None rotates nothing.

    Values are what the keys are before norm and positions where `values_are_keys`; `value_norm` is over each of their
    heads. A layer with a `source` has no keys and values: it sees those of that layer, which comes before it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig | None
    reach: Pattern | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QkNorm | None = None
    bias: Alibi | Sandwich | None = None
    softcap: float | None = None
    sinks: bool = False
    clip: float | None = None
    gate: bool = False
    query_scaling: QueryScaling | None = None
    value_norm: NormConfig | None = None
    values_are_keys: bool = False
    source: int | None = None

    @property
    def projections(self) -> str:
        """The letters of what is projected of x: q, and as far as they are the layer's own k, v, and a gate g."""
        own = "" if self.source is not None else "k" if self.values_are_keys else "kv"
        return "q" + own + ("g" if self.gate else "")


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Multi-head latent attention (arXiv 2405.04434): a token leaves behind a latent and one rotated key.

    `query_rank` None has q from the hidden state in one product.
    """

    num_heads: int
    query_rank: int | None
    latent_rank: int
    plain_dim: int  # of q and k, the part that is not rotated
    value_dim: int
    scale: float
    rope: RopeConfig
    norm: NormConfig
    qkv_bias: bool = False
    output_bias: bool = False
    reach: Pattern | None = None
    query_scaling: QueryScaling | None = None

    @property
    def head_width(self) -> int:
        """Elements of a token's key and value in one head, were they made of its latent."""
        return self.plain_dim + self.rope.dims + self.value_dim

    def expands(self, queries: int) -> bool:
        """Whether as many queries at once are better served by the keys and values of each head than by latents.

        To make them takes as much of each key as to do without takes of each query; a query then reads less of each
        key, `head_width` in place of two latents and the rotated part.
        """
        made = self.latent_rank * (self.plain_dim + self.value_dim)
        return queries * (2 * self.latent_rank + self.rope.dims - self.head_width) > made


@dataclass(frozen=True)
class DeltaConfig:
    """Linear attention by the gated delta rule (arXiv 2412.06464), after a short causal convolution of q, k and v.

    Each key head serves as many consecutive value heads as there are more of these. What a value head gives goes
    through `norm`, and is gated. The `activation` is that of the convolution.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    norm: NormConfig
    activation: Activation = "silu"


@dataclass(frozen=True)
class ConvConfig:
    """A gated short causal convolution (LFM2): out(c * conv(b * x)) for the three parts of one projection."""

    width: int
    kernel: int
    biased: bool


Mixer = AttentionConfig | LatentAttentionConfig | DeltaConfig | ConvConfig


def rope_of(mixer: Mixer) -> RopeConfig | None:
    """Return how a layer rotates its queries and keys, None where it does not."""
    return mixer.rope if isinstance(mixer, AttentionConfig | LatentAttentionConfig) else None


def source_of(mixer: Mixer) -> int | None:
    """Return the layer whose keys and values a layer sees, None where it has its own."""
    return mixer.source if isinstance(mixer, AttentionConfig) else None


def sees_source(layers: Sequence[LayerConfig], number: int) -> bool:
    """Whether a layer's source, where it has one, has what it looks for: keys of its own, alike, and before it."""
    mixer = layers[number].attention
    source = source_of(mixer)
    if source is None:
        return True
    if not isinstance(mixer, AttentionConfig) or not 0 <= source < number:
        return False
    other = layers[source].attention
    if not isinstance(other, AttentionConfig) or other.source is not None:
        return False
    return (mixer.num_kv_heads, mixer.head_dim, mixer.reach) == (other.num_kv_heads, other.head_dim, other.reach)


@dataclass(frozen=True)
class MLPConfig:
    """A feed-forward network: down(activation(gate(x)) * up(x)), or down(activation(up(x))) unless it is `gated`.

    With a `limit`, gate and up are clipped to it, and the product is (up + 1) gate sigmoid(1.702 gate) (gpt-oss).
    """

    intermediate_size: int
    activation: Activation | Literal["xielu"]
    bias: bool = False
    gated: bool = True
    limit: float | None = None


@dataclass(frozen=True)
class RouterConfig:
    """How `top_k` experts are chosen and weighed.

    Scores are the softmax over all experts, over the chosen ones only ("chosen"), or each expert's sigmoid; or each
    chosen one is weighed against those within 2 `jitter` of it ("mixed": SparseMixer, arXiv 2409.12136). With
    `selection_bias` they are chosen, not weighed, by score + bias. Of `groups` of experts only the `top_groups` best
    are chosen from, by their best score, or by the sum of their two best. Weights are divided by their sum if
    `renormalise`, and then times `scale`, and with `expert_scale` times a number of each expert's. `scales_input`
    weighs what goes into an expert in place of what comes out.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "chosen", "sigmoid", "mixed"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "two best"] = "best"
    selection_bias: bool = False
    bias: bool = False
    scales_input: bool = False
    epsilon: float = 0.0
    jitter: float = 0.0
    expert_scale: bool = False


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts, each like `expert`, and what all tokens take beside them (`gated`: times a sigmoid)."""

    router: RouterConfig
    expert: MLPConfig
    shared: MLPConfig | None = None
    shared_gate: bool = False


@dataclass(frozen=True)
class DualConfig:
    """A dense network and a mixture of experts, each between norms of its own, added up (Gemma 4).

    The router reads x as another norm gives it, divided by the root of its width.
    """

    dense: MLPConfig
    experts: MoeConfig


FeedForward = MLPConfig | MoeConfig | DualConfig


@dataclass(frozen=True)
class LayerInputs:
    """What each layer gets of a token by itself: `width` elements of a second embedding, and of a projection of the
    first, gated by what the layer gives, and added to that (Gemma 3n).
    """

    vocab_size: int
    width: int
    activation: Activation


@dataclass(frozen=True)
class LayerConfig:
    """All that one block computes.

    Norms stand before each branch ("pre"), after the sum ("post"), after each branch ("branch"), before and after
    ("sandwich"), or before both branches, which then read the same x ("parallel"; `shared_norm` has one for both).
    A branch is added times `branch_scale`, to the residual times `residual_scale` (DeepNorm's alpha). What comes out
    in the end is multiplied by one number of the layer's, its `scalar`.
    """

    attention: Mixer
    feed_forward: FeedForward
    norm: NormConfig
    placement: Placement = "pre"
    shared_norm: bool = False
    branch_scale: float = 1.0
    residual_scale: float = 1.0
    scalar: bool = False


_SCALED: tuple[Placement, ...] = ("pre", "sandwich")


def contradiction(layer: LayerConfig) -> str | None:
    """Return what of a layer no block computes, None where one computes all of it."""
    scaled, deep = layer.branch_scale != 1, layer.residual_scale != 1
    if (scaled and layer.placement not in _SCALED) or (deep and layer.placement != "post"):
        return f"norms of placement {layer.placement!r} and scaled branches do not go together"
    if layer.shared_norm and layer.placement != "parallel":
        return "shared_norm is for norms of placement 'parallel' alone"
    if isinstance(layer.feed_forward, DualConfig) and (layer.placement != "sandwich" or scaled):
        return "experts beside a dense network have norms before and after each branch only"
    mixer = layer.attention
    if not isinstance(mixer, AttentionConfig):
        return None
    if mixer.source is not None and (mixer.values_are_keys or mixer.value_norm is not None):
        return "a layer that sees another's values does nothing to them"
    if mixer.rope is not None and mixer.rope.dims > mixer.head_dim:
        return f"rope.dims ({mixer.rope.dims}) are more than head_dim ({mixer.head_dim})"
    return None
