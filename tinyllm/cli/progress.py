"""What a person sees on a terminal while there is no answer yet; nothing where nobody watches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinyllm.cli import console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from tinyllm.terminal.prefill_bar import PrefillBar


class Progress:
    """One line on stderr that turns, and makes way for text. A context manager, which leaves no trace of it."""

    def __init__(self) -> None:
        self._console: Console | None = None
        self._live: Live | None = None
        self._bar: PrefillBar | None = None
        if console.on_terminal():
            from tinyllm.terminal.console import TerminalConsole

            self._console = TerminalConsole(stderr=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.clear()

    def show(self, doing: str) -> None:
        """Say what is being done, in place of what was said before."""
        if self._console is None:
            return
        from rich.live import Live
        from rich.spinner import Spinner
        from rich.text import Text

        if self._bar is not None:
            self._bar.stop()
        line = Spinner("dots", Text(doing), style="status.spinner")
        if self._live is None:
            # Without redirect_stdout=False, Rich would show here what is written to stdout, which is the answer's.
            self._live = Live(console=self._console, transient=True, refresh_per_second=12.5, redirect_stdout=False)
            self._live.start()
        self._live.update(line, refresh=True)

    def prefill(self, done: int, total: int) -> None:
        """Show how many of the prompt's tokens are processed, in place of the line, once that has taken a while."""
        if self._console is None:
            return
        if self._bar is None:
            from tinyllm.terminal.prefill_bar import PrefillBar

            self.clear()
            self._bar = PrefillBar(self._console, total)
        self._bar.show(done)

    def clear(self) -> None:
        """Take the line away, or the bar."""
        if self._bar is not None:
            self._bar.stop()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def aside(self, text: str) -> None:
        """Show text that is not the answer, dimmed, in place of the line."""
        self.clear()
        if self._console is not None:
            self._console.print(text, style="dim", end="", markup=False, highlight=False, soft_wrap=True)
