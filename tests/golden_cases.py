"""The folders that scripts/make_golden.py wrote: what they hold, and how a model is run over them."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.config.tensors import tensor_shapes
from tinyllm.model.transformer import ModelForCausalLM
from tinyllm.ops.features import ModelFeatures

GOLDEN = Path(__file__).parent / "golden"
FOLDERS = tuple(sorted(path.parent.name for path in GOLDEN.glob("*/expected.safetensors")))
FEATURES = {"fused": ModelFeatures(), "reference": ModelFeatures.reference()}
TOLERANCE = 1e-4  # of the expected logits' standard deviation, in float32
LONG, STEPS, CHUNK = 100, 8, 7  # so many are fed one by one, and of more than LONG ids none before half of them


def dialects(name: str) -> list[str]:
    """Return the names of all config files of a folder, each of which describes the same model."""
    return sorted(path.name for path in (GOLDEN / name).glob("config*.json"))


def feedings(n: int, *, each: bool = False) -> dict[str, list[int]]:
    """Return the ways to feed `n` ids: the lengths of the pieces.

    Most are a first id alone, chunks, ids one by one and chunks again, so that each kind follows each. With `each`
    there is a way for each kind alone, which takes several times as long.
    """
    if n > LONG:
        half = n // 2
        return {"one pass": [n], "halves, then one by one": [half, n - half - STEPS, *[1] * STEPS]}
    if each:
        chunks = [min(CHUNK, n - start) for start in range(0, n, CHUNK)]
        return {"one pass": [n], "one by one": [1] * n, "in chunks": chunks}
    before, after = divmod(n - 1 - STEPS, CHUNK)
    chunks = [CHUNK] * before
    middle = 2 * before // 3
    pieces = [1, *chunks[:middle], *[1] * STEPS, *chunks[middle:], after]
    return {"one pass": [n], "in pieces": [size for size in pieces if size]}


@lru_cache(maxsize=4)
def expected(name: str) -> tuple[mx.array, mx.array]:
    """Return ids (1, n), and logits (k, vocab) after the last k of them."""
    arrays = mx.load(str(GOLDEN / name / "expected.safetensors"))
    return arrays["ids"][None], arrays["logits"]


@lru_cache(maxsize=2)
def _store(folder: Path) -> WeightStore:
    return WeightStore.from_path(folder)


def build(config: Config, folder: Path, features: ModelFeatures) -> ModelForCausalLM:
    """Make a float32 model of a folder's weights as `config`, which need not be the folder's own, has it.

    Biases are seen in the files: those that `config` has not are left out.
    """
    store, asked = _store(folder), tensor_shapes(config)
    kept = {name: store._tensors[name] for name in store.names if not name.endswith(".bias") or name in asked}
    return ModelForCausalLM(config, WeightStore(kept, store.config).cast(mx.float32), features)


def run(model: ModelForCausalLM, ids: mx.array, pieces: list[int], page_size: int | None = None) -> mx.array:
    """Feed ids (1, n) piece by piece through one set of caches, dense or in such pages: logits (n, vocab).

    All are known from the start: where RoPE depends on the length, it is that of the whole.
    """
    caches = model.create_kv_cache() if page_size is None else model.create_kv_cache("paged", page_size)
    logits = []
    start = 0
    for size in pieces:
        logits.append(model(ids[:, start : start + size], start, caches, length=ids.shape[1])[0])
        mx.eval(logits[-1])
        start += size
    return mx.concatenate(logits)


def rounding(config: Config) -> float:
    """Return how far apart two ways to compute the same logits in float32 may be, in their standard deviations.

    A sum of K products, in whatever order, is off by about sqrt(K) epsilons; a layer has about seven matrix products
    one after another, whose errors are of either sign; those of layers add up. The largest of thousands of errors is
    five times their root mean square, and each of the two ways has its own.
    """
    terms = 7 * config.hidden_size
    return 2 * 5 * len(config.layers) * math.sqrt(terms) * float(mx.finfo(mx.float32).eps)


def difference(actual: mx.array, wanted: mx.array) -> float:
    """Return the largest difference from `wanted` (k, vocab) of the last k rows, in its standard deviations."""
    return (mx.abs(actual[-wanted.shape[0] :] - wanted).max() / mx.std(wanted)).item()
