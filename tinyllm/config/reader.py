"""A JSON object that remembers which of its keys were read, so that none is dropped in silence."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from tinyllm.errors import (
    ConfigError,
    MissingKeyError,
    ModelNotFoundError,
    UnknownKeyError,
    UnsafePathError,
    UnsupportedModelError,
)

MAX_CONFIG_BYTES = 16 << 20
REQUIRED: Any = object()
# Larger numbers are not meant: MLX counts in 32 bits, and float32 ends at 3e38.
_LIMITS: Mapping[type, float] = {int: 2**31 - 1, float: 1e30}


_METADATA = re.compile(
    r"dropout|_pdrop$|_drop$|initializer|init_std$|(^|_)loss(_|$)|(^|_)version$|(^|_)date$|(^|_)path$"
    r"|^(transformers|unsloth|tokenizer|wandb|gradient|quantized_by|training|base_model|created|torch_compile)|^name$"
)
_FACTORS = re.compile(r"factor|scale$|scaling$|multiplier$")


def _is_off(name: str, value: Any) -> bool:
    """Whether a value means that something is not used: null, false, zero, nothing, or a factor of one.

    The name of a module ("model.layers.0.mlp") is no key of that kind.
    """
    if "." in name:
        return False
    if _FACTORS.search(name) and value in (1, None) and value is not True:
        return True
    return value is None or value is False or value in ("", [], {}) or (value == 0 and not _FACTORS.search(name))


@dataclass(frozen=True)
class Key:
    """Where a value stands in config.json, its type, and what its absence means.

    `null` is a value of its own where `nullable`: in Mistral an absent `sliding_window` is 4096 and a null one is
    none at all. `also` are other names for the same: where several stand, they must agree.
    """

    name: str
    kind: type
    default: Any = REQUIRED
    nullable: bool = False
    minimum: float | None = None
    maximum: float | None = None
    also: tuple[str, ...] = ()


def check_link(path: Path) -> None:
    """Raise UnsafePathError for a link that leads out of a download; in other folders links are the user's to make.

    In the hub's cache snapshots/REVISION/NAME, or a NAME in a folder below it, links to blobs/HASH of the same
    repository.
    """
    try:
        real, home = path.resolve(), path.parent.resolve()
    except (OSError, ValueError, RuntimeError):  # a link that leads to itself, a name that no file can have
        raise UnsafePathError(
            f"{path.parent}: the file name {path.name!r} leads nowhere, and is not followed"
        ) from None
    named = path.parent.absolute()
    folders = (folder for each in (named, home) for folder in (each, *each.parents))
    snapshot = next((folder.resolve() for folder in folders if _is_snapshot(folder)), None)
    if snapshot is None or real.is_relative_to(snapshot) or real.parent == snapshot.parents[1] / "blobs":
        return
    raise UnsafePathError(f"{path}: a link that leads out of the folder, and is not followed")


def _is_snapshot(folder: Path) -> bool:
    return folder.parent.name == "snapshots" and (folder.parents[1] / "blobs").is_dir()


def is_there(path: Path) -> bool:
    """Whether a model has this file.

    Raises ConfigError for something else of that name, which would otherwise count as absent, and as `check_link`.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(f"{path}: not readable: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path}: not a file")
    check_link(path)
    return True


