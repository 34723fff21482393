"""A Jinja environment for untrusted chat templates, in which time and memory are bounded.

Jinja's sandbox keeps a template away from Python's internals, but not from `range(99999)` nested four deep or from
`'x' * 10**10`. Here each rendering has a `Budget`, which the template's loops, calls, filters, tests, operators,
literals and printed values are charged to. Nothing in it depends on the thread.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tinyllm.text.arguments import Arguments
from tinyllm.text.budget import Budget, check_growth, check_operands

__all__ = ["BoundedEnvironment"]

_LOOP, _TEXT, _LITERAL = "charged loop", "charged text", "charged literal"  # filters that no template can name


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with a budget, and with the filters and globals that chat templates expect.

    Rendering raises BudgetError when the budget is spent. `range` gives at most Jinja's 100,000 numbers.
    """

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_charge_output,
        )
        self.context_class = _Context
        self._static_characters = 0
        self.tests["string"] = _is_string
        self.filters.update(tojson=_tojson, join=_materialized(self.filters["join"]))
        self.filters = {name: _charged(function) for name, function in self.filters.items()}
        self.tests = {name: _charged(function) for name, function in self.tests.items()}
        self.filters.update({_LOOP: _charge_loop, _TEXT: _charge_text, _LITERAL: _charge_output})
        del self.globals["lipsum"]
        self.globals.update(
            dict=_TemplateDict(),
            namespace=_TemplateNamespace,
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
        )

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Jinja's tree, with loops, `~` and literals sent through filters that charge for them."""
        tree = super()._parse(source, name, filename)
        self._static_characters = _static_characters(tree)
        for node in list(tree.find_all(nodes.Node)):
            _charge_literals(node)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _filtered(_LOOP, loop.iter, nodes.Const(sum(map(_static_characters, loop.body))))
        for concat in list(tree.find_all(nodes.Concat)):
            concat.nodes = [_filtered(_TEXT, nodes.List(concat.nodes, lineno=concat.lineno))]
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """A call of a method, macro or global: checked before, charged after."""
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str) and name == "join" and args:
            args = (list(args[0]),)
        check_growth(name, owner, args, kwargs)
        if isinstance(__obj, LoopContext) and args:  # the items of a recursive loop
            args = (_charge_loop(__context, args[0], __self._static_characters), *args[1:])
        return _budget(__context).charge_value(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator that makes values: checked before, charged after."""
        check_operands(operator, left, right)
        return _budget(context).charge_value(super().call_binop(context, operator, left, right))


class _Context(Context):
    """A rendering's names, and its budget; contexts derived from it share the budget."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.budget = Budget()

    def derived(self, locals: dict[str, Any] | None = None) -> _Context:
        context = super().derived(locals)
        assert isinstance(context, _Context)
        context.budget = self.budget
        return context


def _budget(context: Context) -> Budget:
    assert isinstance(context, _Context)
    return context.budget


def _filtered(name: str, value: nodes.Node, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)


def _static_characters(node: nodes.Node) -> int:
    """How much text a node writes by itself, at most once."""
    texts = [node] if isinstance(node, nodes.TemplateData) else node.find_all(nodes.TemplateData)
    return sum(len(text.data) for text in texts)


def _charge_literals(node: nodes.Node) -> None:
    """Send the literals below a node through a filter: of `[x, x]`, again and again, is made what never ends."""
    for field, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, field, [_charged_literal(item) for item in value])
        else:
            setattr(node, field, _charged_literal(value))


def _charged_literal(value: Any) -> Any:
    literal = isinstance(value, (nodes.List, nodes.Dict)) or (isinstance(value, nodes.Tuple) and value.ctx == "load")
    return _filtered(_LITERAL, value) if literal and value.find(nodes.Name) else value


def _charged(function: Any) -> Callable[..., Any]:
    """A filter or test that pays for what it makes, given what Jinja would pass to it."""
    passed = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    @functools.wraps(function)
    def charged(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        check_growth(function.__name__.removeprefix("do_"), value, args, kwargs)
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        leading = (first[passed],) if passed else ()
        return _budget(context).charge_value(function(*leading, value, *args, **kwargs))

    return charged


@pass_context
def _charge_loop(context: Context, items: Iterable[Any], static_characters: int) -> Iterator[Any]:
    for item in items:
        _budget(context).charge(static_characters)
        yield item


@pass_context
def _charge_text(context: Context, parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    _budget(context).charge(sum(map(len, texts)))
    return str(_budget(context).charge_value("".join(texts)))


@pass_context
def _charge_output(context: Context, value: Any) -> Any:
    return _budget(context).charge_value(value)


def _materialized(function: Any) -> Callable[..., Any]:
    """The `join` filter on a list, whose length can be checked."""

    @functools.wraps(function)
    def join(first: Any, items: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        items = list(items)
        check_growth("join", items, args, kwargs)
        return function(first, items, *args, **kwargs)

    return join


class _TemplateNamespace(Namespace):
    """`namespace()` without names that begin with an underscore, which lead to Python's internals."""

    def __init__(*args: Any, **kwargs: Any):  # no name is taken from those that a template may use
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_attribute(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:  # without its values, which may hold it many times over
        return "<Namespace>"


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not have the attribute {name!r}")


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's words for training; here its body as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements up to `endgeneration`, in a scope of their own as in transformers."""
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


_tojson.__name__ = "tojson"


def _is_string(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, Arguments) and value.given_as_text)


class _TemplateDict:
    """`dict(...)` and `dict.fromkeys`, and nothing else of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        """A dictionary with one value for all keys."""
        return dict.fromkeys(keys, value)


def _raise_exception(message: str) -> None:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
