"""Scores are those of numpy on all logits at once, whatever the pieces, windows and models in memory."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import tiny
from golden_cases import rounding
from numpy.typing import NDArray

from tinyllm._mx import mx
from tinyllm.checkpoint.contents import read_contents
from tinyllm.config.config import Config
from tinyllm.errors import DoesNotFitError, NonFiniteLogitsError, UsageError
from tinyllm.model.load import load_model
from tinyllm.perplexity import score as score_module
from tinyllm.perplexity.score import score, score_against
from tinyllm.perplexity.statistics import perplexity
from tinyllm.perplexity.text import DEFAULT_TEXT, common_tokens
from tinyllm.perplexity.windows import Window, windows
from tinyllm.text.given import read_text

VOCAB = tiny.CONFIG["vocab_size"]
IDS = [int(i) for i in np.random.default_rng(5).integers(3, 250, 61)]
WINDOWS = {"one": (100, 100), "side by side": (16, 16), "overlapping": (16, 6), "every token": (7, 1)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("models")
    return tiny.write_checkpoint(base / "one", seed=1), tiny.write_checkpoint(base / "two", seed=2)


def log_probabilities(folder: Path, ids: list[int], read: list[Window]) -> NDArray[np.float64]:
    """Return log p of every token at each scored place, from the logits of whole windows, in float64."""
    model, rows = load_model(folder), []
    for window in read:
        logits = np.array(model(mx.array([ids[window.start : window.end]]))[0]).astype(np.float64)
        logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        rows.append(logs[window.first - 1 - window.start : window.end - 1 - window.start])
    return np.concatenate(rows)


def rounded(folder: Path, logs: NDArray[np.float64]) -> float:
    """Return how far log-probabilities may be off by rounding: they vary as the logits do."""
    return rounding(Config.from_json_file(folder / "config.json")) * float(logs.std())


def scored_tokens(read: list[Window]) -> list[int]:
    return [IDS[i] for window in read for i in range(window.first, window.end)]


@pytest.mark.parametrize("piece", [3, 256])
@pytest.mark.parametrize("sizes", WINDOWS.values(), ids=WINDOWS)
def test_losses_are_numpys(
    sizes: tuple[int, int], piece: int, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score_module, "_PIECE", piece)
    read = windows(len(IDS), *sizes)
    wanted = log_probabilities(folders[0], IDS, read)
    tokens = scored_tokens(read)
    found = score(read_contents(folders[0]), IDS, read)
    assert np.abs(found + wanted[np.arange(len(tokens)), tokens]).max() < rounded(folders[0], wanted)


@pytest.mark.parametrize("together", [True, False], ids=["together", "one after the other"])
@pytest.mark.parametrize("sizes", WINDOWS.values(), ids=WINDOWS)
def test_a_comparison_is_numpys(
    sizes: tuple[int, int], together: bool, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score_module, "_PIECE", 5)
    monkeypatch.setattr(score_module, "_fit_together", lambda *models: together)
    read = windows(len(IDS), *sizes)
    p, q = (log_probabilities(folder, IDS, read) for folder in folders)
    found = score_against(*map(read_contents, folders), IDS, read)
    rows, tokens = np.arange(len(p)), scored_tokens(read)
    assert np.abs(found.losses + p[rows, tokens]).max() < rounded(folders[0], p)
    assert np.abs(found.other_losses + q[rows, tokens]).max() < rounded(folders[1], q)
    both = rounded(folders[0], p) + rounded(folders[1], q)
    assert np.abs(found.divergences - (np.exp(q) * (q - p)).sum(axis=-1)).max() < both
    assert np.array_equal(found.agreeing, p.argmax(axis=-1) == q.argmax(axis=-1))
    assert 0 < found.divergences.min() < found.divergences.max()


def test_a_model_is_like_itself(folders: tuple[Path, Path]) -> None:
    found = score_against(read_contents(folders[0]), read_contents(folders[0]), IDS, windows(len(IDS), 16, 16))
    assert found.divergences.max() == 0
    assert found.agreeing.all()
    assert np.array_equal(found.losses, found.other_losses)


@pytest.mark.parametrize("bits", [8, 4])
def test_what_a_packed_cache_costs_is_what_a_token_after_the_other_finds(bits: int, tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path, config_overrides={"head_dim": 32})
    ids, read = IDS[:24], windows(24, 24, 24)
    found = score_against(read_contents(folder), read_contents(folder), ids, read, kv_bits=bits)
    assert np.array_equal(found.losses, score(read_contents(folder), ids, read, kv_bits=bits))
    assert np.array_equal(found.other_losses, score(read_contents(folder), ids, read))
    model = load_model(folder)
    caches = model.create_kv_cache("paged", 16, kv_bits=bits)
    rows = [model(mx.array([[token]]), i, caches)[0, 0] for i, token in enumerate(ids[:-1])]
    logits = np.array(mx.stack(rows)).astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    assert np.abs(found.losses + logs[np.arange(23), ids[1:]]).max() < 1e-4
    assert found.divergences.mean() > 1e-7


def test_a_model_that_knows_nothing_is_as_good_as_a_draw(tmp_path: Path) -> None:
    tensors = tiny.random_tensors(tiny.config())
    tensors["lm_head.weight"] *= 0
    folder = tiny.write_checkpoint(tmp_path, tensors=tensors)
    assert perplexity(score(read_contents(folder), IDS, windows(len(IDS), 16, 16))).value == pytest.approx(
        VOCAB, rel=1e-6
    )


def test_a_scripted_model_by_hand(tmp_path: Path) -> None:
    """The embedding of a token, normalised, is one number: so is the logit of the next token, and others are 0."""
    folder = tiny.write_scripted_checkpoint(tmp_path, [10, 11, 12, 13], end=None)
    logit = 1 / math.sqrt(1 / VOCAB + tiny.CONFIG["rms_norm_eps"])
    right = -math.log(math.exp(logit) / (math.exp(logit) + VOCAB - 1))
    wrong = right + logit
    losses = score(read_contents(folder), [10, 11, 12, 10, 11], windows(5, 5, 5))
    assert losses == pytest.approx([right, right, wrong, right], abs=1e-4)


def test_progress_ends_at_all(folders: tuple[Path, Path]) -> None:
    seen: list[int] = []
    score(read_contents(folders[0]), IDS, windows(len(IDS), 16, 16), progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == len(scored_tokens(windows(len(IDS), 16, 16)))


def test_memory_does_not_grow_with_the_text(folders: tuple[Path, Path]) -> None:
    """How soon a thread frees what it used moves a peak a little; all distributions of the text are twice a peak."""
    peaks = []
    for ids in (IDS, IDS * 16):
        mx.clear_cache()
        mx.reset_peak_memory()
        score_against(*map(read_contents, folders), ids, windows(len(ids), 16, 16))
        peaks.append(mx.get_peak_memory())
    distributions = len(IDS) * 16 * VOCAB * 4
    assert peaks[1] < peaks[0] + distributions / 2


def test_infinite_logits_are_told(tmp_path: Path) -> None:
    tensors = tiny.random_tensors(tiny.config())
    tensors["model.norm.weight"][:] = np.inf
    folder = tiny.write_checkpoint(tmp_path, tensors=tensors)
    with pytest.raises(NonFiniteLogitsError):
        score(read_contents(folder), IDS, windows(len(IDS), 16, 16))


def test_other_vocabularies_cannot_be_compared(folders: tuple[Path, Path], tmp_path: Path) -> None:
    other = tiny.write_checkpoint(tmp_path, config_overrides={"vocab_size": 300})
    with pytest.raises(UsageError, match=r"has 288 tokens and .* 300"):
        score_against(read_contents(folders[0]), read_contents(other), IDS, windows(len(IDS), 16, 16))


def test_what_is_kept_must_fit_the_disk(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_module, "_fit_together", lambda *models: False)
    usage = score_module.shutil.disk_usage("/")
    monkeypatch.setattr(score_module.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(DoesNotFitError, match=r"1\.0 kB free: use --limit"):
        score_against(*map(read_contents, folders), IDS, windows(len(IDS), 16, 16))


def test_the_text_of_the_package_is_long_and_plain() -> None:
    text = read_text(DEFAULT_TEXT)
    assert 50_000 < len(text) < 70_000 and text.isascii()
    assert text.startswith("CHAPTER I: DISCUSSION AND BED\n\nUp at the League, says a friend,")


def test_tokens_of_two_models_must_be_the_same(folders: tuple[Path, Path], tmp_path: Path) -> None:
    assert common_tokens("the one", [*map(read_contents, folders)], None) == tiny.token_ids("the one")
    assert common_tokens("the one", [*map(read_contents, folders)], 1) == tiny.token_ids("the one")[:1]
    other = tiny.write_checkpoint(tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["merges"] = []
    tiny.write_json(other / "tokenizer.json", content)
    with pytest.raises(UsageError, match="split the text into other tokens"):
        common_tokens("the one", [read_contents(folders[0]), read_contents(other)], None)


@pytest.mark.real_model
def test_the_embedded_model_is_better_on_english_than_on_its_reverse(real_model: Path) -> None:
    text = read_text(DEFAULT_TEXT)[:400]
    values = []
    for each in (text, text[::-1]):
        ids = common_tokens(each, [read_contents(real_model)], 40)
        values.append(perplexity(score(read_contents(real_model), ids, windows(40, 40, 40))).value)
    assert values[0] < 100 < values[1]
