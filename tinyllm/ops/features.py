"""Which kernels the network runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelFeatures:
    """Each field chooses a fast path; switched off, its readable reference runs instead, with the same logits.

    `fused_projections` multiplies by q, k and v (and by gate and up) as one matrix. `polynomial_exp` computes the
    exponentials of prompts in plain float32 operations, which is faster than MLX's own on a CPU under Linux; None
    leaves that to `load_model`.
    """

    fused_norm: bool = True
    fused_rope: bool = True
    fused_attention: bool = True
    fused_projections: bool = True
    quantized_matmul: bool = True
    polynomial_exp: bool | None = None

    @classmethod
    def reference(cls) -> ModelFeatures:
        """Plain array operations for everything."""
        return cls(
            fused_norm=False,
            fused_rope=False,
            fused_attention=False,
            fused_projections=False,
            quantized_matmul=False,
            polynomial_exp=False,
        )


FEATURES: Mapping[str, ModelFeatures] = {"fused": ModelFeatures(), "reference": ModelFeatures.reference()}
