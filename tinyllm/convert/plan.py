"""What a conversion writes, a step at a time: nothing is read before its step is taken."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import DTYPES, QuantizedWeight, WeightStore
from tinyllm.config.quantization import QuantFormat
from tinyllm.config.tensors import stored_shapes
from tinyllm.convert.layout import as_mlx_lm, as_published, gguf_layout
from tinyllm.convert.naming import FileTensor, file_names, is_known
from tinyllm.convert.pieces import as_filed, fused
from tinyllm.convert.recipe import Choice
from tinyllm.convert.shards import Planned
from tinyllm.ops.packing import Packed, pack

__all__ = ["Conversion", "Step", "as_stored"]

_FILE_TYPES = {dtype: name for name, dtype in DTYPES.items()}
_PRECISE = ("e_score_correction_bias", "A_log")  # decided by more digits than half precision has
_DENSE_BITS = 16
_PARTS = ("weight", "scales", "biases")

Named = list[tuple[str, mx.array]]


@dataclass(frozen=True)
class Step:
    """Tensors that are made together, from one of the source: `make` gives them in the order of `tensors`."""

    tensors: tuple[Planned, ...]
    make: Callable[[], Named]


class Conversion:
    """The steps from a checkpoint to another of the same model, its matrices in the forms that were chosen.

    Modules that the source has as one tensor get one form, of the most bits that was chosen for any of them.
    """

    def __init__(self, store: WeightStore, choice: Choice, *, of_gguf: bool = False) -> None:
        """With `of_gguf` the source is a GGUF file, which says nothing of the names that a checkpoint has.

        Its matrices are unpacked from blocks, some of which MLX has no equal of.
        """
        config = store.config
        self._store = store
        self._unpacked = store.cast(store.dtype, expand=True) if of_gguf else store
        self._shapes = stored_shapes(config, store.names)
        filed = (
            gguf_layout(config, store.names)
            if of_gguf
            else as_published({name: store.stored(name) for name in self._shapes}, config)
        )
        self._filed = as_mlx_lm(filed, config) if any(choice.forms.values()) else filed
        self.dense = choice.dense
        self.forms: dict[str, QuantFormat] = {}
        self.kept = 0  # matrices that were packed already, in that form
        self.repacked: Counter[str] = Counter()  # and in others, by what they were
        self.steps: list[Step] = []
        for names in self._groups():
            modules = [name.removesuffix(".weight") for name in names]
            forms = [choice.forms.get(module) for module in modules]
            form = max(forms, key=lambda form: _DENSE_BITS if form is None else form.bits)
            self.steps.append(self._dense(names) if form is None else self._packed(modules, form))

    @property
    def tensors(self) -> list[Planned]:
        """All that will be written, in that order."""
        return [tensor for step in self.steps for tensor in step.tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Bits that the files have for each number of the model."""
        return 8 * self.nbytes / sum(map(math.prod, self._shapes.values()))

    def quantization(self) -> dict[str, object] | None:
        """Return what config.json says of the forms: the most frequent one, and the modules that differ from it."""
        if not self.forms:
            return None
        [(default, _)] = Counter(self.forms.values()).most_common(1)
        others = {name: _as_json(form) for name, form in self.forms.items() if form != default}
        return {**_as_json(default), **others}

    def _groups(self) -> Iterator[list[str]]:
        """Give canonical names, those together that are pieces of one tensor of the source."""
        groups: dict[object, list[str]] = {}
        for name in self._shapes:
            groups.setdefault(self._filed[name].parts, []).append(name)
        yield from groups.values()

    def _dense(self, names: Sequence[str]) -> Step:
        """Keep tensors as they stand, or under canonical names where what they stand under would not be read."""
        stored = [self._filed[name] for name in names]
        known = all(is_known(part.name, names, self._store.config) for part in stored[0].parts)

        def filed(arrays: Sequence[mx.array]) -> Named:
            return as_filed(arrays, stored) if known else list(zip(names, arrays, strict=True))

        # Arrays that are never computed have shapes and types all the same.
        ghosts = filed([mx.zeros(self._shapes[name], self._dtype(name)) for name in names])
        tensors = tuple(Planned(name, _FILE_TYPES[ghost.dtype], ghost.shape) for name, ghost in ghosts)
        return Step(tensors, lambda: filed([self._read(name) for name in names]))

    def _packed(self, modules: Sequence[str], form: QuantFormat) -> Step:
        stored = [self._filed[f"{module}.weight"] for module in modules]
        files = file_names(modules, stored, _PARTS, self._store.config)
        for module in modules:
            before = self._store.form(module)
            self.kept += before == form
            if before is not None and before != form:
                self.repacked[self._label(module, before)] += 1
        self.forms |= {file.name: form for file in files}
        tensors = [tensor for file in files for tensor in self._planned(file, form)]
        return Step(tuple(tensors), lambda: [named for file in files for named in self._make_packed(file, form)])

    def _planned(self, file: FileTensor, form: QuantFormat) -> Iterator[Planned]:
        shapes = [self._shapes[f"{module}.weight"] for module in file.modules]
        *experts, _, columns = shapes[0]
        rows = (*experts, sum(shape[-2] for shape in shapes))
        groups = (*rows, columns // form.group_size)
        yield Planned(f"{file.name}.weight", "U32", (*rows, columns * form.bits // 32))
        if form.mode != "affine":
            yield Planned(f"{file.name}.scales", "U8", groups)
            return
        kind = _FILE_TYPES[self._packed_dtype(file.modules, form)]
        yield Planned(f"{file.name}.scales", kind, groups)
        yield Planned(f"{file.name}.biases", kind, groups)

    def _make_packed(self, file: FileTensor, form: QuantFormat) -> Iterator[tuple[str, mx.array]]:
        made = [self._pack(module, form) for module in file.modules]
        kind = self._packed_dtype(file.modules, form)
        for i, leaf in enumerate(_PARTS):
            arrays = [part for parts in made if (part := parts[i]) is not None]
            if arrays:
                array = fused(arrays, file.pieces)
                yield f"{file.name}.{leaf}", array.astype(kind) if mx.issubdtype(array.dtype, mx.floating) else array

    def _pack(self, module: str, form: QuantFormat) -> Packed:
        if self._store.form(module) != form:
            return pack(self._unpacked.dense(module), form)
        weight = self._store.linear(module)
        assert isinstance(weight, QuantizedWeight)
        return weight.packed, weight.scales, weight.biases

    def _label(self, module: str, form: QuantFormat) -> str:
        """Say what a matrix is packed as: another library's form, a mode, or bits."""
        stored = self._store.stored(f"{module}.weight")
        return stored.origin or (f"{form.bits} bits" if form.mode == "affine" else form.mode)

    def _packed_dtype(self, modules: Sequence[str], form: QuantFormat) -> mx.Dtype:
        """Return the type of scales: that of the numbers that are packed, or of the scales that are there."""
        first = modules[0]
        as_it_is = self._store.form(first) == form
        if self._store.dtype is not None:
            return self._store.dtype
        return DTYPES[self._store.stored(f"{first}.scales").dtype] if as_it_is else self._dtype(f"{first}.weight")

    def _dtype(self, name: str) -> mx.Dtype:
        """Return the type that a tensor is read as."""
        store = self._store
        if store.form(name.removesuffix(".weight")) is not None:
            return store.dtype or store.stored_dtype
        as_stored = DTYPES[store.stored(name).dtype]
        is_float = mx.issubdtype(as_stored, mx.floating)
        return as_stored if store.dtype is None or not is_float or name.endswith(_PRECISE) else store.dtype

    def _read(self, name: str) -> mx.array:
        module = name.removesuffix(".weight")
        if self._store.form(module) is not None:
            return self._unpacked.dense(module).astype(self._dtype(name))
        return self._store.tensor(name, as_stored=name.endswith(_PRECISE))


def as_stored(store: WeightStore) -> Choice:
    """Choose for every matrix the form that it has."""
    names = stored_shapes(store.config, store.names)
    modules = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    return Choice({module: store.form(module) for module in modules}, {})


def _as_json(form: QuantFormat) -> Mapping[str, object]:
    return {"group_size": form.group_size, "bits": form.bits, "mode": form.mode}
