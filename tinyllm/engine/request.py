"""What the engine is asked for, and what it says as it goes. Ids only. No mlx."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tinyllm.errors import TinyllmError, UsageError

FinishReason = Literal["stop", "length", "cancelled", "error"]
MAX_SEED = 2**32 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen: greedily at `temperature` 0, else at random from softmax(logits / temperature).

    The random key of a request's i-th token is (seed, i), whoever shares its batch. Raises UsageError when a value
    is out of range.
    """

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature must be 0 or more, not {self.temperature}")
        if not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"seed must be from 0 to {MAX_SEED}, not {self.seed}")


@dataclass(frozen=True)
class Request:
    """A prompt to go on from. `max_tokens` None means as many as the context holds; `stop_ids` end the answer."""

    prompt_ids: tuple[int, ...]
    max_tokens: int | None = None
    stop_ids: frozenset[int] = frozenset()
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise UsageError("the prompt is empty, and the model has no token to begin with")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise UsageError(f"max_tokens must be 0 or more, not {self.max_tokens}")


@dataclass(frozen=True)
class Output:
    """News of one request: a token, or its end, or both. Times are in seconds.

    `at` is when the engine knew, by `time.perf_counter`; `prefill_s`, with the first token, is the time that the
    prompt took; `kv_bytes`, at the end, is the size of its cache.
    """

    request_id: int
    token_id: int | None
    at: float
    finish_reason: FinishReason | None = None
    error: TinyllmError | None = None
    prefill_s: float = 0.0
    kv_bytes: int = 0
