"""generation_config.json: what the makers of a model say about generating with it. No mlx."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tinyllm.config.config import read_token_ids
from tinyllm.config.reader import ConfigReader, read_json_object

FILE = "generation_config.json"


@dataclass(frozen=True)
class GenerationConfig:
    """The ids that end an answer, beside those of config.json and of the tokenizer."""

    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_folder(cls, folder: Path) -> GenerationConfig:
        """Read the file of a checkpoint; one that is absent says nothing. Raises ConfigError for a malformed one."""
        path = folder / FILE
        if not path.exists():
            return cls()
        reader = ConfigReader(read_json_object(path), str(path))
        return cls(eos_token_ids=read_token_ids(reader, "eos_token_id"))
