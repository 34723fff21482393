"""Which model to recommend for a machine: the one table to maintain. No mlx."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RECOMMENDED", "Recommended", "recommend"]


@dataclass(frozen=True)
class Recommended:
    """A repository for machines with at least `memory_gib` of memory; `gigabytes` is the size of its weights."""

    memory_gib: int
    repo: str
    gigabytes: float


# Dense models in MLX's 4 bits, whose weights take at most about two fifths of the memory: the context needs some too.
RECOMMENDED = (
    Recommended(48, "mlx-community/Qwen3-32B-4bit", 18.4),
    Recommended(24, "mlx-community/Qwen3-14B-4bit", 8.3),
    Recommended(16, "mlx-community/Qwen3-8B-4bit", 4.6),
    Recommended(8, "mlx-community/Qwen3-4B-4bit", 2.3),
    Recommended(4, "mlx-community/Qwen3-1.7B-4bit", 1.0),
    Recommended(0, "mlx-community/Qwen3-0.6B-4bit", 0.3),
)


def recommend(memory: int, *, on_cpu: bool = False) -> Recommended:
    """Return the largest model for that many bytes; a machine reports a little less than it is sold with.

    On a CPU 4-bit weights are unpacked to float32, and a quarter of the memory's model is as much as is bearable.
    """
    memory = memory // 4 if on_cpu else memory
    return next(row for row in RECOMMENDED if memory >= 0.9 * row.memory_gib * 2**30)
