"""The loop: a line is read, and is a command or a message; a message is answered."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tinyllm.chat.commands import as_typed, find_command, shortened
from tinyllm.chat.conversation import USER
from tinyllm.chat.interrupt import cancelling, without_echo
from tinyllm.chat.lines import fit, fit_named
from tinyllm.chat.session import Session, read_settings
from tinyllm.chat.transcript import Saved, Transcript
from tinyllm.errors import TinyllmError

if TYPE_CHECKING:
    from tinyllm.chat.model import ChatModel
    from tinyllm.chat.screen import Screen

_NEARLY_FULL = 0.85  # of the context


class Lines(Protocol):
    """Where a person's lines come from; `edits` says whether a line can be given to be changed.

    `footer` makes the line at the foot, of so many columns, where there is a place for it.
    """

    edits: bool
    footer: Callable[[int], str]

    def read(self, draft: str, label: str = "") -> str | None:
        """Return the next line, which begins as `draft`, with `label` before the prompt; None after the last one."""

    def wake(self, error: BaseException | None) -> None:
        """Draw the footer anew, and end reading with an `error`, from whatever thread."""


class Repl:
    """One chat. `load` finds a model by the name that a person gives, and begins to load it."""

    def __init__(
        self,
        session: Session,
        lines: Lines,
        screen: Screen,
        *,
        load: Callable[[str], ChatModel],
    ) -> None:
        self.session = session
        self.lines = lines
        self.screen = screen
        self.attached: dict[Path, str] = {}  # what /read has read, for the next message
        self.draft = ""
        self.edits_last = False
        self.over = False
        self._load = load
        self._counted: tuple[object, int] = (None, 0)

    def run(self) -> None:
        """Go on until the lines end, or /exit. What goes wrong in a turn is told, and is no end.

        Without a model there is no going on: raises what loading it has raised.
        """
        model = self.session.model
        model.when_over(lambda: self.lines.wake(model.failure))
        while not self.over:
            draft, self.draft = self.draft, ""
            line = self.lines.read(draft, self._label())
            if line is None:
                return
            try:
                with without_echo() if self.lines.edits else nullcontext():
                    self.take(line)
            except TinyllmError as error:
                if error is self.session.model.failure:
                    raise
                self.screen.complain(str(error))
            except KeyboardInterrupt:
                if self.over:
                    raise
                self.screen.tell("(stopped)")
                if not self.session.model.is_loaded and not self.draft:
                    self._give_back(line)

    def _label(self) -> str:
        files = [f"[{shortened(path.name)}] " for path in self.attached]
        return "".join(["edit "] * self.edits_last + files)

    def take(self, line: str) -> None:
        """Do what a line says. Raises TinyllmError."""
        instead, self.edits_last = self.edits_last, False
        text = unquoted(line)
        if not text.strip():
            return
        if text == line and text.startswith("/") and not text.startswith("//"):
            name, _, argument = text[1:].strip().partition(" ")
            message = find_command(name).run(self, argument.strip())
            if message is not None:
                self.answer(message, as_typed(message), instead=True)
        else:
            message = text[1:] if text.startswith("//") else text
            if self.answer("\n\n".join([*self.attached.values(), message]), line, instead=instead):
                self.attached.clear()

    def answer(self, message: str, typed: str, *, instead: bool) -> bool:
        """Have a message answered, `instead` of the last one or after it; return whether an answer has begun.

        Ctrl-C ends the answer, and a second Ctrl-C the chat. If there are no words of the answer yet, or it fails
        before them, nothing has changed, and the person gets what was `typed` back. Raises TinyllmError.
        """
        begun, reason, dropped = False, None, self.session.dropped
        try:
            answer, chunks = self.session.ask(message, instead=instead)
            with cancelling(answer):
                reply = self.screen.reply(len(answer.prompt_token_ids))
                try:
                    for chunk in chunks:
                        begun = begun or bool(chunk.text or chunk.reasoning)
                        if not begun:
                            reply.prefill(chunk.prefilled)
                        reply.think(chunk.reasoning)
                        reply.say(chunk.text)
                        reason = chunk.finish_reason
                except KeyboardInterrupt:
                    self.over = True
                    raise
                finally:
                    reply.finish()
        finally:
            if not begun:
                self._give_back(typed, edits_last=instead)
        if self.session.dropped > dropped:
            self.screen.tell(f"({self.session.dropped - dropped} of the oldest messages are forgotten)")
        if reason != "cancelled" and not begun:
            self.screen.tell("(the model has answered nothing: the conversation is as it was)")
        self._say_how_it_ended(reason)
        return begun

    def _give_back(self, typed: str, *, edits_last: bool = False) -> None:
        """Let the next line begin as what was typed, if lines can be edited."""
        if self.lines.edits:
            self.draft, self.edits_last = typed, edits_last

    def footer(self, width: int) -> str:
        """Say in one line, of so many columns, what answers, how full the context is, and how fast it went."""
        session = self.session
        if not session.model.is_loaded:
            return fit([f"loading {session.model.title}", "what you type waits for it"], width)
        used, context, statistics = self._used(), session.llm.context, session.statistics
        figures = [f"{used:,} of {context:,} tokens, {context - used:,} left"]
        if statistics is not None:
            figures += [f"{statistics.decode_tps:.1f} tokens/s", f"first token {statistics.ttft_s:.2f} s"]
        return fit_named(session.model.title, figures, width)

    def _used(self) -> int:
        """Count the tokens of the conversation as it stands, once until it changes: a template takes its time."""
        session, conversation = self.session, self.session.conversation
        state = (session.model.name, session.thinking.wanted, conversation.system, tuple(conversation.messages))
        if self._counted[0] != state:
            self._counted = state, session.tokens()
        return self._counted[1]

    def _say_how_it_ended(self, reason: str | None) -> None:
        session = self.session
        used, context = self._used(), session.llm.context
        if reason == "cancelled":
            self.screen.tell("(stopped)")
        elif reason == "length" and session.statistics is not None:
            s = session.statistics
            full = s.prompt_tokens + s.completion_tokens >= context
            self.screen.tell("(the context is full)" if full else "(cut off: max_tokens)")
        if used >= _NEARLY_FULL * context and session.overflow == "stop":
            self.screen.tell(
                f"({used:,} of the context's {context:,} tokens are used: /undo or /clear, or start with --overflow"
                " shift)"
            )

    def switch_model(self, name: str) -> None:
        """Have another model go on with the conversation. Raises TinyllmError, and then the old one stays."""
        model = self._load(name)
        _ = model.llm  # raises, if it cannot be had, while the old one is still there
        self.session.model.close()
        self.session.model, self.session.statistics = model, None

    def resume(self, transcript: Transcript, saved: Saved) -> None:
        """Go on with a saved conversation."""
        session = self.session
        session.begin(saved.conversation, transcript)
        session.settings, problems = read_settings(saved.settings)
        turns = len(saved.conversation.messages)
        other = f", held with {saved.model}" if saved.model != session.model.name else ""
        torn = "; its last line was cut off" if saved.torn else ""
        self.screen.tell(f"{transcript.name}: {turns} messages{other}{torn}")
        for message in saved.conversation.messages[-2:]:
            self.screen.tell(f"  {message.role}: {shortened(message.content)}")
        if saved.conversation.messages[-1:] and saved.conversation.messages[-1].role == USER:
            self.screen.tell("(the last message has no answer: /retry has it answered)")
        for problem in problems:
            self.screen.complain(f"{transcript.name}: a saved setting is left out: {problem}")


def unquoted(line: str) -> str:
    """Return what stands between three quotation marks, where a line begins with them; else the line."""
    stripped = line.strip()
    if not stripped.startswith('"""'):
        return line
    return stripped.removeprefix('"""').removesuffix('"""').strip("\n")
