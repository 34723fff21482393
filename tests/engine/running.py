"""Requests run to their ends in an engine, and what each gives alone: the plainest way there is, dense and eager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinyllm.engine.engine import Engine
from tinyllm.engine.request import Output, Request
from tinyllm.model.transformer import ModelForCausalLM


def run(engine: Engine, requests: Sequence[Request], *, may_fail: bool = False) -> list[list[Output]]:
    """Run requests, the books checked after every step: of each, the outputs that bring a token, or an error."""
    outputs: dict[int, list[Output]] = {engine.add(request): [] for request in requests}
    while engine.has_work:
        for output in engine.step():
            assert may_fail or output.error is None
            if output.token_id is not None or output.error is not None:
                outputs[output.request_id].append(output)
        engine.scheduler.check_invariants()
    return list(outputs.values())


def ids(outputs: Sequence[Output]) -> list[int]:
    return [output.token_id for output in outputs if output.token_id is not None]


def alone(model: ModelForCausalLM, request: Request, **settings: Any) -> list[Output]:
    engine = Engine(model, kv="dense", max_rows=1, prefill_chunk=1000, compiled=False, **settings)
    return run(engine, [request])[0]


def ids_alone(model: ModelForCausalLM, request: Request) -> list[int]:
    return ids(alone(model, request))
