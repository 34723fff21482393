"""Which kernels the network runs on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

GPU_PACKED_ROWS = (
    32  # `packed_attention` of a GPU, not measured: few groups have more heads, so that steps unpack nothing
)


@dataclass(frozen=True)
class ModelFeatures:
    """Each field chooses a fast path; switched off, its readable reference runs instead, with the same logits.

    `fused_projections` multiplies by q, k and v (and by gate and up) as one matrix; `gathered_experts` sorts tokens
    by expert and multiplies by all in one call, in place of each expert by all tokens; `expanded_latents` makes keys
    and values of latents where there are so many queries that it pays; `chunked_recurrence` takes the delta rule
    through many positions at once. What is None is faster on some
    devices only, and left to `load_model`, which says `settled`: `fused_activation` compiles gate and up into one
    kernel (and so the exponentials of `polynomial_exp`); `rope_tables` rotates all layers by the same sines, in place
    of `fused_rope`; `polynomial_exp` computes exponentials in plain float32 operations; `paged_products` multiplies
    by pages where they lie, instead of gathering them; `packed_attention` is the most queries that share keys and
    are multiplied by packed ones as they are; for more, these are unpacked.
    """

    fused_norm: bool = True
    fused_rope: bool = True
    fused_attention: bool = True
    fused_projections: bool = True
    quantized_matmul: bool = True
    gathered_experts: bool = True
    expanded_latents: bool = True
    chunked_recurrence: bool = True
    fused_activation: bool | None = None
    rope_tables: bool | None = None
    polynomial_exp: bool | None = None
    paged_products: bool | None = None
    packed_attention: int | None = None

    def settled(self, *, on_cpu: bool, float32: bool) -> ModelFeatures:
        """Return the features with what is left open decided, for a device and for the type that is computed in.

        On a CPU, `mx.fast.rope` is a dozen operations, sines included, and a compiled kernel first waits for a
        compiler. MLX's exponential is slow under Linux. Products of many matrices are one after another on a CPU,
        which unpacks anew for each query of a packed one.
        """
        plain = on_cpu and float32 and sys.platform == "linux"
        return replace(
            self,
            fused_activation=not on_cpu if self.fused_activation is None else self.fused_activation,
            rope_tables=plain if self.rope_tables is None else self.rope_tables,
            polynomial_exp=plain if self.polynomial_exp is None else self.polynomial_exp,
            paged_products=plain if self.paged_products is None else self.paged_products,
            packed_attention=(4 if on_cpu else GPU_PACKED_ROWS)
            if self.packed_attention is None
            else self.packed_attention,
        )

    @classmethod
    def reference(cls) -> ModelFeatures:
        """Plain array operations for everything."""
        return cls(
            fused_norm=False,
            fused_rope=False,
            fused_attention=False,
            fused_projections=False,
            quantized_matmul=False,
            gathered_experts=False,
            expanded_latents=False,
            chunked_recurrence=False,
            fused_activation=False,
            rope_tables=False,
            polynomial_exp=False,
            paged_products=False,
            packed_attention=0,
        )


FEATURES: Mapping[str, ModelFeatures] = {"fused": ModelFeatures(), "reference": ModelFeatures.reference()}
