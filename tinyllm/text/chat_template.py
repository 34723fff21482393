"""Messages to a prompt: the Jinja chat template of a checkpoint.

Templates are programs from strangers. They run in a process of their own (`template_worker.TemplateWorker`), see
plain JSON values only, and render what transformers' `apply_chat_template` renders, byte for byte. Two things differ
on purpose: arguments of a tool call that are given as JSON text are a mapping too, for templates that want one, and
content is given as the template takes it, as a text or as parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllm.config.reader import check_link, is_there, read_json_object
from tinyllm.errors import ChatTemplateError
from tinyllm.text.arguments import Arguments

if TYPE_CHECKING:
    from tinyllm.text.template_worker import TemplateWorker

__all__ = ["THINKING", "ChatTemplate", "Message", "chat_values", "find_templates", "has_template"]

Message = Mapping[str, Any]

THINKING = ("enable_thinking", "thinking")  # what templates call the switch for reasoning
MAX_TEMPLATE_BYTES = 2**20  # the longest in use are under 50 kB
MAX_DEPTH = 100  # of lists and mappings within each other
_PROBE = "probe7c1e"  # a word that no template has
_IN_A_LIST = re.compile(r"['\"]type['\"]\s*:")  # parts written out as Python or JSON has them
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The templates of one checkpoint by name ("default", "tool_use", ...).

    `variables` are the special tokens that templates know by name (`bos_token`, `eos_token`, ...). `worker` is the
    process that renders, by default a new one, which starts with the first use. Threads may share a `ChatTemplate`.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        variables: Mapping[str, str] | None = None,
        worker: TemplateWorker | None = None,
    ):
        from tinyllm.text.template_worker import TemplateWorker

        if not templates:
            raise ChatTemplateError("a chat template needs at least one template")
        for name, source in templates.items():
            if len(source.encode(errors="replace")) > MAX_TEMPLATE_BYTES:
                raise ChatTemplateError(f"chat template {name!r} is larger than {MAX_TEMPLATE_BYTES:,} bytes")
        self.templates = dict(templates)
        self.variables = dict(variables or {})
        self.worker = worker or TemplateWorker()
        self._forms: dict[str, tuple[bool, bool]] = {}

    def source(self, name: str | None = None, *, tools: object = None) -> str:
        """The template of that name; without one "tool_use" where there are tools, else "default".

        Raises ChatTemplateError, with the names there are, if there is none such.
        """
        wanted = [name] if name else [*(["tool_use"] if tools is not None else []), "default"]
        for candidate in wanted:
            if candidate in self.templates:
                return self.templates[candidate]
        known = ", ".join(sorted(self.templates))
        raise ChatTemplateError(f"there is no chat template named {wanted[-1]!r}; the model has: {known}")

    def reads(self, *names: str) -> bool:
        """Whether the default template looks at any of these variables; others that are given have no effect.

        Raises ChatTemplateError if the template is broken.
        """
        return not self.worker.variables(self.source()).isdisjoint(names)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for these messages, special tokens written out.

        Messages, tools, documents and kwargs (`enable_thinking`, `reasoning_effort`, ...) hold JSON values.
        Arguments of a tool call may be a mapping or its JSON text. Raises ChatTemplateError if the template is broken
        or unsafe, takes too much time or memory, or rejects the messages: then with the template's own words.
        """
        values = chat_values(messages, tools=tools, documents=documents, **kwargs)
        return self.render_values(values, add_generation_prompt=add_generation_prompt, template=template)

    def render_values(
        self, values: Mapping[str, Any], *, add_generation_prompt: bool = True, template: str | None = None
    ) -> str:
        """The same for what `chat_values` made."""
        source = self.source(template, tools=values["tools"])
        values = {**values, "messages": [self._in_form(source, message) for message in values["messages"]]}
        return self.worker.render(
            source, {**self.variables, "add_generation_prompt": add_generation_prompt, **values}
        )

    def _in_form(self, source: str, message: Any) -> Any:
        """Return a message with its content as the template takes it: as a text, or as parts of type "text"."""
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str) and content and not self._takes(source)[0]:
            return {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, list) and content and not self._takes(source)[1]:
            return {**message, "content": "".join(map(_text_of, content))}
        return message

    def _takes(self, source: str) -> tuple[bool, bool]:
        """Whether a template renders a text, and parts of type "text"; found out by rendering both, once."""
        if source not in self._forms:
            shown = []
            for content in (_PROBE, [{"type": "text", "text": _PROBE}]):
                values = {**self.variables, "tools": None, "documents": None, "add_generation_prompt": False}
                try:
                    text = self.worker.render(source, {**values, "messages": [{"role": "user", "content": content}]})
                except ChatTemplateError:  # it may want more than one message
                    text = ""
                shown.append(_PROBE in text and not _IN_A_LIST.search(text))
            self._forms[source] = (shown[0], shown[1]) if any(shown) else (True, True)
        return self._forms[source]


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ChatTemplateError(f"a message has a part of type {kind!r}, and this model's template takes text only")


