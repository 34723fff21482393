"""What the device does for the engine: prompts in chunks, and tokens of several sequences in one step.

A step is built, dispatched and waited for, and these are three calls: the engine builds the step after the one that
runs, waits for that, and then dispatches the next. So the device never waits for a graph, and nothing is copied: a
step that is dispatched while another runs would copy the pools that it writes to, since an operation that is queued
holds what it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from tinyllm._mx import dtype_name, mx
from tinyllm.engine.batch import Batch
from tinyllm.engine.memory import Memory
from tinyllm.engine.request import Request, TokenLogprobs
from tinyllm.engine.sampling import CHOSEN, Arrays, Sampler
from tinyllm.engine.scheduler import Chunk, Sequence
from tinyllm.engine.step import Tree, chosen, is_finite
from tinyllm.errors import NonFiniteLogitsError, TinyllmError
from tinyllm.model.transformer import ModelForCausalLM


@dataclass(frozen=True)
class Step:
    """A step of a batch: what it gives, and the index in each row's answer of the token that it chooses."""

    batch: Batch
    index: tuple[int, ...]
    outputs: Tree

    @property
    def awaited(self) -> list[mx.array]:
        """What must be computed for the step to be over."""
        found = [self.outputs[name] for name in ("tokens", "finite", "exact") if name in self.outputs]
        return [*found, *self.outputs.get("logprobs", ())]


@dataclass(frozen=True)
class Chosen:
    """What a step gave one row: a token, or the error that ends the request."""

    token: int
    logprobs: TokenLogprobs | None
    error: TinyllmError | None


class Runner:
    """Runs sequences of one model, whose keys and values are in `memory`."""

    def __init__(self, model: ModelForCausalLM, memory: Memory) -> None:
        self._model = model
        self.memory = memory

    def prefill(self, chunk: Chunk, request: Request) -> Step | None:
        """Compute a chunk of a prompt, and with the last one the token after it. Waits for the device.

        Raises NonFiniteLogitsError, from any chunk: what is not finite must not stay in pages for others to find.
        """
        logits = self.memory.prefill(chunk)
        if not chunk.last:
            finite = is_finite(logits)
            self.memory.evaluate([finite, *self.memory.arrays(chunk.sequence)])
            if not finite.item():
                raise self._not_finite("in the prompt")
            return None
        batch = self._batch([chunk.sequence], [request], rows=1)
        outputs = chosen(logits, batch.sampler, batch.history(), batch.column(batch.index), batch.logprobs)
        step = Step(batch, batch.index, outputs)
        self.memory.evaluate([*step.awaited, *self.memory.arrays(chunk.sequence)])
        return self._exact(step)

    def build(self, sequences: Rows[Sequence], requests: Rows[Request]) -> Step:
        """Build the step in which each row takes its last token in."""
        batch = self._batch(sequences, requests, rows=self.memory.rows(len(sequences)))
        tokens = batch.column([sequence.ids[-1] for sequence in sequences], CHOSEN)
        return self._step(batch, batch.index, tokens, batch.history(without=1), None)

    def build_after(self, step: Step) -> Step:
        """Build the step after one that may still run."""
        index = tuple(i + 1 for i in step.index)
        return self._step(step.batch, index, step.outputs["tokens"], step.outputs["history"], step.outputs)

    def dispatch(self, step: Step) -> None:
        """Start computing a step. No other may be under way."""
        self.memory.dispatch(step.outputs, step.awaited)

    def discard(self, step: Step) -> None:
        """Forget a step that was built last, and not dispatched."""
        self.memory.undo(step.batch)

    def wait(self, step: Step) -> Step:
        """Wait for a step, and return it; or another one, if its tokens had to be chosen again."""
        mx.eval(step.awaited)
        return self._exact(step)

    def read(self, step: Step) -> Iterator[Chosen]:
        """Yield what each sequence of a step got."""
        tokens, finite = step.outputs["tokens"].tolist(), step.outputs["finite"].tolist()
        columns = [column.tolist() for column in step.outputs.get("logprobs", ())]
        for row, request in enumerate(step.batch.requests):
            logprobs = None
            if request.logprobs is not None:
                chosen_one, ids, values = (column[row] for column in columns)
                n = request.logprobs
                logprobs = TokenLogprobs(chosen_one, tuple(zip(ids[:n], values[:n], strict=True)))
            error = None if finite[row] else self._not_finite(f"at token {step.index[row] + 1} of the answer")
            yield Chosen(tokens[row], logprobs, error)

    def _batch(self, sequences: Rows[Sequence], requests: Rows[Request], rows: int) -> Batch:
        return Batch.of(sequences, requests, rows, self._model.config.vocab_size)

    def _step(
        self, batch: Batch, index: tuple[int, ...], tokens: mx.array, history: Arrays, before: Tree | None
    ) -> Step:
        return Step(batch, index, self.memory.decode(batch, index, tokens, history, before))

    def _exact(self, step: Step) -> Step:
        """Choose again, among the whole vocabulary, where the likeliest tokens did not do for some row."""
        outputs, batch = step.outputs, step.batch
        if "exact" not in outputs or all(outputs["exact"].tolist()[: len(batch.sequences)]):
            return step
        sampler = Sampler(batch.sampler.values, batch.vocab)
        again = chosen(outputs["logits"], sampler, outputs["history"], batch.column(step.index), batch.logprobs)
        chosen_again = Step(batch, step.index, again)
        mx.eval(chosen_again.awaited)
        return chosen_again

    def _not_finite(self, where: str) -> NonFiniteLogitsError:
        dtype = dtype_name(self._model.dtype)
        return NonFiniteLogitsError(
            f"the network produced inf or NaN {where}; it computes in {dtype}: try --dtype bfloat16 or float32"
        )
