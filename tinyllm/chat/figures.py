"""What an answer took, in a few lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tinyllm.hub.sizes import disk_size

if TYPE_CHECKING:
    from tinyllm.engine.request import SamplingParams
    from tinyllm.llm import Statistics

_BETWEEN = " · "


def figures(statistics: Statistics, width: int | None = None) -> Iterator[str]:
    """Say what an answer took, and how it was sampled, in lines of `width` columns that end between two figures."""
    s = statistics
    cached = f" ({s.cached_tokens:,} from the cache)" if s.cached_tokens else ""
    packed = "" if s.kv_bits is None else f" in {s.kv_bits} bits"
    kv = f"{disk_size(s.kv_bytes)} of {disk_size(s.kv_limit_bytes)}{packed}"
    speed = (
        f"prompt {s.prompt_tokens:,} tokens{cached}, {s.prefill_tps:.1f} tokens/s",
        f"answer {s.completion_tokens:,} tokens, {s.decode_tps:.1f} tokens/s",
        f"first token after {s.ttft_s:.2f} s",
    )
    memory = (
        f"loading {s.load_s:.2f} s",
        f"peak memory {disk_size(s.peak_bytes)}",
        f"KV cache {kv}, {s.kv_token_bytes:,} bytes a token",
        f"context {s.context:,} tokens",
    )
    yield from folded(speed, width)
    yield from folded(memory, width)
    yield f"sampling: {describe(s.sampling)}"


def folded(parts: Sequence[str], width: int | None) -> Iterator[str]:
    """Join parts to lines of at most `width` columns, or to one; a part that is wider has a line of its own."""
    line = ""
    for part in parts:
        longer = f"{line}{_BETWEEN}{part}" if line else part
        if line and width is not None and len(longer) > width:
            yield line
            longer = part
        line = longer
    if line:
        yield line


def describe(sampling: SamplingParams) -> str:
    """Name the sampling values that were in force, as their options are called."""
    plain = type(sampling)()
    changed: dict[str, Any] = {
        name: value
        for name, value in asdict(sampling).items()
        if value != getattr(plain, name) and name not in ("seed", "held_back")
    }
    if not sampling.greedy:
        return ", ".join([*_told(changed), f"seed {sampling.seed}"])
    drawing: dict[str, Any] = {
        name: changed.pop(name) for name in ("temperature", "top_k", "top_p", "min_p") if name in changed
    }
    without = f" (at temperature 0, without effect: {', '.join(_told(drawing))})"
    idle = without if drawing and sampling.temperature == 0 else ""
    return ", ".join([f"greedy{idle}", *_told(changed)])


def _told(values: Mapping[str, Any]) -> list[str]:
    return [f"{name} {value}" for name, value in values.items()]
