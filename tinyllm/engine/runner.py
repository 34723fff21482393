"""One request on the device: its prompt in chunks, then a token a step, with the next step's graph built ahead."""

from __future__ import annotations

from time import perf_counter

from tinyllm._mx import mx
from tinyllm.engine.request import Request
from tinyllm.engine.sampling import sample
from tinyllm.errors import NonFiniteLogitsError
from tinyllm.model.transformer import ModelForCausalLM


class Sequence:
    """A request that runs. `advance` until `prefilled`, then `next_token` until the request is over."""

    def __init__(self, request: Request, model: ModelForCausalLM, chunk: int) -> None:
        self.request = request
        self.prefill_s = 0.0
        self.generated = 0
        self._model = model
        self._chunk = chunk
        self._cache = model.create_kv_cache()
        self._ahead: tuple[mx.array, mx.array] | None = None

    @property
    def prefilled(self) -> bool:
        """Whether the whole prompt has been dispatched, and its first token with it."""
        return self._ahead is not None

    @property
    def kv_bytes(self) -> int:
        """Bytes of the cache."""
        return sum(layer.nbytes for layer in self._cache)

    def advance(self) -> None:
        """Prefill the next chunk of the prompt; with the last one, dispatch the choice of the first token."""
        started = perf_counter()
        prompt, start = self.request.prompt_ids, self._cache[0].offset
        chunk = mx.array([prompt[start : start + self._chunk]])
        if start + self._chunk < len(prompt):
            self._model(chunk, start, self._cache, logits_to_keep=1)
            mx.eval([array for layer in self._cache for array in layer.arrays])
        else:
            self._ahead = self._choose(chunk, index=0)
            mx.eval(self._ahead)
        self.prefill_s += perf_counter() - started

    def next_token(self, *, last: bool) -> int:
        """Wait for the token that is being computed, with the one after it built meanwhile unless this is the `last`.

        Raises NonFiniteLogitsError if the network produced inf or NaN.
        """
        assert self._ahead is not None
        token, finite = self._ahead
        # The next step is built while this one runs and dispatched when it is done: dispatched sooner, its writes
        # into the cache would copy the buffers that this step still reads.
        following = None if last else self._choose(token[:, None], index=self.generated + 1)
        mx.eval(token, finite)
        if not finite.item():
            raise NonFiniteLogitsError(
                f"the network produced inf or NaN at token {self.generated + 1} of the answer;"
                f" it computes in {_name(self._model.dtype)}: try another --dtype (bfloat16 or float32)"
            )
        self.generated += 1
        self._ahead = following
        value = token.item()
        assert isinstance(value, int)
        return value

    def dispatch(self) -> None:
        """Start computing the token after the one that `next_token` gave."""
        if self._ahead is not None:
            mx.async_eval(*self._ahead)  # type: ignore[no-untyped-call]

    def _choose(self, inputs: mx.array, index: int) -> tuple[mx.array, mx.array]:
        """Build the graph that feeds `inputs` (1, seq): the token after them, and whether its logits are finite."""
        logits = self._model(inputs, self._cache[0].offset, self._cache, logits_to_keep=1)[:, -1]
        return sample(logits, [self.request.sampling], index), mx.all(mx.isfinite(logits))


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
