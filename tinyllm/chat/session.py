"""A conversation with a model: what a turn asks of it, and what is left of it afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from tinyllm.chat.conversation import ASSISTANT, USER, Conversation, Message
from tinyllm.chat.transcript import Transcript, TranscriptStore
from tinyllm.engine.request import SamplingParams
from tinyllm.errors import ContextLengthError, UsageError
from tinyllm.text.chat_template import THINKING

if TYPE_CHECKING:
    from tinyllm.chat.model import ChatModel
    from tinyllm.llm import LLM, Answer, Chunk, Statistics
    from tinyllm.text.chat_template import ChatTemplate

Overflow = Literal["stop", "shift"]

# Where a model's makers say nothing: lively, and without the tail of what is unlikely.
TALK: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.95}
SETTINGS = (*(field.name for field in fields(SamplingParams)), "max_tokens", "stop")
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
        self.dropped = 0
        self._template_args = dict(template_args or {})

    @property
    def llm(self) -> LLM:
        """The model, which is waited for where it is still being loaded. Raises what loading raises."""
        return self.model.llm

    # ------------------------------------------------------------ asking

    def ask(self, text: str) -> tuple[Answer, Iterator[Chunk]]:
        """Say something. Returns the answer, which can be cancelled, and its chunks; these are to be taken.

        With the last of them the exchange is part of the conversation, also one that was cancelled after some words.
        Raises ContextLengthError where there is no room, and ChatTemplateError where the template refuses.
        """
        question = Message(USER, text)
        answer = self.llm.answer(self._prompt_with_room(question), tells_reasoning=True, **self.in_force)
        self._begin_file(text)
        return answer, self._chunks(question, answer)

    def _chunks(self, question: Message, answer: Answer) -> Iterator[Chunk]:
        self._say(question)
        said, thought = [], []
        try:
            for chunk in answer:
                said.append(chunk.text)
                thought.append(chunk.reasoning)
                self.statistics = chunk.statistics or self.statistics
                yield chunk
        finally:
            if any(said) or any(thought):
                self._say(Message(ASSISTANT, "".join(said), "".join(thought)))
            else:
                self.undo()  # a question without an answer: templates want turns

    def _prompt_with_room(self, question: Message) -> list[int]:
        """Return the tokens of the next prompt, after forgetting what leaves no room for an answer to it."""
        context = self.llm.context
        room = max(1, context // _ROOM_SHARE) if self.overflow == "shift" else 1
        while True:
            prompt_ids = self._encode(question)
            if len(prompt_ids) + room <= context:
                return prompt_ids
            if self.overflow != "shift" or not self._forget_oldest():
                raise ContextLengthError(
                    f"the conversation would take {len(prompt_ids):,} of the context's {context:,} tokens: /undo,"
                    " /clear, or start with --overflow shift, which forgets the oldest turns"
                )

    def _forget_oldest(self) -> bool:
        before = len(self.conversation.messages)
        if not self.conversation.drop_oldest():
            return False
        dropped = before - len(self.conversation.messages)
        self.dropped += dropped
        self._note(drop=dropped)
        return True

    # ------------------------------------------------------------ what is in force

    @property
    def in_force(self) -> dict[str, Any]:
        """The settings of the next answer."""
        stated, greedy = self.llm.sampling, self.settings.get("temperature") == 0
        talk = {} if greedy or "temperature" in stated else {n: v for n, v in TALK.items() if n not in stated}
        return {**talk, **{name: value for name, value in self.settings.items() if value is not None}}

    def set(self, name: str, value: Any) -> None:
        """Change a setting; None gives it back to the model. Raises UsageError for a value that makes no sense."""
        changed = {**self.settings, name: value}
        sampling = {field.name for field in fields(SamplingParams)}
        SamplingParams(**{key: v for key, v in changed.items() if key in sampling and v is not None})
        if name == "stop" and value is not None and not all(value):
            raise UsageError("a stop string must not be empty")
        if name == "max_tokens" and value is not None and value < 1:
            raise UsageError(f"max_tokens must be 1 or more, not {value}")
        self.settings = {key: v for key, v in changed.items() if v is not None}
        self._note(settings=self.settings)

    def set_system(self, text: str | None) -> None:
        """Change the system message, or take it away."""
        self.conversation.system = text
        self._note(system=text)

    def tokens(self) -> int:
        """Count the tokens of the conversation as the next prompt would have them."""
        return len(self._encode()) if self.conversation.prompt() else 0

    def _encode(self, *more: Message) -> list[int]:
        arguments = {**self._template_args, **self.thinking.template_args}
        return self.llm.tokenizer.encode_chat(self.conversation.prompt(*more), **arguments)

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
        self.statistics, self.dropped = None, 0

    # ------------------------------------------------------------ the file

    def _begin_file(self, first_words: str) -> None:
        if self.store is not None and self.transcript is None:
            transcript = self.store.new(first_words)
            transcript.begin(self.model.name, self.conversation, self.settings)
            self.transcript = transcript

    def save(self, name: str | None) -> str:
        """Write the conversation to a file from now on, under a name; return the name. Raises ChatFileError."""
        if self.transcript is None:
            store = self.store or TranscriptStore.of_user()
            transcript = store.new(self.conversation.last_question or "empty")
            transcript.begin(self.model.name, self.conversation, self.settings)
            self.transcript = transcript
        if name is not None and name != self.transcript.name:
            self.transcript.rename(name)
        return self.transcript.name

    def _say(self, message: Message) -> None:
        self.conversation.messages.append(message)
        if self.transcript is not None:
            self.transcript.add(message)

    def _note(self, **change: Any) -> None:
        if self.transcript is not None:
            self.transcript.note(**change)
