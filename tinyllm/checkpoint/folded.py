"""Names that occur once a layer, as one each. No mlx."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

__all__ = ["folded", "ranges"]

_LAYER = re.compile(r"\.layers\.([0-9]{1,9})\.")


def folded(names: Iterable[str]) -> list[str]:
    """Return `names` in order, those that differ in their layer alone as one: model.layers.{0-3}.mlp."""
    layers: dict[str, list[int]] = defaultdict(list)
    for name in sorted(names):
        found = _LAYER.search(name)
        layers[_LAYER.sub(".layers.{}.", name, count=1)].extend([int(found[1])] if found else [])
    return [name.replace("{}", _braced(numbers), 1) for name, numbers in layers.items()]


def ranges(numbers: Iterable[int]) -> str:
    """Write 0, 1, 2, 5 as 0-2,5."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _braced(numbers: list[int]) -> str:
    return ranges(numbers) if len(numbers) == 1 else f"{{{ranges(numbers)}}}"
