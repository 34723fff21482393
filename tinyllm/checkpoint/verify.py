"""Whether the tensors of a checkpoint are those that its config asks for, from names and shapes alone. No mlx."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from tinyllm.checkpoint.safetensors_header import TensorInfo
from tinyllm.config.config import Config
from tinyllm.config.quantization import QuantFormat
from tinyllm.config.tensors import LM_HEAD, tensor_shapes
from tinyllm.errors import TensorMismatchError

_SHOWN = 6
_RECOMPUTED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def check_tensors(tensors: Mapping[str, TensorInfo], config: Config, folder: Path) -> frozenset[str]:
    """Compare `tensors` (canonical name -> info) with what `config` needs; return the names that are of no use.

    Raises TensorMismatchError with everything that is missing, surplus or mis-shaped in one line.
    """
    expected = tensor_shapes(config)
    needed: dict[str, tuple[int, ...]] = {}
    contradictions: list[str] = []
    for name, shape in expected.items():
        module = name.removesuffix(".weight")
        if f"{module}.scales" not in tensors:
            needed[name] = shape
            continue
        form = config.quantization.format_of(module) if config.quantization else None
        if form is None:
            contradictions.append(f"{module} is packed, but config.json says that it is not")
            needed |= {f"{module}.{part}": tensors[f"{module}.{part}"].shape for part in ("weight", "scales")}
            continue
        needed |= _packed_shapes(module, shape, form)

    ignored = {name for name in tensors.keys() - needed.keys() if _is_of_no_use(name, config)}
    missing = needed.keys() - tensors.keys()
    surplus = tensors.keys() - needed.keys() - ignored
    wrong = {
        name: f"{name} is {list(tensors[name].shape)}, not {list(shape)}"
        for name, shape in needed.items()
        if name in tensors and tensors[name].shape != shape
    }
    problems = [
        *_group("missing", missing),
        *_group("surplus", surplus),
        *_group("mis-shaped", wrong, wrong),
        *contradictions[:_SHOWN],
    ]
    if problems:
        raise TensorMismatchError(f"{folder}: the weights do not fit config.json: {'; '.join(problems)}")
    return frozenset(ignored)


def _packed_shapes(module: str, shape: tuple[int, ...], form: QuantFormat) -> dict[str, tuple[int, ...]]:
    """The parts of a matrix (out, in) as MLX packs it."""
    rows, columns = shape
    shapes: dict[str, tuple[int, ...]] = {
        f"{module}.weight": (rows, columns * form.bits // 32),
        f"{module}.scales": (rows, columns // form.group_size),
    }
    if form.mode == "affine":
        shapes[f"{module}.biases"] = shapes[f"{module}.scales"]
    return shapes


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
