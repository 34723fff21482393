"""Rows that take decode steps together."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from tinyllm._mx import mx
from tinyllm.engine.request import Request, SamplingParams
from tinyllm.engine.sampling import Arrays, Sampler, history_of, ring_size, stack_histories
from tinyllm.engine.scheduler import Sequence


@dataclass(frozen=True)
class Batch:
    """Sequences, with what was asked for each, that take steps as `rows` rows: those beyond them are padding.

    A step is told by its `index`: the index in each answer of the token that the step chooses.
    """

    sequences: tuple[Sequence, ...]
    requests: tuple[Request, ...]
    rows: int
    vocab: int
    sampler: Sampler
    logprobs: int | None

    @classmethod
    def of(cls, sequences: Rows[Sequence], requests: Rows[Request], rows: int, vocab: int) -> Batch:
        """Lay out how the rows are sampled."""
        params = [request.sampling for request in requests] + [SamplingParams()] * (rows - len(sequences))
        asked = [request.logprobs for request in requests if request.logprobs is not None]
        sampler = Sampler.of(params, vocab)
        return cls(tuple(sequences), tuple(requests), rows, vocab, sampler, max(asked, default=None))

    @property
    def index(self) -> tuple[int, ...]:
        """The index of the tokens that come next."""
        return tuple(sequence.generated for sequence in self.sequences)

    def positions(self, index: Rows[int]) -> list[int]:
        """Return where in prompt and answer the tokens stand that the step takes in."""
        return [sequence.prompt_length + i - 1 for sequence, i in zip(self.sequences, index, strict=True)]

    def ring_index(self, positions: Rows[int]) -> list[int]:
        """Return where in each row's ring tokens at these positions go."""
        return [
            position % (ring_size(request.sampling, _longest(sequence)) or 1)
            for position, request, sequence in zip(positions, self.requests, self.sequences, strict=True)
        ]

    def history(self, *, without: int = 0) -> Arrays:
        """Return what penalties remember of the rows, `without` the last so many of their tokens."""
        histories = [
            history_of(
                request.sampling,
                sequence.ids[: len(sequence.ids) - without],
                sequence.prompt_length,
                self.vocab,
                _longest(sequence),
            )
            for request, sequence in zip(self.requests, self.sequences, strict=True)
        ]
        return stack_histories([*histories, *[{}] * (self.rows - len(histories))], self.vocab)

    def column(self, values: Rows[int], dtype: mx.Dtype = mx.int32) -> mx.array:
        """Return one number a row (rows,), 0 for padding."""
        return mx.array([*values, *[0] * (self.rows - len(values))], dtype=dtype)


def _longest(sequence: Sequence) -> int:
    return sequence.prompt_length + sequence.max_new
