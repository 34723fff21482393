"""A model's reasoning told apart from its answer."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from tinyllm.text.stops import overlap

__all__ = ["FORMATS", "Part", "ReasoningFormat", "ReasoningSplitter", "Split"]


class Part(enum.Enum):
    """What a stretch of a model's output is."""

    REASONING = "reasoning"
    ANSWER = "answer"
    HEADER = "header"  # a name between control tokens, shown to nobody


class Split(NamedTuple):
    """A piece of output, told apart; either part may be ""."""

    reasoning: str
    answer: str


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks its reasoning.

    `opening` is what begins it, as a chat template may have written already. `marks` maps texts to the part that
    follows them; None stands for `<|message|>`, where the header before it decides. `anywhere` is for marks that
    are control tokens and count wherever they are; others count only around a block at the very start, as an answer
    may speak of `<think>`. `controls` are control tokens that are a part of a mark.
    """

    name: str
    opening: str
    marks: Mapping[str, Part | None]
    anywhere: bool = False
    controls: tuple[str, ...] = ()

    @property
    def shown(self) -> frozenset[str]:
        """The control tokens that a stream must show for its marks to be found."""
        return frozenset({*self.marks, *self.controls})

    def opened_by(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside the reasoning, which its template has opened (fault 25)."""
        return prompt.rstrip().endswith(self.opening)


def _tags(name: str, opening: str, closing: str) -> ReasoningFormat:
    return ReasoningFormat(name, opening, {opening: Part.REASONING, closing: Part.ANSWER})


_COMMAND_A = ReasoningFormat(
    "command-a",
    "<|START_THINKING|>",
    {
        "<|START_THINKING|>": Part.REASONING,
        "<|END_THINKING|>": Part.ANSWER,
        "<|START_RESPONSE|>": Part.ANSWER,
        "<|END_RESPONSE|>": Part.ANSWER,
    },
    anywhere=True,
)
_HARMONY = ReasoningFormat(
    "harmony",
    "<|channel|>analysis<|message|>",
    {
        "<|start|>": Part.HEADER,
        "<|channel|>": Part.HEADER,
        "<|message|>": None,
        "<|end|>": Part.HEADER,
    },
    anywhere=True,
)

_SOLAR = ReasoningFormat(
    "solar",
    "<|think|>",
    {"<|think|>": Part.REASONING, "<|content|>": Part.ANSWER, "<|begin|>": Part.HEADER, "<|end|>": Part.HEADER},
    anywhere=True,
)
_HUNYUAN = ReasoningFormat(
    "hunyuan",
    "<think>",
    {"<think>": Part.REASONING, "</think>": Part.ANSWER, "<answer>": Part.ANSWER, "</answer>": Part.ANSWER},
    anywhere=True,
)
_GEMMA4 = replace(_tags("gemma4", "<|channel>thought", "<channel|>"), controls=("<|channel>",))

# From the chat templates of Qwen 3, DeepSeek R1, SmolLM 3, GLM 4.5, Phi 4 and many more; Magistral; Seed-OSS; Kimi;
# EXAONE Deep; Apertus; Gemma 4; Hunyuan; Solar Open; Command A Reasoning; gpt-oss (https://cookbook.openai.com/articles/openai-harmony).
FORMATS = (
    _HUNYUAN,  # whose templates know the marks of the next one too
    _tags("think", "<think>", "</think>"),
    _tags("magistral", "[THINK]", "[/THINK]"),
    _tags("seed", "<seed:think>", "</seed:think>"),
    _tags("kimi", "◁think▷", "◁/think▷"),
    _tags("exaone", "<thought>", "</thought>"),
    _tags("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
    _GEMMA4,
    _SOLAR,
    _COMMAND_A,
    _HARMONY,
)


class ReasoningSplitter:
    """Splits a stream of text into reasoning and answer; the result is the same for any pieces.

    Without a format all is answer. `opened` says that the prompt has opened the reasoning already. The marks are
    dropped, and so are the line breaks that touch them. Reasoning that is never closed stays reasoning.
    """

    def __init__(self, fmt: ReasoningFormat | None, *, opened: bool = False):
        self._format = fmt
        self._part = Part.REASONING if opened else Part.ANSWER
        self._at_start = fmt is not None and not fmt.anywhere
        self._after_mark = opened
        self._buffer = ""
        self._header = ""

    @property
    def in_reasoning(self) -> bool:
        """Whether the stream is inside the reasoning now."""
        return self._part is Part.REASONING

    def add(self, text: str) -> Split:
        """Take the next piece; give what is known to be reasoning and answer now."""
        self._buffer += text
        given = Split("", "")
        while not (self._at_start and self._may_open()):
            mark, start = self._next_mark()
            if mark is None:
                return _join(given, self._give(len(self._buffer) - self._held()))
            given = _join(given, self._give(start, before_mark=True))
            self._buffer = self._buffer[len(mark) :]
            self._enter(mark)
        return given

    def finish(self) -> Split:
        """Give what was held; the stream ends here."""
        return self._give(len(self._buffer))

    def _may_open(self) -> bool:
        """Whether only an opening mark can be decided upon; takes it off where it is there."""
        assert self._format is not None
        text, opening = self._buffer.lstrip(), self._format.opening
        if text.startswith(opening):
            self._buffer = text[len(opening) :]
            self._enter(opening)
        elif opening.startswith(text):
            return True
        self._at_start = False
        return False

    def _active_marks(self) -> list[str]:
        """The marks that count where the stream is now."""
        if self._format is None or not (self._format.anywhere or self.in_reasoning):
            return []
        return [m for m, part in self._format.marks.items() if self._format.anywhere or part is Part.ANSWER]

    def _next_mark(self) -> tuple[str | None, int]:
        found = [(start, mark) for mark in self._active_marks() if (start := self._buffer.find(mark)) >= 0]
        start, mark = min(found, default=(0, None))
        return mark, start

    def _enter(self, mark: str) -> None:
        assert self._format is not None
        part = self._format.marks[mark]
        if part is None:
            part = Part.REASONING if self._header.strip().startswith("analysis") else Part.ANSWER
        self._part, self._header, self._after_mark = part, "", True

    def _held(self) -> int:
        """How much of the end may still be a mark, or a line break before one."""
        marks = self._active_marks()
        if not marks:
            return 0
        partial = max(overlap(self._buffer, mark) for mark in marks)
        body = self._buffer[: len(self._buffer) - partial]
        return partial + len(body) - len(body.rstrip("\n"))

    def _give(self, length: int, *, before_mark: bool = False) -> Split:
        """Hand out the beginning of the buffer as the part that it is."""
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        text = text.rstrip("\n") if before_mark else text
        text = text.lstrip("\n") if self._after_mark else text
        self._after_mark = self._after_mark and not text
        if self._part is Part.HEADER:
            self._header += text
            return Split("", "")
        return Split(text, "") if self.in_reasoning else Split("", text)


def _join(first: Split, second: Split) -> Split:
    return Split(first.reasoning + second.reasoning, first.answer + second.answer)
