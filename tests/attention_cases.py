"""What a layer may ask of attention: kernels, reaches and the rest, each with what plain numpy gives for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import plain

from tinyllm._mx import mx
from tinyllm.config.layers import Alibi, Sandwich
from tinyllm.config.reach import Chunk, Reach, Strided, Window
from tinyllm.ops.attention import AttentionSpec
from tinyllm.ops.position_bias import PositionBias

HEADS, KV_HEADS, DIM = 6, 2, 8
KERNELS: dict[str, dict[str, Any]] = {
    "fused": {},
    "reference": {"fused": False},
    "polynomial": {"polynomial_exp": True},
}
REACHES: dict[str, Reach | None] = {
    "all": None,
    "window": Window(4),
    "chunk": Chunk(5),
    "strided": Strided(3, 4),
}


@dataclass(frozen=True)
class Asked:
    """What is asked beside scale and reach."""

    softcap: float | None = None
    bias: Alibi | Sandwich | None = None
    sinks: bool = False
    latent: int | None = None

    def spec(self, **settings: Any) -> AttentionSpec:
        return AttentionSpec(
            scale=0.6,
            softcap=self.softcap,
            bias=None if self.bias is None else PositionBias(self.bias, HEADS),
            sinks=SINKS if self.sinks else None,
            latent=self.latent,
            **settings,
        )

    def expected(self, q: mx.array, k: mx.array, v: mx.array, reach: Reach | None) -> np.ndarray:
        sinks = SINKS if self.sinks else None
        return plain.attend(q, k, v, scale=0.6, reach=reach, softcap=self.softcap, bias=self.bias, sinks=sinks)


SINKS = mx.array([0.5, -1.0, 2.0, 4.0, 0.0, 1.5])
ASKED = {
    "plain": Asked(),
    "softcap": Asked(softcap=1.5),
    "sinks": Asked(sinks=True),
    "alibi": Asked(bias=Alibi()),
    "rounded alibi": Asked(bias=Alibi(rounded=True, factor=0.4)),
    "sandwich": Asked(bias=Sandwich(6)),
    "softcap, alibi and sinks": Asked(softcap=2.0, bias=Alibi(), sinks=True),
}


def close(actual: mx.array, expected: np.ndarray, tolerance: float = 2e-5) -> bool:
    return actual.shape == expected.shape and np.allclose(
        np.array(actual.astype(mx.float32)), expected, rtol=tolerance, atol=tolerance
    )
