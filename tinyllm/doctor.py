"""Checks that this machine computes the right numbers, with tiny checkpoints of known logits and the embedded model.

The logits and ids of doctor_data/ are those of transformers in float32. The engine's ways to run are compared with a
sequence that runs alone, on a cache of its own, uncompiled; kernels for long contexts with their plain references.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tinyllm._mx import dtype_name, mx
from tinyllm.checkpoint.contents import read_contents
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.engine.engine import Engine
from tinyllm.engine.request import Output, Request
from tinyllm.model.load import load_model, on_cpu, open_model
from tinyllm.ops.attention import AttentionSpec, Mask, attention, attention_reference
from tinyllm.ops.features import ModelFeatures

__all__ = ["LONG", "Check", "check_attention", "check_golden", "check_long", "check_model", "tolerance", "verdict"]

DATA = Path(__file__).parent / "doctor_data"
GOLDEN = tuple(sorted(path.parent.name for path in DATA.glob("*/expected.safetensors")))
LONG = (1_100, 9_000)
"""Keys in the cache from which kernels differ: MLX's kernels for one query divide long contexts into parts."""

_ROUNDINGS = 6  # epsilons a layer: about a dozen operations one after another, each off by at most half of one
_FAST_TRIGONOMETRY = 2**-13  # the largest error of Metal's fast sine and cosine, which its RoPE kernel uses
_NEAR = 1e-3  # two logits so close may change places: a product of one row and of eight differ in their last bits
_STEPS = 8  # ids of a golden that are fed one by one
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
_LONG_CHECKPOINT = "qwen3"  # every layer of it sees all positions
_HEADS, _KV_HEADS, _HEAD_DIMS = 8, 2, (64, 128)  # GPUs have fused attention for these sizes


@dataclass(frozen=True)
class Check:
    """One comparison, of what comes by some `way`: it agrees if `difference` is no more than `tolerance`.

    Of logits and of attention both are the root mean square, in standard deviations of what is expected. Of steps and
    answers they are how far apart the two best logits were where ids first differ. `error` is what was raised
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


def verdict(checks: Sequence[Check]) -> str:
    """Return one line: that all is right, or what is wrong and what to do about it."""
    wrong = [check for check in checks if not check.agrees]
    if not wrong:
        return f"All right: {len(checks)} of {len(checks)} checks agree, so this machine computes the right numbers."
    cases = list(dict.fromkeys(f"{check.way} in {check.dtype}" for check in wrong))
    shown = "; ".join(cases[:3]) + (f"; and {len(cases) - 3} more" if len(cases) > 3 else "")
    advice = "Please report it with the text below" + (
        "." if on_cpu() else ", and use --device cpu until it is mended."
    )
    return f"Wrong: {len(wrong)} of {len(checks)} checks disagree ({shown}). {advice}"


def tolerance(dtype: mx.Dtype, layers: int, positions: int, features: ModelFeatures) -> float:
    """Return how far logits may be off by rounding: their root mean square, in standard deviations.

    Errors of `layers` add up. In each, numbers are rounded to `dtype`, and angles of RoPE, which is computed in
    float32, by as much as float32 rounds the last of `positions`; fast trigonometry adds its own error.
    """
    fast = features.fused_rope and mx.metal.is_available() and not on_cpu()
    angle = positions * mx.finfo(mx.float32).eps + (_FAST_TRIGONOMETRY if fast else 0)
    return layers * (_ROUNDINGS * float(mx.finfo(dtype).eps) + angle)


def check_golden(name: str) -> Iterator[Check]:
    """Compare one checkpoint's logits in float32 and its stored dtype, and the ids of several engines."""
    folder = DATA / name
    store = WeightStore.from_path(folder)
    layers, positions = len(store.config.layers), _expected(folder)[0].shape[1]
    for dtype in dict.fromkeys((mx.float32, store.stored_dtype)):
        for way, (features, page_size) in _LOGITS.items():
            difference = partial(_logits_difference, folder, features, dtype, page_size)
            yield _check(name, dtype, way, difference, tolerance(dtype, layers, positions, features))
    for way, settings in _ENGINES.items():
        yield _check(name, mx.float32, way, partial(_ids_gap, folder, settings, _PROMPTS), _NEAR)


