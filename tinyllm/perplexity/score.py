"""How well models predict the tokens of a text, a piece at a time: no more logits are held than a piece has."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from tinyllm._mx import mx
from tinyllm.checkpoint.contents import Contents
from tinyllm.engine.load import EngineSettings, plan_memory
from tinyllm.errors import DoesNotFitError, NonFiniteLogitsError, UsageError
from tinyllm.hub.sizes import disk_size
from tinyllm.model.load import OpenedModel, open_model
from tinyllm.model.transformer import ModelForCausalLM
from tinyllm.perplexity.windows import Window

__all__ = ["PairScores", "score", "score_against"]

_PIECE, _PIECE_BYTES = 256, 1 << 26  # tokens; bytes of their logits, of which a few arrays are made

Progress = Callable[[int], None]


@dataclass(frozen=True)
class PairScores:
    """For each token that is scored: both models' losses, how far their distributions are apart, whether they agree.

    Losses are -log p(token). `divergences` are sum q log(q / p), p by the model and q by the other one, in nats.
    `agreeing` says that both give the greatest probability to the same token.
    """

    losses: NDArray[np.float64]
    other_losses: NDArray[np.float64]
    divergences: NDArray[np.float64]
    agreeing: NDArray[np.bool_]


def score(
    contents: Contents,
    ids: Sequence[int],
    windows: Sequence[Window],
    *,
    dtype: mx.Dtype | None = None,
    kv_bits: int | None = None,
    progress: Progress = lambda done: None,
) -> NDArray[np.float64]:
    """Return -log p of each token that the windows score, in float64 of logits in float32.

    With `kv_bits` the KV cache is packed. `progress` gets how many are done. Raises what loading raises,
    DoesNotFitError before any weight is read, and NonFiniteLogitsError.
    """
    opened = _open(contents, ids, windows, dtype, kv_bits)
    losses: list[NDArray[np.float64]] = []
    done = 0
    for piece, logs in _distributions(opened.load(), ids, windows, kv_bits):
        losses.append(_losses(logs, piece))
        done += len(piece)
        progress(done)
    return np.concatenate(losses)


def score_against(
    contents: Contents,
    other: Contents,
    ids: Sequence[int],
    windows: Sequence[Window],
    *,
    dtype: mx.Dtype | None = None,
    kv_bits: int | None = None,
    progress: Progress = lambda done: None,
) -> PairScores:
    """Compare two models' distributions of the same tokens; see `score`. Only the first one's KV cache is packed.

    Both are in memory where they fit in it; else one reads all, its distributions are kept in a temporary file, and
    the other one comes after it. Raises UsageError where they have not the same tokens.
    """
    opened, opened_other = _open(contents, ids, windows, dtype, kv_bits), _open(other, ids, windows, dtype)
    vocab = opened.config.vocab_size
    if opened_other.config.vocab_size != vocab:
        raise UsageError(
            f"{contents.path.name} has {vocab:,} tokens and {other.path.name} {opened_other.config.vocab_size:,}:"
            " their distributions cannot be compared"
        )
    found: list[tuple[NDArray[np.float64], ...]] = []
    agreeing: list[NDArray[np.bool_]] = []
    done = 0
    with tempfile.TemporaryFile() as kept:
        others: Iterator[mx.array]
        if _fit_together(opened, opened_other, windows):
            others = map(itemgetter(1), _distributions(opened_other.load(), ids, windows))
        else:
            others = _kept(opened_other, ids, windows, kept.fileno())
        model = opened.load()
        for (piece, logs), other_logs in zip(_distributions(model, ids, windows, kv_bits), others, strict=True):
            apart = (mx.exp(other_logs) * (other_logs - logs)).sum(axis=-1)
            same = mx.argmax(logs, axis=-1) == mx.argmax(other_logs, axis=-1)
            found.append((_losses(logs, piece), _losses(other_logs, piece), np.array(apart).astype(np.float64)))
            agreeing.append(np.array(same))
            done += len(piece)
            progress(done)
    losses, other_losses, divergences = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return PairScores(losses, other_losses, np.maximum(divergences, 0), np.concatenate(agreeing))


def _open(
    contents: Contents,
    ids: Sequence[int],
    windows: Sequence[Window],
    dtype: mx.Dtype | None,
    kv_bits: int | None = None,
) -> OpenedModel:
    """Check that a model can read the text before any weight is read."""
    opened, name = open_model(contents, dtype=dtype), contents.path.name
    plan_memory(opened, _settings(windows, kv_bits), name=name)
    if max(ids) >= opened.config.vocab_size:
        raise UsageError(f"{name}: token {max(ids)} has no embedding: the tokenizer is not this model's")
    return opened


def _settings(windows: Sequence[Window], kv_bits: int | None = None) -> EngineSettings:
    return EngineSettings(max_context=max(window.end - window.start for window in windows), kv_bits=kv_bits)


def _fit_together(opened: OpenedModel, other: OpenedModel, windows: Sequence[Window]) -> bool:
    try:
        plan_memory(opened, _settings(windows), name="", beside=other.weights.memory_bytes)
    except DoesNotFitError:
        return False
    return True


def _distributions(
    model: ModelForCausalLM, ids: Sequence[int], windows: Sequence[Window], kv_bits: int | None = None
) -> Iterator[tuple[list[int], mx.array]]:
    """Give the tokens that are scored, some at a time, with log p of every token there: (tokens, vocab) float32.

    Each window is a sequence of its own, and each of its tokens is read once.
    """
    size = max(1, min(_PIECE, _PIECE_BYTES // (4 * model.config.vocab_size)))
    for window in windows:
        caches = model.create_kv_cache(kv_bits=kv_bits)
        last = window.end - 1  # nothing is predicted of what comes after the window
        for start in range(window.start, last, size):
            stop = min(start + size, last)
            scored = max(0, stop - max(start, window.first - 1))
            logits = model(
                mx.array([list(ids[start:stop])]),
                start - window.start,
                caches,
                logits_to_keep=max(scored, 1),
                length=last - window.start,
            )[0].astype(mx.float32)
            logs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            mx.eval(logs)
            if scored:
                if not mx.all(mx.isfinite(logs)).item():
                    raise NonFiniteLogitsError(f"logits after token {start:,} are not finite: try --dtype float32")
                yield list(ids[stop - scored + 1 : stop + 1]), logs


def _losses(logs: mx.array, tokens: Sequence[int]) -> NDArray[np.float64]:
    taken = mx.take_along_axis(logs, mx.array(list(tokens))[:, None], axis=-1)
    return -np.array(taken[:, 0]).astype(np.float64)


def _kept(opened: OpenedModel, ids: Sequence[int], windows: Sequence[Window], file: int) -> Iterator[mx.array]:
    """Write all distributions of a model to a file, forget the model, and give them again."""
    vocab = opened.config.vocab_size
    needed, free = 4 * vocab * sum(window.scored for window in windows), shutil.disk_usage(tempfile.gettempdir()).free
    if needed > free:
        raise DoesNotFitError(
            f"the two models do not fit into memory together, and to keep the distributions of one takes"
            f" {disk_size(needed)} of {tempfile.gettempdir()}, which has {disk_size(free)} free: use --limit"
        )
    sizes = []
    with open(file, "r+b", closefd=False) as kept:
        for piece, logs in _distributions(opened.load(), ids, windows):
            kept.write(np.array(logs).data)
            sizes.append(len(piece))
        mx.clear_cache()
        kept.flush()
    return _read_back(file, sizes, vocab)


def _read_back(file: int, sizes: Sequence[int], vocab: int) -> Iterator[mx.array]:
    with open(file, "rb", closefd=False) as kept:
        kept.seek(0)
        for size in sizes:
            content = kept.read(4 * size * vocab)
            yield mx.array(np.frombuffer(content, np.float32).reshape(size, vocab))
