"""A change counts when it is beyond the noise of both runs, by a rule that few samples do not break."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tinyllm.bench.compare import Change, Key, Old, beyond_noise, compare, fail_if_slower, read_report
from tinyllm.bench.result import Result, Sample, Spread, Subject
from tinyllm.bench.workload import Workload
from tinyllm.errors import SlowerError, UsageError

MODEL = Subject("tiny", 10, 1000, 800, 64, "f32", "float32", "fused", "paged", 0.5)
KEY = Key("tiny", "fused", "paged", "tg2", 1)


def result(*rates: float) -> Result:
    samples = [Sample(2 / rate, None, (1 / rate, 1 / rate), 900, 512) for rate in rates]
    return Result.of(MODEL, Workload(0, 2), samples, kv_bytes_read=0.0, bandwidth=1.0)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ([100, 101, 102], [100, 101, 102], False),
        ([100, 100, 100], [98, 98, 98], False),  # within 3 %
        ([100, 100, 100], [96, 96, 96], True),
        ([90, 100, 110], [75, 85, 95], False),  # sd 10 each: 28 is needed
        ([90, 100, 110], [62, 71, 82], True),
        ([100, 100, 40], [70, 70, 70], False),  # an odd repetition hides a change
        ([100], [75], False),  # unknown spreads count as 10 %: 25 is needed
        ([100], [70], True),
    ],
)
def test_the_rule(old: list[float], new: list[float], expected: bool) -> None:
    assert beyond_noise(Spread.of(old), Spread.of(new)) is expected


def test_tests_that_both_have_are_compared() -> None:
    other = KEY._replace(test="pp9")
    old = Old(Path("old.json"), {}, {KEY: Spread.of([100.0, 100.0]), other: Spread.of([1.0])})
    [change] = compare(old, [result(80.0, 80.0)])
    assert (change.model, change.features, change.kv, change.test, change.batch) == KEY
    assert (change.old, change.new, change.beyond_noise) == (100.0, pytest.approx(80.0), True)
    assert change.change == pytest.approx(-0.2)


def test_slower_by_more_than_allowed_and_beyond_noise_fails_with_3() -> None:
    slower, noise = Change(*KEY, 100, 80, -0.2, True), Change(*KEY, 100, 50, -0.5, False)
    faster = Change(*KEY, 100, 200, 1.0, True)
    fail_if_slower([noise, faster], 5)
    fail_if_slower([slower], 20)
    with pytest.raises(SlowerError, match=r"slower by more than 19 %: tiny tg2 \(-20.0%\)") as raised:
        fail_if_slower([noise, slower, faster], 19)
    assert raised.value.exit_code == 3


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", '{"results": 3}', '{"machine": {}, "results": [{}]}', "[" * 9999]
)
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"old\.json: is not a report"):
        read_report(path)


def test_other_machines_are_told() -> None:
    old = Old(Path("old.json"), {"mlx": "0.32.3", "chip": "M9", "date": "then"}, {})
    assert old.differences({"mlx": "0.32.4", "chip": "M9", "date": "now"}) == ["mlx was 0.32.3, and is 0.32.4"]


def test_a_report_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    row = {"test": "tg2", "model": {"name": "tiny", "features": "fused", "kv": "paged"}, "workload": {"batch": 1}}
    tps = {"n": 1, "median": 2.0, "mean": 2.0, "sd": 0.0, "min": 2.0, "max": 2.0}
    path.write_text(json.dumps({"machine": {"mlx": "1"}, "results": [{**row, "tps": tps}]}))
    assert read_report(path) == Old(path, {"mlx": "1"}, {KEY: Spread.of([2.0])})


@pytest.mark.parametrize("median", ["10", 0, -1.0, 10**400, float("nan"), float("inf"), None, True])
def test_an_old_report_whose_rates_are_no_numbers_is_refused(tmp_path: Path, median: object) -> None:
    good = {"n": 3, "median": 10.0, "mean": 10.0, "sd": 0.1, "min": 9.0, "max": 11.0}
    named = {"model": {"name": "tiny", "features": "fused", "kv": "paged"}, "test": "tg2", "workload": {"batch": 1}}
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"machine": {}, "results": [{**named, "tps": good}]}))
    assert read_report(path).rates[KEY].median == 10
    path.write_text(json.dumps({"machine": {}, "results": [{**named, "tps": {**good, "median": median}}]}))
    with pytest.raises(UsageError, match="not a report"):
        read_report(path)
