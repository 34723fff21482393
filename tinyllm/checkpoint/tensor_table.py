"""The tensors of a checkpoint's files under canonical names, from their headers alone. No mlx."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from tinyllm.checkpoint.forms import MadeTensor, restate
from tinyllm.checkpoint.safetensors_header import TensorInfo, read_safetensors_header
from tinyllm.config.config import Config
from tinyllm.config.fused import Piece
from tinyllm.config.names import Target
from tinyllm.errors import CheckpointError

if TYPE_CHECKING:
    from tinyllm.checkpoint.gguf_tensors import GgufPart

__all__ = ["READABLE", "Source", "StoredTensor", "TensorTable", "gather", "read_tensor_table", "tensor_table"]

READABLE = frozenset({"U8", "U16", "U32", "F16", "BF16", "F32"})  # the types that MLX takes as they are
Source: TypeAlias = "TensorInfo | MadeTensor | GgufPart"
_WHOLE = -1  # in place of the number of an expert


@dataclass(frozen=True)
class StoredTensor:
    """A canonical tensor, as it stands in files or is made of what does: one tensor, or one an expert, to be stacked.

    Each is `transposed` first, and then a `piece` is taken of its output axis, number `axis` counted from the end.
    Of one that is `flat` all axes are made one.
    The kernels of a `depthwise` convolution are (channels, kernel), whichever of the file's axes after these is 1.
    """

    parts: tuple[Source, ...]
    stacked: bool = False
    transposed: bool = False
    piece: Piece | None = None
    axis: int = 2
    flat: bool = False
    depthwise: bool = False

    @property
    def dtype(self) -> str:
        """The type as the files write it."""
        return self.parts[0].dtype

    @property
    def origin(self) -> str | None:
        """The form that it is made of, where the files have another than MLX's: "gptq-4"."""
        return self.parts[0].stored.label if isinstance(self.parts[0], MadeTensor) else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The canonical shape."""
        shape = [math.prod(self.parts[0].shape)] if self.flat else list(self.parts[0].shape)
        if self.depthwise and len(shape) == 3 and 1 in shape[1:]:
            del shape[2 if shape[1] != 1 else 1]
        if self.transposed:
            shape[-2:] = shape[:-3:-1]
        if self.piece is not None:
            shape[-self.axis] = self.piece.length
        return (len(self.parts), *shape) if self.stacked else tuple(shape)

    @property
    def is_turned(self) -> bool:
        """Whether a convolution's kernels stand as MLX has them, and PyTorch has not."""
        shape = self.parts[0].shape
        return self.depthwise and len(shape) == 3 and shape[1] != 1 == shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes in the files, or once it is made."""
        whole = sum(part.nbytes for part in self.parts)
        return whole if self.piece is None else whole * self.piece.length // self.piece.whole


@dataclass(frozen=True)
class TensorTable:
    """Canonical name -> where the tensor stands; `skipped` counts those of no use to the text model.

    `faults` has tensors that cannot be put together from what the files hold.
    """

    tensors: dict[str, StoredTensor]
    skipped: int
    faults: dict[str, CheckpointError]


def read_tensor_table(files: Sequence[Path], config: Config) -> TensorTable:
    """Merge the headers of all files; see `tensor_table`."""
    return tensor_table({file: read_safetensors_header(file) for file in files}, config)


def tensor_table(headers: Mapping[Path, Mapping[str, TensorInfo]], config: Config) -> TensorTable:
    """Name the tensors of all files. Raises CheckpointError for one that is there twice or of another type."""
    table = gather(headers, config)
    for fault in table.faults.values():
        raise fault
    return table


def gather(headers: Mapping[Path, Mapping[str, TensorInfo]], config: Config) -> TensorTable:
    """Name the tensors of all files, those aside that `faults` are found with."""
    found: dict[str, _Found] = {}
    faults: dict[str, CheckpointError] = {}
    sources, skipped, unmade = restate(headers, config.quantization.stored if config.quantization else None)
    namer = _Namer(config)
    for info in sources:
        targets, expert = namer.targets(info.name)
        skipped += not targets
        for target in targets:
            if target.name not in found:
                found[target.name] = _Found(target)
            try:
                found[target.name].add(info, target, expert)
            except CheckpointError as fault:
                faults.setdefault(target.name, fault)
    for name, reason in unmade.items():
        for target in namer.targets(name)[0]:
            faults.setdefault(target.name, reason)
    tensors: dict[str, StoredTensor] = {}
    for name, same in found.items():
        if name in faults:
            continue
        try:
            tensors[name] = same.stored()
        except CheckpointError as fault:
            faults[name] = fault
    return TensorTable(tensors, skipped, faults)


class _Namer:
    """What a config calls the tensors of files; those of experts, tens of thousands, differ in a number alone."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._experts: dict[tuple[str, str], tuple[Target, ...]] = {}

    def targets(self, name: str) -> tuple[tuple[Target, ...], int | None]:
        """Return what `Config.targets` does of this expert or of another one, and the number of this one."""
        before, _, rest = name.partition(".experts.")
        number, _, after = rest.partition(".")
        if not number.isdecimal() or len(number) > 9:
            return self._config.targets(name), None
        if (before, after) not in self._experts:
            self._experts[before, after] = self._config.targets(name)
        return self._experts[before, after], int(number)


