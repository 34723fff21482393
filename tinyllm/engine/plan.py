"""What fits into memory, decided from the config before any weight is read. No mlx.

    while loading   weights + twice the largest of them          <= available
    while running   weights + KV cache + workspace (+ headroom)  <= available

The KV cache's budget is a ceiling, which the pools of pages grow towards stepwise: nothing is reserved for a context
that nobody uses. Where no context was asked for, it is the model's, or the longest that fits.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction

from tinyllm.config.config import Config
from tinyllm.config.tensors import tensor_shapes
from tinyllm.engine.plan_text import refusal
from tinyllm.engine.workspace import Workspace
from tinyllm.errors import ContextLengthError, DoesNotFitError, UnsupportedQuantizationError, UsageError
from tinyllm.kv.kinds import LayerKind, layer_kinds
from tinyllm.kv.pages import PageKind

__all__ = ["KindPlan", "MemoryPlan", "Needs", "make_plan"]

_HEADROOM = Fraction(15, 100)
_SNAPSHOTS = Fraction(1, 4)  # what the states at ends of pages may take of what keys and values do


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
    on_gpu: bool = False,
    name: str = "the model",
) -> MemoryPlan:
    """Divide `available_bytes` between the weights, the workspace and the KV cache, `itemsize` bytes an element.

    `kv_budget` is a ceiling in bytes, or a share of what the weights and the workspace leave; a longer context comes
    before a larger cache. By default it is all of that but 15 % of the available memory, left to the system unless
    what was asked for does not fit otherwise. With `max_context` as many as `batch` sequences of that length must
    fit; without it one sequence, as long as may be. With `kv_bits` keys and values are packed.

    The workspace is that of `Workspace`, for steps of `batch` rows, on a CPU or `on_gpu`. `name` is what errors call
    the model.

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
    needs = Needs(
        kinds=kinds,
        itemsize=itemsize,
        free_bytes=available_bytes - weight_bytes,
        kv_budget=kv_budget,
        sequences=batch if max_context else 1,
        page_size=page_size,
        prefill_chunk=prefill_chunk,
        space=Workspace(config, kinds, itemsize, batch, page_size, prefill_chunk, on_gpu),
    )
    load_bytes = _load_bytes(config, weight_bytes)
    possible = not isinstance(kv_budget, int) or kv_budget <= needs.spare(least)
    for headroom in (math.floor(_HEADROOM * available_bytes), 0) if kv_budget is None else (0,):
        context = needs.longest(most, headroom) if load_bytes <= needs.free_bytes else 0
        if possible and context >= least:
            break
    else:
        raise DoesNotFitError(f"{name} {refusal(needs, least, context, weight_bytes, load_bytes)}")
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


@dataclass(frozen=True)
class Needs:
    """What a context of so many `tokens` takes, of the `free_bytes` beside the weights, with layers of these `kinds`.

    `sequences` are those whose keys and values must fit at once, `space` is the workspace of steps.
    """

    kinds: tuple[LayerKind, ...]
    itemsize: int
    free_bytes: int
    kv_budget: int | Fraction | None
    sequences: int
    page_size: int
    prefill_chunk: int
    space: Workspace

    def cache(self, tokens: int) -> int:
        """Bytes of keys and values, with the padding page of each kind."""
        return self._padding + self.sequences * sum(self._sizes(tokens))

    def workspace(self, tokens: int) -> int:
        """Bytes of all that a step makes."""
        return self.space.nbytes(tokens)

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

    def _sequence_pages(self, tokens: int) -> list[int]:
        """How many pages of each kind a sequence holds, a windowed kind no more than a window and a chunk touch.

        Of states there is one for every page of tokens as far as that is cheap, since others may begin with it, but
        not fewer than a chunk touches.
        """
        every = -(-tokens // self.page_size)
        pages = [-(-self.space.kept(tokens, kind.reach) // self.page_size) for kind in self.kinds]
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


def _load_bytes(config: Config, weight_bytes: int) -> int:
    """Bytes beside the weights while the largest of them is read, cast and joined: twice its own."""
    counts = [math.prod(shape) for shape in tensor_shapes(config).values()]
    return 2 * weight_bytes * max(counts) // sum(counts)
