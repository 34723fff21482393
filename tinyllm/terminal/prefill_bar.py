"""A bar of the tokens of a prompt that are processed, while a person waits for the first words."""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn

__all__ = ["PrefillBar"]

_PATIENCE_S = 0.5
_COLUMNS = 20


class PrefillBar(Progress):
    """Appears if a prompt of `total` tokens takes longer than half a second, and only where a person watches.

    `stop` takes it away; so does the last token.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._began = monotonic()
        super().__init__(
            TextColumn("reading the prompt"),
            BarColumn(_COLUMNS),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
            console=console,
            transient=True,
            redirect_stdout=False,
            disable=not console.is_interactive,
        )
        self._total = total
        self._task = self.add_task("", total=total)
        self.start()

    def get_renderables(self) -> Iterable[RenderableType]:
        """Show nothing at first."""
        if monotonic() - self._began >= _PATIENCE_S:
            yield from super().get_renderables()

    def show(self, done: int) -> None:
        """Show how many tokens are processed."""
        if done < self._total:
            self.update(self._task, completed=done)
        else:
            self.stop()

    def stop(self) -> None:
        """Take the bar away; twice is no error."""
        if not self.disable:
            super().stop()
