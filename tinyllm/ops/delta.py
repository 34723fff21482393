"""The gated delta rule (arXiv 2412.06464): linear attention whose state forgets, and corrects what it holds.

A head has a matrix S (key_dim, value_dim). Position t has a query q, a key k, a value v, a decay a and a rate b:

    S = a S;  S = S + k (b (v - k S));  y = q S

so that what the state gives for the key moves towards the value. All is computed in float32.
"""

from __future__ import annotations

from tinyllm._mx import mx

_CHUNK = 64
_EPSILON = 1e-6


def l2_normalised(x: mx.array) -> mx.array:
    """Scale each vector of x (..., dim) to unit length."""
    return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + _EPSILON)


def delta_rule(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    rate: mx.array,
    state: mx.array,
    *,
    chunked: bool = True,
) -> tuple[mx.array, mx.array]:
    """Take q, k (batch, heads, seq, key_dim) and v (batch, heads, seq, value_dim) through the rule.

    `log_decay` and `rate` are (batch, heads, seq), `state` (batch, heads, key_dim, value_dim), float32 all of them.
    Returns what v's shape is, and the state after the last position.
    """
    if not chunked:
        return delta_rule_reference(q, k, v, log_decay, rate, state)
    if q.shape[2] == 1:
        return delta_rule_step(q, k, v, log_decay, rate, state)
    return delta_rule_chunked(q, k, v, log_decay, rate, state)


def delta_rule_reference(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, rate: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """The rule as it is written, position by position."""
    outputs = []
    for t in range(q.shape[2]):
        state = state * mx.exp(log_decay[:, :, t, None, None])
        key, value = k[:, :, t, :, None], v[:, :, t, None, :]
        change = rate[:, :, t, None, None] * (value - (key * state).sum(axis=2, keepdims=True))
        state = state + key * change
        outputs.append((q[:, :, t, :, None] * state).sum(axis=2))
    return mx.stack(outputs, axis=2), state


def delta_rule_step(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, rate: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """One position, reading the state once for q and k together."""
    decay = mx.exp(log_decay)[..., None]
    read = decay * (mx.concatenate([k, q], axis=2) @ state)
    change = rate[..., None] * (v - read[:, :, :1])
    overlap = (q * k).sum(axis=-1, keepdims=True)
    return read[:, :, 1:] + overlap * change, state * decay + k.swapaxes(-1, -2) * change


def delta_rule_chunked(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, rate: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Chunks of 64 positions, each a few products; only the state goes from one to the next (arXiv 2406.06484).

    Within a chunk, the change c that position i makes to the state depends on those of the ones before it:
    c_i = b_i (v_i - k_i S_i), where S_i is the state that the chunk began with and their changes, decayed. This is
    (I + L) c = b (v - k S), L strictly lower triangular, and is solved for all positions of all chunks at once.
    """
    batch, heads, seq, _ = q.shape
    size = min(_CHUNK, seq)
    q, k, v = (_chunks(x, size) for x in (q, k, v))
    log_decay, rate = (_chunks(x[..., None], size)[..., 0] for x in (log_decay, rate))
    index = mx.arange(size)
    lower = index[:, None] > index
    # Summed between each two positions: the difference of two long sums would be off by more than a short sum is.
    between = mx.cumsum(mx.where(lower, log_decay[..., None], 0), axis=-2)
    between = mx.where(index[:, None] >= index, mx.exp(between), 0)
    keys = k.swapaxes(-1, -2)
    fast = rate[..., None] * k
    solve = unit_lower_inverse(mx.where(lower, (fast @ keys) * between, 0))
    since = mx.exp(mx.cumsum(log_decay, axis=-1))[..., None]
    values, reads = solve @ (rate[..., None] * v), solve @ (fast * since)
    inner = (q @ keys) * between
    q = q * since
    keys = keys * between[..., -1:, :]
    whole = since[..., -1:, :]
    outputs = []
    for n in range(q.shape[2]):
        change = values[:, :, n] - reads[:, :, n] @ state
        outputs.append(q[:, :, n] @ state + inner[:, :, n] @ change)
        state = state * whole[:, :, n] + keys[:, :, n] @ change
    return mx.stack(outputs, axis=2).reshape(batch, heads, -1, v.shape[-1])[:, :, :seq], state


def unit_lower_inverse(lower: mx.array) -> mx.array:
    """Invert I + L for strictly lower triangular L (..., n, n).

    By blocks, which double in size: the inverse of [[A, 0], [C, B]] has -B⁻¹ C A⁻¹ below. As stable as solving row
    by row, and a dozen products for n = 64.
    """
    n = lower.shape[-1]
    row, column = mx.arange(n)[:, None], mx.arange(n)
    inverse = mx.broadcast_to(mx.eye(n), lower.shape)
    size = 1
    while size < n:
        below = (row // (2 * size) == column // (2 * size)) & (row // size > column // size)
        inverse = inverse - inverse @ mx.where(below, lower, 0) @ inverse
        size *= 2
    return inverse


def _chunks(x: mx.array, size: int) -> mx.array:
    """Divide x (batch, heads, seq, dim) into (batch, heads, chunks, size, dim): zeros at its end change nothing."""
    batch, heads, seq, dim = x.shape
    x = mx.pad(x, [(0, 0), (0, 0), (0, -seq % size), (0, 0)])
    return x.reshape(batch, heads, -1, size, dim)
