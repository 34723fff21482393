"""Choosing the next token of each row on the device: one implementation, for one row and for many.

Nothing here waits for the device, and no random state is kept; all that changes from step to step is an array, so
that a step can be compiled. What truncates (top-k, top-p, min-p) becomes one number a row: the least logit that may
still be drawn. It is found among the `CANDIDATES` likeliest tokens, since sorting a whole vocabulary takes longer
than a decode step; where these do not hold enough probability for top-p, the choice says that it is not exact, and is
made again over all tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinyllm._mx import mx
from tinyllm.engine.request import SamplingParams

CANDIDATES = 1024

Arrays = Mapping[str, mx.array]
"""Arrays by name. A name that no row needs is absent, and what would use it is not computed."""


@dataclass(frozen=True)
class Sampler:
    """The sampling values of a batch of rows, as arrays, and among how many `candidates` truncation looks.

    `values` may hold "temperature", "greedy" and "seed" where a row draws; "top_k", "top_p" and "min_p" where one
    truncates; "repetition_penalty", "presence_penalty" and "frequency_penalty"; "bias_ids" and "biases"; "held_ids"
    and "held_until".
    """

    values: Arrays
    candidates: int

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab: int, candidates: int = CANDIDATES) -> Sampler:
        """Lay the values of each row out, for logits of `vocab` tokens."""
        values: dict[str, mx.array] = {}
        if not all(row.greedy for row in params):
            values["greedy"] = mx.array([row.greedy for row in params])
            values["temperature"] = _column([1.0 if row.greedy else max(row.temperature, 1e-30) for row in params])
            values["seed"] = mx.array([row.seed for row in params], dtype=mx.uint32)
        wanted = [row.top_k if row.top_k < vocab else 0 for row in params]
        if any(row.truncates for row in params):
            values["top_k"] = _column(wanted)
            values["top_p"] = _column([row.top_p for row in params])
            values["min_p"] = _column([row.min_p for row in params])
        if any(row.repetition_penalty != 1 for row in params):
            values["repetition_penalty"] = _column([row.repetition_penalty for row in params])
        if any(row.presence_penalty or row.frequency_penalty for row in params):
            values["presence_penalty"] = _column([row.presence_penalty for row in params])
            values["frequency_penalty"] = _column([row.frequency_penalty for row in params])
        longest = max(len(row.logit_bias) for row in params)
        if longest:
            padded = [[*row.logit_bias.items(), *[(0, 0.0)] * (longest - len(row.logit_bias))] for row in params]
            values["bias_ids"] = mx.array([[token for token, _ in row] for row in padded])
            values["biases"] = mx.array([[bias for _, bias in row] for row in padded])
        longest = max(len(row.held_back) for row in params)
        if longest:
            held = [[*row.held_back.items(), *[(0, 0)] * (longest - len(row.held_back))] for row in params]
            values["held_ids"] = mx.array([[token for token, _ in row] for row in held])
            values["held_until"] = mx.array([[index for _, index in row] for row in held])
        return cls(values, min(vocab, candidates if max(wanted) <= candidates else vocab))


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values))[:, None]


def history_of(params: SamplingParams, tokens: Sequence[int], prompt: int, vocab: int, longest: int) -> Arrays:
    """Return what the penalties remember of one row: `tokens`, of which the first `prompt` are the prompt.

    "seen" (1, vocab) marks every token of a text of at most `longest`, and "keeps" (1, 1) says that it is kept. Where
    a window is shorter than that, "recent" (1, window) is a ring of the latest ids instead, `vocab` where there is
    none: the token at index i of prompt and answer is at i modulo `ring_size`. "counts" (1, vocab) says how often
    each token occurs in the answer.
    """
    history: dict[str, mx.array] = {}
    size = ring_size(params, longest)
    if size:
        ring = [vocab] * size
        for i in range(max(0, len(tokens) - size), len(tokens)):
            ring[i % size] = tokens[i]
        history["recent"] = mx.array([ring], dtype=mx.int32)
    elif params.repetition_penalty != 1:
        history["seen"] = _by_token(Counter(tokens), vocab) > 0
        history["keeps"] = mx.array([[True]])
    if params.presence_penalty or params.frequency_penalty:
        history["counts"] = _by_token(Counter(tokens[prompt:]), vocab)
    return history


def ring_size(params: SamplingParams, longest: int) -> int:
    """Return how many tokens the repetition penalty looks back on; 0 where it sees none, or all of `longest`."""
    window = params.repetition_window
    return window if params.repetition_penalty != 1 and window < longest else 0


def _by_token(counts: Mapping[int, int], vocab: int) -> mx.array:
    row = mx.zeros((1, vocab))
    if counts:
        row[0, mx.array(list(counts))] = mx.array(list(counts.values()), dtype=mx.float32)
    return row


def stack_histories(histories: Sequence[Arrays], vocab: int) -> Arrays:
    """Put the histories of several rows under each other; one that a row lacks is without effect there."""
    width = max((history["recent"].shape[1] for history in histories if "recent" in history), default=0)
    nothing = {
        "recent": mx.full((1, width), vocab, dtype=mx.int32),
        "seen": mx.zeros((1, vocab), dtype=mx.bool_),
        "keeps": mx.array([[False]]),
        "counts": mx.zeros((1, vocab)),
    }

    def row(history: Arrays, name: str) -> mx.array:
        found = history.get(name, nothing[name])
        return mx.concatenate([found, nothing[name]], axis=1)[:, :width] if name == "recent" else found

    present = [name for name in nothing if any(name in history for history in histories)]
    return {name: mx.concatenate([row(history, name) for history in histories]) for name in present}


def remember(history: Arrays, tokens: mx.array, ring_index: mx.array) -> Arrays:
    """Return the history after `tokens` (rows,), which go to `ring_index` (rows,) of each row's ring."""
    after, column = dict(history), tokens[:, None]
    if "recent" in history:
        latest = column.astype(mx.int32)
        after["recent"] = mx.put_along_axis(history["recent"], ring_index[:, None], latest, axis=1)
    if "seen" in history:
        before = mx.take_along_axis(history["seen"], column, axis=1)
        after["seen"] = mx.put_along_axis(history["seen"], column, before | history["keeps"], axis=1)
    if "counts" in history:
        after["counts"] = history["counts"].at[mx.arange(tokens.shape[0]), tokens].add(1)
    return after


