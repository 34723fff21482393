"""An engine on a clock of its own: each step takes a time that is known."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import tiny

from tinyllm.config.config import Config
from tinyllm.engine.request import Output, Request

CHUNK = 4
CHUNK_S, FIRST_S, TOKEN_S = 2.0, 0.25, 0.5
KV_BYTES = 4096


@dataclass(eq=False)
class Row:
    """A request on its way: how much of its prompt is read, and how many tokens it has."""

    id: int
    request: Request
    read: int = 0
    made: int = 0


class FakeEngine:
    """Reads one prompt after another, CHUNK tokens in CHUNK_S seconds and the first token in FIRST_S more.

    A token of every row that has its first one takes n * TOKEN_S, where the last of these rows has n already. As in
    the real engine, those decode first that could when the last chunk was read.
    """

    def __init__(self, *, ends_early: bool = False, preempts: bool = False) -> None:
        self.now = 100.0
        self.context = 64
        self.preemptions = 0
        self.requests: list[Request] = []
        config = Config.from_dict(tiny.config())
        self.model = SimpleNamespace(config=config, dtype=SimpleNamespace(size=4))
        self.pools = SimpleNamespace(kv_bits=None)
        self._ends_early, self._preempts = ends_early, preempts
        self._waiting: deque[Row] = deque()
        self._active: list[Row] = []
        self._running: list[Row] = []

    def clock(self) -> float:
        return self.now

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._active)

    def add(self, request: Request) -> int:
        self.requests.append(request)
        self._waiting.append(Row(len(self.requests), request))
        return len(self.requests)

    def cancel(self, request_id: int) -> None:
        self._active = [row for row in self._active if row.id != request_id]
        self._waiting = deque(row for row in self._waiting if row.id != request_id)

    def step(self) -> list[Output]:
        running = [row for row in self._running if row in self._active]
        if running:
            self.now += running[-1].made * TOKEN_S
        news = [self._token(row) for row in running]
        self._running = list(self._active)
        if self._waiting:
            news.append(self._read_chunk(self._waiting[0]))
        return news

    def _read_chunk(self, row: Row) -> Output:
        self.now += CHUNK_S
        row.read = min(row.read + CHUNK, len(row.request.prompt_ids))
        if row.read < len(row.request.prompt_ids):
            return Output(row.id, None, self.now, prefilled=row.read)
        self.now += FIRST_S
        self.preemptions += self._preempts
        self._waiting.popleft()
        self._active.append(row)
        return self._token(row)

    def _token(self, row: Row) -> Output:
        row.made += 1
        over = row.made == (1 if self._ends_early else row.request.max_tokens)
        if over:
            self._active.remove(row)
        return Output(row.id, 7, self.now, "length" if over else None, prefilled=row.read, kv_bytes=KV_BYTES * row.id)
