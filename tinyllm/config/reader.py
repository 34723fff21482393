"""A JSON object that remembers which of its keys were read, so that none is dropped in silence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tinyllm.errors import ConfigError, MissingKeyError, ModelNotFoundError, UnknownKeyError

MAX_CONFIG_BYTES = 16 << 20
REQUIRED: Any = object()


@dataclass(frozen=True)
class Key:
    """Where a value stands in config.json, its type, and what its absence means.

    `null` is a value of its own where `nullable`: in Mistral an absent `sliding_window` is 4096 and a null one is
    none at all.
    """

    name: str
    kind: type
    default: Any = REQUIRED
    nullable: bool = False
    minimum: float | None = None


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`; ConfigError names the file when it is something else."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_CONFIG_BYTES >> 20} MB, which no model's configuration is")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path}: there is no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error or type(error).__name__}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a {type(value).__name__} where a JSON object must be")
    return value


class ConfigReader:
    """Typed, checked reads from one JSON object. `source` is the path, and `within` the key, that errors name."""

    def __init__(self, values: Mapping[str, Any], source: str, within: str = "") -> None:
        self.values = values
        self.source = source
        self._within = within
        self._unread = set(values)

    def has(self, name: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(name) is not None

    def fail(self, error: type[ConfigError], message: str) -> ConfigError:
        """Make (not raise) an error that names the file and the enclosing key."""
        place = f"{self.source}: {self._within}: " if self._within else f"{self.source}: "
        return error(place + message)

    def take(self, name: str, default: Any = None) -> Any:
        """Read any value, unchecked, and count it as read."""
        self._unread.discard(name)
        return self.values.get(name, default)

    def read(self, key: Key) -> Any:
        """Read the value of `key`; raises MissingKeyError or ConfigError, each naming the key and the file."""
        self._unread.discard(key.name)
        if key.name not in self.values:
            if key.default is REQUIRED:
                raise self.fail(MissingKeyError, f"the key {key.name!r} is absent, and it has no default")
            return key.default
        return self._checked(key, self.values[key.name])

    def _checked(self, key: Key, value: Any) -> Any:
        if value is None and key.nullable:
            return None
        if key.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, key.kind) or (isinstance(value, bool) and key.kind is not bool):
            kind = "null" if value is None else type(value).__name__
            raise self.fail(ConfigError, f"{key.name!r} must be of type {key.kind.__name__}, not {kind}")
        if key.minimum is not None and not key.minimum <= cast(float, value) < float("inf"):
            raise self.fail(
                ConfigError, f"{key.name!r} is {value}, and the least that makes sense is {key.minimum:g}"
            )
        return value

    def object(self, name: str) -> ConfigReader | None:
        """Read a nested object with a reader of its own; None where it is absent or null."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(ConfigError, f"{name!r} must be an object, not {type(value).__name__}")
        return ConfigReader(value, self.source, f"{self._within}.{name}" if self._within else name)

    def discard(self, names: Iterable[str]) -> None:
        """Count keys as accounted for that have no effect on the numbers."""
        self._unread.difference_update(names)

    def discard_where(self, harmless: Mapping[str, Callable[[Any], bool]]) -> None:
        """Count keys as accounted for whose present value has no effect on the numbers."""
        self._unread.difference_update(
            name for name, is_harmless in harmless.items() if name in self.values and is_harmless(self.values[name])
        )

    def finish(self) -> None:
        """Raise UnknownKeyError, naming each, if any key was neither read nor discarded."""
        if self._unread:
            pairs = ", ".join(f"{name} = {json.dumps(self.values[name])[:60]}" for name in sorted(self._unread))
            raise self.fail(
                UnknownKeyError,
                f"tinyllm does not know what this asks for, and will not guess: {pairs}",
            )
