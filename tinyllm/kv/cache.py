"""What a layer asks of its cache, and the caches of all layers as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from tinyllm._mx import mx
from tinyllm.ops.attention import AttentionSpec

State = tuple[mx.array, ...]
"""What a recurrent layer keeps of all positions before the next one: arrays (batch, ...)."""


Mask = mx.array | Literal["causal"] | None
"""Which keys a query sees: causal by default, or as an array (seq, keys), boolean or additive, says."""


class LayerCache(Protocol):
    """What one layer remembers: keys and values, and the attention over them, or a recurrent layer's state."""

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

    def pieces(self, seq: int) -> Sequence[int]:
        """Return the lengths in which the next `seq` positions are to be taken: each leaves a state to be written."""

    def read_state(self) -> State | None:
        """Return the state after the positions that are held; None where there is no position yet."""

    def write_state(self, state: State, length: int) -> None:
        """Append `length` positions, which leave this state."""
