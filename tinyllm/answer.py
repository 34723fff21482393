"""An answer as a caller of `LLM` has it: its chunks as they are made, and what it took."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from tinyllm._mx import mx
from tinyllm.engine.plan import MemoryPlan
from tinyllm.engine.request import FinishReason, Output, SamplingParams, TokenLogprobs
from tinyllm.engine.worker import Ticket

__all__ = ["Answer", "Chunk", "Meter", "Statistics"]


@dataclass(frozen=True)
class Statistics:
    """One answer in figures. Times are in seconds; `ttft_s` is from the request to its first token.

    Of the `prompt_tokens`, `cached_tokens` were computed before. `prefill_tps` and `decode_tps` are tokens per second
    over the rest of the prompt and over the tokens after the first one, 0 where there were none. `peak_bytes` is the
    most memory that MLX has held, loading included; `kv_bytes` is the size of the answer's cache, and
    `kv_limit_bytes` what all caches may take, where a token takes `kv_token_bytes`, packed to `kv_bits` if so;
    `context` is how many tokens a request may have. `sampling` is what was in force.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    sampling: SamplingParams
    load_s: float
    ttft_s: float
    prefill_tps: float
    decode_tps: float
    total_s: float
    peak_bytes: int
    kv_bytes: int
    kv_limit_bytes: int
    kv_token_bytes: int
    kv_bits: int | None
    context: int


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer: text that is final, and the tokens behind it.

    `reasoning` is what the model thought before its answer, where it marks that. `prefilled` counts the tokens of the
    prompt that are computed. The last chunk has the `finish_reason` ("stop", "length" or "cancelled"), the `stop`
    string that ended the answer if one did, and the `statistics`.
    """

    text: str = ""
    reasoning: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prefilled: int = 0
    finish_reason: FinishReason | None = None
    stop: str | None = None
    statistics: Statistics | None = None


class Answer:
    """An answer: iterate over it for its chunks as they are made, as often as you like.

    `text()`, `reasoning()`, `finish_reason`, `stop` and `statistics` wait for its end. If the answer failed, each of
    them raises the error again. An answer that nothing refers to any more is cancelled.
    """

    def __init__(self, ticket: Ticket, chunks: Iterator[Chunk]) -> None:
        self.prompt_token_ids = ticket.request.prompt_ids
        self._ticket = ticket
        self._coming = chunks
        self._chunks: list[Chunk] = []
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        weakref.finalize(self, ticket.cancel)  # an iterator that was never begun would not

    def __iter__(self) -> Iterator[Chunk]:
        taken = 0
        while True:
            with self._lock:
                if taken == len(self._chunks):
                    if self._failure is not None:
                        raise self._failure
                    chunk = self._next()
                    if chunk is None:
                        return
                    self._chunks.append(chunk)
            yield self._chunks[taken]
            taken += 1

    def _next(self) -> Chunk | None:
        """Wait for the next chunk. What ends the answer early is kept, so that a part never passes for the whole."""
        try:
            return next(self._coming, None)
        except Exception as error:
            self._failure = error
            raise
        except BaseException:  # Ctrl-C: the rest is lost, and the next reader is told
            self._failure = RuntimeError("the answer was interrupted while it was read")
            raise

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        text = "".join(chunk.text for chunk in self._chunks)
        reason = self._chunks[-1].finish_reason if self._chunks else None
        state = "failed" if self._failure is not None else reason or "not finished"
        return f"<Answer {text!r}, {state}>"

    def text(self) -> str:
        """Return the text of all chunks, without the reasoning."""
        return "".join(chunk.text for chunk in self)

    def reasoning(self) -> str:
        """Return what the model thought before its answer, if it marks that."""
        return "".join(chunk.reasoning for chunk in self)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer ended: "stop", "length" or "cancelled"."""
        return self._last.finish_reason

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._last.stop

    @property
    def statistics(self) -> Statistics | None:
        """What the answer took."""
        return self._last.statistics

    @property
    def _last(self) -> Chunk:
        return list(self)[-1]

    def cancel(self) -> None:
        """Let the engine forget the request; its last chunk then has the reason "cancelled"."""
        self._ticket.cancel()


class Meter:
    """Takes the times of one request from its outputs."""

    def __init__(self, ticket: Ticket, load_s: float, plan: MemoryPlan) -> None:
        self._ticket = ticket
        self._plan = plan
        self._load_s = load_s
        self._tokens = 0
        self._cached = 0
        self._first_at = self._last_at = ticket.submitted_at
        self._prefill_s = 0.0
        self._kv_bytes = 0

    def add(self, output: Output) -> None:
        """Take the next output."""
        self._last_at = output.at
        self._cached = output.cached or self._cached
        self._kv_bytes = output.kv_bytes or self._kv_bytes
        if output.token_id is None:
            return
        self._tokens += 1
        if self._tokens == 1:
            self._first_at, self._prefill_s = output.at, output.prefill_s

    def statistics(self) -> Statistics:
        """Return what the answer took so far."""
        request = self._ticket.request
        decode_s = self._last_at - self._first_at
        prompt_tokens = len(request.prompt_ids)
        return Statistics(
            prompt_tokens=prompt_tokens,
            cached_tokens=self._cached,
            completion_tokens=self._tokens,
            sampling=request.sampling,
            load_s=self._load_s,
            ttft_s=self._first_at - self._ticket.submitted_at,
            prefill_tps=(prompt_tokens - self._cached) / self._prefill_s if self._prefill_s else 0.0,
            decode_tps=(self._tokens - 1) / decode_s if self._tokens > 1 else 0.0,
            total_s=self._last_at - self._ticket.submitted_at,
            peak_bytes=mx.get_peak_memory(),
            kv_bytes=self._kv_bytes,
            kv_limit_bytes=self._plan.budget_bytes,
            kv_token_bytes=self._plan.token_bytes,
            kv_bits=self._plan.kv_bits,
            context=self._plan.context,
        )
