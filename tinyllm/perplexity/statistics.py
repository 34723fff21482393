"""What follows from the scores of tokens, with standard errors. No mlx.

Errors take tokens as independent draws of the text. They are not quite: so they are a little small, for all models
alike. Where two models scored the same tokens, the difference of each pair counts, which is far more certain than the
difference of what each scored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Comparison", "Divergence", "Estimate", "compare", "mean", "perplexity"]

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A figure and its standard error, which one value alone does not have."""

    value: float
    error: float | None


@dataclass(frozen=True)
class Divergence:
    """The Kullback-Leibler divergence by token, in nats: its mean, the greatest, and what 99 % are below."""

    mean: Estimate
    greatest: float
    percentile_99: float


@dataclass(frozen=True)
class Comparison:
    """A model against another one on the same tokens. `difference` is how much higher its perplexity is."""

    perplexity: Estimate
    difference: Estimate
    divergence: Divergence
    agreement: Estimate


def mean(values: Values) -> Estimate:
    """Return the mean, and its standard error: the deviation of the sample over the root of its size."""
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(float(values.mean()), error)


def perplexity(losses: Values) -> Estimate:
    """Return exp of the mean loss (nats a token); its error is the mean's, times that (the delta method)."""
    loss = mean(losses)
    value = math.exp(min(loss.value, 700))
    return Estimate(value, None if loss.error is None else value * loss.error)


def compare(losses: Values, other_losses: Values, divergences: Values, agreeing: NDArray[np.bool_]) -> Comparison:
    """Compare what a model lost on each token with what the other one did.

    exp(a) - exp(b) of two mean losses changes by exp(a) da - exp(b) db: the standard error is that of the mean of
    this over the tokens, in which what befalls both models alike cancels out.
    """
    own, other = perplexity(losses), perplexity(other_losses)
    error = mean(own.value * losses - other.value * other_losses).error
    return Comparison(
        perplexity=other,
        difference=Estimate(own.value - other.value, error),
        divergence=Divergence(mean(divergences), float(divergences.max()), float(np.percentile(divergences, 99))),
        agreement=mean(agreeing.astype(np.float64)),
    )
