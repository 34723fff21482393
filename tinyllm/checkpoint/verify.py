"""Whether the tensors of a checkpoint are those that its config asks for, from names and shapes alone. No mlx."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tinyllm.checkpoint.tensor_table import StoredTensor
from tinyllm.config.config import Config
from tinyllm.config.quantization import QuantFormat
from tinyllm.config.tensors import LM_HEAD, tensor_shapes
from tinyllm.errors import TensorMismatchError

_SHOWN = 6
_RECOMPUTED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_LAYER = re.compile(r"\.layers\.([0-9]{1,9})\.")
_FLOATS = ("F32", "F16", "BF16")


def check_tensors(tensors: Mapping[str, StoredTensor], config: Config, folder: Path) -> frozenset[str]:
    """Compare `tensors` (canonical name -> info) with what `config` needs; return the names that are of no use.

    Raises TensorMismatchError with everything that is missing, surplus or mis-shaped in one line.
    """
    needed, contradictions = _needs(tensors, config)
    ignored = {name for name in tensors.keys() - needed.keys() if _is_of_no_use(name, config)}
    missing = needed.keys() - tensors.keys()
    surplus = tensors.keys() - needed.keys() - ignored
    present = {name: (tensors[name], need) for name, need in needed.items() if name in tensors}
    misshaped = {
        name: f"{name} is {list(info.shape)}, not {list(need.shape)}"
        for name, (info, need) in present.items()
        if info.shape != need.shape
    }
    mistyped = {
        name: f"{name} is {info.dtype}, not {' or '.join(need.types)}"
        for name, (info, need) in present.items()
        if info.dtype not in need.types
    }
    problems = [
        *_group("missing", missing),
        *_group("surplus", surplus),
        *_group("mis-shaped", misshaped, misshaped),
        *_group("of another type", mistyped, mistyped),
        *_group("contradicting it", contradictions, contradictions),
    ]
    if problems:
        raise TensorMismatchError(f"{folder}: the weights do not fit config.json: {'; '.join(problems)}")
    return frozenset(ignored)


@dataclass(frozen=True)
class _Need:
    """What a tensor must be; `types` as the file writes them."""

    shape: tuple[int, ...]
    types: tuple[str, ...] = _FLOATS


def _needs(tensors: Mapping[str, StoredTensor], config: Config) -> tuple[dict[str, _Need], dict[str, str]]:
    """Return what `config` needs, packed where `tensors` are; and the modules that contradict it, with the reason."""
    needed: dict[str, _Need] = {}
    contradictions: dict[str, str] = {}
    for name, shape in tensor_shapes(config).items():
        module = name.removesuffix(".weight")
        if len(shape) < 2 or f"{module}.scales" not in tensors:
            needed[name] = _Need(shape)
            continue
        form = config.quantization.format_of(module) if config.quantization else None
        if form is None:
            contradictions[module] = f"{module} is packed, but config.json says that it is not"
            parts = {f"{module}.{part}" for part in ("weight", "scales", "biases")} & tensors.keys()
            needed |= {part: _Need(tensors[part].shape, (tensors[part].dtype,)) for part in parts}
            continue
        needed |= _packed(module, shape, form)
        if shape[-1] % form.group_size:
            contradictions[module] = (
                f"{module} has {shape[-1]} columns, which groups of {form.group_size} do not divide"
            )
    return needed, contradictions


def _packed(module: str, shape: tuple[int, ...], form: QuantFormat) -> dict[str, _Need]:
    """The parts of a matrix (out, in), or of one for each expert, as MLX packs it."""
    *rows, columns = shape
    groups = (*rows, columns // form.group_size)
    needed = {f"{module}.weight": _Need((*rows, columns * form.bits // 32), ("U32",))}
    if form.mode == "affine":
        return needed | {f"{module}.{part}": _Need(groups) for part in ("scales", "biases")}
    return needed | {f"{module}.scales": _Need(groups, ("U8",))}


def _is_of_no_use(name: str, config: Config) -> bool:
    spare_head = config.tie_word_embeddings and name.startswith(LM_HEAD.removesuffix("weight"))
    return spare_head or _RECOMPUTED.search(name) is not None


def _group(kind: str, names: Iterable[str], details: Mapping[str, str] | None = None) -> list[str]:
    """Say `kind` of `names` in one phrase, those of many layers folded into one, as model.layers.{0-3}.mlp."""
    layers: dict[str, list[int]] = defaultdict(list)
    count = 0
    for name in sorted(names):
        count += 1
        text = details[name] if details else name
        found = _LAYER.search(text)
        layers[_LAYER.sub(".layers.{}.", text, count=1)].extend([int(found[1])] if found else [])
    if not count:
        return []
    shown = [text.replace("{}", _ranges(numbers), 1) for text, numbers in list(layers.items())[:_SHOWN]]
    more = [f"and {len(layers) - _SHOWN} more"] if len(layers) > _SHOWN else []
    return [f"{kind} {count}: {', '.join(shown + more)}"]


def _ranges(numbers: list[int]) -> str:
    """Write 0, 1, 2, 5 as {0-2,5}, and a single number plainly."""
    if len(numbers) == 1:
        return str(numbers[0])
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts) + "}"
