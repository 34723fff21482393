"""Choosing the next token of each row on the device: one implementation, for one row and for many.

Nothing here waits for the device, and no random state is kept. What truncates (top-k, top-p, min-p) becomes one
number a row: the least logit that may still be drawn. It is found among the `CANDIDATES` likeliest tokens, since
sorting a whole vocabulary takes longer than a decode step; where these do not hold enough probability for top-p, the
choice says that it is not exact, and is made again over all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tinyllm._mx import mx
from tinyllm.engine.request import SamplingParams

CANDIDATES = 1024


@dataclass(frozen=True)
class History:
    """What the penalties remember of each row, on the device.

    `recent` (rows, window) holds the latest token ids of prompt and answer, in a ring, `vocab` where there is none;
    `counts` (rows, vocab) how often each token occurs in the answer. Each is None where no row needs it.
    """

    recent: mx.array | None
    counts: mx.array | None
    filled: int

    @classmethod
    def of(cls, params: SamplingParams, prompt: Sequence[int], vocab: int, longest: int) -> History:
        """Begin the history of one request, whose prompt and answer have at most `longest` tokens."""
        recent = counts = None
        kept: Sequence[int] = ()
        if params.repetition_penalty != 1:
            window = min(params.repetition_window or longest, longest)
            kept = prompt[-window:]
            recent = mx.array([[*kept, *[vocab] * (window - len(kept))]], dtype=mx.int32)
        if params.presence_penalty or params.frequency_penalty:
            counts = mx.zeros((1, vocab))
        return cls(recent, counts, len(kept))

    def append(self, tokens: mx.array) -> History:
        """Return the history after `tokens` (rows,), which need not be computed yet."""
        recent, counts = self.recent, self.counts
        if recent is not None:
            oldest = mx.array([self.filled % recent.shape[1]])
            recent = mx.slice_update(recent, tokens[:, None].astype(mx.int32), oldest, axes=[1])
        if counts is not None:
            counts = counts.at[mx.arange(len(tokens)), tokens].add(1)
        return replace(self, recent=recent, counts=counts, filled=self.filled + 1)


@dataclass(frozen=True)
class Choice:
    """The tokens (rows,) that were chosen, and whether each row's is `exact` (rows,); None if it cannot but be."""

    tokens: mx.array
    exact: mx.array | None = None


def choose(
    logits: mx.array,
    params: Sequence[SamplingParams],
    history: History,
    index: int,
    *,
    candidates: int = CANDIDATES,
) -> Choice:
    """Choose a token for each row of `logits` (rows, vocab), as the `index`-th of its answer."""
    logits = penalise(logits.astype(mx.float32), params, history)
    greedy = mx.argmax(logits, axis=-1)
    if all(row.greedy for row in params):
        return Choice(greedy)
    is_greedy = mx.array([row.greedy for row in params])
    temperature = mx.array([[1.0 if row.greedy else max(row.temperature, 1e-30)] for row in params])
    # Measured from the likeliest, which is then 0: divided as they are, several would overflow to the same infinity.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    exact = None
    if any(row.truncates for row in params):
        least, exact = least_logit(scaled, params, candidates)
        scaled = mx.where(scaled >= least, scaled, -mx.inf)
        exact = exact | is_greedy
    # argmax(logits + Gumbel noise) is a draw from softmax(logits), without a sum.
    keys = mx.array([[row.seed, index] for row in params], dtype=mx.uint32)
    noise = mx.stack([mx.random.gumbel(logits.shape[1:], key=keys[row]) for row in range(len(params))])
    drawn = mx.argmax(scaled + noise, axis=-1)
    return Choice(mx.where(is_greedy, greedy, drawn), exact)


def penalise(logits: mx.array, params: Sequence[SamplingParams], history: History) -> mx.array:
    """Apply the penalties and biases of each row to `logits` (rows, vocab) float32."""
    rows, vocab = logits.shape
    if history.recent is not None:
        row = mx.arange(rows)[:, None]
        seen = mx.zeros((rows, vocab + 1), dtype=mx.bool_)
        seen[row, history.recent] = True
        penalty = mx.array([[row.repetition_penalty] for row in params])
        penalised = mx.where(logits > 0, logits / penalty, logits * penalty)
        logits = mx.where(seen[:, :vocab], penalised, logits)
    if history.counts is not None:
        presence = mx.array([[row.presence_penalty] for row in params])
        frequency = mx.array([[row.frequency_penalty] for row in params])
        logits = logits - presence * (history.counts > 0) - frequency * history.counts
    for i, one in enumerate(params):
        if one.logit_bias:
            logits = logits.at[i, mx.array(list(one.logit_bias))].add(mx.array(list(one.logit_bias.values())))
    return logits


def least_logit(logits: mx.array, params: Sequence[SamplingParams], candidates: int) -> tuple[mx.array, mx.array]:
    """Return the least of `logits` (rows, vocab) that each row may draw, (rows, 1), and whether it is exact, (rows,).

    top_k keeps what at most k - 1 tokens exceed; top_p what exceeds it having a probability below p, among what
    top_k kept; min_p what is at least so many times as likely as the likeliest. Equals are kept or dropped together.
    """
    vocab = logits.shape[-1]
    wanted = max(row.top_k if row.top_k < vocab else 0 for row in params)
    held = min(vocab, max(candidates, wanted))
    best = mx.sort(logits if held == vocab else mx.topk(logits, held, axis=-1), axis=-1)[:, ::-1]
    top = best[:, :1]

    k = mx.array([[row.top_k if 0 < row.top_k < vocab else 0] for row in params])
    by_k = mx.where(k > 0, mx.take_along_axis(best, mx.maximum(k - 1, 0), axis=-1), -mx.inf)
    weights = mx.where(best >= by_k, mx.exp(best - top), 0.0)
    total = mx.where(k > 0, weights.sum(axis=-1, keepdims=True), mx.exp(logits - top).sum(axis=-1, keepdims=True))
    through = mx.cumsum(weights, axis=-1) / total

    p = mx.array([[row.top_p] for row in params])
    last = mx.minimum(mx.sum(through < p, axis=-1, keepdims=True), held - 1)
    by_p = mx.where(p < 1, mx.take_along_axis(best, last, axis=-1), -mx.inf)
    min_p = mx.array([[row.min_p] for row in params])
    by_min_p = top + mx.log(min_p)
    exact = (p >= 1) | (k > 0) | (through[:, -1:] >= p) | (held == vocab)
    return mx.maximum(mx.maximum(by_k, by_p), by_min_p), exact[:, 0]


def log_probabilities(logits: mx.array, tokens: mx.array, top: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return the raw log-softmax of `logits` (rows, vocab) at `tokens` (rows,), and ids and values of the `top` best.

    Shapes (rows,), (rows, top), (rows, top), the best first.
    """
    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    top = min(top, logits.shape[-1])
    ids = mx.argpartition(-logprobs, max(top - 1, 0), axis=-1)[:, :top]
    values = mx.take_along_axis(logprobs, ids, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return chosen, mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(values, order, axis=-1)
