"""Whether the tensors of a checkpoint are those that its config asks for, from names and shapes alone. No mlx."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from tinyllm.checkpoint.folded import folded
from tinyllm.checkpoint.gguf_header import is_gguf
from tinyllm.checkpoint.tensor_table import StoredTensor
from tinyllm.config.config import Config
from tinyllm.config.packings import Gptq
from tinyllm.config.quantization import QuantFormat
from tinyllm.config.tensors import LM_HEAD, stored_shapes
from tinyllm.errors import TensorMismatchError

_SHOWN = 6
_RECOMPUTED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Need:
    """What a tensor must be; `types` as the file writes them."""

    shape: tuple[int, ...]
    types: tuple[str, ...] = _FLOATS


@dataclass(frozen=True)
class Comparison:
    """Canonical name -> what a config needs, packed where the files are; and how the files differ from that.

    `problems` has for each kind of difference the names, each with what is to be said of it. `ignored` are tensors
    that are of no use.
    """

    needed: Mapping[str, Need]
    problems: Mapping[str, Mapping[str, str]]
    ignored: frozenset[str]


def check_tensors(tensors: Mapping[str, StoredTensor], config: Config, folder: Path) -> frozenset[str]:
    """Compare `tensors` (canonical name -> info) with what `config` needs; return the names that are of no use.

    Biases of GPTQ's among them are to be zero, which their bytes say. Raises TensorMismatchError with everything that
    is missing, surplus or mis-shaped in one line.
    """
    found = compare(tensors, config)
    problems = [_group(kind, details) for kind, details in found.problems.items()]
    if problems:
        raise TensorMismatchError(f"{folder}: the weights do not fit {_named(folder)}: {'; '.join(problems)}")
    return found.ignored


def compare(tensors: Mapping[str, StoredTensor], config: Config) -> Comparison:
    """Compare `tensors` (canonical name -> info) with what `config` needs."""
    needed, contradictions = _needs(tensors, config)
    ignored = {name for name in tensors.keys() - needed.keys() if _is_of_no_use(name, tensors, config)}
    present = {name: (tensors[name], need) for name, need in needed.items() if name in tensors}
    problems = {
        "missing": {name: name for name in needed.keys() - tensors.keys()},
        "surplus": {name: name for name in tensors.keys() - needed.keys() - ignored},
        "mis-shaped": {
            name: f"{name} is {list(info.shape)}, not {list(need.shape)}"
            for name, (info, need) in present.items()
            if info.shape != need.shape
        },
        "of another type": {
            name: f"{name} is {info.dtype}, not {' or '.join(need.types)}"
            for name, (info, need) in present.items()
            if info.dtype not in need.types
        },
        "contradicting it": contradictions,
    }
    return Comparison(needed, {kind: names for kind, names in problems.items() if names}, frozenset(ignored))


def _needs(tensors: Mapping[str, StoredTensor], config: Config) -> tuple[dict[str, Need], dict[str, str]]:
    """Return what `config` needs, packed where `tensors` are; and the modules that contradict it, with the reason."""
    needed: dict[str, Need] = {}
    contradictions: dict[str, str] = {}
    for name, shape in stored_shapes(config, tensors.keys()).items():
        module = name.removesuffix(".weight")
        if len(shape) < 2 or f"{module}.scales" not in tensors:
            needed[name] = Need(shape)
            continue
        form = config.quantization.format_of(module) if config.quantization else None
        if form is None:
            contradictions[module] = f"{module} is packed, but config.json says that it is not"
            parts = {f"{module}.{part}" for part in ("weight", "scales", "biases")} & tensors.keys()
            needed |= {part: Need(tensors[part].shape, (tensors[part].dtype,)) for part in parts}
            continue
        needed |= _packed(module, shape, form)
        if shape[-1] % form.group_size:
            contradictions[module] = (
                f"{module} has {shape[-1]} columns, which groups of {form.group_size} do not divide"
            )
    return needed, contradictions


def _packed(module: str, shape: tuple[int, ...], form: QuantFormat) -> dict[str, Need]:
    """The parts of a matrix (out, in), or of one for each expert, as MLX packs it."""
    *rows, columns = shape
    groups = (*rows, columns // form.group_size)
    needed = {f"{module}.weight": Need((*rows, columns * form.bits // 32), ("U32",))}
    if form.mode == "affine":
        return needed | {f"{module}.{part}": Need(groups) for part in ("scales", "biases")}
    return needed | {f"{module}.scales": Need(groups, ("U8",))}


def is_spare_bias(name: str, tensors: Container[str], config: Config) -> bool:
    """Whether a name is of a bias that a layer may not have, but AutoGPTQ wrote for every matrix: of zeros."""
    stored = None if config.quantization is None else config.quantization.stored
    module, _, leaf = name.rpartition(".")
    return leaf == "bias" and f"{module}.scales" in tensors and isinstance(stored and stored.packing, Gptq)


def _is_of_no_use(name: str, tensors: Container[str], config: Config) -> bool:
    spare_head = config.tie_word_embeddings and name.startswith(LM_HEAD.removesuffix("weight"))
    return spare_head or _RECOMPUTED.search(name) is not None or is_spare_bias(name, tensors, config)


def _named(folder: Path) -> str:
    return "its metadata" if is_gguf(folder) else "config.json"


def _group(kind: str, details: Mapping[str, str]) -> str:
    """Say `kind` of all in one phrase, those of many layers folded into one."""
    lines = folded(details.values())
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return f"{kind} {len(details)}: {', '.join(lines[:_SHOWN] + more)}"
