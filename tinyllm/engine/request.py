"""What the engine is asked for, and what it says as it goes. Ids only. No mlx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tinyllm.errors import TinyllmError, UsageError

FinishReason = Literal["stop", "length", "cancelled", "error"]
MAX_SEED = 2**32 - 1
MAX_LOGPROBS = 100


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen: the values act in the order of the fields, and each default has no effect.

    `repetition_penalty` divides positive logits (multiplies negative ones) of tokens among the last
    `repetition_window` of prompt and answer (0: all of them; arXiv 1909.05858). `presence_penalty` is subtracted
    once, and `frequency_penalty` as often as it occurs, for tokens of the answer. `logit_bias` is added to the
    logits of token ids. At `temperature` 0 the likeliest token is taken; otherwise one is drawn from softmax(logits /
    temperature), among the `top_k` likeliest (0: all), among those that it takes for a probability of `top_p`, and
    among those at least `min_p` times as likely as the likeliest. The random key of the i-th token is (`seed`, i),
    whoever shares the batch. Token ids of `held_back` are not chosen before that index of the answer.

    Raises UsageError, naming the value, when one is out of range.
    """

    repetition_penalty: float = 1.0
    repetition_window: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    held_back: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _check_count("repetition_window", self.repetition_window)
        _check("presence_penalty", self.presence_penalty, -100, 100)
        _check("frequency_penalty", self.frequency_penalty, -100, 100)
        _check("temperature", self.temperature, 0, 100)
        _check_count("top_k", self.top_k)
        _check("top_p", self.top_p, 0, 1)
        _check("min_p", self.min_p, 0, 1)
        _check_count("seed", self.seed, MAX_SEED)
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(f"logit_bias must map token ids to numbers, not {self.logit_bias!r:.60}")
        for token_id, bias in self.logit_bias.items():
            _check_count("a token id of logit_bias", token_id)
            _check(f"logit_bias of token {token_id}", bias, -1000, 1000)

    @classmethod
    def usable(cls, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return those of some values by name that are in range, and what is wrong with the others."""
        good: dict[str, Any] = {}
        problems = []
        for name, value in values.items():
            try:
                cls(**{name: value})
                good[name] = value
            except UsageError as error:
                problems.append(str(error))
        return good, problems

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0 or self.top_p == 0 or self.top_k == 1

    @property
    def truncates(self) -> bool:
        """Whether some tokens are never drawn for being unlikely."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def _check(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise UsageError(f"{name} must be from {low:g} to {high:g}, not {value!r}")


def _check_count(name: str, value: object, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (high is not None and value > high):
        limit = "0 or more" if high is None else f"from 0 to {high}"
        raise UsageError(f"{name} must be a whole number, {limit}, not {value!r}")


@dataclass(frozen=True)
class Request:
    """A prompt to go on from.

    `max_tokens` None means as many as the context holds; `stop_ids` end the answer; with `logprobs` N each token
    comes with its own log-probability and those of the N likeliest.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int | None = None
    stop_ids: frozenset[int] = frozenset()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise UsageError("the prompt is empty, and the model has no token to begin with")
        if self.max_tokens is not None:
            _check_count("max_tokens", self.max_tokens)
        if self.logprobs is not None:
            _check_count("logprobs", self.logprobs, MAX_LOGPROBS)


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities at one position: the raw log-softmax, before penalties and temperature.

    `chosen` is that of the token that was taken; `top` are (id, log-probability) of the likeliest, in order.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Output:
    """News of one request: progress in its prompt, a token, its end. Times are in seconds.

    `prefilled` counts the tokens of the prompt that are computed, of which `cached` were so before the request came.
    `at` is when the engine knew, by `time.perf_counter`; `prefill_s` is the time that the rest of the prompt took;
    `kv_bytes` is the size of the request's cache, what it shares included.
    """

    request_id: int
    token_id: int | None
    at: float
    finish_reason: FinishReason | None = None
    error: TinyllmError | None = None
    logprobs: TokenLogprobs | None = None
    prefilled: int = 0
    cached: int = 0
    prefill_s: float = 0.0
    kv_bytes: int = 0
