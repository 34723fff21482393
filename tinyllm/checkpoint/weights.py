"""The tensors of a checkpoint under canonical names: checked from the headers alone, read one at a time."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tinyllm._mx import mx
from tinyllm.checkpoint.claims import check_claims
from tinyllm.checkpoint.contents import Contents, read_contents
from tinyllm.checkpoint.forms import MadeTensor
from tinyllm.checkpoint.gguf_tensors import GgufPart, as_dense
from tinyllm.checkpoint.quantization import make
from tinyllm.checkpoint.safetensors_header import TensorInfo
from tinyllm.checkpoint.summary import memory_bytes
from tinyllm.checkpoint.tensor_table import Source, StoredTensor
from tinyllm.checkpoint.verify import check_tensors, is_spare_bias
from tinyllm.config.config import Config
from tinyllm.config.quantization import QuantFormat
from tinyllm.config.tensors import EMBEDDING, LM_HEAD
from tinyllm.errors import CheckpointError, MissingFileError, TensorMismatchError
from tinyllm.ops.quant import dequantize

logger = logging.getLogger("tinyllm")

DTYPES = {
    "U8": mx.uint8, "U16": mx.uint16, "U32": mx.uint32, "F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32,
    "I8": mx.int8, "I32": mx.int32, "I64": mx.int64, "F8_E4M3": mx.uint8,
}  # fmt: skip
_FLOATS = (mx.float16, mx.bfloat16, mx.float32)
_HALVES = {"float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class DenseWeight:
    """A matrix (out, in), and the bias (out,) that is added to its products; or one of each for every expert.

    `transposed` (in, out) is another view of the matrix, made once: it is what every product multiplies by.
    """

    weight: mx.array
    bias: mx.array | None = None
    transposed: mx.array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "transposed", self.weight.swapaxes(-1, -2))
        mx.eval(self.transposed)

    @property
    def shape(self) -> tuple[int, ...]:
        """(out, in), after the number of experts if there are several."""
        return self.weight.shape

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True)
class QuantizedWeight:
    """A packed matrix: `packed` (out, in * bits / 32) uint32, `scales` and `biases` (out, in / group_size).

    Experts have one each, stacked.

    `biases` belong to the packing, and only affine has them; `bias` (out,) is the layer's own.
    """

    packed: mx.array
    scales: mx.array
    biases: mx.array | None
    form: QuantFormat
    bias: mx.array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(out, in) of the dense matrix, after the number of experts if there are several."""
        return (*self.packed.shape[:-1], self.packed.shape[-1] * 32 // self.form.bits)

    def dequantize(self) -> mx.array:
        """Return the dense matrix (out, in), in the dtype of `scales` (bfloat16 where they are no floats)."""
        return dequantize(self.packed, self.scales, self.biases, self.form)


LinearWeight = DenseWeight | QuantizedWeight


class WeightStore:
    """A checkpoint's tensors. Nothing is read before it is asked for, and nothing that was read is kept."""

    def __init__(self, tensors: dict[str, StoredTensor], config: Config) -> None:
        self.config = config
        self.dtype: mx.Dtype | None = None
        self.expands = False
        self._tensors = tensors
        self._lazy: dict[Path, dict[str, mx.array]] = {}
        self._made: dict[MadeTensor, mx.array] = {}
        self._readings: Counter[Source] = Counter(part for tensor in tensors.values() for part in tensor.parts)
        for part in list(self._readings):
            if isinstance(part, MadeTensor):
                self._readings.update(part.sources)

    @classmethod
    def from_path(cls, path: str | Path, config: Config | None = None) -> WeightStore:
        """Read the headers of a folder or a GGUF file, see `read_contents`; raises what that does, and `of`."""
        return cls.of(read_contents(path, config))

    @classmethod
    def of(cls, contents: Contents) -> WeightStore:
        """Hold what the headers have against the config.

        Of those in other libraries' forms, small ones are read that decide whether the large ones can be.

        Raises TensorMismatchError, listing them all, for tensors that are missing, surplus or mis-shaped;
        MissingFileError where that is for want of a file that the index names; UnsupportedQuantizationError for what
        the small ones say.
        """
        folder, config, found, table = contents.path, contents.config, contents.files, contents.table
        tensors = table.tensors
        if table.skipped:
            logger.warning("%s: %d tensors that the text model has no use for are left out", folder, table.skipped)
        try:
            useless = check_tensors(tensors, config, folder)
        except TensorMismatchError as error:
            if not found.absent:
                raise
            raise MissingFileError(
                f"{folder}: the index names files that are not there ({', '.join(found.absent)}), and"
                f" model.safetensors alone does not do: {error}"
            ) from error
        if found.absent:
            logger.warning("%s: the index is stale; model.safetensors holds every tensor, and is read alone", folder)
        if LM_HEAD in useless and not _same_bytes(tensors[LM_HEAD], tensors[EMBEDDING]):
            logger.warning("%s: %s differs from the embedding that it is tied to, and is not used", folder, LM_HEAD)
        for name in sorted(useless):
            if is_spare_bias(name, tensors, config) and not _is_zero(tensors[name]):
                raise TensorMismatchError(f"{folder}: {name} is not zero, but config.json has no bias there")
        used = {name: info for name, info in tensors.items() if name not in useless}
        made = (part for info in used.values() for part in info.parts if isinstance(part, MadeTensor))
        check_claims(dict.fromkeys(claim for part in made for claim in part.claims))
        return cls(used, config)

    def cast(self, dtype: mx.Dtype | None, *, expand: bool = False) -> WeightStore:
        """Return the store, reading floating-point tensors as `dtype`; `expand` reads packed matrices as dense."""
        store = WeightStore(as_dense(self._tensors) if expand else self._tensors, self.config)
        store.dtype, store.expands = dtype, expand
        return store

    @property
    def names(self) -> frozenset[str]:
        """Canonical names of all tensors."""
        return frozenset(self._tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, as stored."""
        return sum(info.nbytes for info in self._tensors.values())

    @property
    def memory_bytes(self) -> int:
        """Bytes of all tensors, as they are read."""
        size = None if self.dtype is None else self.dtype.size
        return memory_bytes(self.config, self._tensors, size, expand=self.expands)

    @property
    def stored_dtype(self) -> mx.Dtype:
        """The floating-point type of the embedding, or of its scales where it is packed.

        Scales of a GGUF file that are float32 are products of halves, and no word of what to compute in; in a folder
        that was made of one config.json has it.
        """
        scales = EMBEDDING.replace(".weight", ".scales")
        info = self._info(scales if self.has(scales) else EMBEDDING)
        stored = DTYPES[info.dtype]
        if self.has(scales) and stored == mx.float32:
            from_blocks = isinstance(info.parts[0], GgufPart)
            return mx.bfloat16 if from_blocks else _HALVES.get(self.config.dtype or "", stored)
        return stored if stored in _FLOATS else mx.bfloat16

    @property
    def is_quantized(self) -> bool:
        """Whether any matrix is packed."""
        return any(name.endswith(".scales") for name in self._tensors)

    @property
    def offsets_added(self) -> bool:
        """Whether weights of norms hold already what a norm adds to them.

        mlx-lm adds it where it turns the kernels of convolutions, and goes by these itself to tell.
        """
        return any(tensor.is_turned for tensor in self._tensors.values())

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that canonical name."""
        return name in self._tensors

    def stored(self, name: str) -> StoredTensor:
        """Return how a tensor of that canonical name stands in the files."""
        return self._info(name)

    def form(self, module: str) -> QuantFormat | None:
        """Return how the matrix of a module is packed in the files; None for a dense one."""
        return self._form(module)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape as stored: a packed matrix has fewer columns than it stands for."""
        return self._info(name).shape

    def tensor(self, name: str, *, as_stored: bool = False) -> mx.array:
        """Read one tensor, cast or `as_stored`. Raises CheckpointError if there is none of that name."""
        stored = self._info(name)
        array = self._read(stored)
        if array.dtype in _FLOATS:
            array = array.astype(DTYPES[stored.dtype] if self.dtype is None or as_stored else self.dtype)
        mx.eval(array)
        return array

    def linear(self, *modules: str) -> LinearWeight:
        """Read the matrix and bias of a module ("model.layers.0.mlp.up_proj"), or of several with their rows joined.

        Only `joinable` modules can be joined. Reading takes, beside the result, as much memory again while joining.
        """
        if len(modules) > 1 and self.dtype is not None and not any(map(self._form, modules)):
            return self._dense_rows(modules, self.dtype)
        parts = [self._linear(module) for module in modules]
        return parts[0] if len(parts) == 1 else _join_rows(parts)

    def dense(self, module: str) -> mx.array:
        """Read the matrix of a module, unpacked, in the type that the store is read as."""
        weight = self._linear(module)
        if isinstance(weight, DenseWeight):
            return weight.weight
        dense = weight.dequantize().astype(self.dtype or self.stored_dtype)
        mx.eval(dense)
        return dense

    def joinable(self, *modules: str) -> bool:
        """Whether `linear` can join these modules: they are packed alike, and all have a bias or none has."""
        return len({(self._form(module), self.has(f"{module}.bias")) for module in modules}) == 1

    def _linear(self, module: str) -> LinearWeight:
        bias = self.tensor(f"{module}.bias") if self.has(f"{module}.bias") else None
        form = self._form(module)
        if form is None:
            return DenseWeight(self.tensor(f"{module}.weight"), bias)
        packed = QuantizedWeight(
            packed=self.tensor(f"{module}.weight"),
            scales=self._scales(f"{module}.scales"),
            biases=self._scales(f"{module}.biases") if self.has(f"{module}.biases") else None,
            form=form,
            bias=bias,
        )
        if not self.expands:
            return packed
        dense = packed.dequantize().astype(self.dtype or self.stored_dtype)
        mx.eval(dense)
        return DenseWeight(dense, bias)

    def _dense_rows(self, modules: Sequence[str], dtype: mx.Dtype) -> DenseWeight:
        """Join dense matrices before they are cast: as stored they are half the bytes to copy, where it matters."""
        rows = mx.concatenate([self._read(self._info(f"{module}.weight")) for module in modules], axis=-2)
        rows = rows.astype(dtype)
        mx.eval(rows)
        has_bias = self.has(f"{modules[0]}.bias")
        return DenseWeight(rows, _joined([self.tensor(f"{m}.bias") if has_bias else None for m in modules], axis=-1))

    def _scales(self, name: str) -> mx.array:
        """Read scales, never as a shorter type than they are stored in: they make up all elements of a group."""
        shorter = self.dtype is not None and DTYPES[self._info(name).dtype].size > self.dtype.size
        return self.tensor(name, as_stored=shorter)

    def _form(self, module: str) -> QuantFormat | None:
        if not self.has(f"{module}.scales") or self.config.quantization is None:
            return None
        return self.config.quantization.format_of(module)

    def _info(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}")
        return self._tensors[name]

    def _read(self, stored: StoredTensor) -> mx.array:
        """Return a canonical tensor, of the parts of it and of what is to be done with each."""
        arrays = [_taken(self._load(part), stored) for part in stored.parts]
        return mx.stack(arrays) if stored.stacked else arrays[0]

    def _load(self, info: Source) -> mx.array:
        """Return an array that nothing else holds after its last reading: one kept here would keep its data alive.

        A tensor of which several canonical ones are pieces is read from the file, or made, once for all of them.
        """
        self._readings[info] -= 1
        last = self._readings[info] <= 0
        if isinstance(info, MadeTensor):
            if info not in self._made:
                self._made[info] = make(info, [self._load(source) for source in info.sources])
                mx.eval(self._made[info])
            return self._made.pop(info) if last else self._made[info]
        arrays = self._lazy.setdefault(info.file, {})
        if info.name not in arrays:
            arrays.update(_load_file(info))
        return arrays.pop(info.name) if last else arrays[info.name]


def _taken(array: mx.array, stored: StoredTensor) -> mx.array:
    """Return the part of a file's tensor that a canonical one is."""
    if stored.flat:
        array = array.flatten()
    if stored.depthwise:
        return array.reshape(stored.shape)
    if stored.transposed:
        array = array.swapaxes(-1, -2)
    piece = stored.piece
    if piece is None:
        return array
    axis = array.ndim - stored.axis
    before, after = array.shape[:axis], array.shape[axis + 1 :]
    units = array.reshape(*before, piece.groups, piece.units, piece.size, *after)
    index = (*[slice(None)] * (axis + 1), slice(piece.start, piece.stop))
    return mx.contiguous(units[index].reshape(*before, piece.length, *after))


def _load_file(info: TensorInfo | GgufPart) -> dict[str, mx.array]:
    """Return lazy arrays of the tensor's whole file, or of it alone: of a GGUF file, and of one that MLX refuses.

    It refuses sound files too: headers above 100 MB, and every tensor of a file that holds one of a type which it
    does not have.
    """
    if isinstance(info, GgufPart):
        from tinyllm.checkpoint.gguf import load_part  # NumPy, and of no use to other files

        return load_part(info)
    try:
        loaded = mx.load(str(info.file), format="safetensors")
    except (RuntimeError, ValueError):
        import numpy as np  # takes a tenth of a second to import, for files that are rare

        data = np.memmap(info.file, mode="r", offset=info.start, shape=(info.nbytes,), dtype=np.uint8)
        return {info.name: mx.array(data).view(DTYPES[info.dtype]).reshape(info.shape)}
    assert isinstance(loaded, dict)
    return loaded


def _join_rows(parts: Sequence[LinearWeight]) -> LinearWeight:
    """Stack the rows of matrices that are packed alike, and their biases."""
    bias = _joined([part.bias for part in parts], axis=-1)
    dense = [part for part in parts if isinstance(part, DenseWeight)]
    if dense:
        return DenseWeight(_join([part.weight for part in dense], axis=-2), bias)
    packed = [part for part in parts if isinstance(part, QuantizedWeight)]
    return QuantizedWeight(
        packed=_join([part.packed for part in packed], axis=-2),
        scales=_join([part.scales for part in packed], axis=-2),
        biases=_joined([part.biases for part in packed], axis=-2),
        form=packed[0].form,
        bias=bias,
    )


def _join(arrays: Sequence[mx.array], axis: int) -> mx.array:
    joined = mx.concatenate(list(arrays), axis=axis)
    mx.eval(joined)
    return joined


def _joined(arrays: Sequence[mx.array | None], axis: int) -> mx.array | None:
    present = [array for array in arrays if array is not None]
    return _join(present, axis) if present else None


def _is_zero(stored: StoredTensor) -> bool:
    """Whether a tensor's bytes in the files are all zero."""
    for part in stored.parts:
        if not isinstance(part, TensorInfo):
            return False
        with part.file.open("rb") as file:
            file.seek(part.start)
            left = part.nbytes
            while left:
                chunk = file.read(min(left, 1 << 20))
                if not chunk or chunk.strip(b"\0"):
                    return False
                left -= len(chunk)
    return True


def _same_bytes(head: StoredTensor, embedding: StoredTensor) -> bool:
    """Whether two tensors hold the same data, by samples: matrices that were trained apart differ everywhere."""
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return False
    [a], [b] = head.parts, embedding.parts
    if isinstance(a, MadeTensor) or isinstance(b, MadeTensor):
        return False
    size, samples = 1 << 16, 64
    offsets = range(0, a.nbytes, max(size, a.nbytes // samples))
    with a.file.open("rb") as file_a, b.file.open("rb") as file_b:
        for offset in offsets:
            length = min(size, a.nbytes - offset)
            file_a.seek(a.start + offset)
            file_b.seek(b.start + offset)
            if file_a.read(length) != file_b.read(length):
                return False
    return True
