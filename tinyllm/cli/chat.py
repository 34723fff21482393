"""`tinyllm chat`: a conversation on the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinyllm.cli import console, options
from tinyllm.errors import ChatTemplateError, UsageError

if TYPE_CHECKING:
    from tinyllm.chat.commands import Kind
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
    limits: Mapping[str, Any]
    offline: bool


def chat(
    model: options.Model = None,
    system: options.System = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.ChatTemperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    repetition_window: options.RepetitionWindow = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    logit_bias: options.LogitBias = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
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
    kv_budget: options.KvBudget = None,
    kv_bits: options.KvBits = None,
    max_context: options.MaxContext = None,
    no_wired_limit: options.NoWiredLimit = False,
    eager: options.Eager = False,
    dtype: options.Dtype = None,
    device: options.Device = None,
    offline: options.Offline = False,
    debug: options.Debug = False,
) -> None:
    """Talk with a model. /help says what can be asked of the chat itself.

    What is piped in is answered line by line, as plain text. Conversations are written, turn by turn, to files that
    only you can read; `tinyllm chat --resume` goes on with the latest.
    """

    def command() -> None:
        settings: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "repetition_window": repetition_window,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "logit_bias": options.read_logit_bias(logit_bias),
            "seed": seed,
            "stop": stop or (),
        }
        options.check(settings, dtype, device)
        options.check_kv_bits(kv_bits)
        if max_tokens == 0:
            raise UsageError("--max-tokens must be 1 or more in a chat")
        if overflow not in ("stop", "shift"):
            raise UsageError(f"--overflow must be stop or shift, not {overflow!r}")
        if name is not None and not resume:
            raise UsageError(f"{name!r}: a conversation's name goes with --resume")
        limits = {
            "kv_budget": options.read_kv_budget(kv_budget),
            "kv_bits": kv_bits,
            "max_context": max_context,
            "wired": not no_wired_limit,
            "compiled": not eager,
            "batch": 1,
            "dtype": dtype,
            "device": device,
        }
        _chat(
            _Opening(
                model=model,
                system=system,
                settings={key: value for key, value in settings.items() if value not in (None, ())},
                template_args=options.read_template_args(template_arg, None),
                think=think,
                resume=(name or _LATEST) if resume else None,
                save=not no_save,
                plain=plain,
                overflow="shift" if overflow == "shift" else "stop",
                limits=limits,
                offline=offline,
            )
        )

    raise typer.Exit(console.run(command, debug=debug))


def _chat(opening: _Opening) -> None:
    from tinyllm.chat.conversation import Conversation
    from tinyllm.chat.repl import Repl
    from tinyllm.chat.session import Session
    from tinyllm.chat.transcript import TranscriptStore, read_transcript
    from tinyllm.cli.generate import figures

    store = TranscriptStore.of_user()
    resumed = None if opening.resume is None else store.find(opening.resume or None)
    saved = None if resumed is None else read_transcript(resumed.path)
    wanted = opening.model or (saved.model if saved is not None and saved.model else None)
    llm, model = _load(wanted, opening)
    try:
        session = Session(
            llm,
            model,
            conversation=Conversation(opening.system),
            settings=opening.settings,
            template_args=opening.template_args,
            think=opening.think,
            overflow=opening.overflow,
            store=store if opening.save else None,
        )
        lines = _lines(opening, store)
        load = partial(_load, opening=opening)
        repl = Repl(session, lines, _screen(opening), load=load, figures=figures, complain=console.say)
        lines.footer = repl.footer
        if resumed is not None and saved is not None:
            repl.resume(resumed, saved)
            for key, value in opening.settings.items():
                session.set(key, value)
            if opening.system is not None:
                session.set_system(opening.system)
        elif _is_interactive(opening):
            repl.screen.tell(f"{session.title} · /help says what there is, Ctrl-D leaves")
        repl.run()
    finally:
        session.llm.close()


def _load(name: str | None, opening: _Opening) -> tuple[LLM, str]:
    """Find and load a model; return it with the name that finds it again. Raises TinyllmError."""
    from tinyllm.cli.progress import Progress
    from tinyllm.hub.locate import find_model, model_name
    from tinyllm.text.chat_template import has_template

    with Progress() as progress:
        folder = find_model(name, offline=opening.offline, report=console.say)
        if not has_template(folder):
            raise ChatTemplateError(f"{folder} has no chat template: tinyllm generate --raw continues a text with it")
        progress.show(f"loading {model_name(folder)}")
        from tinyllm.llm import LLM

        llm = LLM(folder, **opening.limits)
    return llm, name or model_name(folder)


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
            return store.names()
        return _model_names() if kind == "model" else ()

    return EditedLines(store.folder.parent / "history" if opening.save else None, names)


def _model_names() -> Iterable[str]:
    from tinyllm.hub.inventory import inventory

    return [entry.name for entry in inventory() if entry.problem is None]
