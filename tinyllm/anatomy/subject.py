"""What is looked at: a config, and the headers of its files where there are any. No mlx."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tinyllm.checkpoint.contents import read_contents
from tinyllm.checkpoint.files import INDEX, find_weight_files
from tinyllm.checkpoint.forms import MadeTensor
from tinyllm.checkpoint.gguf_header import is_gguf
from tinyllm.checkpoint.safetensors_header import TensorInfo, read_safetensors_header
from tinyllm.checkpoint.tensor_table import StoredTensor, TensorTable, gather
from tinyllm.checkpoint.verify import Comparison, compare
from tinyllm.config.config import Config
from tinyllm.config.generation import METADATA, GenerationConfig
from tinyllm.config.quantization import QuantFormat
from tinyllm.config.reader import is_there, read_json_object
from tinyllm.config.tensors import tensor_shapes
from tinyllm.hub.locate import find_model, model_name

__all__ = ["Format", "Subject", "open_subject"]

_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}
_PACKED_PARTS = ("weight", "scales", "biases")


@dataclass(frozen=True)
class Format:
    """Parameters that are stored alike: how many, in how many bytes, and which of them are matrices."""

    name: str
    parameters: int
    nbytes: int
    matrices: tuple[str, ...]

    @property
    def bits_per_weight(self) -> float:
        """Bits for each parameter, the scales of packed ones included."""
        return 8 * self.nbytes / max(1, self.parameters)


class _Kept(NamedTuple):
    """A tensor as it unpacks, the name of the format that it is kept in, and its bytes there, scales included."""

    format: str
    name: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Subject:
    """A model under its `name`; `table` is None where there is a config and nothing else. `files` are its weights.

    `eos_token` is the text of the end token that the tokenizer's files name.
    """

    name: str
    config: Config
    table: TensorTable | None
    files: int = 0
    generation: GenerationConfig = GenerationConfig()
    eos_token: str | None = None

    @cached_property
    def stop_tokens(self) -> Mapping[int | str, tuple[str, ...]]:
        """The tokens that end an answer, as ids or as text, and where each is from."""
        origin = METADATA if self.generation.source == METADATA else "config.json"
        sources: dict[int | str, list[str]] = defaultdict(list)
        for i in self.config.eos_token_ids:
            sources[i].append(origin)
        for i in self.generation.eos_token_ids:
            sources[i].append(self.generation.source)
        if self.eos_token is not None:
            sources[self.eos_token].append("tokenizer_config.json")
        return {token: tuple(names) for token, names in sources.items()}

    @cached_property
    def comparison(self) -> Comparison | None:
        """What the config asks for against what the files have; None without files."""
        return None if self.table is None else compare(self.table.tensors, self.config)

    @cached_property
    def problems(self) -> Mapping[str, Mapping[str, str]]:
        """For each kind of difference the canonical names, each with what is to be said of it."""
        if self.table is None or self.comparison is None:
            return {}
        faults = {name: str(fault) for name, fault in self.table.faults.items()}
        kinds = {kind: dict(names) for kind, names in self.comparison.problems.items()}
        if "missing" in kinds:  # it is there, and something is wrong with it
            kinds["missing"] = {name: text for name, text in kinds["missing"].items() if name not in faults}
        return {kind: names for kind, names in {**kinds, "unusable": faults}.items() if names}

    @cached_property
    def used(self) -> Mapping[str, StoredTensor]:
        """Canonical name -> the tensor, of those that are of use."""
        if self.table is None or self.comparison is None:
            return {}
        return {name: info for name, info in self.table.tensors.items() if name not in self.comparison.ignored}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Canonical name -> the shape in the files, packed matrices as they unpack."""
        shapes = {}
        for name, info in self.used.items():
            module, _, leaf = name.rpartition(".")
            if not self._is_packed(module) or leaf not in _PACKED_PARTS:
                shapes[name] = info.shape
            elif leaf == "weight":
                form = self._form(module)
                columns = info.shape[-1] if form is None else info.shape[-1] * 32 // form.bits
                shapes[name] = (*info.shape[:-1], columns)
        return shapes

    @cached_property
    def filed(self) -> int:
        """How many tensors of the files are of the text model: of packed ones, each that a matrix is made of."""
        if self.table is None:
            return 0
        parts = [part for tensor in self.table.tensors.values() for part in tensor.parts]
        plain = {part.name for part in parts if isinstance(part, TensorInfo)}
        made = {info.name for part in parts if isinstance(part, MadeTensor) for info in part.stands_for}
        blocks = {part.stored.name for part in parts if not isinstance(part, TensorInfo | MadeTensor)}
        return len(plain | made | blocks)

    def format_name(self, name: str) -> str:
        """Say how a tensor is stored: as 4-bit, groups of 64, or bf16, and what it is made of: bf16 of fp8."""
        module = name.removesuffix(".weight")
        form = self._form(module) if name != module and self._is_packed(module) else None
        label, origin = self.used[name].dtype.lower() if form is None else _label(form), self.used[name].origin
        return label if origin is None else f"{label}, of {origin}"

    @cached_property
    def formats(self) -> tuple[Format, ...]:
        """How the parameters are stored, those of which there are most first; without files as expected."""
        alike: dict[str, list[_Kept]] = defaultdict(list)
        for tensor in self._stored() if self.table is not None else self._expected():
            alike[tensor.format].append(tensor)
        formats = [
            Format(
                name,
                sum(math.prod(tensor.shape) for tensor in tensors),
                sum(tensor.nbytes for tensor in tensors),
                tuple(tensor.name for tensor in tensors if len(tensor.shape) > 1),
            )
            for name, tensors in alike.items()
        ]
        return tuple(sorted(formats, key=lambda form: -form.parameters))

    def _stored(self) -> Iterator[_Kept]:
        for name, shape in self.shapes.items():
            module = name.removesuffix(".weight")
            packed = name != module and self._is_packed(module)
            parts = [f"{module}.{part}" for part in _PACKED_PARTS] if packed else [name]
            nbytes = sum(self.used[part].nbytes for part in parts if part in self.used)
            yield _Kept(self.format_name(name), name, shape, nbytes)

    def _expected(self) -> Iterator[_Kept]:
        dtype = self.config.dtype or "bfloat16"
        for name, shape in tensor_shapes(self.config).items():
            form = self._form(name.removesuffix(".weight")) if len(shape) > 1 else None
            bits = _BITS.get(dtype, 16) if form is None else form.bits + _overhead(form)
            label = dtype if form is None else _label(form)
            yield _Kept(label, name, shape, math.ceil(math.prod(shape) * bits / 8))

    def _is_packed(self, module: str) -> bool:
        return f"{module}.scales" in self.used

    def _form(self, module: str) -> QuantFormat | None:
        return None if self.config.quantization is None else self.config.quantization.format_of(module)


