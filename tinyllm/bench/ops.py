"""The kernels of a decode step on a GPU, modelled: counted in the graph that the engine builds, on any machine.

The model is what it would be on a GPU: in its stored type, packed where it is, with the kernels that are settled
there. The step is compiled as it is there, so that a chain of element-wise operations which MLX joins is one region.
A `mx.fast` operation is one kernel on a GPU, though a CPU's graph holds its parts; so each is replaced by one that
depends on the same arrays, which `mx.compile` cannot look into. Of the rest of the graph, operations that only look
at an array differently count as none, a slice that is written at a start known to the device alone as two, and every
other one as one.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from time import perf_counter, thread_time
from typing import Any, NamedTuple

from tinyllm._mx import dtype_name, mx
from tinyllm.bench.modes import Mode
from tinyllm.bench.report import md_table
from tinyllm.checkpoint.contents import Contents
from tinyllm.engine import compiler
from tinyllm.engine.engine import Engine
from tinyllm.engine.load import EngineSettings, load_engine
from tinyllm.engine.request import Request
from tinyllm.kv.kinds import layer_kinds
from tinyllm.kv.paged import PAGE_SIZE
from tinyllm.kv.paged_step import Placement, TinyKvPagedStep
from tinyllm.model.load import open_model
from tinyllm.model.transformer import ModelForCausalLM
from tinyllm.ops.features import ModelFeatures
from tinyllm.ops.rope import Positions

__all__ = ["HostTime", "count_ops", "host_time", "layer_ops", "load_as_on_gpu", "step_ops"]

_VIEWS = frozenset(
    "Reshape Transpose Split Slice Squeeze ExpandDims Broadcast Flatten Unflatten AsStrided View Depends".split()
)
_KINDS: Mapping[str, str] = {
    **dict.fromkeys(["Matmul", "AddMM", "GatherMM", "QuantizedMatmul", "GatherQMM"], "matrix product"),
    **dict.fromkeys(["SliceUpdate", "DynamicSliceUpdate", "Scatter", "ScatterAxis"], "cache write"),
    **dict.fromkeys(["Gather", "GatherAxis"], "lookup"),
}
_COMPILED = "Compiled"  # followed by what it is made of
_KERNELS: Mapping[str, int] = {"DynamicSliceUpdate": 2}  # one computes the offset
_FAST = ("rms_norm", "rope", "scaled_dot_product_attention")
_LABEL = re.compile(r'\[label ="(\w+)"')
_HOST_STEPS = 16


def count_ops(name: str, contents: Contents, mode: Mode) -> str:
    """Load a model, and write the table of a decode step: kernels by kind, in all and a layer."""
    engine = load_engine(contents, replace(mode.settings, batch=1))
    host = host_time(engine)
    engine.close()
    del engine
    model = load_as_on_gpu(contents, mode.settings.features)
    step, layer = step_ops(model, mode.settings), layer_ops(model, mode.settings)
    rows = [[kind, str(count), str(layer[kind])] for kind, count in step.most_common()]
    total = ["all", str(step.total()), str(layer.total())]
    return (
        f"{name}, mode {mode.name}, {mode.settings.cache} KV cache, {len(model.layers)} layers in"
        f" {dtype_name(model.dtype)}: a decode step as a GPU would dispatch it (modelled from its graph);"
        f" host time outside evaluation {host.worked * 1e3:.2f} ms a step on this machine, {host.passed * 1e3:.2f} ms"
        f" by the clock (medians of {_HOST_STEPS})\n\n"
        + md_table(["kind", "a step", "a layer"], [*rows, total])
        + "\n"
    )


def load_as_on_gpu(contents: Contents, features: ModelFeatures) -> ModelForCausalLM:
    """Load a checkpoint as it would be on a GPU, whatever this machine has."""
    return open_model(contents, features, for_cpu=False).load()


def step_ops(model: ModelForCausalLM, settings: EngineSettings) -> Counter[str]:
    """Count the kernels of the whole step: the network, and the choice of the likeliest token."""
    with _replaced(compiler, on_cpu=lambda: False):  # it is compiled without a compiler being there
        engine = Engine(
            model,
            kv=settings.kv,
            kv_bits=settings.kv_bits,
            compiled=settings.compiled,
            share=False,
            max_rows=1,
        )
    with _uncompiled():
        _begin_answer(engine, tokens=3)
    dispatched: list[mx.array] = []
    with _replaced(mx, async_eval=lambda *arrays: dispatched.extend(arrays)):
        return _ops_of(engine.step, dispatched)


def layer_ops(model: ModelForCausalLM, settings: EngineSettings) -> Counter[str]:
    """Count the kernels of one layer alone, the first that attends."""
    kinds, places = layer_kinds(model.config, settings.kv_bits)
    index = next(i for i, (kind, _) in enumerate(places) if not kinds[kind].states)
    block, kind = model.layers[index], kinds[places[index][0]]
    x = mx.zeros((1, 1, model.config.hidden_size), dtype=model.dtype)
    outputs: list[mx.array] = []
    if settings.kv == "dense":
        cache = model.create_kv_cache(kv_bits=settings.kv_bits)[index]
        with _uncompiled():
            mx.eval(block(x, Positions(0, 1), cache))  # the cache has its buffer from here on
        return _ops_of(lambda: outputs.append(block(x, Positions(1, 1), cache)), outputs)

    def layer(x: mx.array, position: mx.array, arrays: list[mx.array], seen: mx.array) -> mx.array:
        placement = Placement(slots=position, first=position, span=(0, PAGE_SIZE))
        step = TinyKvPagedStep(arrays, placement, position, seen, PAGE_SIZE, bits=kind.bits)
        return block(x, Positions(position, 1), step)

    arrays = [
        mx.zeros((1, form.heads, PAGE_SIZE, form.width), dtype=mx.uint32 if form.packed else model.dtype)
        for form in kind.arrays
    ]
    inputs = x, mx.array([1]), arrays, mx.ones((1, 1, 1, PAGE_SIZE), dtype=mx.bool_)
    mx.eval(inputs)
    function = mx.compile(layer) if settings.compiled else layer
    return _ops_of(lambda: outputs.append(function(*inputs)), outputs)


class HostTime(NamedTuple):
    """Seconds of a decode step outside of evaluation: what its thread `worked`, and what `passed` meanwhile.

    More passes than is worked where a CPU computes the step before on the same cores.
    """

    worked: float
    passed: float


def host_time(engine: Engine) -> HostTime:
    """Return what a decode step takes on the host, outside of evaluation: building graphs, and the engine itself."""
    _begin_answer(engine, tokens=_HOST_STEPS + 1)
    steps: list[HostTime] = []
    waits: list[HostTime] = []

    def timed(function: Callable[..., Any], into: list[HostTime]) -> Callable[..., None]:
        def wrapper(*arguments: Any) -> None:
            worked, passed = thread_time(), perf_counter()
            function(*arguments)
            into.append(HostTime(thread_time() - worked, perf_counter() - passed))

        return wrapper

    step = timed(engine.step, steps)
    with _replaced(mx, eval=timed(mx.eval, waits), async_eval=timed(mx.async_eval, waits)):
        while engine.has_work:
            step()
            worked, passed = map(sum, zip(*waits, strict=True))
            steps[-1] = HostTime(steps[-1].worked - worked, steps[-1].passed - passed)
            waits.clear()
    return HostTime(*map(median, zip(*steps, strict=True)))


def _begin_answer(engine: Engine, tokens: int) -> None:
    """Leave the engine in the middle of an answer, with `tokens` - 1 still to come."""
    engine.add(Request((0,), max_tokens=tokens))
    while not any(output.token_id is not None for output in engine.step()):
        pass


def _ops_of(build: Callable[[], object], outputs: list[mx.array]) -> Counter[str]:
    """Count the kernels of the graph that `build` puts into `outputs`, which nothing evaluates."""
    counts: Counter[str] = Counter()

    def one_kernel(name: str) -> Callable[..., mx.array]:
        def stand_in(x: mx.array, *arguments: Any, **options: Any) -> mx.array:
            counts[f"mx.fast.{name}"] += 1
            given = [a for a in (x, *arguments, *options.values()) if isinstance(a, mx.array)]
            result: mx.array = mx.depends(x, given)
            return result

        return stand_in

    with _replaced(mx.fast, **{name: one_kernel(name) for name in _FAST}):
        build()
    graph = io.StringIO()
    mx.export_to_dot(graph, *outputs)
    for label in _LABEL.findall(graph.getvalue()):
        if label.startswith(_COMPILED):
            counts["compiled region"] += 1
        elif label not in _VIEWS:
            counts[_KINDS.get(label, "element-wise or reduction")] += _KERNELS.get(label, 1)
    return counts


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Evaluate what is compiled on a GPU without compiling it, which would need a compiler here."""
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


@contextmanager
def _replaced(module: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    """Put other functions in the place of a module's."""
    before = {name: getattr(module, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(module, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)
