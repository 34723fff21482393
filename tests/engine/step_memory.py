"""How many bytes decode steps need, which must not depend on how large a pool is."""

from __future__ import annotations

from random import Random

from tinyllm._mx import mx
from tinyllm.engine.engine import Engine
from tinyllm.engine.request import Request


def bytes_of_steps(engine: Engine, pages: int) -> int:
    """Return the most bytes, beyond those held before, of 4 decode steps of 3 sequences in pools of so many pages."""
    manager, random = engine.pools.manager, Random(0)
    big = manager.open(())
    manager.reserve(big, pages * manager.page_size)
    manager.release(big)
    for _ in range(3):
        engine.add(Request(tuple(random.randrange(3, 90) for _ in range(20)), max_tokens=60))
    seen = 0
    while seen < 12:
        seen += sum(output.token_id is not None for output in engine.step())
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(4):
        engine.step()
    return mx.get_peak_memory() - before
