"""Where a person's lines come from: an editor on a terminal, or plain stdin."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tinyllm.chat.commands import ALIASES, COMMANDS, Kind
from tinyllm.chat.session import SETTINGS
from tinyllm.terminal.text import visible
from tinyllm.text.given import MOST_BYTES, decoded, too_large

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

_QUOTES = '"""'
_LEAST_NAME = 8  # columns of a name that is cut


class PlainLines:
    """Lines of stdin. On a terminal there is a prompt, and Ctrl-C twice leaves; elsewhere each line is a turn."""

    edits = False

    def __init__(self) -> None:
        self.footer: Callable[[int], str] = lambda width: ""
        self._interactive = sys.stdin.isatty()

    def read(self, draft: str, label: str = "") -> str | None:
        """Return the next line, or all lines up to the closing quotation marks.

        Raises UsageError for a message that does not end, or is not text.
        """
        interrupted = False
        while True:
            try:
                return self._read(label)
            except KeyboardInterrupt:
                if interrupted or not self._interactive:
                    raise
                interrupted = True
                print("\n(Ctrl-C again leaves)", file=sys.stderr)

    def wake(self, error: BaseException | None) -> None:
        """There is no footer, and reading is not ended."""

    def _read(self, label: str) -> str | None:
        lines: list[str] = []
        left = MOST_BYTES
        while True:
            if self._interactive:
                print("... " if lines else visible(f"{label}> "), end="", file=sys.stderr, flush=True)
            content = sys.stdin.buffer.readline(left + 1)
            if not content:
                return "".join(lines) or None
            left -= len(content)
            if left < 0:
                raise too_large("a message")
            lines.append(decoded(content, "stdin").replace("\r\n", "\n"))
            if not is_open("".join(lines)):
                return "".join(lines).rstrip("\n")


class EditedLines:
    """Lines from prompt_toolkit: history across runs, completion, several lines, $EDITOR, and a footer."""

    edits = True

    def __init__(self, history: Path | None, names: Callable[[Kind], Iterable[str]]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.history import InMemoryHistory

        self.footer: Callable[[int], str] = lambda width: ""
        self._leaving = False
        self._drafted = False
        self._error: BaseException | None = None
        file = None if history is None else _private(history)
        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory() if file is None else _history(file),
            completer=_completer(names),
            complete_while_typing=False,
            key_bindings=self._keys(),
            multiline=Condition(lambda: is_open(self._session.default_buffer.text)),
            prompt_continuation=lambda width, number, wrapped: "  " if wrapped else "... ",
            bottom_toolbar=self._toolbar,
            reserve_space_for_menu=4,
            tempfile_suffix=".md",
            enable_suspend=True,
        )

    def read(self, draft: str, label: str = "") -> str | None:
        """Edit a line; None after Ctrl-D, or Ctrl-C twice. What others print meanwhile is shown above it.

        Ctrl-C on a line that began as a draft gives an empty line. Ctrl-Z suspends the process group.
        """
        from prompt_toolkit.patch_stdout import patch_stdout

        self._leaving, self._drafted = False, bool(draft)
        try:
            with patch_stdout():
                return self._session.prompt(f"{label}> ", default=draft, pre_run=self._look)
        except (EOFError, KeyboardInterrupt):
            return None

    def wake(self, error: BaseException | None) -> None:
        """Draw the footer anew, and end reading with an `error`: this one, or else the next one."""
        self._error = error
        loop = self._session.app.loop
        if loop is not None:
            with suppress(RuntimeError):  # it is closed: a line has come meanwhile
                loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        app = self._session.app
        if self._error is not None and app.future is not None and not app.future.done():
            app.exit(exception=self._error)
        app.invalidate()

    def _toolbar(self) -> str:
        return "Ctrl-C again leaves" if self._leaving else self.footer(self._session.output.get_size().columns)

    def _keys(self) -> KeyBindings:
        from prompt_toolkit.key_binding import KeyBindings

        keys = KeyBindings()

        @keys.add("c-c")
        def clear(event: KeyPressEvent) -> None:
            if self._drafted:
                event.app.exit(result="")
            elif event.current_buffer.text:
                event.current_buffer.reset()
                self._leaving = False
            elif self._leaving:
                event.app.exit(exception=KeyboardInterrupt)
            else:
                self._leaving = True

        @keys.add("escape", "enter")
        def new_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("c-g")
        def edit(event: KeyPressEvent) -> None:
            event.current_buffer.open_in_editor(validate_and_handle=False)

        return keys


def is_open(text: str) -> bool:
    """Whether a text begins with three quotation marks that are not closed yet."""
    stripped = text.strip()
    return stripped.startswith(_QUOTES) and not (len(stripped) >= 6 and stripped.endswith(_QUOTES))


def fit(parts: Sequence[str], width: int) -> str:
    """Join as many of the parts, the first before the others, as fit into so many columns."""
    for count in range(len(parts), 0, -1):
        line = " · ".join(parts[:count])
        if len(line) <= width:
            return line
    return parts[0][:width] if parts else ""


def fit_named(name: str, parts: Sequence[str], width: int) -> str:
    """Join a name and as many of the parts as fit; the name is cut for their sake, and left out for the first's."""
    for count in range(len(parts), 0, -1):
        rest = " · ".join(parts[:count])
        room = width - len(rest) - len(" · ")
        if room >= min(len(name), _LEAST_NAME):
            return f"{name if len(name) <= room else name[: room - 1] + '…'} · {rest}"
    return fit(parts, width)


def _completer(names: Callable[[Kind], Iterable[str]]) -> Completer:
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    class Commands(Completer):
        def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
            text = document.text_before_cursor
            if not text.startswith("/") or "\n" in text:
                return
            name, space, argument = text[1:].partition(" ")
            if not space:
                for command in COMMANDS:
                    for each in (command.name, *ALIASES.get(command.name, ())):
                        if each.startswith(name):
                            yield Completion(each, -len(name), display=f"/{each}", display_meta=command.help)
                return
            kind: Kind = next((command.completes for command in COMMANDS if command.name == name), "")
            if kind == "file":
                rest = Document(argument, len(argument))
                yield from PathCompleter(expanduser=True).get_completions(rest, event)
            elif kind:
                for each in _names_of(kind, names):
                    if each.lower().startswith(argument.lower()):
                        yield Completion(each, -len(argument))

    return Commands()


def _names_of(kind: Kind, names: Callable[[Kind], Iterable[str]]) -> Iterable[str]:
    known: dict[Kind, Iterable[str]] = {
        "command": [command.name for command in COMMANDS],
        "setting": SETTINGS,
        "think": ("on", "off", "default", "show"),
    }
    return known[kind] if kind in known else names(kind)


def _history(file: Path) -> History:
    """Return the lines of earlier chats. A line that cannot be written, as on a full disk, is kept for this chat."""
    from prompt_toolkit.history import FileHistory

    class Lenient(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):
                super().store_string(string)

    return Lenient(str(file))


def _private(path: Path) -> Path | None:
    """Make a file that only its owner may read, unless it is there; None if it cannot be made."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError:
        return None
    return path
