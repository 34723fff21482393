"""A report against an earlier one: what became faster or slower by more than both runs vary. No mlx.

The rule. Two medians differ when they are further apart than twice the combined standard deviation of both runs,
sqrt(sd_old² + sd_new²), and by more than 3 % of the old one: two processes in a row differ by as much where nothing
has changed. The deviation is that of single repetitions, not of their mean, so that a few suffice and one odd
repetition hides a change rather than making one up. A run of one repetition counts as varying by 10 %.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tinyllm.bench.result import NOISY, Result, Spread
from tinyllm.errors import SlowerError, UsageError
from tinyllm.text.given import read_whole

__all__ = ["RULE", "Change", "Key", "Old", "beyond_noise", "compare", "fail_if_slower", "read_report"]

_LEAST = 0.03
_DEVIATIONS = 2

RULE = (
    f"Beyond the noise: apart by more than {_DEVIATIONS} combined standard deviations of both runs, and by more than"
    f" {_LEAST:.0%} of the old one."
)


class Key(NamedTuple):
    """What two reports must agree on for their rates to be compared."""

    model: str
    features: str
    kv: str
    test: str
    batch: int


@dataclass(frozen=True)
class Change:
    """One test, then and now, in median tokens a second; `change` is relative to `old`."""

    model: str
    features: str
    kv: str
    test: str
    batch: int
    old: float
    new: float
    change: float
    beyond_noise: bool


@dataclass(frozen=True)
class Old:
    """An earlier report: what it ran on, and its rates."""

    path: Path
    machine: Mapping[str, Any]
    rates: Mapping[Key, Spread]

    def differences(self, machine: Mapping[str, Any]) -> list[str]:
        """Say what is not the same of the two machines, and of the software on them."""
        names = [name for name in machine if name != "date" and machine[name] != self.machine.get(name)]
        return [f"{name} was {self.machine.get(name)}, and is {machine[name]}" for name in names]


def read_report(path: Path) -> Old:
    """Read what `-o json` wrote. Raises UsageError for anything else."""
    try:
        with path.open("rb") as file:
            report = json.loads(read_whole(file, str(path)))
        rates = {_key(result): _spread(result["tps"]) for result in report["results"]}
        return Old(path, dict(report["machine"]), rates)
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError, OverflowError) as error:
        raise UsageError(f"{path}: is not a report that tinyllm bench -o json wrote") from error


def compare(old: Old, results: Sequence[Result]) -> list[Change]:
    """Compare the tests that both reports have."""
    changes = []
    for result in results:
        model, workload = result.model, result.workload
        key = Key(model.name, model.features, model.kv, workload.label, workload.batch)
        before, now = old.rates.get(key), result.tps
        if before is not None:
            change = now.median / before.median - 1
            changes.append(Change(*key, before.median, now.median, change, beyond_noise(before, now)))
    return changes


def fail_if_slower(changes: Sequence[Change], percent: float) -> None:
    """Raise SlowerError naming the tests that are slower by more than `percent`, and beyond the noise."""
    slower = [c for c in changes if c.beyond_noise and c.change * 100 < -percent]
    if slower:
        told = ", ".join(f"{c.model} {c.test} ({c.change:+.1%})" for c in slower)
        raise SlowerError(f"slower by more than {percent:g} %: {told}")


def beyond_noise(old: Spread, new: Spread) -> bool:
    """Whether two medians differ, by the rule of this module."""
    noise = math.hypot(_deviation(old), _deviation(new))
    return abs(new.median - old.median) > max(_DEVIATIONS * noise, _LEAST * old.median)


def _key(result: Mapping[str, Any]) -> Key:
    model = result["model"]
    return Key(model["name"], model["features"], model["kv"], result["test"], result["workload"]["batch"])


def _spread(values: Mapping[str, Any]) -> Spread:
    """Read a rate. Raises ValueError for numbers that nothing can be compared with."""
    spread = Spread(**values)
    rates = (spread.median, spread.mean, spread.sd, spread.min, spread.max)
    if not all(type(rate) in (int, float) and 0 <= rate < math.inf for rate in rates) or not spread.median > 0:
        raise ValueError("a rate is no number")
    if type(spread.n) is not int or spread.n < 1:
        raise ValueError("a count is no number")
    return Spread(spread.n, *map(float, rates))


def _deviation(spread: Spread) -> float:
    return spread.sd if spread.n > 1 else NOISY * spread.median
