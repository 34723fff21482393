"""What a person sees of a chat: on a terminal with Rich, or as plain text."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tinyllm.chat.markdown_stream import MarkdownStream, Tail, dimmed
from tinyllm.terminal.console import TerminalConsole
from tinyllm.terminal.prefill_bar import PrefillBar
from tinyllm.terminal.text import tell

_THOUGHT_LINES = 6
_REDRAW_S = 0.06


class Reply(Protocol):
    """One answer as it is shown."""

    def prefill(self, done: int) -> None:
        """Show how many tokens of the prompt have been processed."""

    def think(self, text: str) -> None:
        """Show a piece of reasoning."""

    def say(self, text: str) -> None:
        """Show a piece of the answer."""

    def finish(self) -> None:
        """The answer is over."""


class Screen(Protocol):
    """Where a chat shows what is said."""

    @property
    def width(self) -> int:
        """Columns."""

    def reply(self, prompt_tokens: int) -> Reply:
        """Begin to show an answer to a prompt of so many tokens."""

    def tell(self, text: str) -> None:
        """Say something that neither side has said."""

    def complain(self, text: str) -> None:
        """Say what could not be done."""

    def clear(self) -> None:
        """Take away what is shown of the present."""


class PlainScreen:
    """Answers as they are, on stdout through `write`, and what is told on stderr."""

    width = 80

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def reply(self, prompt_tokens: int) -> PlainReply:
        """Begin an answer."""
        return PlainReply(self._write, PrefillBar(TerminalConsole(stderr=True), prompt_tokens))

    def tell(self, text: str) -> None:
        """Print to stderr."""
        tell(text)

    def complain(self, text: str) -> None:
        """Print to stderr, under the program's name."""
        self.tell(f"tinyllm: {text}")

    def clear(self) -> None:
        """Nothing is taken away."""


class PlainReply:
    """Text as it comes, ended by a line break; reasoning is not shown, and progress on stderr alone."""

    def __init__(self, write: Callable[[str], None], bar: PrefillBar) -> None:
        self._write = write
        self._bar = bar
        self._last = ""

    def prefill(self, done: int) -> None:
        """Show a bar after a while."""
        self._bar.show(done)

    def think(self, text: str) -> None:
        """Reasoning is no part of the answer."""

    def say(self, text: str) -> None:
        """Write a piece."""
        if text:
            self._bar.stop()
            self._write(text)
            self._last = text

    def finish(self) -> None:
        """End the line."""
        self._bar.stop()
        if not self._last.endswith("\n"):
            self._write("\n")


class RichScreen:
    """Markdown on a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or TerminalConsole(highlight=False)

    @property
    def width(self) -> int:
        """Columns of the terminal, now."""
        return self._console.width

    def reply(self, prompt_tokens: int) -> RichReply:
        """Begin an answer."""
        return RichReply(self._console, prompt_tokens)

    def tell(self, text: str) -> None:
        """Print dimmed."""
        self._console.print(dimmed(text))

    def complain(self, text: str) -> None:
        """Print in red."""
        self._console.print(Text(text, style="red"))

    def clear(self) -> None:
        """Clear the screen."""
        self._console.clear()


class RichReply:
    """Reasoning dimmed while it lasts, and then folded into one line; the answer as Markdown."""

    def __init__(self, console: Console, prompt_tokens: int) -> None:
        self._console = console
        self._bar = PrefillBar(console, prompt_tokens)
        self._markdown = MarkdownStream(console)
        self._thought = ""
        self._thinking_since = 0.0
        self._drawn_at = 0.0
        self._live: Live | None = None

    def prefill(self, done: int) -> None:
        """Show a bar after a while."""
        self._bar.show(done)

    def think(self, text: str) -> None:
        """Show the last lines of what is thought."""
        if not text:
            return
        if self._live is None:
            self._bar.stop()
            self._thinking_since = monotonic()
            self._live = Live(console=self._console, transient=True, auto_refresh=False)
            self._live.start()
        self._thought += text
        if monotonic() - self._drawn_at >= _REDRAW_S:
            lines = self._thought.strip("\n").splitlines()[-_THOUGHT_LINES:]
            self._live.update(Tail(Text("\n".join(lines), style="dim italic")), refresh=True)
            self._drawn_at = monotonic()

    def say(self, text: str) -> None:
        """Show a piece of the answer."""
        if text:
            self._fold()
            self._markdown.add(text)

    def finish(self) -> None:
        """Show what the answer has become."""
        self._fold()
        self._markdown.finish()
        self._console.print()

    def _fold(self) -> None:
        self._bar.stop()
        if self._live is None:
            return
        self._live.stop()
        self._live = None
        self._console.print(dimmed(f"(thought for {monotonic() - self._thinking_since:.1f} s: /think show)"))
        self._console.print()
