"""What fits into memory, decided from the config before any weight is read. No mlx.

    while loading   weights + twice the largest of them          <= available
    while running   weights + KV cache + workspace (+ headroom)  <= available

The KV cache's budget is a ceiling, which the pools of pages grow towards stepwise: nothing is reserved for a context
that nobody uses. Where no context was asked for, it is the model's, or the longest that fits.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
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
from tinyllm.config.tensors import tensor_shapes
from tinyllm.errors import ContextLengthError, DoesNotFitError, UnsupportedQuantizationError, UsageError
from tinyllm.hub.sizes import memory_size
from tinyllm.kv.kinds import LayerKind, layer_kinds
from tinyllm.kv.pages import PageKind
from tinyllm.ops.features import GPU_PACKED_ROWS

__all__ = ["KindPlan", "MemoryPlan", "describe", "make_plan", "read_size", "table"]

_HEADROOM = Fraction(15, 100)
_FLOAT32_BYTES = 4
# How many arrays of a size are alive at once, since MLX allocates ahead of what it computes. Measured on a CPU: at
# most 5.8 of those of a layer, 13.5 with all options of sampling, 1.9 with pages that are gathered.
_LAYER_ARRAYS = 6
_LOGITS_ARRAYS = 14
_GATHERED_ARRAYS = 2
_STATE_ARRAYS = 3  # those before and after a step, and those after the one that is built ahead
_DELTA_CHUNK = 64  # positions that the delta rule takes at once, and has a matrix of for each head
_SNAPSHOTS = Fraction(1, 4)  # what the states at ends of pages may take of what keys and values do
_ROUNDING = Fraction(5, 4)  # of the pages that are gathered, as many for each row as for the longest

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?) ?(%|[a-z]{1,3})", re.ASCII | re.IGNORECASE)
_UNITS: dict[str, int] = {"b": 1} | {
    f"{prefix}{i}b": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for i, base in (("", 1000), ("i", 1024))
}


@dataclass(frozen=True)
class KindPlan:
    """The pool of one kind of layer, as `LayerKind` has it.

    A page has `page_bytes` over all of the layers, keys and values, and `array_page_bytes` in the largest array of
    one layer. There are at most `ceiling_pages`, one of them for padding; a sequence of the plan's context holds
    `sequence_pages`.
    """

    kind: LayerKind
    page_bytes: int
    array_page_bytes: int
    ceiling_pages: int
    sequence_pages: int

    @property
    def array_bytes(self) -> int:
        """Bytes of the largest array of one layer when the pool is as large as it may be."""
        return self.ceiling_pages * self.array_page_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes in bytes: the weights, the KV cache's ceiling over all `kinds`, and the workspace, of what is available.

    A sequence has at most `context` tokens. Loading takes `load_bytes` beside the weights, for as long as it lasts.
    """

    weight_bytes: int
    load_bytes: int
    workspace_bytes: int
    budget_bytes: int
    available_bytes: int
    context: int
    page_size: int
    kinds: tuple[KindPlan, ...]

    @property
    def wired_bytes(self) -> int:
        """What the model can come to take in all: the limit to wire on Metal while it runs."""
        return self.weight_bytes + self.workspace_bytes + self.budget_bytes

    @property
    def ceilings(self) -> tuple[int, ...]:
        """The most pages of each kind, the padding page included."""
        return tuple(kind.ceiling_pages for kind in self.kinds)

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values that one token takes in all layers."""
        return sum(kind.page_bytes for kind in self.kinds if not kind.kind.states) // self.page_size

    @property
    def kv_bits(self) -> int | None:
        """How many bits keys and values are packed to, if they are."""
        return next((kind.kind.bits for kind in self.kinds if kind.kind.bits is not None), None)

    @property
    def sequence_bytes(self) -> int:
        """Bytes of the pages of one sequence of `context` tokens: of windowed layers, what a window needs."""
        return sum(kind.sequence_pages * kind.page_bytes for kind in self.kinds)

    @property
    def sequences(self) -> int:
        """How many sequences of `context` tokens the KV cache holds at once."""
        return min((kind.ceiling_pages - 1) // kind.sequence_pages for kind in self.kinds)


def make_plan(
    config: Config,
    *,
    weight_bytes: int,
    itemsize: int,
    available_bytes: int,
    kv_budget: int | Fraction | None = None,
    max_context: int | None = None,
    kv_bits: int | None = None,
    batch: int = 1,
    page_size: int = 128,
    prefill_chunk: int = 256,
    fused_attention: bool = False,
    name: str = "the model",
) -> MemoryPlan:
    """Divide `available_bytes` between the weights, the workspace and the KV cache, `itemsize` bytes an element.

    On Metal what is available is the lesser of the recommended working set and the memory that is free now.
    `kv_budget` is a ceiling in bytes, or a share of what the weights and the workspace leave; a longer context comes
    before a larger cache. By default it is all of that but 15 % of the available memory, left to the system unless
    what was asked for does not fit otherwise. With `max_context` as many as `batch` sequences of that length must
    fit; without it one sequence, as long as may be. With `kv_bits` keys and values are packed.

    The workspace is what `_Needs.workspace` says, for steps of `batch` rows; with `fused_attention`, as the kernels
    of a GPU are, no array of scores is made but with latents. `name` is what errors call the model.

    Raises DoesNotFitError, saying what would fit, where it is less than what `max_context` asks for, or no more than
    a chunk of a prompt; ContextLengthError where the model has fewer positions; UsageError for counts below 1;
    UnsupportedQuantizationError where keys or values cannot be packed.
    """
    if min(batch, 1 if max_context is None else max_context) < 1:
        raise UsageError(f"the context and the batch must be 1 or more, not {max_context} and {batch}")
    limit = config.max_position_embeddings
    if max_context is not None and max_context > limit:
        raise ContextLengthError(f"{name} can attend to {limit:,} tokens: a context of {max_context:,} is too long")
    most, least = max_context or limit, max_context or min(limit, prefill_chunk + 1)
    try:
        kinds, _ = layer_kinds(config, kv_bits)
    except UnsupportedQuantizationError as error:
        raise UnsupportedQuantizationError(f"{name}: {error}") from error
    needs = _Needs(
        config=config,
        kinds=kinds,
        itemsize=itemsize,
        free_bytes=available_bytes - weight_bytes,
        kv_budget=kv_budget,
        sequences=batch if max_context else 1,
        batch=batch,
        page_size=page_size,
        prefill_chunk=prefill_chunk,
        fused_attention=fused_attention,
    )
    load_bytes = _load_bytes(config, weight_bytes)
    possible = not isinstance(kv_budget, int) or kv_budget <= needs.spare(least)
    for headroom in (math.floor(_HEADROOM * available_bytes), 0) if kv_budget is None else (0,):
        context = needs.longest(most, headroom) if load_bytes <= needs.free_bytes else 0
        if possible and context >= least:
            break
    else:
        raise DoesNotFitError(f"{name} {_refusal(needs, least, context, weight_bytes, load_bytes)}")
    budget = needs.budget(context, headroom)
    plans = needs.divide(budget, context)
    return MemoryPlan(
        weight_bytes=weight_bytes,
        load_bytes=load_bytes,
        workspace_bytes=needs.workspace(context) + max(kind.array_bytes for kind in plans),
        budget_bytes=budget,
        available_bytes=available_bytes,
        context=context,
        page_size=page_size,
        kinds=plans,
    )


def read_size(option: str, text: str) -> int | Fraction:
    """Read 2GB or 512MiB as bytes, 40% as a share. Raises UsageError naming `option`."""
    found = _SIZE.fullmatch(text.strip())
    number, unit = (Fraction(found[1]), found[2].lower()) if found else (Fraction(0), "")
    if unit == "%" and 0 < number <= 100:
        return number / 100
    if size := math.floor(number * _UNITS.get(unit, 0)):
        return size
    raise UsageError(f"{option} must be a size (2GB, 512MiB) or a share up to 100%, not {text!r}")


def describe(plan: MemoryPlan) -> str:
    """Put a plan in one line."""
    return (
        f"weights {memory_size(plan.weight_bytes)} + KV cache up to {memory_size(plan.budget_bytes)}"
        f" ({plan.context:,} tokens of context) + workspace {memory_size(plan.workspace_bytes)},"
        f" of {memory_size(plan.available_bytes)} available"
    )


def table(plan: MemoryPlan) -> list[tuple[str, str, str]]:
    """Put a plan in rows: what, how much, and what is to be said of it."""
    sequences = "1 sequence" if plan.sequences == 1 else f"{plan.sequences:,} sequences"
    packed = "" if plan.kv_bits is None else f", packed to {plan.kv_bits} bits"
    left = plan.available_bytes - plan.wired_bytes
    return [
        ("weights", memory_size(plan.weight_bytes), f"{memory_size(plan.load_bytes)} more while they are read"),
        (
            "KV cache",
            f"up to {memory_size(plan.budget_bytes)}",
            f"{sequences} of {plan.context:,} tokens, {plan.token_bytes:,} bytes a token{packed}",
        ),
        *(_kind_row(kind) for kind in plan.kinds if len(plan.kinds) > 1),
        ("workspace", memory_size(plan.workspace_bytes), "activations, scores and logits"),
        ("left free", memory_size(left), f"of {memory_size(plan.available_bytes)} available"),
    ]


@dataclass(frozen=True)
class _Needs:
    """What a context of so many `tokens` takes, of the `free_bytes` beside the weights, with layers of these `kinds`.

    `sequences` are those whose keys and values must fit at once, `batch` the rows of a step.
    """

    config: Config
    kinds: tuple[LayerKind, ...]
    itemsize: int
    free_bytes: int
    kv_budget: int | Fraction | None
    sequences: int
    batch: int
    page_size: int
    prefill_chunk: int
    fused_attention: bool

    def cache(self, tokens: int) -> int:
        """Bytes of keys and values, with the padding page of each kind."""
        return self._padding + self.sequences * sum(self._sizes(tokens))

    def workspace(self, tokens: int) -> int:
        """Bytes of all that a step makes, of `prefill_chunk` rows of one sequence or a row of each of `batch`.

        6 times     what a layer makes of its rows: hidden, q, k, v, gate, up; and in float32 the scores
        14 times    the logits of a row of each sequence, in float32
        2 times     keys and values of a layer, as wide as the longest sequence, where pages are gathered, and where
                    they are made of latents, or of what is packed
        3 times     the states of all recurrent layers
        """
        prefill = self._step(min(self.prefill_chunk, tokens), 1, tokens)
        return max(prefill, self._step(self.batch, self.batch, tokens))

    def spare(self, tokens: int, headroom: int = 0) -> int:
        """The most bytes that the KV cache can have, with the copy of an array that is made when it grows."""
        left = self.free_bytes - headroom - self.workspace(tokens) - self.growth(0, tokens)
        return max(0, math.floor(left / (1 + self._largest_array(tokens))))

    def growth(self, budget: int, tokens: int) -> int:
        """Bytes of the largest array of such a KV cache, which is copied when it grows; others wait."""
        page = max(self._array_page_bytes(kind) for kind in self.kinds)
        return page + math.ceil(budget * self._largest_array(tokens))

    def budget(self, tokens: int, headroom: int) -> int:
        """Bytes that the KV cache may have."""
        spare = self.spare(tokens, headroom)
        if isinstance(self.kv_budget, int):
            return min(self.kv_budget, spare)
        return spare if self.kv_budget is None else math.floor(spare * self.kv_budget)

    def longest(self, most: int, headroom: int) -> int:
        """The most tokens that fit, up to `most`; 0 where none do."""
        return bisect_left(
            range(1, most + 1), True, key=lambda tokens: self.cache(tokens) > self.budget(tokens, headroom)
        )

    def divide(self, budget: int, tokens: int) -> tuple[KindPlan, ...]:
        """Divide a budget so that sequences of so many tokens exhaust all kinds together."""
        each, over = sum(self._sizes(tokens)), budget - self._padding
        return tuple(
            KindPlan(
                kind=kind,
                page_bytes=self._page_bytes(kind),
                array_page_bytes=self._array_page_bytes(kind),
                ceiling_pages=1 + pages * over // each,
                sequence_pages=pages,
            )
            for kind, pages in zip(self.kinds, self._sequence_pages(tokens), strict=True)
        )

    def _step(self, rows: int, sequences: int, tokens: int) -> int:
        layer = max(self._layer_bytes(layer, rows, tokens) for layer in self.config.layers)
        logits = sequences * self.config.vocab_size * _FLOAT32_BYTES
        sizes = zip(self.kinds, self._sizes(tokens), strict=True)
        widest = max((size // kind.layers for kind, size in sizes if not kind.states), default=0)
        gathered = math.ceil(_ROUNDING * sequences * widest)
        made = sequences * max(
            self._expanded_bytes(layer.attention, rows // sequences, tokens) for layer in self.config.layers
        )
        unpacked = sequences * max(self._unpacked_bytes(kind, tokens) for kind in self.kinds)
        states = sequences * sum(self._page_bytes(kind) for kind in self.kinds if kind.states)
        return (
            _LAYER_ARRAYS * layer
            + _LOGITS_ARRAYS * logits
            + _GATHERED_ARRAYS * (gathered + made + unpacked)
            + _STATE_ARRAYS * states
        )

    def _largest_array(self, tokens: int) -> Fraction:
        """The share of the KV cache that the largest array has: of the keys, or the values, of one layer."""
        pages = self._sequence_pages(tokens)
        largest = max(n * self._array_page_bytes(kind) for kind, n in zip(self.kinds, pages, strict=True))
        return Fraction(largest, sum(self._sizes(tokens)))

    @property
    def _padding(self) -> int:
        return sum(self._page_bytes(kind) for kind in self.kinds)

    def _page_bytes(self, kind: LayerKind) -> int:
        return kind.page_bytes(self.page_size, self.itemsize)

    def _array_page_bytes(self, kind: LayerKind) -> int:
        return kind.array_bytes(self.page_size, self.itemsize)

    def _unpacked_bytes(self, kind: LayerKind, tokens: int) -> int:
        """Bytes of a layer's keys and values once they are unpacked, where they are packed."""
        if kind.bits is None:
            return 0
        return self._kept(tokens, kind.reach) * kind._replace(bits=None, layers=1).token_bytes(self.itemsize)

    def _sequence_pages(self, tokens: int) -> list[int]:
        """How many pages of each kind a sequence holds, a windowed kind no more than a window and a chunk touch.

        Of states there is one for every page of tokens as far as that is cheap, since others may begin with it, but
        not fewer than a chunk touches.
        """
        every = -(-tokens // self.page_size)
        pages = [-(-self._kept(tokens, kind.reach) // self.page_size) for kind in self.kinds]
        attended = sum(
            n * self._page_bytes(kind) for n, kind in zip(pages, self.kinds, strict=True) if not kind.states
        )
        for number, kind in enumerate(self.kinds):
            if kind.states:
                most = PageKind(kind.reach, ceiling=0).most_pages(self.prefill_chunk, self.page_size)
                cheap = math.floor(_SNAPSHOTS * attended / self._page_bytes(kind))
                pages[number] = min(every, max(most or every, cheap))
        return pages

    def _sizes(self, tokens: int) -> list[int]:
        pages = self._sequence_pages(tokens)
        return [n * self._page_bytes(kind) for n, kind in zip(pages, self.kinds, strict=True)]

    def _kept(self, tokens: int, reach: Reach | None) -> int:
        held = None if reach is None else reach.held(self.prefill_chunk + 1)
        return tokens if held is None else min(tokens, held + self.page_size)

    def _layer_bytes(self, layer: LayerConfig, rows: int, tokens: int) -> int:
        heads, width, scored = _mixer_sizes(layer.attention)
        width += self.config.hidden_size + _feed_forward_width(layer.feed_forward)
        # No kernel has keys as wide as latents, and none has packed ones.
        fused = self.fused_attention and isinstance(layer.attention, AttentionConfig)
        packed = any(kind.bits is not None for kind in self.kinds)
        unfused_rows = min(rows, max(self.batch, GPU_PACKED_ROWS) if packed else 0) if fused else rows
        scores = unfused_rows * heads * self._kept(tokens, scored)
        return rows * width * self.itemsize + scores * _FLOAT32_BYTES

    def _expanded_bytes(self, mixer: Mixer, queries: int, tokens: int) -> int:
        """Bytes of the keys and values that are made of a sequence's latents for so many of its queries."""
        if not isinstance(mixer, LatentAttentionConfig) or not mixer.expands(queries):
            return 0
        return self._kept(tokens, mixer.reach) * mixer.num_heads * mixer.head_width * self.itemsize


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


def _feed_forward_width(network: FeedForward) -> int:
    """Return the elements of gate and up of all that a token goes through."""
    if isinstance(network, DualConfig):
        return _feed_forward_width(network.dense) + _feed_forward_width(network.experts)
    if isinstance(network, MLPConfig):
        return 2 * network.intermediate_size
    shared = 0 if network.shared is None else network.shared.intermediate_size
    return 2 * (network.router.top_k * network.expert.intermediate_size + shared)


def _refusal(needs: _Needs, least: int, context: int, weight_bytes: int, load_bytes: int) -> str:
    """Say how `least` tokens are too many, and what would fit: `context` tokens, if any do."""
    held = f"{least:,} tokens" if needs.sequences == 1 else f"{needs.sequences} sequences of {least:,} tokens"
    cache, spare, weights = needs.cache(least), needs.spare(least), memory_size(weight_bytes)
    available = memory_size(weight_bytes + needs.free_bytes)
    advice = f": a context of {context:,} tokens would fit" if context else ""
    if needs.kv_budget is not None and load_bytes <= needs.free_bytes and cache <= spare:
        given = needs.kv_budget if isinstance(needs.kv_budget, int) else math.floor(needs.kv_budget * spare)
        if given > spare:
            return (
                f"cannot have a KV budget of {memory_size(given)}: weights {weights} + workspace"
                f" {memory_size(needs.workspace(least) + needs.growth(spare, least))} leave {spare // 2**20} MiB, of"
                f" {available} that are free"
            )
        return f"needs a KV cache of {memory_size(cache)} for {held}, and its budget is {memory_size(given)}{advice}"
    workspace = needs.workspace(least) + needs.growth(cache, least)
    needed = weight_bytes + max(load_bytes, cache + workspace)
    if load_bytes > cache + workspace:
        parts = f"{weights}, and {memory_size(load_bytes)} more while they are read"
    else:
        parts = f"{weights} + KV cache {memory_size(cache)} for {held} + workspace {memory_size(workspace)}"
    advice = advice or f": it takes a machine with {memory_size(needed)} free, or a smaller model"
    return f"needs {memory_size(needed)} of memory (weights {parts}), and {available} are free{advice}"


def _load_bytes(config: Config, weight_bytes: int) -> int:
    """Bytes beside the weights while the largest of them is read, cast and joined: twice its own."""
    counts = [math.prod(shape) for shape in tensor_shapes(config).values()]
    return 2 * weight_bytes * max(counts) // sum(counts)


def _kind_row(kind: KindPlan) -> tuple[str, str, str]:
    size, form = memory_size(kind.ceiling_pages * kind.page_bytes), kind.kind
    if form.states:
        return f"  {form.layers} layers", size, f"states of {memory_size(kind.page_bytes)} for a sequence, in all"
    seen = "everything" if form.reach is None else form.reach.describe()
    return f"  {form.layers} layers", size, f"{form.kv_heads} heads of {form.key_dim}, which see {seen}"
