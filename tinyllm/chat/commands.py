"""What can be asked of the chat itself: a table, from which help, completion and suggestions are made."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from textwrap import TextWrapper, fill
from typing import TYPE_CHECKING, Any, Literal

from tinyllm.chat.figures import figures
from tinyllm.chat.session import SETTINGS
from tinyllm.chat.transcript import TranscriptStore, export_json, export_markdown, read_transcript
from tinyllm.errors import ChatFileError, UsageError
from tinyllm.text.given import encodable, read_text

if TYPE_CHECKING:
    from tinyllm.chat.repl import Repl

_SHOWN = 20  # conversations of a list

Kind = Literal["", "file", "model", "conversation", "setting", "command", "think"]


@dataclass(frozen=True)
class Command:
    """One command: `run` takes what follows its name, and returns a message to be sent, if there is to be one."""

    name: str
    argument: str
    help: str
    run: Callable[[Repl, str], str | None]
    completes: Kind = ""


def find_command(name: str) -> Command:
    """Return the command of that name, without its slash. Raises UsageError that suggests the nearest."""
    for command in COMMANDS:
        if name == command.name or name in ALIASES.get(command.name, ()):
            return command
    names = [command.name for command in COMMANDS] + [alias for aliases in ALIASES.values() for alias in aliases]
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean /{near[0]}?" if near else "/help says what there is"
    raise UsageError(f"there is no command /{name}: {hint} (a message that begins with / is written with two)")


# ---------------------------------------------------------------- the commands


def _help(repl: Repl, argument: str) -> None:
    if argument:
        command = find_command(argument.removeprefix("/"))
        repl.screen.tell(f"{_usage(command)}\n{_indented(command.help, repl.screen.width)}")
        return
    width = max(len(_usage(command)) for command in COMMANDS)
    if repl.screen.width < width + 30:
        lines = [f"{_usage(command)}\n{_indented(command.help, repl.screen.width)}" for command in COMMANDS]
    else:
        lines = [f"{_usage(command):{width}}  {command.help}" for command in COMMANDS]
    repl.screen.tell("\n".join([*lines, "", *KEYS]))


def _indented(text: str, width: int) -> str:
    return fill(text, max(width, 12), initial_indent=" " * 4, subsequent_indent=" " * 4)


def _usage(command: Command) -> str:
    return f"/{command.name} {command.argument}".rstrip()


def _system(repl: Repl, argument: str) -> None:
    if not argument:
        system = repl.session.conversation.system
        repl.screen.tell("there is no system message" if system is None else f"system: {system}")
        return
    repl.session.set_system(None if argument == "none" else argument)
    repl.screen.tell("no system message from now on" if argument == "none" else "the system message is changed")


def _set(repl: Repl, argument: str) -> None:
    name, _, text = argument.partition(" ")
    name = name.replace("-", "_")
    if not name:
        repl.screen.tell(_table(repl.session.in_force, repl.screen.width) or "all is as the model says")
        return
    if name not in SETTINGS:
        near = get_close_matches(name, SETTINGS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(SETTINGS)}"
        raise UsageError(f"there is no setting {name!r}: {hint}")
    repl.session.set(name, None if text in ("", "default") else _value(name, text))
    value = repl.session.in_force.get(name)
    repl.screen.tell(f"{name}: {'as the model says' if value is None else value}")


def _value(name: str, text: str) -> Any:
    if name == "stop":
        return (text,)
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if name == "logit_bias" and isinstance(value, dict) and all(key.lstrip("-").isdigit() for key in value):
        return {int(key): bias for key, bias in value.items()}
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name} must be a number, not {text!r}")
    return value


def _show(repl: Repl, argument: str) -> None:
    session = repl.session
    template = session.llm.tokenizer.chat_template
    names = "none" if template is None else ", ".join(template.templates)
    about = {
        "model": session.model.title,
        "folder": session.llm.path,
        "family": f"{session.llm.config.model_type}, {session.llm.config.num_hidden_layers} layers",
        "context": f"{session.llm.context:,} tokens, when it is full: {session.overflow}",
        "template": names,
        "thinking": session.thinking.told(template),
        "system": session.conversation.system or "none",
        "conversation": f"{len(session.conversation.messages)} messages, {_where(repl)}",
    }
    repl.screen.tell(_table({**about, **session.in_force}, repl.screen.width))


def _where(repl: Repl) -> str:
    session = repl.session
    if session.transcript is not None:
        return f"saved as {session.transcript.name}"
    return "not saved" if session.store is None else "saved from the first message on"


def _clear(repl: Repl, argument: str) -> None:
    repl.session.clear()
    repl.attached.clear()
    repl.screen.clear()
    repl.screen.tell("a new conversation")


def _retry(repl: Repl, argument: str) -> str | None:
    text = repl.session.conversation.last_question
    if text is None:
        raise UsageError("there is nothing to answer again")
    return text


def _undo(repl: Repl, argument: str) -> None:
    text = repl.session.undo()
    if text is None:
        raise UsageError("there is nothing to take back")
    repl.screen.tell(f"taken back: {shortened(text)}")


def _edit(repl: Repl, argument: str) -> str | None:
    last = repl.session.conversation.last_question
    if last is None:
        raise UsageError("there is no message to edit")
    if argument or not repl.lines.edits:
        if not argument:
            raise UsageError("/edit TEXT puts TEXT in the place of the last message")
        return argument
    repl.draft, repl.edits_last = as_typed(last), True
    return None


def _read(repl: Repl, argument: str) -> None:
    if not argument:
        raise UsageError("/read needs the name of a file")
    path = Path(argument).expanduser()
    text = read_text(path)
    repl.attached[path.absolute()] = f"{path.name}:\n\n{text.rstrip()}"
    tokens = len(repl.session.llm.tokenizer.encode(text))
    repl.screen.tell(f"{path.name}, {tokens:,} tokens, goes with the next message")


def _model(repl: Repl, argument: str) -> None:
    if not argument:
        repl.screen.tell(repl.session.model.title)
        return
    repl.switch_model(argument)
    repl.screen.tell(f"{repl.session.model.title} answers from now on")


def _save(repl: Repl, argument: str) -> None:
    name = repl.session.save(argument or None)
    repl.screen.tell(f"a copy is saved as {name}" if argument else f"saved as {name}")


def _rename(repl: Repl, argument: str) -> None:
    if not argument:
        raise UsageError("/rename needs the new name")
    repl.session.rename(argument)
    repl.screen.tell(f"the conversation is now named {argument}")


def _load(repl: Repl, argument: str) -> None:
    transcript = _store(repl).find(argument or None)
    repl.resume(transcript, read_transcript(transcript.path))


def _list(repl: Repl, argument: str) -> None:
    names = _store(repl).names(argument)
    if not names:
        where = f" with {argument!r} in its name" if argument else ""
        raise ChatFileError(f"there is no saved conversation{where}")
    more = [f"and {len(names) - _SHOWN} more: /list TEXT"] if len(names) > _SHOWN else []
    repl.screen.tell("\n".join([*names[:_SHOWN], *more]))


def _store(repl: Repl) -> TranscriptStore:
    return repl.session.store or TranscriptStore.of_user()


def _export(repl: Repl, argument: str) -> None:
    path = Path(argument).expanduser()
    forms = {".md": export_markdown, ".json": export_json}
    if path.suffix not in forms:
        raise UsageError("/export needs the name of a file that ends in .md or .json")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(encodable(forms[path.suffix](repl.session.conversation, repl.session.model.title)))
    except FileExistsError:
        raise UsageError(f"{path}: there is such a file already") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    repl.screen.tell(f"written to {path}")


def _tokens(repl: Repl, argument: str) -> None:
    session = repl.session
    used, context = session.tokens(), session.llm.context
    repl.screen.tell(f"{used:,} of {context:,} tokens used, {context - used:,} left")


def _stats(repl: Repl, argument: str) -> None:
    if repl.session.statistics is None:
        raise UsageError("there is no answer yet")
    repl.screen.tell("\n".join(figures(repl.session.statistics, repl.screen.width)))


def _think(repl: Repl, argument: str) -> None:
    session = repl.session
    if argument == "show":
        answer = session.conversation.last_answer
        repl.screen.tell(
            answer.reasoning if answer and answer.reasoning else "no thoughts are known of the last answer"
        )
        return
    states = {"on": True, "off": False, "default": None}
    if argument not in states and argument:
        raise UsageError(f"/think takes on, off, default or show, not {argument!r}")
    session.thinking.wanted = states[argument] if argument else session.thinking.wanted is not True
    repl.screen.tell(f"thinking: {session.thinking.told(session.llm.tokenizer.chat_template)}")


def _exit(repl: Repl, argument: str) -> None:
    repl.over = True


def _table(values: Mapping[str, Any], width: int) -> str:
    """Write a line a value, which goes on below itself where it is longer; a path is not broken."""
    indent = max(map(len, values), default=0) + 2
    lines = TextWrapper(max(width, indent + 10), break_long_words=False, break_on_hyphens=False)
    lines.subsequent_indent = " " * indent
    rows = []
    for name, value in values.items():
        for number, line in enumerate(str(value).splitlines() or [""]):
            lines.initial_indent = f"{'' if number else name:{indent}}"
            rows.append(lines.fill(line))
    return "\n".join(rows)


def shortened(text: str) -> str:
    """Return the beginning of a text as one line."""
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}..."


def as_typed(message: str) -> str:
    """Return the line that is read as this message."""
    if message.strip().startswith('"""'):
        return f'"""{message}"""'
    return f"/{message}" if message.startswith("/") else message


