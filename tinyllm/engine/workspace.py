"""Bytes of the arrays that a step of the engine makes beside weights and KV cache. No mlx.

The factors are how many arrays of a size are alive at once, since MLX allocates ahead of what it computes. They were
measured on a CPU in float32, over the shapes of tests/engine/test_workspace.py, and hold for its plain attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from tinyllm.config.config import Config
from tinyllm.config.layers import (
    AttentionConfig,
    ConvConfig,
    DeltaConfig,
    DualConfig,
    FeedForward,
    LatentAttentionConfig,
    LayerConfig,
    Mixer,
    MLPConfig,
)
from tinyllm.config.reach import Reach
from tinyllm.kv.kinds import LayerKind
from tinyllm.ops.features import GPU_PACKED_ROWS

__all__ = ["Workspace"]

_FLOAT32_BYTES = 4
_SCORE_ARRAYS = 6  # scores while a layer attends; two of them are still there while it feeds forward
_SCORES_LEFT = 2
_WIDE_ARRAYS = 4  # gate and up, of which one set is there while the next layer attends
_WIDE_LEFT = 1
_MIXER_ARRAYS, _OTHER_MIXER_ARRAYS = 2, 6  # hidden, q, k and v; of mixers that are no plain attention
_LOGITS_ARRAYS = 10  # with all options of sampling, eager
_GATHERED_ARRAYS = 2
_STATE_ARRAYS = 3  # those before and after a step, and those after the one that is built ahead
_DELTA_CHUNK = 64  # positions that the delta rule takes at once, and has a matrix of for each head
_ROUNDING = Fraction(5, 4)  # of the pages that are gathered, as many for each row as for the longest

# Head sizes for which MLX's GPU backends, Metal and CUDA, attend without an array of scores: a prompt, and one token.
_FUSED_PREFILL = frozenset({64, 72, 80, 96, 128})
_FUSED_DECODE = frozenset({64, 96, 128, 256})
# Buffers of a GPU are held until the command buffer that uses them is done. MLX ends one after about 50 MB, and fills
# the next while one runs; before it queues more than fits, it waits.
_COMMAND_BUFFERS, _COMMAND_BUFFER_BYTES = 2, 50_000_000


@dataclass(frozen=True)
class Workspace:
    """The workspace of a model with layers of these `kinds`, computed in `itemsize` bytes an element.

    A step takes `prefill_chunk` tokens of one prompt, or one of each of `batch` sequences. `on_gpu` is whether a GPU
    computes, which has fused attention for some layers and holds what several command buffers use.
    """

    config: Config
    kinds: tuple[LayerKind, ...]
    itemsize: int
    batch: int
    page_size: int
    prefill_chunk: int
    on_gpu: bool

    def nbytes(self, tokens: int) -> int:
        """Return the bytes of the largest step with sequences of so many tokens."""
        prefill = self._step(min(self.prefill_chunk, tokens), 1, tokens)
        return max(prefill, self._step(self.batch, self.batch, tokens))

    def kept(self, tokens: int, reach: Reach | None) -> int:
        """Return how many of a sequence's tokens are held for queries that see so far."""
        held = None if reach is None else reach.held(self.prefill_chunk + 1)
        return tokens if held is None else min(tokens, held + self.page_size)

    def _step(self, rows: int, sequences: int, tokens: int) -> int:
        """Add up what a layer makes, the logits, gathered pages, what is unpacked or made of latents, and states."""
        layers = [self._layer_bytes(layer, rows, tokens) for layer in self.config.layers]
        logits = sequences * self.config.vocab_size * _FLOAT32_BYTES
        widest = max((self._kept_bytes(kind, tokens) for kind in self.kinds if not kind.states), default=0)
        gathered = math.ceil(_ROUNDING * sequences * widest)
        made = sequences * max(
            self._expanded_bytes(layer.attention, rows // sequences, tokens) for layer in self.config.layers
        )
        unpacked = sequences * max(self._unpacked_bytes(kind, tokens) for kind in self.kinds)
        states = sequences * sum(kind.page_bytes(self.page_size, self.itemsize) for kind in self.kinds if kind.states)
        return (
            max(layers)
            + (min(sum(layers) - max(layers), _COMMAND_BUFFERS * _COMMAND_BUFFER_BYTES) if self.on_gpu else 0)
            + _LOGITS_ARRAYS * logits
            + _GATHERED_ARRAYS * (gathered + made + unpacked)
            + _STATE_ARRAYS * states
        )

    def _layer_bytes(self, layer: LayerConfig, rows: int, tokens: int) -> int:
        """Return the bytes of a layer's arrays, at the time when there are most of them."""
        heads, width, scored = _mixer_sizes(layer.attention)
        scores = self._scored_rows(layer.attention, rows) * heads * self.kept(tokens, scored) * _FLOAT32_BYTES
        wide = rows * _feed_forward_width(layer.feed_forward, self.config.hidden_size) * self.itemsize
        mixer = rows * (self.config.hidden_size + width) * self.itemsize
        arrays = _MIXER_ARRAYS if isinstance(layer.attention, AttentionConfig) else _OTHER_MIXER_ARRAYS
        attending = _SCORE_ARRAYS * scores + _WIDE_LEFT * wide
        feeding = _WIDE_ARRAYS * wide + _SCORES_LEFT * scores
        return max(attending, feeding) + arrays * mixer

    def _scored_rows(self, mixer: Mixer, rows: int) -> int:
        """Return how many of a step's rows have an array of scores: none where a GPU has a kernel for all of it."""
        if not self.on_gpu or not isinstance(mixer, AttentionConfig):  # no kernel has keys as wide as latents
            return rows
        if mixer.softcap is not None or mixer.bias is not None or mixer.head_dim not in _FUSED_PREFILL:
            return rows
        unfused = 0 if mixer.head_dim in _FUSED_DECODE else self.batch
        if any(kind.bits is not None for kind in self.kinds):  # no kernel has packed keys
            unfused = max(self.batch, GPU_PACKED_ROWS)
        return min(rows, unfused)

    def _kept_bytes(self, kind: LayerKind, tokens: int) -> int:
        """Return the bytes of the pages of a sequence in one layer."""
        pages = -(-self.kept(tokens, kind.reach) // self.page_size)
        return pages * kind.page_bytes(self.page_size, self.itemsize) // kind.layers

    def _unpacked_bytes(self, kind: LayerKind, tokens: int) -> int:
        """Return the bytes of a layer's keys and values once they are unpacked, where they are packed."""
        if kind.bits is None:
            return 0
        return self.kept(tokens, kind.reach) * kind._replace(bits=None, layers=1).token_bytes(self.itemsize)

    def _expanded_bytes(self, mixer: Mixer, queries: int, tokens: int) -> int:
        """Return the bytes of the keys and values made of a sequence's latents for so many of its queries."""
        if not isinstance(mixer, LatentAttentionConfig) or not mixer.expands(queries):
            return 0
        return self.kept(tokens, mixer.reach) * mixer.num_heads * mixer.head_width * self.itemsize


def _mixer_sizes(mixer: Mixer) -> tuple[int, int, Reach | None]:
    """Return heads with scores, elements of a token's q, k and v, and how far a query sees."""
    match mixer:
        case AttentionConfig():
            heads = mixer.num_heads + 2 * mixer.num_kv_heads
            return mixer.num_heads, heads * mixer.head_dim, mixer.reach
        case LatentAttentionConfig():
            kept = mixer.latent_rank + mixer.rope.dims
            return mixer.num_heads, (mixer.num_heads + 1) * kept, mixer.reach
        case DeltaConfig():
            per_head = 2 * (mixer.key_dim + mixer.value_dim) + _DELTA_CHUNK
            return 0, mixer.num_value_heads * per_head, None
        case ConvConfig():
            return 0, 3 * mixer.width, None


def _feed_forward_width(network: FeedForward, hidden: int) -> int:
    """Return the elements of gate and up of all that a token goes through, and of the token's copies for experts."""
    if isinstance(network, DualConfig):
        return _feed_forward_width(network.dense, hidden) + _feed_forward_width(network.experts, hidden)
    if isinstance(network, MLPConfig):
        return 2 * network.intermediate_size
    shared = 0 if network.shared is None else network.shared.intermediate_size
    return 2 * (network.router.top_k * network.expert.intermediate_size + shared) + network.router.top_k * hidden
