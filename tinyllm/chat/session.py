"""A conversation with a model: what a turn asks of it, and what is left of it afterwards."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from tinyllm.chat.conversation import ASSISTANT, USER, Conversation, Message
from tinyllm.chat.transcript import Transcript, TranscriptStore
from tinyllm.engine.request import SamplingParams
from tinyllm.errors import ChatFileError, ContextLengthError, UsageError
from tinyllm.text.chat_template import THINKING

if TYPE_CHECKING:
    from tinyllm.chat.model import ChatModel
    from tinyllm.llm import LLM, Answer, Chunk, Statistics
    from tinyllm.text.chat_template import ChatTemplate

logger = logging.getLogger("tinyllm")

Overflow = Literal["stop", "shift"]

# Where a model's makers say nothing: lively, and without the tail of what is unlikely.
TALK: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.95}
SETTINGS = (*(field.name for field in fields(SamplingParams) if field.name != "held_back"), "max_tokens", "stop")
_TOKEN_ID = re.compile(r"[0-9]{1,18}")
_LONGEST_PROBLEM = 200  # characters: a file may hold a setting of any length
_ROOM_SHARE = 8  # of the context, one part of this many is to be left for an answer before turns are dropped


@dataclass
class Thinking:
    """What a template is told of reasoning; None leaves it to the template."""

    wanted: bool | None = None

    @property
    def template_args(self) -> dict[str, Any]:
        """The variables by which templates know it."""
        return {} if self.wanted is None else dict.fromkeys(THINKING, self.wanted)

    def told(self, template: ChatTemplate | None) -> str:
        """Say what is wanted, and whether a template has a switch for it at all."""
        if self.wanted is None:
            return "as the template says"
        idle = template is not None and not template.reads(*THINKING)
        return (
            "on" if self.wanted else "off"
        ) + " (without effect: this model's template has no switch for it)" * idle


class Session:
    """Asks `model` on behalf of a conversation, with `settings` of `LLM.chat`, and writes it to `store` turn by turn.

    The pages of earlier turns are kept by the engine: a turn computes what is new, or what the template has changed.
    With `overflow` "shift" the oldest exchanges are forgotten when the context is full. `settings` are the person's
    own; what is neither there nor stated by the model is as in `TALK`.
    """

    def __init__(
        self,
        model: ChatModel,
        *,
        conversation: Conversation | None = None,
        settings: Mapping[str, Any] | None = None,
        template_args: Mapping[str, Any] | None = None,
        think: bool | None = None,
        overflow: Overflow = "stop",
        store: TranscriptStore | None = None,
        transcript: Transcript | None = None,
    ) -> None:
        self.model = model
        self.conversation = conversation or Conversation()
        self.settings = dict(settings or {})
        self.thinking = Thinking(think)
        self.overflow = overflow
        self.store = store
        self.transcript = transcript
        self.statistics: Statistics | None = None
        self.dropped = 0  # messages that were forgotten because the context was full
        self._template_args = dict(template_args or {})
        self._behind = False  # whether the file lacks something that could not be written

    @property
    def llm(self) -> LLM:
        """The model, which is waited for where it is still being loaded. Raises what loading raises."""
        return self.model.llm

    # ------------------------------------------------------------ asking

    def ask(self, text: str, *, instead: bool = False) -> tuple[Answer, Iterator[Chunk]]:
        """Ask something, `instead` of the last question or after it; return the answer and its chunks.

        The exchange becomes part of the conversation with the first words of the answer: if it is cancelled or fails
        before them, nothing has changed. Raises ContextLengthError if the context is too small, and ChatTemplateError
        if the template refuses.
        """
        question = Message(USER, text)
        prompt_ids, dropped = self._prompt_with_room(question, instead=instead)
        answer = self.llm.answer(prompt_ids, tells_reasoning=True, **self.in_force)
        return answer, self._chunks(question, answer, instead=instead, dropped=dropped)

    def _chunks(self, question: Message, answer: Answer, *, instead: bool, dropped: int) -> Iterator[Chunk]:
        said: list[str] = []
        thought: list[str] = []
        try:
            for chunk in answer:
                if not said and (chunk.text or chunk.reasoning):
                    if instead:
                        self.undo()
                    self._forget(dropped)
                    self._begin_file(question.content)
                    self._say(question)
                if said or chunk.text or chunk.reasoning:
                    said.append(chunk.text)
                    thought.append(chunk.reasoning)
                    self.statistics = chunk.statistics or self.statistics
                yield chunk
        finally:
            if said:
                self._say(Message(ASSISTANT, "".join(said), "".join(thought)))

    def _prompt_with_room(self, question: Message, *, instead: bool) -> tuple[list[int], int]:
        """Return the tokens of the next prompt, and how many of the oldest messages it leaves out.

        With `overflow` "shift" the oldest exchanges are left out until an answer of some length fits.
        """
        context = self.llm.context
        said = self.conversation
        before = said.without_last() if instead else Conversation(said.system, said.messages)
        turns = len(before.messages)
        while True:
            prompt_ids = self._encode(before.prompt(question))
            shifts = self.overflow == "shift" and bool(before.messages)
            if len(prompt_ids) + (max(1, context // _ROOM_SHARE) if shifts else 1) <= context:
                return prompt_ids, turns - len(before.messages)
            if not shifts:
                raise ContextLengthError(self._too_long(len(prompt_ids), alone=not before.messages))
            before.drop_oldest()

    def _too_long(self, tokens: int, *, alone: bool) -> str:
        context = self.llm.context
        if alone:
            system = "" if self.conversation.system is None else " with the system message"
            return (
                f"the message{system} takes {tokens:,} tokens, and the context has {context:,}: shorten it, or start"
                " with a larger --max-context if the model allows that"
            )
        return (
            f"the conversation would take {tokens:,} of the context's {context:,} tokens: /undo, /clear, or start"
            " with --overflow shift, which forgets the oldest turns"
        )

    def _forget(self, count: int) -> None:
        """Drop the oldest messages, so many."""
        if count:
            del self.conversation.messages[:count]
            self.dropped += count
            self._note(drop=count)

    # ------------------------------------------------------------ what is in force

    @property
    def in_force(self) -> dict[str, Any]:
        """The settings of the next answer."""
        stated, greedy = self.llm.sampling, self.settings.get("temperature") == 0
        talk = {} if greedy or "temperature" in stated else {n: v for n, v in TALK.items() if n not in stated}
        return {**talk, **{name: value for name, value in self.settings.items() if value is not None}}

    def set(self, name: str, value: Any) -> None:
        """Change a setting; None gives it back to the model. Raises UsageError for a value that makes no sense."""
        if value is not None:
            check_setting(name, value)
        self.settings = {key: v for key, v in {**self.settings, name: value}.items() if v is not None}
        self._note(settings=self.settings)

    def set_system(self, text: str | None) -> None:
        """Change the system message, or take it away."""
        self.conversation.system = text
        self._note(system=text)

    def tokens(self) -> int:
        """Count the tokens of the conversation as the next prompt would have them."""
        return len(self._encode(self.conversation.prompt())) if self.conversation.prompt() else 0

    def _encode(self, messages: list[dict[str, Any]]) -> list[int]:
        arguments = {**self._template_args, **self.thinking.template_args}
        return self.llm.tokenizer.encode_chat(messages, **arguments)

    # ------------------------------------------------------------ going back, and to others

    def undo(self) -> str | None:
        """Take the last exchange back; return what was said in it."""
        text = self.conversation.undo()
        self._note(keep=len(self.conversation.messages))
        return text

    def clear(self) -> None:
        """Begin another conversation, with the same system message and settings."""
        self.begin(Conversation(self.conversation.system), None)

    def begin(self, conversation: Conversation, transcript: Transcript | None) -> None:
        """Go on with another conversation, in its file where it has one."""
        self.conversation, self.transcript = conversation, transcript
        self.statistics, self.dropped, self._behind = None, 0, False

    # ------------------------------------------------------------ the file

    def _begin_file(self, first_words: str) -> None:
        if self.store is not None and self.transcript is None:
            self.transcript = self.store.new(first_words)
            self._write_whole()

    def save(self, name: str | None) -> str:
        """Write a copy of the conversation under a name, and return the name. Raises ChatFileError.

        Without a name, begin to save the conversation, which is done already unless saving was switched off.
        """
        store = self.store or TranscriptStore.of_user()
        if name is None and self.transcript is not None:
            return self.transcript.name
        if name is None:
            copy = self.transcript = store.new(self.conversation.last_question or "empty")
        else:
            copy = store.named(name)
        copy.begin(self.model.name, self.conversation, self.settings)
        return copy.name

    def rename(self, name: str) -> None:
        """Give the conversation's file another name. Raises ChatFileError."""
        if self.transcript is None:
            when = "not saved: /save saves it" if self.store is None else "saved from the first message on"
            raise ChatFileError(f"this conversation has no file to rename: it is {when}")
        self.transcript.rename(name)

    def _say(self, message: Message) -> None:
        self.conversation.messages.append(message)
        self._write(lambda transcript: transcript.add(message))

    def _note(self, **change: Any) -> None:
        self._write(lambda transcript: transcript.note(**change))

    def _write_whole(self) -> None:
        self._write(lambda transcript: transcript.write_whole(self.model.name, self.conversation, self.settings))

    def _write(self, write: Callable[[Transcript], None]) -> None:
        """Write to the file, if there is one; after a failure, which is warned of once, write everything again."""
        if self.transcript is None:
            return
        try:
            if self._behind:
                self.transcript.write_whole(self.model.name, self.conversation, self.settings)
            else:
                write(self.transcript)
            self._behind = False
        except ChatFileError as error:
            if not self._behind:
                logger.warning("%s (the chat goes on, and is saved as soon as that is possible)", error)
            self._behind = True


def check_setting(name: str, value: Any) -> None:
    """Raise UsageError, naming the setting, for one that does not exist or a value that it cannot have."""
    match name:
        case "stop":
            if not isinstance(value, list | tuple) or not all(isinstance(each, str) and each for each in value):
                raise UsageError("stop must be strings that are not empty")
        case "max_tokens":
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"max_tokens must be 1 or more, not {value}")
        case "logit_bias" if not isinstance(value, Mapping):
            raise UsageError("logit_bias must map token ids to numbers")
        case _ if name not in SETTINGS:
            raise UsageError(f"there is no setting {name!r}")
        case _:
            SamplingParams(**{name: value})


def read_settings(saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that a file holds, and why others of it are left out."""
    settings: dict[str, Any] = {}
    problems = []
    for name, value in saved.items():
        if name == "logit_bias" and isinstance(value, Mapping):  # JSON has strings for keys
            value = {int(key) if _TOKEN_ID.fullmatch(key) else key: bias for key, bias in value.items()}
        try:
            check_setting(name, value)
            settings[name] = tuple(value) if name == "stop" else value
        except UsageError as error:
            problems.append(str(error)[:_LONGEST_PROBLEM])
    return settings, problems