COMMANDS = (
    Command("help", "[COMMAND]", "What there is.", _help, "command"),
    Command("system", "[TEXT|none]", "Show or change the system message.", _system),
    Command("set", "[NAME [VALUE]]", "Show or change a setting; no value: as the model says.", _set, "setting"),
    Command("show", "", "Settings, model, template, system message.", _show),
    Command("clear", "", "Begin a new conversation.", _clear),
    Command("retry", "", "Answer the last message again.", _retry),
    Command("undo", "", "Take the last message and its answer back.", _undo),
    Command("edit", "[TEXT]", "Change the last message, and send it again.", _edit),
    Command("read", "FILE", "Send a text file with the next message.", _read, "file"),
    Command("model", "[MODEL]", "Have another model go on.", _model, "model"),
    Command("save", "[NAME]", "Save a copy of the conversation as NAME.", _save),
    Command("rename", "NAME", "Give the saved conversation another name.", _rename),
    Command("load", "[NAME]", "Go on with a saved conversation.", _load, "conversation"),
    Command("list", "[TEXT]", "Saved conversations, the latest first.", _list),
    Command("export", "FILE", "Write the conversation as .md or .json.", _export, "file"),
    Command("tokens", "", "How much of the context is used.", _tokens),
    Command("stats", "", "What the last answer took.", _stats),
    Command("think", "[on|off|show]", "Have the model think first, or see what it thought.", _think, "think"),
    Command("exit", "", "Leave.", _exit),
)
ALIASES: Mapping[str, tuple[str, ...]] = {"exit": ("quit", "bye"), "retry": ("regen",), "help": ("?",)}
KEYS = (
    'Several lines: begin and end with """, or Alt-Enter. Ctrl-G: your editor.',
    "Ctrl-C stops an answer, and clears a line; twice, or Ctrl-D, leaves.",
    "Ctrl-Z suspends the chat: fg in the shell brings it back.",
)