CHOSEN = mx.uint32  # the type of tokens that are chosen: those of a first step have it too, or it is compiled twice


@dataclass(frozen=True)
class Choice:
    """The tokens (rows,) that were chosen, and whether each row's is `exact` (rows,); None if it cannot but be."""

    tokens: mx.array
    exact: mx.array | None = None


def choose(logits: mx.array, sampler: Sampler, history: Arrays, index: mx.array) -> Choice:
    """Choose a token for each row of `logits` (rows, vocab), as the one at `index` (rows,) of its answer."""
    values = sampler.values
    logits = penalise(logits.astype(mx.float32), values, history)
    if "held_ids" in values:
        held = mx.where(index[:, None].astype(mx.int32) < values["held_until"], -mx.inf, 0.0)
        logits = logits.at[mx.arange(logits.shape[0])[:, None], values["held_ids"]].add(held)
    greedy = mx.argmax(logits, axis=-1)
    if "temperature" not in values:
        return Choice(greedy)
    # Measured from the likeliest, which is then 0: divided as they are, several would overflow to the same infinity.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / values["temperature"]
    exact = None
    if "top_k" in values:
        least, exact = least_logit(scaled, values, sampler.candidates)
        scaled = mx.where(scaled >= least, scaled, -mx.inf)
        exact = exact | values["greedy"]
    # argmax(logits + Gumbel noise) is a draw from softmax(logits), without a sum.
    keys = mx.stack([values["seed"], index.astype(mx.uint32)], axis=-1)
    noise = mx.vmap(lambda key: mx.random.gumbel(logits.shape[1:], key=key))(keys)
    drawn = mx.argmax(scaled + noise, axis=-1)
    return Choice(mx.where(values["greedy"], greedy, drawn), exact)


def penalise(logits: mx.array, values: Arrays, history: Arrays) -> mx.array:
    """Apply the penalties and biases of each row to `logits` (rows, vocab) float32."""
    rows, vocab = logits.shape
    row = mx.arange(rows)[:, None]
    if "repetition_penalty" in values:
        seen = history.get("seen", mx.array(False))
        if "recent" in history:
            recent = mx.zeros((rows, vocab + 1), dtype=mx.bool_)
            recent[row, history["recent"]] = True
            seen = seen | recent[:, :vocab]
        penalty = values["repetition_penalty"]
        penalised = mx.where(logits > 0, logits / penalty, logits * penalty)
        logits = mx.where(seen, penalised, logits)
    if "presence_penalty" in values:
        counts = history["counts"]
        logits = logits - values["presence_penalty"] * (counts > 0) - values["frequency_penalty"] * counts
    if "biases" in values:
        logits = logits.at[row, values["bias_ids"]].add(values["biases"])
    return logits


def least_logit(logits: mx.array, values: Arrays, candidates: int) -> tuple[mx.array, mx.array]:
    """Return the least of `logits` (rows, vocab) that each row may draw, (rows, 1), and whether it is exact, (rows,).

    top_k keeps what at most k - 1 tokens exceed; top_p what exceeds it having a probability below p, among what
    top_k kept; min_p what is at least so many times as likely as the likeliest. Equals are kept or dropped together.
    """
    vocab = logits.shape[-1]
    best = mx.sort(logits if candidates == vocab else mx.topk(logits, candidates, axis=-1), axis=-1)[:, ::-1]
    top = best[:, :1]

    k = values["top_k"]
    by_k = mx.where(k > 0, mx.take_along_axis(best, mx.maximum(k - 1, 0), axis=-1), -mx.inf)
    weights = mx.where(best >= by_k, mx.exp(best - top), 0.0)
    total = mx.where(k > 0, weights.sum(axis=-1, keepdims=True), mx.exp(logits - top).sum(axis=-1, keepdims=True))
    through = mx.cumsum(weights, axis=-1) / total

    p = values["top_p"]
    last = mx.minimum(mx.sum(through < p, axis=-1, keepdims=True), candidates - 1)
    by_p = mx.where(p < 1, mx.take_along_axis(best, last, axis=-1), -mx.inf)
    by_min_p = top + mx.log(values["min_p"])
    exact = (p >= 1) | (k > 0) | (through[:, -1:] >= p) | (candidates == vocab)
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
