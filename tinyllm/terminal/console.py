"""A Rich console through which no control character of a text reaches the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from tinyllm.terminal.text import visible

__all__ = ["TerminalConsole"]


class TerminalConsole(Console):
    """A console that sends its own control codes only."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as Rich does, with the control characters of texts made visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)