def open_subject(
    name: str | None, *, revision: str | None = None, offline: bool = False, report: Callable[[str], None]
) -> Subject:
    """Read the config.json and the headers that `name` means: a file, or what `find_model` takes.

    A repository that is not on this machine is looked at from a distance. Raises as `find_model`, and ConfigError or
    CheckpointError for what cannot be read at all.
    """
    if name is not None and Path(name).expanduser().is_file() and not is_gguf(Path(name)):
        file = Path(name).expanduser()
        return Subject(file.resolve().parent.name, Config.from_json_file(file), None)
    with _folder(name, revision, offline, report) as folder:
        return _read_folder(folder)


@contextmanager
def _folder(name: str | None, revision: str | None, offline: bool, report: Callable[[str], None]) -> Iterator[Path]:
    """Give the folder of a model, a hollow copy where it is not on this machine."""
    with ExitStack() as stack:

        def fetch(repo: str, revision: str | None) -> Path:
            from tinyllm.hub.pull import hollow  # of no use to what is here

            return stack.enter_context(hollow(repo, revision))

        yield find_model(name, revision=revision, offline=offline, report=report, fetch=fetch)


def _read_folder(folder: Path) -> Subject:
    if is_gguf(folder):
        contents = read_contents(folder)
        assert contents.header is not None
        generation = GenerationConfig.from_gguf(contents.header.metadata)
        return Subject(
            model_name(folder), contents.config, contents.table, len(contents.files.files), generation=generation
        )
    config = Config.from_json_file(folder)
    stated: dict[str, Any] = {"generation": GenerationConfig.from_folder(folder), "eos_token": _eos_token(folder)}
    if not (folder / INDEX).exists() and not any(folder.glob("*.safetensors")):
        return Subject(model_name(folder), config, None, **stated)
    files = find_weight_files(folder).files
    table = gather({file: read_safetensors_header(file) for file in files}, config)
    return Subject(model_name(folder), config, table, len(files), **stated)


def _eos_token(folder: Path) -> str | None:
    path = folder / "tokenizer_config.json"
    said = read_json_object(path).get("eos_token") if is_there(path) else None
    text = said.get("content") if isinstance(said, dict) else said
    return text if isinstance(text, str) else None


def _label(form: QuantFormat) -> str:
    name = f"{form.bits}-bit" if form.mode == "affine" else form.mode
    return f"{name}, groups of {form.group_size}"


def _overhead(form: QuantFormat) -> float:
    """Bits a weight for the scales, and for the biases of affine ones."""
    return (32 if form.mode == "affine" else 8) / form.group_size
