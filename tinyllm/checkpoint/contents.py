"""What a checkpoint is and which tensors it has: a folder of safetensors files, or a GGUF file. No mlx."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tinyllm.checkpoint.files import WeightFiles, find_weight_files
from tinyllm.checkpoint.gguf_header import GgufHeader, is_gguf
from tinyllm.checkpoint.gguf_parts import parts_of, read_gguf_parts
from tinyllm.checkpoint.tensor_table import TensorTable, read_tensor_table
from tinyllm.config.config import Config

__all__ = ["Contents", "read_contents"]


@dataclass(frozen=True)
class Contents:
    """The checkpoint at `path` as its headers have it: read once, and handed on to all that is made of it.

    A config, the files that were read, and their tensors under canonical names. A GGUF file's `header` has all that
    it says, its tokenizer too, which takes a while to read; a folder has none.
    """

    path: Path
    config: Config
    files: WeightFiles
    table: TensorTable
    header: GgufHeader | None = None


def read_contents(path: str | Path, config: Config | None = None) -> Contents:
    """Read the headers of a folder's files, by its config.json or `config`, or of a GGUF file, which has its own.

    Raises ConfigError or CheckpointError, or a class below them.
    """
    path = Path(path)
    if is_gguf(path):
        return _read_gguf(path)
    config = config or Config.from_json_file(path)
    files = find_weight_files(path)
    return Contents(path, config, files, read_tensor_table(files.files, config))


def _read_gguf(path: Path) -> Contents:
    from tinyllm.checkpoint.gguf_tensors import config_and_tensors  # of no use to folders

    header = read_gguf_parts(path)
    config, table = config_and_tensors(header)
    return Contents(path, config, WeightFiles(parts_of(path)), table, header)
