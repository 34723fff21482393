"""What a layer asks of its cache, and the caches of all layers as one."""

from __future__ import annotations

from typing import Protocol

from tinyllm._mx import mx
from tinyllm.ops.attention import AttentionSpec


class LayerCache(Protocol):
    """The keys and values of one layer, and the attention over them."""

    @property
    def offset(self) -> int | None:
        """How many positions are held; None where the positions are the caller's alone."""

    def attend(
        self, q: mx.array, k: mx.array | None, v: mx.array | None, spec: AttentionSpec, mask: mx.array | None = None
    ) -> mx.array:
        """Append k and v (batch, kv_heads, seq, head_dim), then attend with q (batch, heads, seq, head_dim).

        Without k nothing is appended: q is of the last positions, which another layer has appended already.

        Queries are causal, and see as far as `spec` says, unless `mask` takes the place of that. Latent attention has
        no v: `spec` says which part of k it is.
        """
