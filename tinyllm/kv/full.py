"""The dense cache of one layer: every key and value that it has seen, in one buffer, or its state."""

from __future__ import annotations

from collections.abc import Sequence

from tinyllm._mx import mx
from tinyllm.kv.cache import State
from tinyllm.ops.attention import AttentionSpec, attention_over, mask_of
from tinyllm.ops.packed_kv import stored_form


class TinyKvFullCache:
    """Keys and values of one layer for `offset` positions, (batch, kv_heads, offset, head_dim) each.

    The buffers grow by `step` positions at a time. A window narrows what is seen, not what is kept, so that `trim`
    is exact. Latent attention has no values of its own. With `bits` what is held is packed to as many.

    A recurrent layer has a state instead, and this is kept as it was before the last write too.
    """

    def __init__(self, step: int = 256, bits: int | None = None) -> None:
        self.offset = 0
        self._step = step
        self._bits = bits
        self._buffers: list[mx.array] = []
        self._states: list[tuple[int, State]] = []  # the last two, and after how many positions

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, with the room that is not used yet."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def arrays(self) -> list[mx.array]:
        """The buffers, for the caller that evaluates them."""
        return [*self._buffers, *(array for _, state in self._states for array in state)]

    def attend(
        self, q: mx.array, k: mx.array | None, v: mx.array | None, spec: AttentionSpec, mask: mx.array | None = None
    ) -> mx.array:
        """Append k and v (batch, kv_heads, seq, head_dim), then attend with q (batch, heads, seq, head_dim).

        Queries are causal, and see as far as `spec` says, unless `mask` (seq, offset + seq) takes the place of that.
        Without k nothing is appended: q is of the last positions that are held.
        """
        seq = q.shape[2]
        if k is not None:
            new = stored_form([k] if v is None else [k, v], self._bits)
            buffers: list[mx.array | None] = [*self._buffers] or [None] * len(new)
            self._buffers = [
                _appended(buffer, each, self.offset, self._step) for buffer, each in zip(buffers, new, strict=True)
            ]
            self.offset += seq
        start, end = self.offset - seq, self.offset
        first = 0 if mask is not None or spec.reach is None else spec.reach.first(start)
        stored = [array[:, :, first:end] for array in self._buffers]
        seen = mask_of(spec, start, seq, first, own=mask, dtype=q.dtype)
        return attention_over(q, stored, spec, seen, self._bits)

    def pieces(self, seq: int) -> Sequence[int]:
        """Return `seq`: all positions are taken at once."""
        return [seq]

    def read_state(self) -> State | None:
        """Return the state after the positions that are held; None where there is no position yet."""
        return self._states[-1][1] if self._states else None

    def write_state(self, state: State, length: int) -> None:
        """Append `length` positions, which leave this state."""
        self.offset += length
        self._states = [*self._states[-1:], (self.offset, state)]

    def trim(self, n: int) -> None:
        """Forget the last `n` positions.

        Raises ValueError if there are fewer, or if no state is kept that the rest has left.
        """
        left = self.offset - n
        if not 0 <= left <= self.offset:
            raise ValueError(f"cannot trim {n} of {self.offset} positions")
        if self._states:
            states = [(offset, state) for offset, state in self._states if offset <= left]
            if left and (not states or states[-1][0] != left):
                kept = " or ".join(f"{offset}" for offset in (0, *(offset for offset, _ in self._states)))
                raise ValueError(f"cannot trim {n} of {self.offset} positions: a state goes back to {kept} of them")
            self._states = states
        self.offset = left


def _appended(buffer: mx.array | None, new: mx.array, start: int, step: int) -> mx.array:
    """Return the buffer with `new` at positions from `start` on."""
    end = start + new.shape[2]
    buffer = _with_room(buffer, new, end, step)
    buffer[:, :, start:end] = new
    return buffer


def _with_room(buffer: mx.array | None, new: mx.array, end: int, step: int) -> mx.array:
    """Return a buffer like `new` with room for `end` positions, holding what `buffer` held."""
    room = 0 if buffer is None else buffer.shape[2]
    if buffer is not None and end <= room:
        return buffer
    batch, heads, _, head_dim = new.shape
    added = mx.zeros((batch, heads, -(-(end - room) // step) * step, head_dim), dtype=new.dtype)
    return added if buffer is None else mx.concatenate([buffer, added], axis=2)
