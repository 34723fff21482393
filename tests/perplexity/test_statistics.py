"""Figures and their errors, by hand and against repeated draws."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tinyllm.perplexity.statistics import Estimate, compare, mean, perplexity


def test_perplexity_of_two_tokens_by_hand() -> None:
    """Losses of ln 2 and ln 8: the mean is ln 4, the deviation ln 4 / root 2, the error of the mean half ln 4."""
    found = perplexity(np.log([2.0, 8.0]))
    assert found.value == pytest.approx(4)
    assert found.error == pytest.approx(4 * math.log(4) / 2)


def test_one_token_has_no_error() -> None:
    assert mean(np.array([3.0])) == Estimate(3.0, None)


def test_a_hopeless_model_has_a_number() -> None:
    assert math.isfinite(perplexity(np.full(3, 1e6)).value)


def test_what_befalls_both_models_alike_is_no_error_of_their_difference() -> None:
    losses = np.random.default_rng(0).exponential(2, 500)
    none = compare(losses, losses, np.zeros(500), np.ones(500, bool))
    assert none.difference == Estimate(0.0, 0.0)
    shifted = compare(losses + 0.1, losses, np.full(500, 0.1), np.ones(500, bool))
    assert shifted.difference.value == pytest.approx(perplexity(losses).value * (math.exp(0.1) - 1))
    own, error = perplexity(losses + 0.1).error, shifted.difference.error
    assert own is not None and error is not None and error < own / 5


def test_errors_are_the_spread_of_repeated_draws() -> None:
    random = np.random.default_rng(1)
    values, differences, errors = [], [], []
    for _ in range(400):
        other = random.gamma(2, 1, 300)
        losses = other + random.normal(0.05, 0.3, 300)
        found = compare(losses, other, np.zeros(300), np.ones(300, bool))
        values.append(perplexity(losses))
        differences.append(found.difference.value)
        errors.append(found.difference.error)
    assert np.std([each.value for each in values]) == pytest.approx(
        np.mean([each.error for each in values]), rel=0.15
    )
    assert np.std(differences) == pytest.approx(np.mean(errors), rel=0.15)


def test_a_comparison_by_hand() -> None:
    divergences = np.arange(101) / 100
    agreeing = np.array([True] * 75 + [False] * 25)
    found = compare(np.ones(4), np.ones(4), divergences, agreeing)
    assert found.divergence.mean.value == pytest.approx(0.5)
    assert (found.divergence.greatest, found.divergence.percentile_99) == (1.0, pytest.approx(0.99))
    assert found.agreement.value == 0.75
    assert found.agreement.error == pytest.approx(math.sqrt(0.75 * 0.25 / 99))
