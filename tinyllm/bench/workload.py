"""What to measure: prompts, answers and depths as a list of workloads, checked before any model is loaded. No mlx."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

from tinyllm.config.config import Config
from tinyllm.errors import ContextLengthError, UsageError

__all__ = ["Workload", "check_context", "make_workloads", "read_counts", "read_pair"]

_RANGE = re.compile(r"(?P<first>\d{1,12})(?:-(?P<last>\d{1,12})(?:(?P<sign>[+*])(?P<step>\d{1,12}))?)?", re.ASCII)
_MOST_COUNTS = 1000


@dataclass(frozen=True)
class Workload:
    """`prompt` tokens are read, then `generate` tokens made, `depth` tokens into the context, in `batch` rows.

    What is timed is exactly that: the depth is computed before the clock starts. The first token of an answer comes
    with its prompt; a test without a prompt times the `generate` tokens after it.

    The rows are requests with prompts of their own. The engine reads one prompt after another, while the rows before
    it decode already; their prompts have taken the time until the last row has its first token. A test without a
    prompt times `generate` steps in which every row gets a token, and lets the first rows go on until then.
    """

    prompt: int
    generate: int
    depth: int = 0
    batch: int = 1

    @property
    def label(self) -> str:
        """The test as llama-bench names it: pp512, tg128 @ d2048, pp512+tg128."""
        parts = [f"pp{self.prompt}"] * (self.prompt > 0) + [f"tg{self.generate}"] * (self.generate > 0)
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def prompt_tokens(self) -> int:
        """Length of the request's prompt: no answer begins from nothing."""
        return max(self.depth + self.prompt, 1)

    @property
    def max_tokens(self) -> int:
        """How many tokens the request generates, the one that comes with the prompt included."""
        if not self.prompt:
            return self.generate + 1
        return max(self.generate, 1)

    @property
    def positions(self) -> int:
        """How much of the context a row takes at the end."""
        return self.prompt_tokens + self.max_tokens

    def lead(self, chunk: int) -> int:
        """How many tokens the first row is ahead of the last one: a token beside each `chunk` of the others' prompts.

        None where the first row ends by itself.
        """
        return 0 if self.prompt else (self.batch - 1) * -(-self.prompt_tokens // chunk)

    def prompts(self, vocab_size: int, seed: int, repetition: int) -> list[tuple[int, ...]]:
        """Draw a prompt for each row: the same for the same seed, and others in each repetition."""
        random = Random(f"{seed} {self} {repetition}")
        return [tuple(random.choices(range(vocab_size), k=self.prompt_tokens)) for _ in range(self.batch)]


def read_counts(option: str, text: str, *, least: int = 0) -> tuple[int, ...]:
    """Read counts and ranges: 128,512 or 1-8 or 1-16*2 or 128-512+128. Raises UsageError naming `option`."""
    counts: dict[int, None] = {}
    for part in text.split(","):
        counts |= dict.fromkeys(_read_range(option, part.strip()))
    if min(counts) < least:
        raise UsageError(f"{option} must be {least} or more, not {min(counts)}")
    return tuple(counts)


def read_pair(text: str) -> tuple[int, int]:
    """Read P,N of --pg. Raises UsageError."""
    counts = text.split(",")
    if len(counts) != 2:
        raise UsageError(f"--pg must be two counts, as in 512,128, not {text!r}")
    prompt, generate = (read_counts("--pg", count, least=1)[0] for count in counts)
    return prompt, generate


def make_workloads(
    prompts: Sequence[int],
    generates: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    depths: Sequence[int],
    batches: Sequence[int],
    *,
    chunk: int,
) -> list[Workload]:
    """Cross everything; a count of 0 leaves its workloads out.

    Raises UsageError when nothing is left, and where the clock could not start behind a depth: before a prompt, if
    the depth is no multiple of `chunk`, the tokens that the engine reads in one step; and before a prompt with an
    answer, if there are several rows, since the depths of some are read while others answer.
    """
    shapes = [*((p, 0) for p in prompts if p), *((0, n) for n in generates if n), *pairs]
    workloads = [Workload(*shape, depth, batch) for depth, batch, shape in product(depths, batches, shapes)]
    if not workloads:
        raise UsageError("there is nothing to measure: -p and -n are 0, and there is no --pg")
    for workload in workloads:
        if workload.prompt and workload.depth % chunk:
            raise UsageError(
                f"-d {workload.depth}: a prompt can be timed only after a multiple of {chunk} tokens; for answers"
                " alone (-p 0) any depth will do"
            )
        if workload.prompt and workload.generate and workload.depth and workload.batch > 1:
            raise UsageError(
                f"--pg cannot be timed behind a depth in a batch (-d {workload.depth} -b {workload.batch})"
            )
    return workloads


def check_context(workloads: Sequence[Workload], config: Config, name: str, *, chunk: int) -> None:
    """Raise ContextLengthError if a test needs more positions than the model has; `chunk` as above."""
    for workload in workloads:
        needed = workload.positions + workload.lead(chunk)
        if needed > config.max_position_embeddings:
            raise ContextLengthError(
                f"{workload.label} needs {needed:,} positions, and the context of {name} has"
                f" {config.max_position_embeddings:,}"
            )


def _read_range(option: str, text: str) -> Sequence[int]:
    found = _RANGE.fullmatch(text)
    if found is None:
        raise UsageError(f"{option} must be counts (128,512) or ranges (1-8, 1-16*2, 128-512+128), not {text!r}")
    first = int(found["first"])
    last, step = int(found["last"] or first), int(found["step"] or 1)
    multiplies = found["sign"] == "*"
    if step == 0 or (multiplies and (step == 1 or first == 0)):
        raise UsageError(f"{option}: the range {text!r} never ends")
    counts: Sequence[int] = range(first, last + 1, step)
    if multiplies:
        counts = [first * step**i for i in range(last.bit_length()) if first * step**i <= last]
    if not 0 < len(counts) <= _MOST_COUNTS:
        raise UsageError(f"{option}: the range {text!r} holds {len(counts):,} counts; 1 to {_MOST_COUNTS} will do")
    return counts
