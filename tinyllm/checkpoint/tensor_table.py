"""The tensors of a checkpoint's files under canonical names, from their headers alone. No mlx."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinyllm.checkpoint.forms import MadeTensor, Source, restate
from tinyllm.checkpoint.safetensors_header import TensorInfo, read_safetensors_header
from tinyllm.config.config import Config
from tinyllm.config.fused import Piece
from tinyllm.config.names import Target
from tinyllm.errors import CheckpointError

__all__ = ["READABLE", "StoredTensor", "TensorTable", "gather", "read_tensor_table", "tensor_table"]

READABLE = frozenset({"U8", "U16", "U32", "F16", "BF16", "F32"})  # the types that MLX takes as they are
_EXPERT = re.compile(r"\.experts\.(\d{1,9})\.")
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
    found: dict[str, dict[int, StoredTensor]] = defaultdict(dict)
    faults: dict[str, CheckpointError] = {}
    sources, skipped, unmade = restate(headers, config.quantization.stored if config.quantization else None)
    namer = _Namer(config)
    for info in sources:
        targets, expert = namer.targets(info.name)
        skipped += not targets
        for target in targets:
            try:
                _add(found[target.name], info, target, _number(target, expert))
            except CheckpointError as fault:
                faults.setdefault(target.name, fault)
    for name, reason in unmade.items():
        for target in namer.targets(name)[0]:
            faults.setdefault(target.name, reason)
    tensors: dict[str, StoredTensor] = {}
    for name, same in found.items():
        if not same:
            continue
        try:
            tensors[name] = same[_WHOLE] if _WHOLE in same else _stack(name, same)
        except CheckpointError as fault:
            faults.setdefault(name, fault)
    for name in faults:
        tensors.pop(name, None)
    return TensorTable(tensors, skipped, faults)


class _Namer:
    """What a config calls the tensors of files; those of experts, tens of thousands, differ in a number alone."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._experts: dict[tuple[str, str], tuple[Target, ...]] = {}

    def targets(self, name: str) -> tuple[tuple[Target, ...], int | None]:
        """Return what `Config.targets` does of this expert or of another one, and the number of this one."""
        found = _EXPERT.search(name)
        if found is None:
            return self._config.targets(name), None
        expert, around = int(found[1]), (name[: found.start(1)], name[found.end(1) :])
        if around not in self._experts:
            self._experts[around] = self._config.targets(name)
        return self._experts[around], expert


def _number(target: Target, expert: int | None) -> int:
    """Return the number of an expert, that of its own name before the one that the target was found with."""
    if target.expert is None:
        return _WHOLE
    return target.expert if expert is None else expert


def _add(same: dict[int, StoredTensor], info: Source, target: Target, number: int) -> None:
    """Add one tensor of a file to those that make up a canonical one, by the number of the expert."""
    if info.dtype not in READABLE:
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r} is of type {info.dtype}, which tinyllm does not read"
        )
    if number in same or (same and (number == _WHOLE) != (_WHOLE in same)):
        first = next(iter(same.values())).parts[0].file
        raise CheckpointError(f"{info.file}: {info.name!r} is there twice, the first time in {first}")
    same[number] = _stored(info, target)


def _stored(info: Source, target: Target) -> StoredTensor:
    axis, piece = 1 if info.name.endswith("bias") else 2, target.piece
    transposed = target.transposed and len(info.shape) > 1 and info.dtype != "U32"  # packed ones stand as (out, in)
    stored = StoredTensor(
        (info,), transposed=transposed, piece=piece, axis=axis, flat=target.flat, depthwise=target.depthwise
    )
    if piece is not None:
        whole = StoredTensor((info,), transposed=transposed).shape
        if len(whole) < axis or whole[-axis] != piece.whole:
            raise CheckpointError(
                f"{info.file}: {info.name!r} is {list(info.shape)}, and {piece.whole} was to be"
                f" {'columns' if transposed else 'rows'} of it"
            )
    return stored


def _stack(name: str, by_number: Mapping[int, StoredTensor]) -> StoredTensor:
    """Return one tensor of all experts. Raises CheckpointError where one is absent, or unlike the others."""
    first = by_number[min(by_number)]
    absent = [str(i) for i in range(len(by_number)) if i not in by_number]
    if absent:
        raise CheckpointError(f"{name!r}: expert {', '.join(absent[:6])} is absent, but later ones are there")
    ordered = [by_number[i] for i in range(len(by_number))]
    if any((each.shape, each.dtype) != (first.shape, first.dtype) for each in ordered):
        raise CheckpointError(f"{name!r}: experts are of different shapes or types")
    parts = tuple(each.parts[0] for each in ordered)
    return StoredTensor(parts, stacked=True, transposed=first.transposed, piece=first.piece, axis=first.axis)
