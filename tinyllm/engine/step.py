"""A decode step as a function of arrays alone, so that it can be compiled whole.

The step takes a token for each of its rows and gives the next one. All that changes from step to step is an array
that goes in, or a shape; nothing keeps a reference to a pool's arrays, which go in and come out. What cannot be an
array (how many rows, which slots a lone sequence reads in place) is the `Layout`, and each layout is compiled once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tinyllm._mx import mx
from tinyllm.config.reach import Reach
from tinyllm.engine.sampling import Arrays, Sampler, choose, log_probabilities, remember
from tinyllm.kv.paged_step import Placement, TinyKvPagedStep
from tinyllm.model.transformer import ModelForCausalLM
from tinyllm.ops.attention import added_for

Tree = dict[str, Any]
"""Arrays in dicts and lists: what goes into a step and comes out of it."""

_MOST_COMPILED = 32


@dataclass(frozen=True)
class Layout:
    """What a step is compiled for, beside the shapes of its arrays.

    `layers` says of each layer of the model which pool it is in, and which of that pool's layers it is; `reaches`,
    `spans`, `recurrent`, `page_size` and `bits` are of the pools: `spans` as in `Placement`, None where pages are
    gathered, `recurrent` where a page is a state.
    """

    layers: tuple[tuple[int, int], ...]
    reaches: tuple[Reach | None, ...]
    spans: tuple[tuple[int, int] | None, ...]
    recurrent: tuple[bool, ...]
    page_size: int
    bits: tuple[int | None, ...]
    candidates: int
    logprobs: int | None


class DecodeStep:
    """The step of one model: compiled for each layout that it meets, or as it is."""

    def __init__(self, model: ModelForCausalLM, *, compiled: bool) -> None:
        self._model = model
        self._compiled = compiled
        self._functions: OrderedDict[Hashable, Callable[[Tree], Tree]] = OrderedDict()

    def __call__(self, layout: Layout, inputs: Tree) -> Tree:
        """Build the graph of a step.

        `inputs` are "tokens", "positions", "index" and "ring_index", each (rows,); by pool, lists of "slots" and
        "first" (rows,), "pages" (rows, n) or {}, and of its layers "arrays", and "states" where there are any;
        "history" and "sampling". It gives what `chosen` gives, and "arrays" and "states" after the step.
        """
        step = partial(paged_step, self._model, layout)
        if not self._compiled:
            return step(inputs)
        # One function for each form of the inputs, though it could take all of them: it keeps what it has compiled
        # for as long as it lives, and is let go here.
        key = layout, _form(inputs)
        function = self._functions.pop(key, None) or mx.compile(step)
        self._functions[key] = function
        if len(self._functions) > _MOST_COMPILED:
            self._functions.popitem(last=False)
        return function(inputs)


def _form(inputs: Tree) -> Hashable:
    """Return what `mx.compile` tells inputs apart by: shapes, and which of them are there."""
    by_name = {**inputs["history"], **inputs["sampling"]}
    return (
        inputs["tokens"].shape,
        tuple(None if pages == {} else pages.shape for pages in inputs["pages"]),
        tuple(layers[0][0].shape for layers in inputs["arrays"]),
        tuple((name, by_name[name].shape) for name in sorted(by_name)),
    )


def paged_step(model: ModelForCausalLM, layout: Layout, inputs: Tree) -> Tree:
    """Feed a token of each row through the network and choose the next one; see `DecodeStep`."""
    positions = inputs["positions"]
    placements = [
        Placement(slots, first, None if pages == {} else pages, span)
        for slots, first, pages, span in zip(
            inputs["slots"], inputs["first"], inputs["pages"], layout.spans, strict=True
        )
    ]
    seen = [
        None if recurrent else placement.mask(positions, reach, layout.page_size)
        for placement, reach, recurrent in zip(placements, layout.reaches, layout.recurrent, strict=True)
    ]
    if model.features.polynomial_exp:  # attention in plain operations: to add is quicker than to choose
        seen = [None if mask is None else added_for(mask) for mask in seen]
    caches = [
        TinyKvPagedStep(
            inputs["arrays"][kind][layer],
            placements[kind],
            positions,
            seen[kind],
            layout.page_size,
            tuple(inputs["states"][kind][layer]) if layout.recurrent[kind] else None,
            layout.bits[kind],
        )
        for kind, layer in layout.layers
    ]
    logits = model(inputs["tokens"][:, None], positions, caches)[:, -1]
    history = remember(inputs["history"], inputs["tokens"], inputs["ring_index"])
    sampler = Sampler(inputs["sampling"], layout.candidates)
    outputs = chosen(logits, sampler, history, inputs["index"], layout.logprobs)
    outputs["arrays"] = [list(layers) for layers in inputs["arrays"]]
    outputs["states"] = [list(layers) for layers in inputs["states"]]
    for cache, (kind, layer) in zip(caches, layout.layers, strict=True):
        outputs["arrays"][kind][layer] = cache.arrays
        if cache.state is not None:
            outputs["states"][kind][layer] = list(cache.state)
    return outputs


def is_finite(logits: mx.array) -> mx.array:
    """Whether all logits (rows, vocab) of a row are finite, (rows,): a sum is finite only if all of its terms are."""
    return mx.isfinite(logits.astype(mx.float32).sum(axis=-1))


def chosen(logits: mx.array, sampler: Sampler, history: Arrays, index: mx.array, logprobs: int | None) -> Tree:
    """Choose from logits (rows, vocab), and return "tokens" (rows,) with what is to be known about them.

    "finite" (rows,) says that no logit of the row is inf or NaN; "exact" and "logits" are there where a choice may
    have to be made again, "logprobs" where they were asked for; "history" is what was given.
    """
    choice = choose(logits, sampler, history, index)
    outputs: Tree = {"tokens": choice.tokens, "finite": is_finite(logits), "history": history}
    if choice.exact is not None:
        outputs |= {"exact": choice.exact, "logits": logits}
    if logprobs is not None:
        outputs["logprobs"] = list(log_probabilities(logits, choice.tokens, logprobs))
    return outputs
