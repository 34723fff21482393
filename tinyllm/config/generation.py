"""generation_config.json: what the makers of a model say about generating with it. No mlx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tinyllm.config.config import read_token_ids
from tinyllm.config.reader import ConfigReader, Key, is_there, read_json_object

FILE = "generation_config.json"
_DRAWING = (
    Key("temperature", float, None, nullable=True),
    Key("top_k", int, None, nullable=True),
    Key("top_p", float, None, nullable=True),
    Key("min_p", float, None, nullable=True),
)
_REPETITION = Key("repetition_penalty", float, None, nullable=True)


@dataclass(frozen=True)
class GenerationConfig:
    """Ids that end an answer, beside those of config.json and the tokenizer; and sampling values that are stated.

    `sampling` has the names of `SamplingParams`' fields, and only those that the file states a value of.
    """

    eos_token_ids: tuple[int, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_folder(cls, folder: Path) -> GenerationConfig:
        """Read the file of a checkpoint; one that is absent says nothing. Raises ConfigError for a malformed one."""
        path = folder / FILE
        if folder.is_file() or not is_there(path):
            return cls()
        reader = ConfigReader(read_json_object(path), str(path))
        return cls(eos_token_ids=read_token_ids(reader, "eos_token_id"), sampling=_read_sampling(reader))


def _read_sampling(reader: ConfigReader) -> dict[str, float]:
    """`do_sample: false` means greedy, whatever else stands there; `true` alone means a temperature of 1."""
    samples = reader.read(Key("do_sample", bool, None, nullable=True))
    drawing = {key.name: reader.read(key) for key in _DRAWING}
    if samples is False:
        drawing = {"temperature": 0.0}
    elif samples and drawing["temperature"] is None:
        drawing["temperature"] = 1.0
    values = {**drawing, "repetition_penalty": reader.read(_REPETITION)}
    return {name: value for name, value in values.items() if value is not None}
