"""What small tensors must hold for matrices to be what is made of them; looked at before any of these. No mlx."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tinyllm.checkpoint.safetensors_header import TensorInfo
from tinyllm.errors import UnsupportedQuantizationError

__all__ = ["Claim", "check_claims"]


@dataclass(frozen=True)
class Claim:
    """The elements of a tensor of integers are 0, 1, 2 ..., each of them `group` times; else `refusal` is said."""

    info: TensorInfo
    group: int
    refusal: str


def check_claims(claims: Iterable[Claim]) -> None:
    """Read the tensors. Raises UnsupportedQuantizationError for one that holds something else."""
    for claim in claims:
        info = claim.info
        count = math.prod(info.shape)
        with info.file.open("rb") as file:
            file.seek(info.start)
            content = file.read(info.nbytes)
        width = info.nbytes // max(count, 1)
        if content != b"".join(i.to_bytes(width, "little") * claim.group for i in range(count // claim.group)):
            raise UnsupportedQuantizationError(f"{info.file}: {info.name} {claim.refusal}")
