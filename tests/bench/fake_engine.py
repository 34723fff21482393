"""An engine on a clock of its own: each step takes a time that is known."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import tiny

from tinyllm.config.config import Config
from tinyllm.engine.request import Output, Request

CHUNK = 4
CHUNK_S, FIRST_S, TOKEN_S = 2.0, 0.25, 0.5
KV_BYTES = 4096


class FakeEngine:
    """Prefills CHUNK tokens in CHUNK_S seconds; the first token takes FIRST_S, and the n-th after it n * TOKEN_S."""

    def __init__(self, *, ends_early: bool = False) -> None:
        self.now = 100.0
        self.context = 64
        self.requests: list[Request] = []
        config = Config.from_dict(tiny.config())
        self.model = SimpleNamespace(config=config, dtype=SimpleNamespace(size=4))
        self._ends_early = ends_early
        self._outputs: Iterator[Output] | None = None

    def clock(self) -> float:
        return self.now

    @property
    def has_work(self) -> bool:
        return self._outputs is not None

    def add(self, request: Request) -> int:
        self.requests.append(request)
        self._outputs = self._run(request)
        return 1

    def step(self) -> list[Output]:
        output = next(self._outputs)
        if output.finish_reason:
            self._outputs = None
        return [output]

    def _run(self, request: Request) -> Iterator[Output]:
        prompt = len(request.prompt_ids)
        for start in range(0, prompt, CHUNK):
            self.now += CHUNK_S
            yield Output(1, None, self.now, prefilled=min(start + CHUNK, prompt))
        tokens = 1 if self._ends_early else request.max_tokens
        for i in range(tokens):
            self.now += i * TOKEN_S or FIRST_S
            reason = "length" if i + 1 == tokens else None
            yield Output(1, 7, self.now, reason, prefilled=prompt, kv_bytes=KV_BYTES)
