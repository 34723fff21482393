"""Markdown on a terminal as it arrives, without flicker.

A block that is complete (a paragraph, a list, a fenced piece of code) is printed once and stays. Only the last block,
which may still change, is drawn again and again, in a region no higher than the screen.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING, ClassVar

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import CodeBlock, ListItem, Markdown, MarkdownElement
from rich.segment import Segment
from rich.style import Style
from rich.syntax import Syntax
from rich.text import Text

if TYPE_CHECKING:
    from markdown_it.token import Token

_REDRAW_S = 0.06
_CODE_THEME = "ansi_dark"
_IS_CODE = "code"  # in the meta data of a style: the line stands at the left margin


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
            self._console.print(render(text), crop=False)
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
        self._live.update(Tail(render(self._pending, fold_code=True)), refresh=True)
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


class _Code(CodeBlock):
    """Code that can be copied: nothing before or after its lines, and long lines are left to the terminal to wrap."""

    def __init__(self, lexer_name: str, theme: str, fold: bool) -> None:
        super().__init__(lexer_name, theme)
        self._fold = fold

    @classmethod
    def create(cls, markdown: Markdown, token: Token) -> _Code:
        language = (token.info or "").partition(" ")[0] or "text"
        return cls(language, markdown.code_theme, isinstance(markdown, _Markdown) and markdown.fold_code)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        text = Syntax(code, self.lexer_name, theme=self.theme, word_wrap=self._fold).highlight(code)
        text.rstrip()
        text.stylize(Style(meta={_IS_CODE: True}))
        text.overflow = "fold" if self._fold else "ignore"
        yield text


class _Item(ListItem):
    """A list item whose text is indented, and whose code is not."""

    def render_bullet(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._lines(console, options, Segment(" • ", console.get_style("markdown.item.bullet")))

    def render_number(self, console: Console, options: ConsoleOptions, number: int, last_number: int) -> RenderResult:
        numeral = f"{number}".rjust(len(f"{last_number}") + 1) + " "
        yield from self._lines(console, options, Segment(numeral, console.get_style("markdown.item.number")))

    def _lines(self, console: Console, options: ConsoleOptions, mark: Segment) -> Iterable[Segment]:
        within = options.update(width=options.max_width - len(mark.text))
        segments = Segment.apply_style(console.render(self.elements, within), self.style)
        for number, line in enumerate(Segment.split_lines(segments)):
            if number == 0:
                yield mark
            if number == 0 and _is_code(line):
                yield Segment.line()
            elif number > 0 and line and not _is_code(line):
                yield Segment(" " * len(mark.text))
            yield from line
            yield Segment.line()


def _is_code(line: list[Segment]) -> bool:
    return any(segment.style is not None and segment.style.meta.get(_IS_CODE) for segment in line)


class _Markdown(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "fence": _Code,
        "code_block": _Code,
        "list_item_open": _Item,
    }
    fold_code = False


def render(text: str, *, fold_code: bool = False) -> RenderableType:
    """Return Markdown in Rich's form: code in the terminal's own colours, links as they are written.

    Lines of code that are wider than the terminal are folded with `fold_code`, and otherwise left whole: print them
    uncropped, and they are copied as one line.
    """
    markdown = _Markdown(text.strip("\n"), code_theme=_CODE_THEME, justify="default", hyperlinks=False)
    markdown.fold_code = fold_code
    return markdown


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
