"""Which tokens a checkpoint calls special, and by what name.

tokenizer.json has most of them; tokenizer_config.json, special_tokens_map.json and added_tokens.json name them and
may add more. The rules are those of transformers 5 (tokenization_utils_base.py, `_from_pretrained`), but that
`additional_special_tokens` count beside `extra_special_tokens` instead of being lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllm.config.reader import is_there
from tinyllm.errors import TokenizerError
from tinyllm.text.given import encodable

if TYPE_CHECKING:
    from tokenizers import AddedToken

__all__ = ["SpecialTokens", "read_json_object"]

MAX_JSON_BYTES = 64 * 2**20  # the largest tokenizer_config.json in use is about 1 MB
MAX_TOKEN_CHARACTERS = 1000
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a checkpoint's JSON files.

    `named` maps names such as `eos_token` to texts: what chat templates call them. `extra` are the others.
    `added` maps ids to tokens that the vocabulary must have, special or not.
    """

    named: dict[str, AddedToken] = field(default_factory=dict)
    extra: tuple[AddedToken, ...] = ()
    added: dict[int, AddedToken] = field(default_factory=dict)

    @classmethod
    def from_path(cls, path: Path, config: Mapping[str, Any]) -> SpecialTokens:
        """Read the folder's files; `config` is its tokenizer_config.json. Raises TokenizerError, naming the file."""
        source = path / "tokenizer_config.json"
        values = dict(config)
        added: dict[int, AddedToken] = {}
        if "added_tokens_decoder" in config:
            for token_id, entry in _mapping(config["added_tokens_decoder"], source, "added_tokens_decoder").items():
                added[_id(token_id, source)] = _token(entry, source, "added_tokens_decoder")
        else:  # the older layout
            values.update(read_json_object(path / "special_tokens_map.json"))
        named = {name: _token(values[name], source, name) for name in _names_in(values)}
        extra = list(_extra(values, source))
        for name, entry in _named_extra(values, source):
            named[name] = _token(entry, source, name)
        if "added_tokens_decoder" not in config:
            specials = {token.content for token in (*named.values(), *extra)}
            for text, token_id in read_json_object(path / "added_tokens.json").items():
                added[_id(token_id, path / "added_tokens.json")] = _plain_token(text, special=text in specials)
        return cls(named, tuple(extra), added)


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is no such file. Raises TokenizerError if it holds anything else."""
    if not is_there(file):
        return {}
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise TokenizerError(f"{file} is larger than {MAX_JSON_BYTES:,} bytes")
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{file} cannot be read as JSON: {error}") from error
    return _mapping(value, file, "the file")


def _names_in(values: Mapping[str, Any]) -> Iterator[str]:
    """Names of tokens: the well-known ones, then any other `*_token` that is a text."""
    yield from (name for name in _NAMES if values.get(name) is not None)
    yield from (
        name
        for name, value in values.items()
        if name.endswith("_token") and name not in _NAMES and isinstance(value, str)
        and name not in ("add_bos_token", "add_eos_token")
    )  # fmt: skip


def _extra(values: Mapping[str, Any], source: Path) -> Iterator[AddedToken]:
    """Special tokens without a name, of both keys that list them (fault 14)."""
    for key in ("additional_special_tokens", "extra_special_tokens"):
        entries = values.get(key) or ()
        if isinstance(entries, Mapping) and key == "extra_special_tokens":
            continue  # these have names
        if not isinstance(entries, (list, tuple)):
            raise TokenizerError(f"{source}: {key} is neither a list nor an object")
        yield from (_token(entry, source, key) for entry in entries)


def _named_extra(values: Mapping[str, Any], source: Path) -> Iterator[tuple[str, Any]]:
    entries = values.get("extra_special_tokens")
    if isinstance(entries, Mapping):
        yield from entries.items()


def _token(entry: Any, source: Path, key: str) -> AddedToken:
    """A token given as a text, or as an object with its flags."""
    from tokenizers import AddedToken

    text = entry.get("content") if isinstance(entry, Mapping) else entry
    if isinstance(text, str) and len(text) > MAX_TOKEN_CHARACTERS:
        raise TokenizerError(
            f"{source}: {key} has {len(text):,} characters, and {MAX_TOKEN_CHARACTERS:,} are the most"
        )
    if isinstance(text, str) and encodable(text) != text:
        raise TokenizerError(f"{source}: {key} holds {text!a:.80}, which is no text")
    if isinstance(entry, str):
        return _plain_token(entry, special=True)
    if isinstance(entry, Mapping) and isinstance(text, str):
        flags = {"special": key != "added_tokens_decoder"}
        flags |= {name: bool(entry[name]) for name in _FLAGS if name in entry}
        if flags["special"]:
            flags["normalized"] = False
        return AddedToken(text, **flags)
    raise TokenizerError(f"{source}: {key} holds {entry!r:.80}, which is no token")


def _plain_token(text: str, *, special: bool) -> AddedToken:
    from tokenizers import AddedToken

    return AddedToken(text, special=special, normalized=not special)


def _id(value: Any, source: Path) -> int:
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise TokenizerError(f"{source}: {value!r:.80} is no token id") from error


def _mapping(value: Any, source: Path, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TokenizerError(f"{source}: {key} is not a JSON object")
    return value
