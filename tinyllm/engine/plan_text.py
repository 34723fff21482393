"""A memory plan in words, and sizes as people write them. No mlx."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import TYPE_CHECKING

from tinyllm.errors import UsageError
from tinyllm.hub.sizes import memory_size

if TYPE_CHECKING:
    from tinyllm.engine.plan import KindPlan, MemoryPlan, Needs

__all__ = ["read_size", "refusal", "table"]

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?) ?(%|[a-z]{1,3})", re.ASCII | re.IGNORECASE)
_UNITS: dict[str, int] = {"b": 1} | {
    f"{prefix}{i}b": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for i, base in (("", 1000), ("i", 1024))
}


def read_size(option: str, text: str) -> int | Fraction:
    """Read 2GB or 512MiB as bytes, 40% as a share. Raises UsageError naming `option`."""
    found = _SIZE.fullmatch(text.strip())
    number, unit = (Fraction(found[1]), found[2].lower()) if found else (Fraction(0), "")
    if unit == "%" and 0 < number <= 100:
        return number / 100
    if size := math.floor(number * _UNITS.get(unit, 0)):
        return size
    raise UsageError(f"{option} must be a size (2GB, 512MiB) or a share up to 100%, not {text!r}")


def table(plan: MemoryPlan) -> list[tuple[str, str, str]]:
    """Put a plan in rows: what, how much, and what is to be said of it."""
    sequences = "1 sequence" if plan.sequences == 1 else f"{plan.sequences:,} sequences"
    packed = "" if plan.kv_bits is None else f", packed to {plan.kv_bits} bits"
    left = plan.available_bytes - plan.wired_bytes
    return [
        ("weights", memory_size(plan.weight_bytes), f"{memory_size(plan.load_bytes)} more while they are read"),
        (
            "KV cache",
            f"up to {memory_size(plan.budget_bytes)}",
            f"{sequences} of {plan.context:,} tokens, {plan.token_bytes:,} bytes a token{packed}",
        ),
        *(_kind_row(kind) for kind in plan.kinds if len(plan.kinds) > 1),
        ("workspace", memory_size(plan.workspace_bytes), "activations, scores and logits"),
        ("left free", memory_size(left), f"of {memory_size(plan.available_bytes)} available"),
    ]


def refusal(needs: Needs, least: int, context: int, weight_bytes: int, load_bytes: int) -> str:
    """Return why `least` tokens are too many, and what would fit: `context` tokens, if any do."""
    held = f"{least:,} tokens" if needs.sequences == 1 else f"{needs.sequences} sequences of {least:,} tokens"
    cache, spare, weights = needs.cache(least), needs.spare(least), memory_size(weight_bytes)
    available = memory_size(weight_bytes + needs.free_bytes)
    advice = f": a context of {context:,} tokens would fit" if context else ""
    if needs.kv_budget is not None and load_bytes <= needs.free_bytes and cache <= spare:
        given = needs.kv_budget if isinstance(needs.kv_budget, int) else math.floor(needs.kv_budget * spare)
        if given > spare:
            return (
                f"cannot have a KV budget of {memory_size(given)}: weights {weights} + workspace"
                f" {memory_size(needs.workspace(least) + needs.growth(spare, least))} leave {spare // 2**20} MiB, of"
                f" {available} that are free"
            )
        return f"needs a KV cache of {memory_size(cache)} for {held}, and its budget is {memory_size(given)}{advice}"
    workspace = needs.workspace(least) + needs.growth(cache, least)
    needed = weight_bytes + max(load_bytes, cache + workspace)
    if load_bytes > cache + workspace:
        parts = f"{weights}, and {memory_size(load_bytes)} more while they are read"
    else:
        parts = f"{weights} + KV cache {memory_size(cache)} for {held} + workspace {memory_size(workspace)}"
    advice = advice or f": it takes a machine with {memory_size(needed)} free, or a smaller model"
    return f"needs {memory_size(needed)} of memory (weights {parts}), and {available} are free{advice}"


def _kind_row(kind: KindPlan) -> tuple[str, str, str]:
    size, form = memory_size(kind.ceiling_pages * kind.page_bytes), kind.kind
    if form.states:
        return f"  {form.layers} layers", size, f"states of {memory_size(kind.page_bytes)} for a sequence, in all"
    seen = "everything" if form.reach is None else form.reach.describe()
    return f"  {form.layers} layers", size, f"{form.kv_heads} heads of {form.key_dim}, which see {seen}"