class _Found:
    """What files hold of one canonical tensor, the `target` of all: it as a whole, or its experts by number."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._parts: dict[int, Source] = {}

    def add(self, info: Source, target: Target, expert: int | None) -> None:
        """Add a tensor of a file; `expert` goes before the number of the name that the target was found with."""
        if info.dtype not in READABLE:
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r} is of type {info.dtype}, which tinyllm does not read"
            )
        number = _WHOLE if target.expert is None else target.expert if expert is None else expert
        parts = self._parts
        if number in parts or (parts and (number == _WHOLE) != (_WHOLE in parts)):
            first = next(iter(parts.values())).file
            raise CheckpointError(f"{info.file}: {info.name!r} is there twice, the first time in {first}")
        if target is not self._target and replace(target, expert=self._target.expert) != self._target:
            raise CheckpointError(f"{info.file}: {info.name!r} is fused or turned otherwise than those beside it")
        parts[number] = info

    def stored(self) -> StoredTensor:
        """Return the canonical tensor. Raises CheckpointError for experts that are absent, or unlike the others."""
        target, stacked = self._target, _WHOLE not in self._parts
        parts = self._in_order() if stacked else tuple(self._parts.values())
        first = parts[0]
        stored = StoredTensor(
            parts,
            stacked=stacked,
            transposed=target.transposed and len(first.shape) > 1 and first.dtype != "U32",  # packed: (out, in)
            piece=target.piece,
            axis=1 if first.name.endswith("bias") else 2,
            flat=target.flat,
            depthwise=target.depthwise,
        )
        _check_piece(stored)
        return stored

    def _in_order(self) -> tuple[Source, ...]:
        name, numbers = self._target.name, range(len(self._parts))
        absent = [str(i) for i in numbers if i not in self._parts]
        if absent:
            raise CheckpointError(f"{name!r}: expert {', '.join(absent[:6])} is absent, but later ones are there")
        if len({(part.shape, part.dtype) for part in self._parts.values()}) > 1:
            raise CheckpointError(f"{name!r}: experts are of different shapes or types")
        return tuple(self._parts[i] for i in numbers)


def _check_piece(stored: StoredTensor) -> None:
    """Raise CheckpointError where what a piece is to be taken of is not as long as it was to be."""
    if stored.piece is None:
        return
    [info, *_], whole = stored.parts, replace(stored, piece=None, stacked=False).shape
    if len(whole) < stored.axis or whole[-stored.axis] != stored.piece.whole:
        raise CheckpointError(
            f"{info.file}: {info.name!r} is {list(info.shape)}, and {stored.piece.whole} was to be"
            f" {'columns' if stored.transposed else 'rows'} of it"
        )
