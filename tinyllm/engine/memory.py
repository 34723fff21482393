"""What sequences leave behind on the device, paged or dense, and the network's way over it."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from functools import partial
from typing import Protocol

from tinyllm._mx import mx
from tinyllm.engine.batch import Batch
from tinyllm.engine.compiler import Compiler
from tinyllm.engine.sampling import Arrays, remember
from tinyllm.engine.scheduler import Chunk, Sequence
from tinyllm.engine.step import DecodeStep, Layout, Tree, chosen
from tinyllm.kv.cache import LayerCache, State
from tinyllm.kv.full import TinyKvFullCache
from tinyllm.kv.paged import carry_out_copies
from tinyllm.kv.paged_step import Places, find_places, find_slots, rounded_up
from tinyllm.kv.pools import KvPools
from tinyllm.model.transformer import ModelForCausalLM


class Memory(Protocol):
    """The keys and values of all sequences."""

    def rows(self, n: int) -> int:
        """Return how many rows a step of `n` sequences has: padding makes for fewer numbers."""

    def prefill(self, chunk: Chunk) -> mx.array:
        """Feed a chunk of a prompt; the logits (1, vocab) after it are not computed unless they are evaluated."""

    def arrays(self, sequence: Sequence) -> list[mx.array]:
        """Return what is to be evaluated for `prefill` to have taken place."""

    def decode(self, batch: Batch, index: Rows[int], tokens: mx.array, history: Arrays, before: Tree | None) -> Tree:
        """Build the step that takes `tokens` (rows,) in and chooses those at `index` of the rows' answers.

        `before` is what the step before it gives where that may still run, None where no step does.
        """

    def evaluate(self, arrays: list[mx.array]) -> None:
        """Compute what `prefill` built, and wait for it."""

    def dispatch(self, outputs: Tree, awaited: list[mx.array]) -> None:
        """Start computing the step that was built last, and take over what it writes."""

    def undo(self, batch: Batch) -> None:
        """Forget the step that was built last, which was not dispatched."""

    def nbytes(self, sequence: Sequence) -> int:
        """Bytes that a sequence takes."""

    def forget(self, request_id: int) -> None:
        """Let go of what is kept of a sequence, whose tables are the scheduler's to release."""

    def clear(self, pages: Rows[Rows[int]]) -> None:
        """Set pages, by kind, to zero: what is not finite would reach others even through a weight of zero."""


def prefill(model: ModelForCausalLM, chunk: Chunk, caches: Rows[LayerCache]) -> mx.array:
    """Feed a chunk through a sequence's caches; return the logits (1, vocab) after it."""
    length = len(chunk.sequence.ids)
    return model(mx.array([chunk.ids]), chunk.start, caches, logits_to_keep=1, length=length)[:, -1]


