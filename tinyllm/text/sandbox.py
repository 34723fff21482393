"""Renders chat templates in a process of its own, under limits of the operating system.

Chat templates are programs from strangers. Jinja's immutable sandbox keeps them away from Python's internals and
from the values that they are given, but not from `range(99999)` nested four deep or `'x' * 10**10`. So this module
runs in a worker process, which `template_worker.TemplateWorker` starts, watches and kills. It imports Jinja and the
standard library only, so that it starts quickly.

Requests and replies are frames: a length of eight bytes, little-endian, then so many bytes. A request is the pickle
of ("render", source, values) or ("variables", source). A reply is a kind (`=` a result, `!` an error, `M` out of
memory), then the text in UTF-8.
"""

from __future__ import annotations

import functools
import json
import pickle
import resource
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tinyllm.text.arguments import Arguments

__all__ = ["main"]


def main(seconds: float, memory: int, limit_address_space: bool) -> None:
    """Answer requests on stdin with replies on stdout until stdin ends.

    A request that takes longer than `seconds` of processor time ends the process: the parent's clock normally ends
    it first, unless the parent itself was killed. `memory` is in bytes.
    """
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        _set_limit(kind, 0)  # a template that does break out can still write no file and start no process
    if limit_address_space:
        _set_limit(resource.RLIMIT_AS, memory)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    while header := source.read(8):
        request = source.read(int.from_bytes(header, "little"))
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (_at_most(int(time.process_time() + seconds) + 1, hard), hard))
        reply = _reply(request)
        target.write(len(reply).to_bytes(8, "little") + reply)
        target.flush()


def _set_limit(kind: int, most: int) -> None:
    most = _at_most(most, resource.getrlimit(kind)[1])
    resource.setrlimit(kind, (most, most))


def _at_most(value: int, hard: int) -> int:
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def _reply(request: bytes) -> bytes:
    try:
        return _result_or_error(request)
    except MemoryError:
        return b"M"


def _result_or_error(request: bytes) -> bytes:
    try:
        return b"=" + _answer(*pickle.loads(request)).encode(errors="surrogatepass")
    except MemoryError:
        raise
    except Exception as error:  # a template may fail in as many ways as Python
        return b"!" + _describe(error).encode(errors="surrogatepass")


def _answer(question: str, source: str, values: dict[str, Any] | None = None) -> str:
    template = _compile(source)
    if question == "variables":
        return "\n".join(sorted(find_undeclared_variables(_ENVIRONMENT.parse(source))))
    return template.render(values or {})


class _CompileError(Exception):
    """The template cannot be compiled."""


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> Template:
    try:
        return _ENVIRONMENT.from_string(source)
    except (MemoryError, TemplateSyntaxError):
        raise
    except Exception as error:
        raise _CompileError(str(error) or type(error).__name__) from error


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if len(text) <= 500 else text[:500] + "..."
    if isinstance(error, TemplateSyntaxError):
        return f"the chat template is broken in line {error.lineno}: {text}"
    if isinstance(error, _CompileError):
        return f"the chat template cannot be compiled: {text}"
    if isinstance(error, SecurityError):
        return f"the chat template is unsafe: {text}"
    if isinstance(error, RecursionError):
        return "the chat template calls itself too deeply"
    return f"the chat template rejects the messages: {text}"


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's words for training; here its body as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parse the statements up to `endgeneration`, in a scope of their own as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = nodes.CallBlock(self.call_method("_body"), [], [], body)
        return [call.set_lineno(line)]

    @staticmethod
    def _body(caller: Callable[[], str]) -> str:
        return caller()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: no escapes for HTML, keys in their order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _is_string(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, Arguments) and value.given_as_text)


def _raise_exception(message: str) -> None:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja's immutable sandbox with the filters, tests and globals that chat templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.tests["string"] = _is_string
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


_ENVIRONMENT = _environment()
