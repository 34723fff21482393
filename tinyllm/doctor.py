"""Whether this machine computes what it should: tiny checkpoints of known logits, and the embedded model's answers.

The logits and ids of doctor_data/ are those of transformers in float32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyllm._mx import dtype_name, mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.engine.engine import Engine
from tinyllm.engine.request import Request
from tinyllm.model.load import load_model
from tinyllm.model.transformer import ModelForCausalLM
from tinyllm.ops.features import FEATURES

__all__ = ["Check", "check_golden", "check_model"]

DATA = Path(__file__).parent / "doctor_data"
GOLDEN = tuple(sorted(path.parent.name for path in DATA.glob("*/expected.safetensors")))
# Root mean square, in standard deviations of the logits: twice what transformers is off by in the same dtype.
_TOLERANCES = {mx.float32: 2e-5, mx.float16: 0.02, mx.bfloat16: 0.12}
_STEPS = 8  # so many of a golden's ids are fed one by one


@dataclass(frozen=True)
class Check:
    """One comparison: it agrees if `difference` is no more than `tolerance`.

    Both are the root mean square over all logits, in standard deviations of the expected ones, or count the ids that
    differ. `error` is what was raised instead.
    """

    what: str
    dtype: str
    features: str
    difference: float
    tolerance: float
    error: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether this machine passes; NaN does not."""
        return self.difference <= self.tolerance


def check_golden(name: str) -> Iterator[Check]:
    """Compare one checkpoint's logits in float32 and its stored dtype, with each kind of kernels."""
    stored = WeightStore.from_path(DATA / name).stored_dtype
    for dtype in dict.fromkeys((mx.float32, stored)):
        for features in FEATURES:
            difference, error = math.nan, None
            try:
                difference = _logits_difference(DATA / name, load_model(DATA / name, FEATURES[features], dtype=dtype))
            except Exception as raised:  # a kernel that this device does not have, say: it belongs in the report
                error = f"{type(raised).__name__}: {raised}"
            yield Check(name, dtype_name(dtype), features, difference, _TOLERANCES[dtype], error)


def check_model(folder: Path) -> Check:
    """Compare some of the embedded model's greedy answers, in float32."""
    answers = json.loads((DATA / "real_model.json").read_text(encoding="utf-8"))["answers"][::3]
    difference, error = math.nan, None
    try:
        engine = Engine(load_model(folder, dtype=mx.float32))
        difference = sum(_ids_difference(engine, answer) for answer in answers)
    except Exception as raised:  # as above
        error = f"{type(raised).__name__}: {raised}"
    return Check(folder.name, "float32", "fused", difference, 0, error)


def _logits_difference(folder: Path, model: ModelForCausalLM) -> float:
    """Return the greater difference, of the ids at once and of most at once with the last few after them."""
    arrays = mx.load(str(folder / "expected.safetensors"))
    assert isinstance(arrays, dict)
    ids, expected = arrays["ids"][None], arrays["logits"]
    begun = ids.shape[1] - _STEPS
    caches = model.create_kv_cache()
    pieces = [model(ids[:, :begun], 0, caches)]
    for i in range(begun, ids.shape[1]):
        mx.eval(pieces)
        pieces.append(model(ids[:, i : i + 1], i, caches))
    ways = (model(ids)[0], mx.concatenate(pieces, axis=1)[0])
    return max(_off(logits[-len(expected) :].astype(mx.float32), expected) for logits in ways)


def _off(logits: mx.array, expected: mx.array) -> float:
    error = logits - expected
    off = mx.sqrt(mx.mean(error * error)) / mx.std(expected)
    return float(off.tolist())  # type: ignore[arg-type]


def _ids_difference(engine: Engine, answer: dict[str, Any]) -> int:
    """Return how many of the recorded ids are not what the engine says."""
    engine.add(Request(tuple(answer["prompt_ids"]), max_tokens=len(answer["ids"])))
    ids = []
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            ids += [] if output.token_id is None else [output.token_id]
    return sum(said != recorded for said, recorded in zip(ids, answer["ids"], strict=True))
