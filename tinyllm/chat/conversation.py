"""What was said: a system message and turns of a user and a model. No mlx, no terminal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"


@dataclass(frozen=True)
class Message:
    """One side's words. `reasoning` is what a model thought before its answer, which is no part of `content`."""

    role: str
    content: str
    reasoning: str = ""

    def for_template(self) -> dict[str, Any]:
        """Return what a chat template is given: whether it keeps the reasoning of earlier turns is its business."""
        said = {"role": self.role, "content": self.content}
        return {**said, "reasoning_content": self.reasoning} if self.reasoning else said


class Conversation:
    """Messages in turn, a user's first, and the `system` message that stands before them."""

    def __init__(self, system: str | None = None, messages: Iterable[Message] = ()) -> None:
        self.system = system
        self.messages = list(messages)

    def prompt(self, *more: Message) -> list[dict[str, Any]]:
        """Return all messages, and `more` after them, as a chat template takes them.

        A message that was never answered, because the process was killed, is joined with the user's next one: many
        templates refuse a conversation in which the two sides do not take turns.
        """
        turns: list[Message] = [] if self.system is None else [Message(SYSTEM, self.system)]
        for message in (*self.messages, *more):
            if turns and turns[-1].role == message.role == USER:
                turns[-1] = Message(USER, f"{turns[-1].content}\n\n{message.content}")
            else:
                turns.append(message)
        return [message.for_template() for message in turns]

    @property
    def last_question(self) -> str | None:
        """What the user said last, if anything."""
        return next((message.content for message in reversed(self.messages) if message.role == USER), None)

    @property
    def last_answer(self) -> Message | None:
        """What the model said last, if anything."""
        return next((message for message in reversed(self.messages) if message.role == ASSISTANT), None)

    def undo(self) -> str | None:
        """Take the last exchange back, and return what the user said in it; None where there is none."""
        while self.messages:
            message = self.messages.pop()
            if message.role == USER:
                return message.content
        return None

    def without_last(self) -> Conversation:
        """Return the conversation before its last exchange."""
        before = Conversation(self.system, self.messages)
        before.undo()
        return before

    def drop_oldest(self) -> None:
        """Forget the oldest exchange: everything before the user's second message."""
        later = [i for i, message in enumerate(self.messages) if message.role == USER and i > 0]
        del self.messages[: later[0] if later else None]
