"""`tinyllm perplexity` through real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from process import tinyllm


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("perplexity")
    return tiny.write_checkpoint(base / "one", seed=1), tiny.write_checkpoint(base / "two", seed=2)


def show(*arguments: str | Path, code: int = 0) -> str:
    done = tinyllm("perplexity", *arguments)
    assert done.returncode == code, done.stderr
    return (done.stderr if code else done.stdout).decode()


def report(*arguments: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(show(*arguments, "--json"))
    return found


def test_a_model_on_the_text_of_the_package(folders: tuple[Path, Path]) -> None:
    found = report(folders[0], "--limit", "50", "--context", "20")
    assert (found["model"], found["text"]) == ("one", "news_from_nowhere.txt")
    assert (found["tokens"], found["windows"], found["scored"]) == (50, 3, 47)
    assert found["against"] is None
    assert found["perplexity"]["value"] > 1 and found["perplexity"]["error"] > 0


def test_the_window_is_no_longer_than_the_model_allows(folders: tuple[Path, Path]) -> None:
    assert report(folders[0], "--limit", "300")["context"] == 256


def test_overlapping_windows_score_all_tokens_but_one(folders: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the one two three " * 10)
    found = report(folders[0], tmp_path / "text", "--context", "16", "--stride", "8")
    assert found["scored"] == found["tokens"] - 1 and found["stride"] == 8


def test_a_model_against_another(folders: tuple[Path, Path]) -> None:
    arguments = [*folders[:1], "--limit", "40", "--against", folders[1]]
    found = report(*arguments)["against"]
    assert (
        found["divergence"]["greatest"] >= found["divergence"]["percentile_99"] > found["divergence"]["mean"]["value"]
    )
    shown = show(*arguments)
    assert f"KL divergence:   {found['divergence']['mean']['value']:.5f} ± " in shown
    assert "same best token:" in shown and "(two)" in shown


def test_a_packed_kv_cache_against_none(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path, config_overrides={"head_dim": 32})
    arguments = [folder, "--limit", "30", "--against", folder]
    eight, four = (report(*arguments, "--kv-bits", bits) for bits in "84")
    assert (eight["kv_bits"], four["kv_bits"], report(*arguments)["kv_bits"]) == (8, 4, None)
    assert 0 < eight["against"]["divergence"]["mean"]["value"] < four["against"]["divergence"]["mean"]["value"]
    assert "KV cache packed to 4 bits" in show(*arguments, "--kv-bits", "4")
    assert "--kv-bits" in show(*arguments, "--kv-bits", "5", code=2)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--context", "8", "--stride", "9"], "the stride no more than it"),
        (["absent.txt"], "absent.txt"),
        (["--dtype", "int8"], "--dtype must be one of"),
    ],
)
def test_what_cannot_be_meant_is_one_line(arguments: list[str], told: str, folders: tuple[Path, Path]) -> None:
    stderr = show(folders[0], *arguments, code=2)
    assert told in stderr and stderr.count("\n") == 1


def test_a_window_that_the_model_cannot_see_is_refused(folders: tuple[Path, Path]) -> None:
    assert "256" in show(folders[0], "--context", "400", code=1)


def test_a_text_without_an_end_is_refused(folders: tuple[Path, Path]) -> None:
    line = show(folders[0], "/dev/zero", code=2)
    assert line.startswith("tinyllm: /dev/zero: larger than ") and line.count("\n") == 1
