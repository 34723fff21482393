"""What a checkpoint is and which tensors it has: a folder of safetensors files, or a GGUF file. No mlx."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tinyllm.checkpoint.files import WeightFiles, find_weight_files
from tinyllm.checkpoint.gguf_header import is_gguf
from tinyllm.checkpoint.gguf_parts import parts_of
from tinyllm.checkpoint.tensor_table import TensorTable, read_tensor_table
from tinyllm.config.config import Config

__all__ = ["Contents", "read_config", "read_contents"]


@dataclass(frozen=True)
class Contents:
    """A config, the files that were read, and their tensors under canonical names."""

    config: Config
    files: WeightFiles
    table: TensorTable


def read_config(path: Path) -> Config:
    """Read what a folder's config.json, or a GGUF file, says. Raises ConfigError or CheckpointError."""
    return _read_gguf(path)[0] if is_gguf(path) else Config.from_json_file(path)


def read_contents(path: Path, config: Config | None = None) -> Contents:
    """Read the headers of a folder's files, or of a GGUF file, which has its own config. Raises as they do."""
    if is_gguf(path):
        found, table = _read_gguf(path)
        return Contents(found, WeightFiles(parts_of(path)), table)
    config = config or Config.from_json_file(path)
    files = find_weight_files(path)
    return Contents(config, files, read_tensor_table(files.files, config))


def _read_gguf(path: Path) -> tuple[Config, TensorTable]:
    from tinyllm.checkpoint.gguf_tensors import read_gguf  # of no use to folders

    return read_gguf(path)
