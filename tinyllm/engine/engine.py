"""The engine: requests in, tokens out, one step at a time. It is owned by one thread, and speaks ids only."""

from __future__ import annotations

from collections import deque
from time import perf_counter

from tinyllm.engine.request import FinishReason, Output, Request
from tinyllm.engine.runner import Sequence
from tinyllm.errors import ContextLengthError, TinyllmError, TokenizerError, UsageError
from tinyllm.model.transformer import ModelForCausalLM

PREFILL_CHUNK = 256


class Engine:
    """Runs requests in the order of their arrival, one sequence at a time.

    `prefill_chunk` is how many tokens of a prompt one step takes.
    """

    def __init__(self, model: ModelForCausalLM, *, prefill_chunk: int = PREFILL_CHUNK) -> None:
        self.model = model
        self.context = model.config.max_position_embeddings
        self._prefill_chunk = prefill_chunk
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: tuple[int, Sequence] | None = None
        self._added = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return self._running is not None or bool(self._waiting)

    def add(self, request: Request) -> int:
        """Queue a request and return its id.

        Raises ContextLengthError if its prompt leaves no room for a token, TokenizerError for ids that the
        model has no embedding of, and UsageError for a logit_bias of a token that it does not have.
        """
        self._check(request)
        self._added += 1
        self._waiting.append((self._added, request))
        return self._added

    def cancel(self, request_id: int) -> None:
        """Forget a request, with all that it holds; one that is over already is no error."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] != request_id)
        if self._running is not None and self._running[0] == request_id:
            self._running = None

    def step(self) -> list[Output]:
        """Do a bounded piece of work: a chunk of a prompt, or one token. Returns the news."""
        if self._running is None:
            if not self._waiting:
                return []
            request_id, request = self._waiting.popleft()
            if self._budget(request) == 0:
                return [Output(request_id, None, perf_counter(), "length")]
            self._running = request_id, self._begin(request)
        request_id, sequence = self._running
        if not sequence.is_prefilled:
            sequence.advance()
            return [Output(request_id, None, perf_counter(), prefilled=sequence.prefilled)]
        return [self._decode(request_id, sequence)]

    def _decode(self, request_id: int, sequence: Sequence) -> Output:
        first, budget = sequence.generated == 0, self._budget(sequence.request)
        try:
            token, logprobs = sequence.next_token(last=sequence.generated + 1 == budget)
        except TinyllmError as error:
            self._running = None
            return Output(request_id, None, perf_counter(), "error", error)
        reason: FinishReason | None = None
        if token in sequence.request.stop_ids:
            reason = "stop"
        elif sequence.generated == budget:
            reason = "length"
        output = Output(
            request_id,
            token,
            perf_counter(),
            reason,
            logprobs=logprobs,
            prefilled=sequence.prefilled,
            prefill_s=sequence.prefill_s if first else 0.0,
            kv_bytes=sequence.kv_bytes,
        )
        if reason:
            self._running = None
        else:
            sequence.dispatch()
        return output

    def _begin(self, request: Request) -> Sequence:
        longest = len(request.prompt_ids) + self._budget(request)
        return Sequence(request, self.model, chunk=self._prefill_chunk, longest=longest)

    def _budget(self, request: Request) -> int:
        """How many tokens the request may generate."""
        room = self.context - len(request.prompt_ids)
        return room if request.max_tokens is None else min(room, request.max_tokens)

    def _check(self, request: Request) -> None:
        prompt, vocab = len(request.prompt_ids), self.model.config.vocab_size
        if prompt > self.context or (prompt == self.context and request.max_tokens != 0):
            raise ContextLengthError(
                f"the prompt has {prompt:,} tokens, and with the answer the model can attend to {self.context:,}:"
                " shorten it"
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