def chat_values(
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """What a template sees of a chat, by name: JSON values only.

    Messages are without None; tool arguments are usable as map and as text; and reasoning given under one of its
    names is there under the others that templates read, as in transformers.
    """
    return {
        **{name: _plain(value) for name, value in kwargs.items()},
        "messages": [_prepare_message(message) for message in messages],
        "tools": _plain(tools),
        "documents": _plain(documents),
    }


def _prepare_message(message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"a message must be a mapping, not {type(message).__name__}")
    prepared = {key: _plain(value) for key, value in message.items() if value is not None}
    reasoning = next((prepared[key] for key in _REASONING_KEYS if key in prepared), None)
    if reasoning is not None:
        prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
    calls = prepared.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function", call) if isinstance(call, dict) else {}
        if isinstance(function, dict) and "arguments" in function:
            function["arguments"] = _arguments(function["arguments"])
    return prepared


def _arguments(value: Any) -> Any:
    if isinstance(value, dict):
        return Arguments(value)
    parsed = Arguments.from_json(value) if isinstance(value, str) else value
    _plain(parsed)  # JSON text may be nested too deeply as well
    return parsed


def _plain(value: Any, depth: int = 0) -> Any:
    """A copy made of str, int, float, bool, None, list and dict alone, whose methods the sandbox knows."""
    if depth > MAX_DEPTH:
        raise ChatTemplateError(f"messages are nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    if isinstance(value, Mapping):
        return {_plain(key, depth + 1): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value]
    raise ChatTemplateError(f"messages hold JSON values only, not {type(value).__name__}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def find_templates(path: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a checkpoint folder by name; {} if it has none.

    chat_template.jinja with additional_chat_templates/*.jinja comes first, then `chat_template` of
    tokenizer_config.json (a text, or a list of {name, template}), then the older chat_template.json.
    """
    return _from_files(path) or _from_config(tokenizer_config) or _from_legacy(path / "chat_template.json")


def has_template(folder: Path) -> bool:
    """Whether a checkpoint has any chat template, before anything else of it is read."""
    config = folder / "tokenizer_config.json"
    return bool(find_templates(folder, read_json_object(config) if is_there(config) else {}))


def _from_files(path: Path) -> dict[str, str]:
    files = {"default": path / "chat_template.jinja"} if is_there(path / "chat_template.jinja") else {}
    files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    return {name: _read(file) for name, file in files.items()}


def _from_config(config: Mapping[str, Any]) -> dict[str, str]:
    entry = config.get("chat_template")
    if isinstance(entry, str):
        return {"default": entry}
    try:
        return {str(item["name"]): str(item["template"]) for item in entry or ()}
    except (TypeError, KeyError) as error:
        raise ChatTemplateError(
            "chat_template in tokenizer_config.json is neither a text nor a list of {name, template}"
        ) from error


def _from_legacy(file: Path) -> dict[str, str]:
    if not is_there(file):
        return {}
    try:
        return _from_config(json.loads(_read(file)))
    except (ValueError, AttributeError, RecursionError) as error:
        raise ChatTemplateError(f"{file} is not a chat template in JSON: {_one_line(error)}") from error


def _read(file: Path) -> str:
    check_link(file)
    try:
        if file.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ChatTemplateError(f"{file} is larger than {MAX_TEMPLATE_BYTES:,} bytes")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ChatTemplateError(f"{file} cannot be read: {_one_line(error)}") from error
