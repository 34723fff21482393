"""The dense cache of one layer: every key and value that it has seen, in one buffer."""

from __future__ import annotations

from tinyllm._mx import mx
from tinyllm.ops.attention import AttentionSpec, Mask, attention, causal_mask


class TinyKvFullCache:
    """Keys and values of one layer for `offset` positions, (batch, kv_heads, offset, head_dim) each.

    The buffers grow by `step` positions at a time. A window narrows what is seen, not what is kept, so that `trim`
    is exact.
    """

    def __init__(self, step: int = 256) -> None:
        self.offset = 0
        self._step = step
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers, with the room that is not used yet."""
        return 0 if self._keys is None or self._values is None else self._keys.nbytes + self._values.nbytes

    @property
    def arrays(self) -> list[mx.array]:
        """The buffers, for the caller that evaluates them."""
        return [array for array in (self._keys, self._values) if array is not None]

    def attend(
        self, q: mx.array, k: mx.array, v: mx.array, spec: AttentionSpec, mask: mx.array | None = None
    ) -> mx.array:
        """Append k and v (batch, kv_heads, seq, head_dim), then attend with q (batch, heads, seq, head_dim).

        Queries are causal, and windowed as `spec` says, unless `mask` (seq, offset + seq) takes the place of that.
        """
        keys, values = self._append(k, v)
        seq, window = q.shape[2], spec.window
        if mask is None and window is not None and seq == 1:  # one query sees the end of the buffer: no mask needed
            keys, values = keys[:, :, -window:], values[:, :, -window:]
        seen: Mask = self._mask(seq, window) if mask is None else mask
        return attention(q, keys, values, spec, seen)

    def trim(self, n: int) -> None:
        """Forget the last `n` positions. Raises ValueError if there are fewer."""
        if not 0 <= n <= self.offset:
            raise ValueError(f"cannot trim {n} of {self.offset} positions")
        self.offset -= n

    def _append(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        start, end = self.offset, self.offset + k.shape[2]
        self._keys = _with_room(self._keys, k, end, self._step)
        self._values = _with_room(self._values, v, end, self._step)
        self._keys[:, :, start:end] = k
        self._values[:, :, start:end] = v
        self.offset = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def _mask(self, seq: int, window: int | None) -> Mask:
        if seq == 1:
            return None
        if window is None or self.offset <= window:
            return "causal"
        return causal_mask(seq, self.offset, window)


def _with_room(buffer: mx.array | None, new: mx.array, end: int, step: int) -> mx.array:
    """Return a buffer like `new` with room for `end` positions, holding what `buffer` held."""
    room = 0 if buffer is None else buffer.shape[2]
    if buffer is not None and end <= room:
        return buffer
    batch, heads, _, head_dim = new.shape
    added = mx.zeros((batch, heads, -(-(end - room) // step) * step, head_dim), dtype=new.dtype)
    return added if buffer is None else mx.concatenate([buffer, added], axis=2)