def read_json_object(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read the JSON object in `path`; ConfigError names the file when it is something else, or over `limit` bytes."""
    try:
        if not is_there(path):
            raise ModelNotFoundError(f"{path}: there is no such file")
        if path.stat().st_size > limit:
            raise ConfigError(f"{path}: larger than {limit >> 20} MB, which no model's configuration is")
        value = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a {type(value).__name__} where a JSON object must be")
    return value


def parse_json(content: bytes) -> Any:
    """Parse UTF-8 JSON. Raises ValueError for what is none, or where a key stands twice with different values."""
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_without_contradictions)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _without_contradictions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    for name, said in pairs if len(value) < len(pairs) else ():
        if said != value[name]:
            raise ValueError(f"{name!r} is there twice, as {brief(said)} and as {brief(value[name])}")
    return value


def _is_of(kind: type, value: Any) -> bool:
    """Whether `value` is of a type, as JSON has it: a whole number may be a float, and no flag is a number."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


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
        names = [name for name in (key.name, *key.also) if name in self.values]
        self._unread.difference_update(names)
        if not names:
            if key.default is REQUIRED:
                raise self.fail(MissingKeyError, f"the key {key.name!r} is absent, and it has no default")
            return key.default
        value, *others = (self._checked(replace(key, name=name), self.values[name]) for name in names)
        if any(other != value for other in others):
            raise self.fail(ConfigError, f"{' and '.join(map(repr, names))} contradict each other")
        return value

    def _checked(self, key: Key, value: Any) -> Any:
        if value is None and key.nullable:
            return None
        if not _is_of(key.kind, value):
            kind = "null" if value is None else type(value).__name__
            raise self.fail(ConfigError, f"{key.name!r} must be of type {key.kind.__name__}, not {kind}")
        if key.kind in _LIMITS:
            self._check_range(key, value)
        return float(value) if key.kind is float else value

    def _check_range(self, key: Key, value: float) -> None:
        most = _LIMITS[key.kind] if key.maximum is None else key.maximum
        least = -most if key.minimum is None else key.minimum
        if not least <= value <= most:
            raise self.fail(
                ConfigError, f"{key.name!r} is {brief(value)}, and what makes sense is {least:g} to {most:g}"
            )

    def object(self, name: str) -> ConfigReader | None:
        """Read a nested object with a reader of its own; None where it is absent or null."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(ConfigError, f"{name!r} must be an object, not {type(value).__name__}")
        return ConfigReader(value, self.source, f"{self._within}.{name}" if self._within else name)

    def objects(self, name: str) -> list[ConfigReader]:
        """Read a list of objects, each with a reader of its own. Raises as `read` does."""
        items = self.read(Key(name, list))
        place = f"{self._within}.{name}" if self._within else name
        for i, value in enumerate(items):
            if not isinstance(value, dict):
                raise self.fail(ConfigError, f"{name}[{i}] must be an object, not {type(value).__name__}")
        return [ConfigReader(value, self.source, f"{place}[{i}]") for i, value in enumerate(items)]

    def discard(self, names: Iterable[str]) -> None:
        """Count keys as accounted for that have no effect on the numbers."""
        self._unread.difference_update(names)

    def discard_where(self, harmless: Mapping[str, Callable[[Any], bool]]) -> None:
        """Count keys as accounted for whose present value has no effect on the numbers."""
        self._unread.difference_update(
            name for name, is_harmless in harmless.items() if name in self.values and is_harmless(self.values[name])
        )

    def refuse(self, accepted: Mapping[str, Callable[[Any], bool]]) -> None:
        """Read keys of which only some values are computed. Raises UnsupportedModelError for others."""
        for name, accepts in accepted.items():
            if name in self.values and not accepts(self.take(name)):
                raise self.fail(
                    UnsupportedModelError, f"{name} = {brief(self.values[name])} is not computed by tinyllm"
                )

    def finish(self, *, strict: bool = False) -> None:
        """Raise UnknownKeyError, naming each, if any key was neither read nor discarded.

        Keys about origins, tools and training have no effect. Nor does an unknown key at a value that switches
        something off: what the reference's code of a family reads is known to its row (scripts/reference_keys.py).
        `strict` takes every unknown key for a mistake.
        """
        unknown = sorted(
            name
            for name in self._unread
            if strict or not (name.startswith("_") or _METADATA.search(name) or _is_off(name, self.values[name]))
        )
        if unknown:
            pairs = ", ".join(f"{name} = {brief(self.values[name])}" for name in unknown)
            raise self.fail(
                UnknownKeyError,
                f"tinyllm does not know what this asks for, and will not guess: {pairs}",
            )
