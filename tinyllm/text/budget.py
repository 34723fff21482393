"""What one rendering of a chat template may spend.

A template is charged where work is made: an iteration of a loop, a call, a filter, a test, an operator, a literal, a
printed value. Steps and sizes are counted, so that the same template ends in the same way everywhere; the clock is
the last resort, for steps that are slow one by one. Nothing here knows of Jinja but the error it can report.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2.exceptions import TemplateRuntimeError

__all__ = ["Budget", "BudgetError", "check_growth", "check_operands"]

MAX_STEPS = 1_000_000  # about a second; a conversation of a thousand messages takes some ten thousand
MAX_SECONDS = 10.0
MAX_SIZE = 8 * 2**20  # characters of one value, all that is nested in it included
MAX_WORK = 64 * MAX_SIZE  # of all values together: templates that append to a string are quadratic
_ITEM_SIZE = 16  # an item of a list counts like so many characters
MAX_BITS = 4096  # of a number


class BudgetError(TemplateRuntimeError):
    """The template asks for more work than a chat template can need."""


class Budget:
    """What is left for one rendering; `charge` raises BudgetError when it is spent."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._work = MAX_WORK
        self._deadline = time.monotonic() + MAX_SECONDS

    def charge(self, work: int = 0) -> None:
        """Pay for a step, and for the characters or items made in it."""
        self._steps -= 1
        self._work -= work
        if self._steps < 0:
            raise BudgetError(f"it takes more than {MAX_STEPS:,} steps")
        if self._work < 0:
            raise BudgetError(f"it makes more than {MAX_WORK:,} characters and items")
        if time.monotonic() > self._deadline:
            raise BudgetError(f"it takes more than {MAX_SECONDS:.0f} seconds")

    def charge_value(self, value: Any) -> Any:
        """Pay for a value that was made, and give it back."""
        if isinstance(value, str):
            _check_size(len(value))
            self.charge(len(value))
        elif isinstance(value, bytes):
            raise BudgetError("it makes bytes, which are no text")
        elif isinstance(value, (list, tuple, dict)):
            self.charge(_count_items(value))
        else:
            self.charge()
        return value


def _check_size(size: int, limit: int = MAX_SIZE) -> None:
    if size > limit:
        raise BudgetError(f"it makes a value of more than {limit:,} characters, items or bits")


def _count_items(value: Any) -> int:
    """The items nested in a list, tuple or dict; refuses one that would be too long when printed.

    A list may hold another twice, and so on: sixty levels of that print 2**60 items.
    """
    items, size = 0, 0
    waiting = [value]
    while waiting:
        value = waiting.pop()
        items += 1
        size += len(value) if isinstance(value, str) else _ITEM_SIZE
        _check_size(size + len(waiting) * _ITEM_SIZE)
        if isinstance(value, dict):
            waiting.extend(value.keys())
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
    return items


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuse `*`, `**` and `%` whose result is too big to be made."""
    if operator == "%" and isinstance(left, str):
        _check_size(_format_growth(left, *(right if isinstance(right, tuple) else (right,))))
    elif operator == "*":
        if isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() + right.bit_length(), MAX_BITS)
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                _check_size(len(sequence) * times)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_size(left.bit_length() * right, MAX_BITS)


def check_growth(name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a filter or method whose result can be far longer than what it is given."""
    if growth := _GROWTH.get(name):
        _check_size(growth(value, *args, **kwargs))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict)) else 0


def _largest(values: Iterable[Any]) -> int:
    """The largest of numbers and lengths."""
    return max((abs(value) if isinstance(value, int) else _length(value) for value in values), default=0)


def _width_growth(value: Any, *args: Any, **kwargs: Any) -> int:
    return _largest([*args, *kwargs.values()])


def _item_growth(value: Any, *args: Any, **kwargs: Any) -> int:
    return _ITEM_SIZE * _width_growth(value, *args, **kwargs)


def _digit_growth(value: Any, *args: Any, **kwargs: Any) -> int:
    """Of roundings, which raise ten to a power."""
    return 1024 * _width_growth(value, *args, **kwargs)


def _character_growth(value: Any, *args: Any, **kwargs: Any) -> int:
    """Of what may put a text after every character."""
    tables = [text for arg in args if isinstance(arg, dict) for text in arg.values()]
    texts = [arg for arg in (*args, *kwargs.values(), *tables) if isinstance(arg, str)]
    return _length(value) * _largest(texts)


def _line_growth(value: Any, *args: Any, **kwargs: Any) -> int:
    lines = 1 + (value.count("\n") + value.count("\t") if isinstance(value, str) else 0)
    return lines * _width_growth(value, *args, **kwargs)


def _depth_growth(value: Any, *args: Any, **kwargs: Any) -> int:
    """Of JSON with an indent, which is written at every item and level."""
    return _count_items(value) * _width_growth(value, *args, **kwargs) if args or kwargs else 0


def _replace_growth(value: Any, old: Any = "", new: Any = "", *args: Any, **kwargs: Any) -> int:
    found = value.count(old) if isinstance(value, str) and isinstance(old, str) else 0
    return found * _length(new)


def _join_growth(value: Any, *args: Any, **kwargs: Any) -> int:
    """Of `separator.join(items)` and `items | join(separator)`."""
    first = args[0] if args else kwargs.get("d", "")
    separator, items = (value, first) if isinstance(value, str) else (first, value)
    if not isinstance(items, (list, tuple, dict)):
        return 0
    return sum(map(_length, items)) + len(items) * _length(separator)


def _format_growth(value: Any, *args: Any, **kwargs: Any) -> int:
    """Of `%` and `str.format`: every width that is written, and every field as long as the longest argument."""
    text = str(value)
    widths = sum(int(digits) for digits in re.findall(r"\d{1,9}", text))
    fields = text.count("%") + text.count("{")
    return widths + fields * _width_growth(value, *args, **kwargs) if fields else 0


def _sum_growth(value: Any, attribute: Any = None, start: Any = 0) -> int:
    """Sums of lists copy the list at every item."""
    return 0 if isinstance(start, (int, float)) else MAX_SIZE + 1


_GROWTH: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes"), _width_growth),
    **dict.fromkeys(("batch", "slice"), _item_growth),
    **dict.fromkeys(("indent", "expandtabs"), _line_growth),
    **dict.fromkeys(("wordwrap", "translate"), _character_growth),
    **dict.fromkeys(("format", "format_map"), _format_growth),
    "round": _digit_growth,
    "tojson": _depth_growth,
    "replace": _replace_growth,
    "join": _join_growth,
    "sum": _sum_growth,
}
