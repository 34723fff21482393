"""Checks of what Python callers give to `LLM`, each with an error that names the argument."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fractions import Fraction

from tinyllm.errors import UsageError

__all__ = ["check_chat", "check_limits", "check_prompts", "check_settings", "stop_strings", "token_ids"]

# What `LLM.chat` itself gives to a template.
_RESERVED = ("messages", "add_generation_prompt")


def check_prompts(prompt: object) -> None:
    """Raise UsageError unless this is a text or an iterable of texts, as far as can be told before iterating."""
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | bytearray | Mapping):
        raise UsageError(f"prompt must be a text or a list of texts, not {_kind(prompt)}")


def check_chat(messages: object, template_args: object) -> None:
    """Raise UsageError unless these are messages with roles, and variables that a template does not have anyway."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise UsageError(f'messages must be a list of {{"role": ..., "content": ...}}, not {_kind(messages)}')
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            raise UsageError(f'message {number} must be {{"role": ..., "content": ...}}, not {_kind(message)}')
        if not isinstance(message.get("role"), str):
            raise UsageError(f'message {number} needs a "role" ("user", say), not {message.get("role")!r:.60}')
        content = message.get("content")
        if not (content is None or isinstance(content, str | Sequence)) or isinstance(content, bytes):
            raise UsageError(f'the "content" of message {number} must be a text, not {_kind(content)}')
    if not messages:
        raise UsageError("there is no message to answer")
    if not isinstance(template_args, Mapping) or not all(isinstance(name, str) for name in template_args):
        raise UsageError(f"template_args must be a dict of names and values, not {template_args!r:.60}")
    for name in _RESERVED:
        if name in template_args:
            raise UsageError(f"template_args: {name} is always there, and cannot be given")


def check_settings(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise UsageError, with the nearest name, for a setting that does not exist."""
    known = sorted(known)
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"there is no setting {name!r}: {hint}")


def stop_strings(stop: object) -> tuple[str, ...]:
    """Return one or several stop strings as a tuple. Raises UsageError unless they are texts, and none is empty."""
    if isinstance(stop, bytes | Mapping) or not isinstance(stop, Iterable):
        raise UsageError(f"stop must be a text or a list of texts, not {stop!r:.60}")
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    for each in stops:
        if not isinstance(each, str):
            raise UsageError(f"stop must be a text or a list of texts, and {each!r:.60} is not a text")
        if not each:
            raise UsageError("a stop string must not be empty")
    return stops


def token_ids(prompt_ids: object) -> tuple[int, ...]:
    """Return token ids as a tuple of int. Raises UsageError unless they are whole numbers."""
    try:
        return tuple(map(operator.index, prompt_ids))  # type: ignore[call-overload]
    except TypeError:
        raise UsageError(f"prompt_ids must be a list of token ids (whole numbers), not {prompt_ids!r:.60}") from None


def check_limits(*, kv_budget: object, **whole: object) -> None:
    """Raise UsageError for a limit that is not a number; None is the default of each."""
    for name, value in whole.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise UsageError(f"{name} must be a whole number, not {value!r:.60}")
    if isinstance(kv_budget, bool) or not isinstance(kv_budget, int | float | Fraction | None):
        raise UsageError(f"kv_budget must be bytes (a whole number) or a Fraction, not {kv_budget!r:.60}")


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__
