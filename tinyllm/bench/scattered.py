"""An engine whose sequences get pages from all over the pool, none of which follows the one before it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tinyllm.checkpoint.contents import Contents
from tinyllm.engine.engine import Engine
from tinyllm.engine.load import EngineSettings, load_engine, plan_memory
from tinyllm.kv.manager import PageManager
from tinyllm.model.load import open_model

__all__ = ["load_scattered", "scatter"]


def load_scattered(contents: Contents, settings: EngineSettings, *, rows: int, tokens: int | None) -> Engine:
    """Load an engine with scattered pages for `rows` sequences of so many tokens, by default of the longest context.

    It has twice the pages that they take, and not one more. Raises what `load_engine` does.
    """
    opened = open_model(contents, settings.features, dtype=settings.dtype)
    doubled = replace(settings, batch=2 * rows, max_context=tokens)
    plan = plan_memory(opened, doubled, name=contents.path.name)
    budget = 2 * rows * plan.sequence_bytes + sum(kind.page_bytes for kind in plan.kinds)  # and a page for padding
    engine = load_engine(contents, replace(doubled, max_context=plan.context, kv_budget=budget))
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
