"""The ids of one answer as text, told apart: the one place where detokenizer, reasoning and stop strings meet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tinyllm.text.reasoning import ReasoningSplitter, Split
from tinyllm.text.stops import StopStrings
from tinyllm.text.tokenizer import Tokenizer


class TextStream:
    """Turns token ids into text that is final, piece by piece.

    With `tells_reasoning`, reasoning is split from the answer; stop strings are matched in the answer alone. Once
    `stop` is set the text is over. Raises UsageError for an empty stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        stops: str | Iterable[str] = (),
        tells_reasoning: bool,
    ) -> None:
        form = tokenizer.reasoning_format if tells_reasoning else None
        self._detokenizer = tokenizer.detokenizer(keep=form.shown if form else ())
        self._splitter = tokenizer.reasoning_splitter(prompt_ids) if form else ReasoningSplitter(None)
        self._stops = StopStrings(stops)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.matched

    def add(self, token_id: int) -> Split:
        """Take the next id; give the reasoning and the answer that are final now."""
        return self._stopped(self._splitter.add(self._detokenizer.add(token_id)))

    def finish(self) -> Split:
        """Give what was held back; the ids end here."""
        if self.stop is not None:
            return Split("", "")
        reasoning, answer = self._stopped(self._splitter.add(self._detokenizer.finish()))
        last = self._stopped(self._splitter.finish())
        return Split(reasoning + last.reasoning, answer + last.answer + self._stops.finish())

    def _stopped(self, split: Split) -> Split:
        return Split(split.reasoning, self._stops.add(split.answer))
