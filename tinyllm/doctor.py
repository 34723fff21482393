"""Whether this machine computes what it should: tiny checkpoints of known logits, and the embedded model's answers.

The logits and ids of doctor_data/ are those of transformers in float32. What the engine says in its several ways is
held against a sequence that runs alone, on a cache of its own, with nothing compiled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tinyllm._mx import dtype_name, mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.engine.engine import Engine
from tinyllm.engine.request import Output, Request
from tinyllm.model.load import load_model
from tinyllm.ops.features import ModelFeatures

__all__ = ["Check", "check_golden", "check_model"]

DATA = Path(__file__).parent / "doctor_data"
GOLDEN = tuple(sorted(path.parent.name for path in DATA.glob("*/expected.safetensors")))
# Root mean square, in standard deviations of the logits: twice what transformers is off by in the same dtype.
_TOLERANCES = {mx.float32: 2e-5, mx.float16: 0.02, mx.bfloat16: 0.12}
_NEAR = (
    1e-3  # logits so near each other may change places: a product of one row and of eight differ in their last bits
)
_STEPS = 8  # so many of a golden's ids are fed one by one
_PAGE = 16  # smaller than what is fed
_LOGITS: Mapping[str, tuple[ModelFeatures, int | None]] = {
    "fused": (ModelFeatures(), None),
    "reference": (ModelFeatures.reference(), None),
    "fused, paged": (ModelFeatures(), _PAGE),
}
_ENGINES: Mapping[str, Mapping[str, Any]] = {
    "eager steps": {"compiled": False, "max_rows": 1},
    "compiled steps": {"max_rows": 1},
    "steps of a batch": {"share": False},
}
_PROMPTS, _TOKENS = (5, 21, 34), 12


@dataclass(frozen=True)
class Check:
    """One comparison, of what comes by some `way`: it agrees if `difference` is no more than `tolerance`.

    Of logits both are the root mean square, in standard deviations of the expected ones. Of steps they are how far
    apart the two best logits were where ids first differ. Of answers they count ids. `error` is what was raised
    instead.
    """

    what: str
    dtype: str
    way: str
    difference: float
    tolerance: float
    error: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether this machine passes; NaN does not."""
        return self.difference <= self.tolerance


def check_golden(name: str) -> Iterator[Check]:
    """Compare one checkpoint's logits in float32 and its stored dtype, and the ids of several engines."""
    folder = DATA / name
    for dtype in dict.fromkeys((mx.float32, WeightStore.from_path(folder).stored_dtype)):
        for way, (features, page_size) in _LOGITS.items():
            difference = partial(_logits_difference, folder, features, dtype, page_size)
            yield _check(name, dtype, way, difference, _TOLERANCES[dtype])
    for way, settings in _ENGINES.items():
        yield _check(name, mx.float32, way, partial(_ids_gap, folder, settings), _NEAR)


def check_model(folder: Path) -> Check:
    """Compare some of the embedded model's greedy answers, in float32."""
    return _check(folder.name, mx.float32, "answers", partial(_ids_difference, folder), 0)


def _check(what: str, dtype: mx.Dtype, way: str, compare: Callable[[], float], tolerance: float) -> Check:
    difference, error = math.nan, None
    try:
        difference = compare()
    except Exception as raised:  # a kernel that this device does not have, say: it belongs in the report
        error = f"{type(raised).__name__}: {raised}"
    return Check(what, dtype_name(dtype), way, difference, tolerance, error)


def _logits_difference(folder: Path, features: ModelFeatures, dtype: mx.Dtype, page_size: int | None) -> float:
    """Return the greater difference, of the ids at once and of most at once with the last few after them."""
    model = load_model(folder, features, dtype=dtype)
    ids, expected = _expected(folder)
    begun = ids.shape[1] - _STEPS
    caches = model.create_kv_cache() if page_size is None else model.create_kv_cache("paged", page_size)
    pieces = [model(ids[:, :begun], 0, caches)]
    for i in range(begun, ids.shape[1]):
        mx.eval(pieces)
        pieces.append(model(ids[:, i : i + 1], i, caches))
    ways = (model(ids)[0], mx.concatenate(pieces, axis=1)[0])
    return max(_off(logits[-len(expected) :].astype(mx.float32), expected) for logits in ways)


def _expected(folder: Path) -> tuple[mx.array, mx.array]:
    """Return ids (1, n), and logits (k, vocab) after the last k of them."""
    arrays = mx.load(str(folder / "expected.safetensors"))
    assert isinstance(arrays, dict)
    return arrays["ids"][None], arrays["logits"]


def _off(logits: mx.array, expected: mx.array) -> float:
    error = logits - expected
    off = mx.sqrt(mx.mean(error * error)) / mx.std(expected)
    return float(off.tolist())  # type: ignore[arg-type]


def _ids_gap(folder: Path, settings: Mapping[str, Any]) -> float:
    """Return how far apart the two best logits were, at most, where an engine's ids first differ from those alone."""
    model = load_model(folder, dtype=mx.float32)
    ids: list[int] = _expected(folder)[0][0].tolist()  # type: ignore[assignment]
    requests = [Request(tuple(ids[:n]), _TOKENS, logprobs=2) for n in _PROMPTS]
    answers = Engine(model, page_size=_PAGE, **settings).run(requests)
    return max(
        ids_gap(Engine(model, kv="dense", compiled=False).run([request])[0], answer)
        for request, answer in zip(requests, answers, strict=True)
    )


def ids_gap(expected: Sequence[Output], answer: Sequence[Output]) -> float:
    """Return how far apart the two best logits were where an answer first differs from what was expected; else 0."""
    for wanted, said in zip(expected, answer, strict=True):
        if said.token_id != wanted.token_id:
            assert wanted.logprobs is not None
            (_, best), (_, second) = wanted.logprobs.top
            return best - second
    return 0.0


def _ids_difference(folder: Path) -> int:
    """Return how many of the recorded ids are not what the engine says."""
    answers = json.loads((DATA / "real_model.json").read_text(encoding="utf-8"))["answers"][::3]
    engine = Engine(load_model(folder, dtype=mx.float32))
    wrong = 0
    for answer in answers:
        [outputs] = engine.run([Request(tuple(answer["prompt_ids"]), len(answer["ids"]))])
        wrong += sum(said.token_id != recorded for said, recorded in zip(outputs, answer["ids"], strict=True))
    return wrong