class PagedMemory:
    """All sequences in the pools of `pools`; a step is one graph over all of its rows, compiled or not."""

    def __init__(self, model: ModelForCausalLM, pools: KvPools, compiler: Compiler) -> None:
        self._model = model
        self._pools = pools
        self._compiler = compiler
        self._step = DecodeStep(model, compiled=compiler.available)

    def rows(self, n: int) -> int:
        """Return `n` rounded up by at most a quarter."""
        return rounded_up(n)

    def prefill(self, chunk: Chunk) -> mx.array:
        """Feed a chunk through views of the sequence's pages."""
        caches = self._pools.caches(chunk.sequence.tables)
        return prefill(self._model, chunk, caches)

    def arrays(self, sequence: Sequence) -> list[mx.array]:
        """Return the arrays of all pools."""
        return [array for pool in self._pools.pools for array in pool.flat]

    def decode(self, batch: Batch, index: Rows[int], tokens: mx.array, history: Arrays, before: Tree | None) -> Tree:
        """Build the step, which leaves the pools as they are.

        States go from step to step; only the first of steps reads them from the pools, to which all of them write.
        """
        pools = self._pools.pools
        carry_out_copies(pools)
        positions = batch.positions(index)
        places = []
        for pool, reach in zip(pools, self._pools.reaches, strict=True):
            pool.make_room(pool.arrays[0])
            tables = [sequence.tables.by_kind[pool.kind] for sequence in batch.sequences]
            find = find_slots if pool.states else partial(find_places, reach=reach)
            places.append(find(pool, tables, positions, rows=batch.rows))
        layout = Layout(
            layers=self._pools.layers,
            reaches=self._pools.reaches,
            spans=tuple(place.span for place in places),
            recurrent=tuple(bool(pool.states) for pool in pools),
            page_size=pools[0].page_size,
            bits=tuple(pool.bits for pool in pools),
            candidates=batch.sampler.candidates,
            logprobs=batch.logprobs,
        )
        inputs: Tree = {
            "tokens": tokens,
            "positions": batch.column(positions),
            "index": batch.column(index),
            "ring_index": batch.column(batch.ring_index(positions)),
            "slots": [mx.array(place.slots) for place in places],
            "first": [mx.array(place.first) for place in places],
            "pages": [{} if place.pages is None else mx.array(place.pages) for place in places],
            "arrays": [[list(layer) for layer in pool.arrays] for pool in pools],
            "states": self._states(places) if before is None else before["states"],
            "history": history,
            "sampling": batch.sampler.values,
        }
        return self._step(layout, inputs)

    def evaluate(self, arrays: list[mx.array]) -> None:
        """Compute what `prefill` built, and wait for it."""
        with self._compiler.in_use():
            mx.eval(arrays)

    def dispatch(self, outputs: Tree, awaited: list[mx.array]) -> None:
        """Put the arrays that the step gives into the pools, and nowhere else: they can be written to in place."""
        arrays = outputs.pop("arrays")
        for pool in self._pools.pools:
            pool.arrays = arrays[pool.kind]
        written = [array for pool in self._pools.pools if pool.states for array in pool.flat]  # nothing reads them
        with self._compiler.in_use():
            mx.async_eval(*awaited, *written)  # type: ignore[no-untyped-call]

    def undo(self, batch: Batch) -> None:
        """Nothing was changed."""

    def nbytes(self, sequence: Sequence) -> int:
        """Bytes of the sequence's pages, those that it shares included."""
        tables = sequence.tables.by_kind
        return sum(len(tables[pool.kind].live) * pool.page_bytes for pool in self._pools.pools)

    def forget(self, request_id: int) -> None:
        """Nothing is kept beside the pages."""

    def clear(self, pages: Rows[Rows[int]]) -> None:
        """Set pages, by kind, to zero."""
        for pool in self._pools.pools:
            pool.clear(pages[pool.kind])

    def _states(self, places: Rows[Places]) -> list[list[State]]:
        """Read the states of a step's rows, by pool and layer."""
        states = [
            [pool.read_states(layer, place.first) for layer in range(len(pool.arrays))] if pool.states else []
            for pool, place in zip(self._pools.pools, places, strict=True)
        ]
        self.evaluate([array for layers in states for layer in layers for array in layer])
        return states


class DenseMemory:
    """A dense cache for each sequence, packed or not: a step is a forward for each row, one after another."""

    def __init__(self, model: ModelForCausalLM, compiler: Compiler, kv_bits: int | None = None) -> None:
        self._model = model
        self._kv_bits = kv_bits
        self._compiler = compiler
        self._caches: dict[int, list[TinyKvFullCache]] = {}

    def rows(self, n: int) -> int:
        """Return `n`: nothing is compiled for a number of rows."""
        return n

    def prefill(self, chunk: Chunk) -> mx.array:
        """Feed a chunk through the sequence's caches, which are made with its first one."""
        if chunk.start == 0:
            self._caches[chunk.sequence.id] = self._model.create_kv_cache(kv_bits=self._kv_bits)
        caches = self._caches[chunk.sequence.id]
        return prefill(self._model, chunk, caches)

    def arrays(self, sequence: Sequence) -> list[mx.array]:
        """Return the buffers of the sequence's caches."""
        return [array for layer in self._caches[sequence.id] for array in layer.arrays]

    def decode(self, batch: Batch, index: Rows[int], tokens: mx.array, history: Arrays, before: Tree | None) -> Tree:
        """Build the step, whose writes are in the caches from here on."""
        positions = batch.positions(index)
        logits = mx.concatenate(
            [
                self._model(tokens[row : row + 1, None], position, self._caches[sequence.id])[:, -1]
                for row, (sequence, position) in enumerate(zip(batch.sequences, positions, strict=True))
            ]
        )
        history = remember(history, tokens, batch.column(batch.ring_index(positions)))
        return chosen(logits, batch.sampler, history, batch.column(index), batch.logprobs)

    def evaluate(self, arrays: list[mx.array]) -> None:
        """Compute what `prefill` built, and wait for it."""
        with self._compiler.in_use():
            mx.eval(arrays)

    def dispatch(self, outputs: Tree, awaited: list[mx.array]) -> None:
        """The caches have their arrays already."""
        with self._compiler.in_use():
            mx.async_eval(*awaited)  # type: ignore[no-untyped-call]

    def undo(self, batch: Batch) -> None:
        """Take the last position of each row back."""
        for sequence in batch.sequences:
            for layer in self._caches.get(sequence.id, ()):  # none where the row's request is over
                layer.trim(1)

    def nbytes(self, sequence: Sequence) -> int:
        """Bytes of the sequence's caches."""
        return sum(layer.nbytes for layer in self._caches.get(sequence.id, ()))

    def forget(self, request_id: int) -> None:
        """Drop the sequence's caches."""
        self._caches.pop(request_id, None)

    def clear(self, pages: Rows[Rows[int]]) -> None:
        """Nothing is shared that others could see."""
