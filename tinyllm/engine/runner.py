"""One request on the device: its prompt in chunks, then a token a step, with the next step's graph built ahead."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from tinyllm._mx import dtype_name, mx
from tinyllm.engine.request import Request, TokenLogprobs
from tinyllm.engine.sampling import Choice, History, choose, log_probabilities
from tinyllm.errors import NonFiniteLogitsError
from tinyllm.model.transformer import ModelForCausalLM


@dataclass(frozen=True)
class _Step:
    """A token that is being computed: from `logits` (1, vocab), with the `history` before it."""

    logits: mx.array
    finite: mx.array
    history: History
    choice: Choice
    logprobs: tuple[mx.array, mx.array, mx.array] | None

    @property
    def arrays(self) -> list[mx.array]:
        """What must be computed for the step to be over."""
        exact = [] if self.choice.exact is None else [self.choice.exact]
        return [self.finite, self.choice.tokens, *exact, *(self.logprobs or ())]


class Sequence:
    """A request that runs: `advance` until `is_prefilled`, then `next_token` and `dispatch` until it is over."""

    def __init__(self, request: Request, model: ModelForCausalLM, *, chunk: int, longest: int) -> None:
        self.request = request
        self.prefill_s = 0.0
        self.generated = 0
        self._model = model
        self._chunk = chunk
        self._cache = model.create_kv_cache()
        self._history = History.of(request.sampling, request.prompt_ids, model.config.vocab_size, longest)
        self._step: _Step | None = None

    @property
    def is_prefilled(self) -> bool:
        """Whether the whole prompt has been computed, and the choice of the first token with it."""
        return self._step is not None

    @property
    def prefilled(self) -> int:
        """How many tokens of the prompt are computed."""
        return min(self._cache[0].offset, len(self.request.prompt_ids))

    @property
    def kv_bytes(self) -> int:
        """Bytes of the cache."""
        return sum(layer.nbytes for layer in self._cache)

    def advance(self) -> None:
        """Prefill the next chunk of the prompt; with the last one, choose the first token."""
        started = perf_counter()
        prompt, start = self.request.prompt_ids, self._cache[0].offset
        chunk = mx.array([prompt[start : start + self._chunk]])
        if start + self._chunk < len(prompt):
            self._model(chunk, start, self._cache, logits_to_keep=1)
            mx.eval([array for layer in self._cache for array in layer.arrays])
        else:
            self._step = self._build(chunk, self._history, index=0)
            mx.eval(self._step.arrays)
        self.prefill_s += perf_counter() - started

    def next_token(self, *, last: bool) -> tuple[int, TokenLogprobs | None]:
        """Wait for the token that is being computed, with the step after it built meanwhile unless it is the `last`.

        Raises NonFiniteLogitsError if the network produced inf or NaN.
        """
        assert self._step is not None
        step = self._step
        # The next step is built while this one runs, and dispatched when it is done: dispatched sooner, its writes
        # into the cache would copy the buffers that this step still reads.
        following = None if last else self._after(step)
        mx.eval(step.arrays)
        if not step.finite.item():
            raise NonFiniteLogitsError(
                f"the network produced inf or NaN at token {self.generated + 1} of the answer; it computes in"
                f" {dtype_name(self._model.dtype)}: try --dtype bfloat16 or float32"
            )
        if step.choice.exact is not None and not step.choice.exact.item():
            step = self._chosen_from_all(step)
            if following is not None:
                for layer in self._cache:
                    layer.trim(1)
                following = self._after(step)
        self.generated += 1
        self._step = following
        token = step.choice.tokens.item()
        assert isinstance(token, int)
        return token, _read_logprobs(step)

    def dispatch(self) -> None:
        """Start computing the token after the one that `next_token` gave."""
        if self._step is not None:
            mx.async_eval(*self._step.arrays)  # type: ignore[no-untyped-call]

    def _after(self, step: _Step) -> _Step:
        tokens = step.choice.tokens
        return self._build(tokens[:, None], step.history.append(tokens), index=self.generated + 1)

    def _build(self, inputs: mx.array, history: History, index: int) -> _Step:
        """Build the graph that feeds `inputs` (1, seq) and chooses the token after them."""
        logits = self._model(inputs, self._cache[0].offset, self._cache, logits_to_keep=1)[:, -1]
        return self._choose(logits, history, choose(logits, [self.request.sampling], history, index))

    def _chosen_from_all(self, step: _Step) -> _Step:
        """Choose the step's token again, among the whole vocabulary."""
        vocab = step.logits.shape[-1]
        params = [self.request.sampling]
        again = choose(step.logits, params, step.history, self.generated, candidates=vocab)
        step = self._choose(step.logits, step.history, again)
        mx.eval(step.arrays)
        return step

    def _choose(self, logits: mx.array, history: History, choice: Choice) -> _Step:
        top = self.request.logprobs
        logprobs = None if top is None else log_probabilities(logits, choice.tokens, top)
        return _Step(logits, mx.all(mx.isfinite(logits)), history, choice, logprobs)


def _read_logprobs(step: _Step) -> TokenLogprobs | None:
    if step.logprobs is None:
        return None
    chosen, ids, values = (array.tolist() for array in step.logprobs)
    return TokenLogprobs(chosen[0], tuple(zip(ids[0], values[0], strict=True)))  # type: ignore[index,arg-type]
