"""The kernels of a decode step on a GPU, modelled: counted in the graph that the engine builds, on any machine.

A `mx.fast` operation is one kernel on a GPU, though a CPU's graph holds its parts; so while the step is built, each
is taken as one and its result as given. Of the rest of the graph, operations that only look at an array differently
count as none, and every other one as one.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from tinyllm._mx import mx
from tinyllm.bench.report import md_table
from tinyllm.bench.subject import load_subject
from tinyllm.engine.engine import Engine
from tinyllm.engine.request import Request

__all__ = ["count_ops", "host_seconds", "layer_ops", "step_ops"]

_VIEWS = frozenset(
    "Reshape Transpose Split Slice Squeeze ExpandDims Broadcast Flatten Unflatten AsStrided View".split()
)
_KINDS: Mapping[str, str] = {
    **dict.fromkeys(["Matmul", "AddMM", "GatherMM", "QuantizedMatmul", "GatherQMM"], "matrix product"),
    **dict.fromkeys(["SliceUpdate", "DynamicSliceUpdate", "Scatter"], "cache write"),
    "Gather": "lookup",
    "Compiled": "compiled region",
}
_FAST = ("rms_norm", "rope", "scaled_dot_product_attention")
_NODE = re.compile(r'\{ (\d+) \[label ="(\w+)"')
_HOST_STEPS = 16


def count_ops(name: str, folder: Path, features: str) -> str:
    """Load a model, and write the table of a decode step: kernels by kind, in all and a layer."""
    subject, engine = load_subject(name, folder, features)
    step, layer = step_ops(engine), layer_ops(engine)
    host = host_seconds(engine)
    rows = [[kind, str(count), str(layer[kind])] for kind, count in step.most_common()]
    total = ["all", str(step.total()), str(layer.total())]
    return (
        f"{subject.name}, {features} kernels: a decode step as a GPU would dispatch it (modelled from its graph);"
        f" host time outside evaluation {host * 1e3:.2f} ms a step (median of {_HOST_STEPS})\n\n"
        + md_table(["kind", "a step", "a layer"], [*rows, total])
        + "\n"
    )


def step_ops(engine: Engine) -> Counter[str]:
    """Count the kernels of the whole step: the network, and the choice of the token."""
    request_id = _begin_answer(engine, tokens=3)
    dispatched: list[mx.array] = []
    with _replaced(mx, async_eval=lambda *arrays: dispatched.extend(arrays)):
        counts = _ops_of(engine.step, dispatched)
    engine.cancel(request_id)
    return counts


def layer_ops(engine: Engine) -> Counter[str]:
    """Count the kernels of the first layer alone."""
    model = engine.model
    block, cache = model.layers[0], model.create_kv_cache()[0]
    x = mx.zeros((1, 1, model.config.hidden_size), dtype=model.dtype)
    mx.eval(block(x, 0, cache))  # the cache has its buffer from here on
    outputs: list[mx.array] = []
    return _ops_of(lambda: outputs.append(block(x, 1, cache)), outputs)


def host_seconds(engine: Engine) -> float:
    """Return what a decode step takes on the host, outside of evaluation: building graphs, and the engine itself."""
    _begin_answer(engine, tokens=_HOST_STEPS + 1)
    waited = 0.0

    def timed(evaluate: Callable[..., None]) -> Callable[..., None]:
        def wrapper(*arrays: Any) -> None:
            nonlocal waited
            started = perf_counter()
            evaluate(*arrays)
            waited += perf_counter() - started

        return wrapper

    seconds = []
    with _replaced(mx, eval=timed(mx.eval), async_eval=timed(mx.async_eval)):
        while engine.has_work:
            started, waited = perf_counter(), 0.0
            engine.step()
            seconds.append(perf_counter() - started - waited)
    return median(seconds)


def _begin_answer(engine: Engine, tokens: int) -> int:
    """Leave the engine in the middle of an answer, with `tokens` - 1 still to come; return the request's id."""
    request_id = engine.add(Request((0,), max_tokens=tokens))
    while not any(output.token_id is not None for output in engine.step()):
        pass
    return request_id


def _ops_of(build: Callable[[], object], outputs: list[mx.array]) -> Counter[str]:
    """Count the kernels of the graph that `build` puts into `outputs`."""
    counts: Counter[str] = Counter()

    def one_kernel(name: str) -> Callable[..., mx.array]:
        def stand_in(x: mx.array, *arguments: Any, **options: Any) -> mx.array:
            counts[f"mx.fast.{name}"] += 1
            outputs.extend(a for a in (x, *arguments) if isinstance(a, mx.array))
            result = mx.zeros_like(x)
            mx.eval(result)
            return result

        return stand_in

    with _replaced(mx.fast, **{name: one_kernel(name) for name in _FAST}):
        build()
    graph = io.StringIO()
    mx.export_to_dot(graph, *outputs)
    for label in dict(_NODE.findall(graph.getvalue())).values():
        if label not in _VIEWS:
            counts[_KINDS.get(label, "element-wise or reduction")] += 1
    return counts


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
