"""What packed keys and values cost: logits of goldens whose heads can be packed, beside those of plain caches.

Tiny networks of random weights have nothing to spare: what a trained one loses is in docs/ARCHITECTURE.md.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import pytest
from golden_cases import FEATURES, FOLDERS, GOLDEN, expected

from tinyllm._mx import mx
from tinyllm.config.config import Config
from tinyllm.errors import UnsupportedQuantizationError
from tinyllm.kv.kinds import layer_kinds
from tinyllm.model.load import load_model

# Root mean square, in standard deviations of the logits; the worst of these is off by two thirds of that.
BOUNDS = {8: 0.03, 4: 0.36}
SAME = 1e-4  # the same, of two ways to compute with the same bits


def can_be_packed(name: str) -> bool:
    try:
        layer_kinds(Config.from_json_file(GOLDEN / name), 8)
    except UnsupportedQuantizationError:
        return False
    return True


PACKABLE = [name for name in FOLDERS if can_be_packed(name)]


def off(a: mx.array, b: mx.array) -> float:
    return (mx.sqrt(mx.mean((a - b) ** 2)) / mx.std(b)).item()


@lru_cache(maxsize=8)
def logits(name: str, features: str, mode: str, bits: int | None) -> mx.array:
    """Of a prompt in two pieces and a few ids one by one, (n, vocab)."""
    ids, _ = expected(name)
    model = load_model(GOLDEN / name, FEATURES[features], dtype=mx.float32)
    caches = (
        model.create_kv_cache("paged", 16, kv_bits=bits) if mode == "paged" else model.create_kv_cache(kv_bits=bits)
    )
    n, start, pieces = ids.shape[1], 0, []
    for size in (n // 2, n - n // 2 - 6, *[1] * 6):
        pieces.append(model(ids[:, start : start + size], start, caches, length=n)[0])
        mx.eval(pieces)
        start += size
    return mx.concatenate(pieces)


def test_there_are_some_of_every_width_with_windows_sinks_and_biases() -> None:
    kinds = [kind for name in PACKABLE for kind in layer_kinds(Config.from_json_file(GOLDEN / name))[0]]
    assert {kind.key_dim for kind in kinds} >= {32, 64, 128}
    assert any(kind.reach is not None for kind in kinds)
    assert {"olmo3", "gpt-oss-defaults"} <= set(PACKABLE)
    assert "llama" not in PACKABLE


@pytest.mark.parametrize("bits", BOUNDS)
@pytest.mark.parametrize("name", PACKABLE)
def test_logits_are_within_a_bound_of_those_of_plain_caches(name: str, bits: int) -> None:
    lost = off(logits(name, "fused", "dense", bits), logits(name, "fused", "dense", None))
    assert SAME < lost <= BOUNDS[bits]


@pytest.mark.parametrize("bits", BOUNDS)
@pytest.mark.parametrize("name", PACKABLE)
def test_paged_and_dense_fused_and_reference_lose_the_same(name: str, bits: int) -> None:
    of_dense = logits(name, "fused", "dense", bits)
    assert off(logits(name, "fused", "paged", bits), of_dense) <= SAME
    assert off(logits(name, "reference", "dense", bits), of_dense) <= SAME


@pytest.mark.parametrize(("bits", "bound"), [(8, 0.003), (4, 0.4)])
def test_the_embedded_model_gives_almost_the_same_probabilities(real_model: Path, bits: int, bound: float) -> None:
    """KL divergence from plain caches, the mean over a recorded conversation."""
    answers = json.loads((GOLDEN / "real_model.json").read_text(encoding="utf-8"))["answers"]
    answer = max(answers, key=lambda answer: len(answer["prompt_ids"]) + len(answer["ids"]))
    ids, model = mx.array([[*answer["prompt_ids"], *answer["ids"]]]), load_model(real_model, dtype=mx.float32)
    plain, packed = (
        (logits := model(ids, 0, model.create_kv_cache(kv_bits=kv_bits))[0])
        - mx.logsumexp(logits, axis=-1, keepdims=True)
        for kv_bits in (None, bits)
    )
    divergence = (mx.exp(plain) * (plain - packed)).sum(axis=-1).mean().item()
    assert 0 < divergence <= bound
