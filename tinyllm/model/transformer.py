"""The decoder: blocks of attention and feed-forward between an embedding and an output head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.kv.cache import LayerCache
from tinyllm.kv.full import TinyKvFullCache
from tinyllm.kv.kinds import layer_kinds
from tinyllm.kv.paged import PAGE_SIZE
from tinyllm.kv.pools import KvPools, PagedCaches
from tinyllm.model.block import Tail, TransformerBlock
from tinyllm.model.ends import Head, TokenEmbedding, TokenInputs
from tinyllm.model.norm import make_norm
from tinyllm.ops.features import ModelFeatures
from tinyllm.ops.rope import Positions


class ModelForCausalLM:
    """A whole decoder: token ids in, logits of the next token out."""

    def __init__(self, config: Config, weights: WeightStore, features: ModelFeatures | None = None) -> None:
        features = features or ModelFeatures()
        self.config = config
        self.features = features
        self.dtype = weights.dtype or weights.stored_dtype
        self._pools: dict[tuple[int, int | None], KvPools] = {}
        self.num_hidden_layers = config.num_hidden_layers
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.embedding = TokenEmbedding(config, weights, features)
        self.layers = [TransformerBlock(i, config, weights, features) for i in range(config.num_hidden_layers)]
        inputs = config.layer_inputs
        self._inputs = None if inputs is None else TokenInputs(inputs, config, weights, features)
        tailed = inputs is not None or any(layer.scalar for layer in config.layers)
        self._tails = [
            Tail(i, config, weights, features) if tailed else None for i in range(config.num_hidden_layers)
        ]
        self._places = config.cache_places
        self.norm = make_norm("model.norm", config.final_norm, weights, features) if config.final_norm else None
        self._head = Head(self.embedding, config, weights, features)
        self.w_lm_head = self._head.w_lm_head

    def __call__(
        self,
        inputs: mx.array,
        offset: int | mx.array = 0,
        cache: Sequence[LayerCache] | None = None,
        logits_to_keep: int | None = None,
        length: int | None = None,
    ) -> mx.array:
        """Score the token after each of `inputs` (batch, seq), which start at position `offset`: (batch, seq, vocab).

        `cache` is what `create_kv_cache` made, and is appended to; without it the inputs see only each other.
        `logits_to_keep` scores only the last so many positions. `length` is that of the sequence where these are not
        the last of its tokens that are known: RoPE of some kinds depends on it. Raises ValueError if `offset` is not
        where a cache that is not empty ends, or the caches are not as many as `create_kv_cache` made.
        """
        caches: Sequence[LayerCache] = self.create_kv_cache() if cache is None else cache
        _check_offset(offset, caches[0].offset)
        positions = Positions(offset, inputs.shape[1], length)
        x = self.embedding(inputs, positions)
        token_inputs = None if self._inputs is None else self._inputs(inputs, x)
        by_layer = self._by_layer(caches)
        for block, layer_cache, tail in zip(self.layers, by_layer, self._tails, strict=True):
            x = block(x, positions, layer_cache)
            if tail is not None:
                x = tail(x, token_inputs)
        if logits_to_keep is not None:
            x = x[:, x.shape[1] - min(logits_to_keep, x.shape[1]) :]
        return self._head(x if self.norm is None else self.norm(x))

    def _by_layer(self, caches: Sequence[LayerCache]) -> list[LayerCache]:
        """Return the cache of each layer, of which some have one together. Raises ValueError for too few or many."""
        if len(caches) != len(set(self._places)):
            raise ValueError(f"{len(caches)} caches were given for {len(set(self._places))} layers that need one")
        return [caches[place] for place in self._places]

    @overload
    def create_kv_cache(
        self, mode: Literal["dense"] = "dense", *, kv_bits: int | None = None
    ) -> list[TinyKvFullCache]: ...

    @overload
    def create_kv_cache(
        self, mode: Literal["paged"], page_size: int = PAGE_SIZE, *, kv_bits: int | None = None
    ) -> PagedCaches: ...

    def create_kv_cache(
        self, mode: Literal["dense", "paged"] = "dense", page_size: int = PAGE_SIZE, *, kv_bits: int | None = None
    ) -> list[TinyKvFullCache] | PagedCaches:
        """Make an empty cache for each layer that has keys and values of its own.

        Paged ones are views of a sequence on pools that are made on the first call and shared by later ones; trim,
        fork and release belong to the list as a whole. With `kv_bits`, 8 or 4, what is cached is packed; raises
        UnsupportedQuantizationError where it cannot be.
        """
        if mode == "dense":
            kinds, places = layer_kinds(self.config, kv_bits)
            return [TinyKvFullCache(bits=kinds[kind].bits) for kind, _ in places]
        if mode != "paged":
            raise ValueError(f"there is no cache of mode {mode!r}; tinyllm has 'dense' and 'paged'")
        key = page_size, kv_bits
        if key not in self._pools:
            self._pools[key] = KvPools(self.config, page_size, kv_bits=kv_bits)
        return self._pools[key].caches()


def _check_offset(offset: int | mx.array, held: int | None) -> None:
    if not held:
        return
    agrees = offset == held if isinstance(offset, int) else bool(mx.all(offset == held).item())
    if not agrees:
        raise ValueError(f"offset {offset} disagrees with a cache that holds {held} positions")
