"""From a folder to an engine: what fits is planned before any weight is read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from hashlib import sha256

from tinyllm._mx import mx
from tinyllm.checkpoint.contents import Contents
from tinyllm.engine.device_memory import LIMITS, device_memory
from tinyllm.engine.engine import MAX_ROWS, PREFILL_CHUNK, Engine, KvMode
from tinyllm.engine.plan import MemoryPlan, make_plan
from tinyllm.engine.request import Request
from tinyllm.kernels import has_compiler
from tinyllm.kv.paged import PAGE_SIZE
from tinyllm.model.load import OpenedModel, on_cpu, open_model
from tinyllm.ops.features import ModelFeatures

logger = logging.getLogger("tinyllm")

_WARM_UP_PROMPT, _WARM_UP_TOKENS = 32, 4  # long enough for the activations of a prompt, and for steps ahead


@dataclass(frozen=True)
class EngineSettings:
    """How an engine runs a model.

    Up to `batch` requests run at once, by default `MAX_ROWS`. `kv_budget` is the most that the KV cache may take, in
    bytes or as a share of what is left; `max_context` the most tokens of a request: where it is given, as many as
    `batch` such requests must fit. With `wired`, the memory of a model that needs most of a Mac's is kept resident
    while it runs. The rest is as `Engine`, `ModelFeatures` and `load_model` have it.
    """

    batch: int | None = None
    kv_budget: int | Fraction | None = None
    max_context: int | None = None
    wired: bool = True
    kv: KvMode = "paged"
    kv_bits: int | None = None
    compiled: bool = True
    share: bool = True
    features: ModelFeatures = field(default_factory=ModelFeatures)
    dtype: mx.Dtype | None = None

    @property
    def cache(self) -> str:
        """The cache's name: paged, dense, paged 8 bits ..."""
        return self.kv if self.kv_bits is None else f"{self.kv} {self.kv_bits} bits"


MODES: Mapping[str, EngineSettings] = {
    "fused": EngineSettings(),
    "compiled": EngineSettings(),
    "paged": EngineSettings(),
    "eager": EngineSettings(compiled=False),
    "dense": EngineSettings(kv="dense"),
    "reference": EngineSettings(compiled=False, features=ModelFeatures.reference()),
}
"""Ways to run a model, by what sets them apart; the first three are the default, under each of its names."""


def load_engine(contents: Contents, settings: EngineSettings | None = None) -> Engine:
    """Load a checkpoint, and make an engine for it.

    Raises, before any weight is read, what the checkpoint is refused for, and DoesNotFitError, saying what would fit.
    """
    settings = settings or EngineSettings()
    opened = open_model(contents, _features(settings), dtype=settings.dtype)
    plan = plan_memory(opened, settings, name=contents.path.name)
    release = LIMITS.take(plan, wired=settings.wired)
    try:
        engine = Engine(
            opened.load(),
            kv=settings.kv,
            kv_bits=settings.kv_bits,
            compiled=settings.compiled,
            max_rows=settings.batch or MAX_ROWS,
            share=settings.share,
            plan=plan,
            release=release,
        )
        _warm_up(engine)
    except BaseException:
        release()
        raise
    return engine


def _warm_up(engine: Engine) -> None:
    """Have kernels compiled before the first answer, not in the middle of it, where nobody has compiled them yet."""
    model = engine.model
    layers = sorted({repr(layer) for layer in model.config.layers})  # what kernels have in them: constants, not sizes
    name = sha256(repr((layers, model.dtype, model.features, engine.pools.kv_bits)).encode()).hexdigest()[:16]
    if not engine.compiler.is_cold(name) or engine.context <= _WARM_UP_PROMPT + _WARM_UP_TOKENS:
        return
    logger.info("compiling kernels, once per machine (about 20 seconds)")
    engine.run([Request((0,) * _WARM_UP_PROMPT, max_tokens=_WARM_UP_TOKENS)])
    engine.pools.manager.clear()
    engine.compiler.warmed_up(name)


def _features(settings: EngineSettings) -> ModelFeatures:
    """Have activations compiled on a CPU too where steps are: there is a compiler, and a place for its kernels."""
    features = settings.features
    if features.fused_activation is None and settings.compiled and has_compiler():
        return replace(features, fused_activation=True)
    return features


def plan_memory(opened: OpenedModel, settings: EngineSettings, *, name: str, beside: int = 0) -> MemoryPlan:
    """Plan what a model takes on the default device, from what is free there now, less `beside` bytes of it."""
    return make_plan(
        opened.config,
        weight_bytes=opened.weights.memory_bytes,
        itemsize=opened.dtype.size,
        available_bytes=max(0, device_memory().available - beside),
        kv_budget=settings.kv_budget,
        max_context=settings.max_context,
        kv_bits=settings.kv_bits,
        batch=settings.batch or 1,
        page_size=PAGE_SIZE,
        prefill_chunk=PREFILL_CHUNK,
        on_gpu=not on_cpu(),
        name=name,
    )
