"""`tinyllm chat`: a conversation on the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinyllm.cli import console, options
from tinyllm.errors import ChatFileError, ChatTemplateError, UsageError

if TYPE_CHECKING:
    from tinyllm.chat.commands import Kind
    from tinyllm.chat.model import ChatModel
    from tinyllm.chat.repl import Lines
    from tinyllm.chat.screen import Screen
    from tinyllm.chat.session import Overflow
    from tinyllm.chat.transcript import TranscriptStore
    from tinyllm.llm import LLM

_LATEST = ""


@dataclass(frozen=True)
class _Opening:
    """What the command line asks of a chat; `resume` names a conversation, "" the latest."""

    model: str | None
    system: str | None
    settings: Mapping[str, Any]
    template_args: Mapping[str, Any]
    think: bool | None
    resume: str | None
    save: bool
    plain: bool
    overflow: Overflow
    arguments: Mapping[str, Any]
    offline: bool


@options.grouped
def chat(
    *,
    model: options.Model = None,
    system: options.System = None,
    sampling: options.ChatSampling,
    think: options.Think = None,
    template_arg: options.TemplateArg = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the latest conversation, or with NAME.")
    ] = False,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="With --resume: which conversation.")] = None,
    no_save: Annotated[bool, typer.Option("--no-save", help="Do not write the conversation to a file.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Plain text: no Markdown, no line editor.")] = False,
    overflow: Annotated[
        str, typer.Option(metavar="HOW", help="When the context is full: stop, or shift (forget the oldest turns).")
    ] = "stop",
    running: options.Running,
    offline: options.Offline = False,
    debug: options.Debug = False,
) -> None:
    """Talk with a model. /help says what can be asked of the chat itself.

    What is piped in is answered line by line, as plain text. Conversations are written, turn by turn, to files that
    only you can read; `tinyllm chat --resume` goes on with the latest.
    """

    def command() -> None:
        settings = sampling.settings()
        arguments = running.arguments(batch=1)
        if overflow not in ("stop", "shift"):
            raise UsageError(f"--overflow must be stop or shift, not {overflow!r}")
        if name is not None and not resume:
            raise UsageError(f"{name!r}: a conversation's name goes with --resume")
        _chat(
            _Opening(
                model=model,
                system=system,
                settings=settings,
                template_args=options.read_template_args(template_arg, None),
                think=think,
                resume=(name or _LATEST) if resume else None,
                save=not no_save,
                plain=plain,
                overflow="shift" if overflow == "shift" else "stop",
                arguments=arguments,
                offline=offline,
            )
        )

    raise typer.Exit(console.run(command, debug=debug))


def _chat(opening: _Opening) -> None:
    from tinyllm.chat.conversation import Conversation
    from tinyllm.chat.repl import Repl
    from tinyllm.chat.session import Session
    from tinyllm.chat.transcript import TranscriptStore, read_transcript

    store = TranscriptStore.of_user()
    resumed = None if opening.resume is None else store.find(opening.resume or None)
    saved = None if resumed is None else read_transcript(resumed.path)
    load = partial(_begin_to_load, opening=opening)
    lines, screen = _lines(opening, store), _screen(opening)  # before the model: the two would hold each other up
    model = load(opening.model or (saved.model if saved is not None and saved.model else None))
    session = Session(
        model,
        conversation=Conversation(opening.system),
        settings=opening.settings,
        template_args=opening.template_args,
        think=opening.think,
        overflow=opening.overflow,
        store=store if opening.save else None,
    )
    try:
        if not _is_interactive(opening):
            _ = model.llm  # raises what loading raises, before anything is read
        repl = Repl(session, lines, screen, load=load)
        lines.footer = repl.footer
        if resumed is not None and saved is not None:
            repl.resume(resumed, saved)
            for key, value in opening.settings.items():
                session.set(key, value)
            if opening.system is not None:
                session.set_system(opening.system)
        elif sys.stdin.isatty():
            repl.screen.tell(f"{model.title} · /help says what there is, Ctrl-D leaves")
        repl.run()
        if not session.model.is_loaded:
            console.leave(0)  # and do not wait for a model that nobody asks any more
    finally:
        session.model.close()


def _begin_to_load(name: str | None, opening: _Opening) -> ChatModel:
    """Find a model, and begin to load it. Raises TinyllmError for one that is not here, or cannot chat."""
    from tinyllm.chat.model import ChatModel
    from tinyllm.cli.progress import Progress
    from tinyllm.hub.locate import find_model, model_name
    from tinyllm.text.chat_template import has_template

    folder = find_model(name, offline=opening.offline, report=console.say)
    if not has_template(folder):
        raise ChatTemplateError(f"{folder} has no chat template: tinyllm generate --raw continues a text with it")

    def load() -> LLM:
        from tinyllm.llm import LLM

        return LLM(folder, **opening.arguments)

    @contextmanager
    def waiting() -> Iterator[None]:
        with Progress() as progress:
            progress.show(f"loading {model_name(folder)}")
            yield

    return ChatModel(name or model_name(folder), folder, load, waiting=waiting)


def _is_interactive(opening: _Opening) -> bool:
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    return on_terminal and not opening.plain and os.environ.get("TERM") != "dumb"


def _screen(opening: _Opening) -> Screen:
    from tinyllm.chat.screen import PlainScreen, RichScreen

    return RichScreen() if _is_interactive(opening) else PlainScreen(console.write)


def _lines(opening: _Opening, store: TranscriptStore) -> Lines:
    from tinyllm.chat.lines import EditedLines, PlainLines

    if not _is_interactive(opening):
        return PlainLines()

    def names(kind: Kind) -> Iterable[str]:
        if kind == "conversation":
            with suppress(ChatFileError):  # there is nothing to complete, and /load says why
                return store.names()
        return _model_names() if kind == "model" else ()

    return EditedLines(store.folder.parent / "history" if opening.save else None, names)


def _model_names() -> Iterable[str]:
    from tinyllm.hub.inventory import inventory

    return [entry.name for entry in inventory() if entry.problem is None]