def check_long() -> Iterator[Check]:
    """Compare what engines say after long prompts with what a sequence says alone, in plain operations.

    On a CPU, whose kernels are the same for all lengths, the longest prompt is left out: it takes minutes there.
    """
    for keys in LONG[:1] if on_cpu() else LONG:
        for way in ("compiled steps", "steps of a batch"):
            gap = partial(_ids_gap, DATA / _LONG_CHECKPOINT, _ENGINES[way], (keys, keys // 2))
            yield _check(_LONG_CHECKPOINT, mx.float32, f"{way}, {keys:,} keys", gap, _NEAR)


def check_attention(keys: int) -> Iterator[Check]:
    """Compare fused attention over so many keys with the reference, for one query and for several, in each dtype.

    It may be off as one layer is, and by what sums over all keys lose, in float32, where errors are of either sign.
    """
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        allowed = _ROUNDINGS * float(mx.finfo(dtype).eps) + math.sqrt(keys) * float(mx.finfo(mx.float32).eps)
        for way, queries, hidden in (("1 query", 1, 0), ("1 query, masked", 1, 3), ("16 queries", 16, 0)):
            difference = partial(_attention_difference, keys, queries, hidden, dtype)
            yield _check("attention", dtype, f"{way}, {keys:,} keys", difference, allowed)


def check_model(folder: Path) -> Check:
    """Compare some of the embedded model's greedy answers, in float32."""
    return _check(folder.name, mx.float32, "answers", partial(_answers_gap, folder), _NEAR)


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


def _attention_difference(keys: int, queries: int, hidden: int, dtype: mx.Dtype) -> float:
    """Return the greatest difference over the head sizes; the reference takes the same numbers, in float32.

    The last `hidden` keys are masked, as in a step of a batch; otherwise queries are causal.
    """
    mask: Mask = mx.arange(keys)[None, None, None] < keys - hidden if hidden else "causal" if queries > 1 else None
    worst = 0.0
    for head_dim in _HEAD_DIMS:
        shapes = ((_HEADS, queries), (_KV_HEADS, keys), (_KV_HEADS, keys))
        seeds = enumerate(mx.random.split(mx.random.key(keys), 3))
        q, k, v = (mx.random.normal((1, *shapes[i], head_dim), key=key).astype(dtype) for i, key in seeds)
        spec = AttentionSpec(head_dim**-0.5)
        wide = [array.astype(mx.float32) for array in (q, k, v)]
        expected = attention_reference(wide[0], wide[1], wide[2], spec, mask)
        worst = max(worst, _off(attention(q, k, v, spec, mask).astype(mx.float32), expected))
    return worst


def _expected(folder: Path) -> tuple[mx.array, mx.array]:
    """Return ids (1, n), and logits (k, vocab) after the last k of them."""
    arrays = mx.load(str(folder / "expected.safetensors"))
    assert isinstance(arrays, dict)
    return arrays["ids"][None], arrays["logits"]


def _off(logits: mx.array, expected: mx.array) -> float:
    error = logits - expected
    off = mx.sqrt(mx.mean(error * error)) / mx.std(expected)
    return float(off.tolist())  # type: ignore[arg-type]


def _ids_gap(folder: Path, settings: Mapping[str, Any], prompts: Sequence[int]) -> float:
    """Return how far apart the two best logits were, at most, where an engine's ids first differ from those alone.

    Prompts have as many tokens as `prompts` says. The sequence that runs alone does so in plain operations.
    """
    ids: list[int] = _expected(folder)[0][0].tolist()  # type: ignore[assignment]
    longest = max(prompts)
    ids = ids * -(-longest // len(ids))
    requests = [Request(tuple(ids[:n]), _TOKENS, logprobs=2) for n in prompts]
    models = []
    for features in (ModelFeatures(), ModelFeatures.reference()):
        opened = open_model(read_contents(folder), features, dtype=mx.float32)
        context = max(opened.config.max_position_embeddings, longest + _TOKENS)
        models.append(replace(opened, config=replace(opened.config, max_position_embeddings=context)).load())
    model, reference = models
    answers = Engine(model, page_size=_PAGE, **settings).run(requests)
    return max(
        ids_gap(Engine(reference, kv="dense", compiled=False).run([request])[0], answer)
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


def _answers_gap(folder: Path) -> float:
    """Return how far the best logit was above the recorded token's, at most, where an answer first differs."""
    answers = json.loads((DATA / "real_model.json").read_text(encoding="utf-8"))["answers"][::3]
    engine = Engine(load_model(folder, dtype=mx.float32))
    worst = 0.0
    for answer in answers:
        [outputs] = engine.run([Request(tuple(answer["prompt_ids"]), len(answer["ids"]), logprobs=2)])
        for said, recorded in zip(outputs, answer["ids"], strict=True):
            if said.token_id != recorded:
                assert said.logprobs is not None
                values = dict(said.logprobs.top)
                best = said.logprobs.top[0][1]
                worst = max(worst, best - values.get(recorded, -math.inf))
                break
    return worst
