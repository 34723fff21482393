"""The engine: requests in, tokens out, one step at a time. It is owned by one thread, and speaks ids only."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

from tinyllm.engine.compiler import Compiler
from tinyllm.engine.memory import DenseMemory, PagedMemory
from tinyllm.engine.plan import MemoryPlan
from tinyllm.engine.request import FinishReason, Output, Request
from tinyllm.engine.runner import Chosen, Runner, Step
from tinyllm.engine.scheduler import Chunk, Scheduler, Sequence
from tinyllm.errors import ContextLengthError, NonFiniteLogitsError, TinyllmError, TokenizerError, UsageError
from tinyllm.kv.paged import PAGE_SIZE
from tinyllm.kv.pools import KvPools
from tinyllm.model.transformer import ModelForCausalLM

PREFILL_CHUNK = 256
MAX_ROWS = 8

KvMode = Literal["paged", "dense"]


def _nothing() -> None:
    """Nothing to release."""


@dataclass
class _Progress:
    """A request on its way: what its prompt took, and how many of its tokens were found computed already."""

    request: Request
    prefill_s: float = 0.0
    cached: int | None = None


class Engine:
    """Runs up to `max_rows` requests at once, in the order of their arrival; see `Scheduler` for who goes first.

    `prefill_chunk` is how many tokens of a prompt one step takes. With `kv` "paged", keys and values are in pools of
    pages of `page_size` tokens, of which each layer kind has at most `ceilings`; prefixes are shared (unless not
    `share`), and the decode step is `compiled` (or not). With "dense" each request has its own buffers and forwards.
    With `kv_bits`, 8 or 4, keys and values are packed. A `plan` says how much memory there is, ceilings included;
    `release` is called when the engine is closed or collected.
    """

    def __init__(
        self,
        model: ModelForCausalLM,
        *,
        kv: KvMode = "paged",
        kv_bits: int | None = None,
        compiled: bool = True,
        max_rows: int = MAX_ROWS,
        prefill_chunk: int = PREFILL_CHUNK,
        page_size: int = PAGE_SIZE,
        ceilings: tuple[int, ...] | None = None,
        share: bool = True,
        plan: MemoryPlan | None = None,
        release: Callable[[], None] = _nothing,
    ) -> None:
        self.model = model
        self.plan = plan
        self.pools = KvPools(
            model.config,
            page_size,
            ceilings=ceilings if plan is None else plan.ceilings,
            prefill_chunk=prefill_chunk,
            share=share and kv == "paged",
            kv_bits=kv_bits,
        )
        self.scheduler = Scheduler(
            self.pools.manager, max_rows=max_rows, prefill_chunk=prefill_chunk, regime=self.pools.regime
        )
        most = model.config.max_position_embeddings if plan is None else plan.context
        self.context = min(most, self.scheduler.capacity + 1)
        # Also for an engine that nobody closes.
        self._release = weakref.finalize(self, release)
        self.compiler = compiler = Compiler(wanted=compiled)
        self._memory = (
            DenseMemory(model, compiler, kv_bits) if kv == "dense" else PagedMemory(model, self.pools, compiler)
        )
        self._runner = Runner(model, self._memory)
        self._requests: dict[int, _Progress] = {}
        self._over: list[Output] = []
        self._running: Step | None = None
        self._added = 0
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._over) or self.scheduler.has_work  # rows that run are the scheduler's until they are over

    def add(self, request: Request) -> int:
        """Queue a request and return its id.

        Raises ContextLengthError if its prompt leaves no room for a token, TokenizerError for ids that the
        model has no embedding of, and UsageError for a logit_bias of a token that it does not have.
        """
        self._check(request)
        self._added += 1
        most = self._most_tokens(request)
        if most == 0:
            self._over.append(Output(self._added, None, perf_counter(), "length"))
        else:
            self.scheduler.add(self._added, request.prompt_ids, most)
            self._requests[self._added] = _Progress(request)
        return self._added

    def cancel(self, request_id: int) -> None:
        """Forget a request, with all that it holds; one that is over already is no error."""
        self._over = [output for output in self._over if output.request_id != request_id]
        if self._requests.pop(request_id, None) is None or self._is_running(request_id):
            return  # what a step writes to stays where it is until the step is over
        self.scheduler.cancel(request_id)
        self._memory.forget(request_id)

    def reset(self) -> None:
        """Forget all requests and all that is cached: after a step has failed, nothing on the device is certain."""
        running = [] if self._running is None else [sequence.id for sequence in self._running.batch.sequences]
        self._over, self._running = [], None
        for request_id in {*self._requests, *running}:
            self._requests.pop(request_id, None)
            self.scheduler.cancel(request_id)
            self._memory.forget(request_id)
        self.pools.reset()

    def close(self) -> None:
        """End what the engine was given memory limits for; it must not be used any more. Twice is no error."""
        self._release()

    def step(self) -> list[Output]:
        """Do a bounded piece of work: a chunk of a prompt, and a token of each answer. Returns the news."""
        news, self._over = self._over, []
        if self._running is not None:
            news += self._complete(self._running)
        if self._running is None:
            news += self._begin()
        return news

    def run(self, requests: Iterable[Request]) -> list[list[Output]]:
        """Run requests to their ends; return the tokens of each. Raises what one of them ends with."""
        tokens: dict[int, list[Output]] = {self.add(request): [] for request in requests}
        while self.has_work:
            for output in self.step():
                if output.error is not None:
                    raise output.error
                if output.token_id is not None:
                    tokens[output.request_id].append(output)
        return list(tokens.values())

    def _complete(self, step: Step) -> list[Output]:
        """Wait for the step that runs; have the next one run, if it is the same rows again."""
        ahead = self._runner.build_after(step) if self._goes_on(step) else None
        self._running = None
        done = self._runner.wait(step)
        news = self._accept(done)
        if ahead is None:
            return news
        if done is step and all(output.finish_reason is None for output in news):
            self._runner.dispatch(ahead)
            self._running = ahead
        else:
            self._runner.discard(ahead)
        return news

    def _begin(self) -> Iterator[Output]:
        """Do what the scheduler has next: a chunk of a prompt, which is waited for, and a step, which is not."""
        work = self.scheduler.next()
        self.preemptions += len(work.preempted)
        for request_id in work.preempted:
            self._memory.forget(request_id)
        if work.prefill is not None:
            yield from self._prefill(work.prefill)
        if work.decode:
            requests = [self._requests[sequence.id].request for sequence in work.decode]
            step = self._runner.build(work.decode, requests)
            self._runner.dispatch(step)
            self._running = step

    def _goes_on(self, step: Step) -> bool:
        """Whether the rows of a step are those of the next one too, as far as can be told before it is over."""
        rows = step.batch.sequences
        return (
            rows == self.scheduler.decoding
            and all(row.id in self._requests for row in rows)
            and not self.scheduler.wants_prefill
            and self.scheduler.reserve_ahead(rows)
        )

    def _prefill(self, chunk: Chunk) -> Iterator[Output]:
        progress = self._requests[chunk.sequence.id]
        if progress.cached is None:
            progress.cached = chunk.start
        started = perf_counter()
        try:
            step = self._runner.prefill(chunk, progress.request)
        except NonFiniteLogitsError as error:
            del self._requests[chunk.sequence.id]
            yield self._fail(chunk.sequence, error)
            return
        now = perf_counter()
        progress.prefill_s += now - started
        if step is None or all(chosen.error is None for chosen in self._runner.read(step)):
            self.scheduler.prefilled(chunk)  # else its pages are dropped, while it still has all of them
        if step is not None:
            yield from self._accept(step)
        else:
            yield Output(chunk.sequence.id, None, now, prefilled=chunk.end, cached=progress.cached)

    def _accept(self, step: Step) -> list[Output]:
        """Take what a step gave each row; let go of those that nobody wants any more."""
        news = []
        for sequence, chosen in zip(step.batch.sequences, self._runner.read(step), strict=True):
            if chosen.error is not None:
                failed = self._fail(sequence, chosen.error)
                news += [failed] if self._requests.pop(sequence.id, None) else []
            elif sequence.id in self._requests:
                news.append(self._accept_row(sequence, chosen))
            else:
                self.scheduler.cancel(sequence.id)
                self._memory.forget(sequence.id)
        return news

    def _fail(self, sequence: Sequence, error: TinyllmError) -> Output:
        """Let go of a row whose numbers are spoilt, with all that it has written."""
        self._memory.clear(self.scheduler.drop(sequence))
        self._memory.forget(sequence.id)
        return Output(sequence.id, None, perf_counter(), "error", error)

    def _is_running(self, request_id: int) -> bool:
        step = self._running
        return step is not None and any(sequence.id == request_id for sequence in step.batch.sequences)

    def _accept_row(self, sequence: Sequence, chosen: Chosen) -> Output:
        progress = self._requests[sequence.id]
        self.scheduler.accepted(sequence, chosen.token)
        reason: FinishReason | None = None
        if chosen.token in progress.request.stop_ids:
            reason = "stop"
        elif sequence.generated == sequence.max_new:
            reason = "length"
        output = Output(
            sequence.id,
            chosen.token,
            perf_counter(),
            reason,
            logprobs=chosen.logprobs,
            prefilled=sequence.prompt_length,
            cached=progress.cached or 0,
            prefill_s=progress.prefill_s,
            kv_bytes=self._memory.nbytes(sequence),
        )
        if reason:
            del self._requests[sequence.id]
            self.scheduler.finish(sequence)
            self._memory.forget(sequence.id)
        return output

    def _most_tokens(self, request: Request) -> int:
        """How many tokens the request may generate."""
        room = self.context - len(request.prompt_ids)
        return room if request.max_tokens is None else min(room, request.max_tokens)

    def _check(self, request: Request) -> None:
        prompt, vocab = len(request.prompt_ids), self.model.config.vocab_size
        if prompt > self.context or (prompt == self.context and request.max_tokens != 0):
            most = self.model.config.max_position_embeddings
            subject, advice = "the model", ""
            if self.context < most:
                subject, advice = "this run of the model", " (see --max-context and --kv-budget)"
            raise ContextLengthError(
                f"the prompt has {prompt:,} tokens, and with the answer {subject} can attend to {self.context:,}:"
                f" shorten it{advice}"
            )
        unknown = [i for i in request.sampling.logit_bias if not 0 <= i < vocab]
        if unknown:
            raise UsageError(f"logit_bias names token {unknown[0]}, and the model has {vocab:,}")
        highest = max(request.prompt_ids)
        if highest >= vocab or min(request.prompt_ids) < 0:
            raise TokenizerError(
                f"token id {highest if highest >= vocab else min(request.prompt_ids)} has no embedding:"
                f" the model has {vocab:,} rows, so the tokenizer is not this model's"
            )
