"""An engine whose sequences get pages from all over the pool, none of which follows the one before it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

from tinyllm.engine.engine import Engine
from tinyllm.engine.load import EngineSettings, plan_memory
from tinyllm.kv.manager import PageManager
from tinyllm.model.load import open_model

__all__ = ["load_scattered", "scatter"]


def load_scattered(folder: Path, settings: EngineSettings, *, rows: int, tokens: int | None) -> Engine:
    """Load an engine with scattered pages for `rows` sequences of so many tokens, by default of the longest context.

    Raises what `load_engine` does: half of the pages are for nobody.
    """
    opened = open_model(folder, settings.features, dtype=settings.dtype)
    plan = plan_memory(opened, replace(settings, batch=2 * rows, max_context=tokens), name=folder.name)
    pages = 2 * rows * max(kind.sequence_pages for kind in plan.kinds)
    engine = Engine(
        opened.load(),
        compiled=settings.compiled,
        max_rows=rows,
        ceilings=(1 + pages,) * len(plan.kinds),
        share=False,
    )
    scatter(engine.pools.manager)
    return engine


def scatter(manager: PageManager) -> None:
    """Take every second of a manager's pages for good, and leave the others in a random order."""
    singles = [manager.open(()) for _ in range(min(manager.available))]
    for tables in singles:
        manager.reserve(tables, manager.page_size)
    spare = singles[::2]
    Random(0).shuffle(spare)
    for tables in spare:
        manager.release(tables)
