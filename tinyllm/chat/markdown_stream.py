"""Markdown on a terminal as it arrives, without flicker.

A block that is complete (a paragraph, a list, a fenced piece of code) is printed once and stays. Only the last block,
which may still change, is drawn again and again, in a region no higher than the screen.
"""

from __future__ import annotations

from time import monotonic

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

_REDRAW_S = 0.06
_CODE_THEME = "ansi_dark"


class MarkdownStream:
    """Shows a text that grows. `finish` it: what was drawn last is replaced by what it has become."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pending = ""
        self._live: Live | None = None
        self._drawn_at = 0.0
        self._printed = False

    def add(self, text: str) -> None:
        """Take the next piece."""
        self._pending += text
        done = last_block(self._pending)
        if done:
            self._print(self._pending[:done])
            self._pending = self._pending[done:]
            self._drawn_at = 0.0
        if monotonic() - self._drawn_at >= _REDRAW_S:
            self._draw()

    def finish(self) -> None:
        """Print what is left."""
        self._print(self._pending)
        self._pending = ""

    def _print(self, text: str) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if text.strip():
            if self._printed:
                self._console.print()
            self._console.print(render(text))
            self._printed = True

    def _draw(self) -> None:
        if not self._pending.strip():
            return
        if self._live is None:
            if self._printed:
                self._console.print()
                self._printed = False  # its empty line is there already
            self._live = Live(console=self._console, transient=True, auto_refresh=False)
            self._live.start()
        self._live.update(Tail(render(self._pending)), refresh=True)
        self._drawn_at = monotonic()


class Tail:
    """The last lines of something, as many as fit on the screen."""

    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render everything, and keep the end."""
        lines = console.render_lines(self._renderable, options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


def render(text: str) -> RenderableType:
    """Return Markdown in Rich's form: code in the terminal's own colours, links as they are written."""
    return Markdown(text.strip("\n"), code_theme=_CODE_THEME, hyperlinks=False)


def last_block(text: str) -> int:
    """Return where the last block of a text begins, in characters: what stands before it is complete."""
    starts = [token.map[0] for token in Markdown(text).parsed if token.level == 0 and token.map]
    if len(starts) < 2:
        return 0
    lines = text.splitlines(keepends=True)
    return sum(len(line) for line in lines[: starts[-1]])


def dimmed(text: str) -> Text:
    """Return text that is an aside."""
    return Text(text, style="dim")
