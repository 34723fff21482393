"""Arguments of a tool call: a mapping for some templates, a text for others."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tinyllm.errors import ChatTemplateError

__all__ = ["Arguments"]


class Arguments(dict[str, Any]):
    """A mapping that becomes its JSON text where a template appends it to a string.

    Some templates iterate over the items or use `tojson`, others concatenate; callers give a mapping or JSON text.
    All four meet. `_text` is the text that was given; without one, printing gives Python's form, as in transformers.
    """

    def __init__(self, values: Mapping[str, Any], text: str | None = None):
        super().__init__(values)
        self._text = text

    @classmethod
    def from_json(cls, text: str) -> Arguments | str:
        """Read JSON text; one that holds no object stays text. Raises ChatTemplateError if it is not JSON."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ChatTemplateError(f"the arguments of a tool call are not JSON: {error}") from error
        return cls(values, text) if isinstance(values, dict) else text

    @property
    def given_as_text(self) -> bool:
        """Whether the caller gave JSON text, which a template may ask for with `is string`."""
        return self._text is not None

    def map_texts(self, function: Callable[[Any], Any]) -> Arguments:
        """The same with a function applied to its keys, its values, and its text."""
        values = {function(key): function(value) for key, value in self.items()}
        return Arguments(values, None if self._text is None else function(self._text))

    def __str__(self) -> str:
        return super().__str__() if self._text is None else self._text

    def __add__(self, other: object) -> str:
        return self._as_json() + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> str:
        return other + self._as_json() if isinstance(other, str) else NotImplemented

    def _as_json(self) -> str:
        return json.dumps(self, ensure_ascii=False) if self._text is None else self._text
