"""What a checkpoint is, in a few words and figures, from its config and headers alone. No mlx."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tinyllm import hardware
from tinyllm.checkpoint.contents import Contents
from tinyllm.checkpoint.files import check_tokenizer
from tinyllm.checkpoint.tensor_table import StoredTensor
from tinyllm.checkpoint.verify import check_tensors
from tinyllm.config.config import Config
from tinyllm.config.tensors import EMBEDDING, tensor_shapes

__all__ = ["Summary", "expands_on_cpu", "memory_bytes", "summarize"]

_FLOAT32_BYTES = 4
_FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class Summary:
    """A checkpoint that tinyllm runs. `quantization` is "4-bit", "mxfp4" or, where nothing is packed, "bf16".

    Forms of other libraries have names of their own: "gptq-4", "fp8".

    `memory_bytes` is what the weights take once loaded: those that are packed as they are, unless they are unpacked
    on a CPU; others in the type that is computed in.
    """

    family: str
    quantization: str
    memory_bytes: int


def summarize(contents: Contents, *, itemsize: int | None = None, on_cpu: bool | None = None) -> Summary:
    """Raises what loading the checkpoint would raise, of what its config and headers show.

    `itemsize` is of the type to compute in, by default float32 on a CPU and what is stored on a GPU; `on_cpu` says
    where, by default where this machine would.
    """
    on_cpu = not hardware.has_gpu_backend() if on_cpu is None else on_cpu
    config, tensors = contents.config, contents.table.tensors
    useless = check_tensors(tensors, config, contents.path)
    check_tokenizer(contents.path)
    used = {name: info for name, info in tensors.items() if name not in useless}
    size = itemsize or (_FLOAT32_BYTES if on_cpu else None)
    expand = on_cpu and _is_packed(used) and expands_on_cpu(config)
    return Summary(config.model_type, _quantization(config, used), memory_bytes(config, used, size, expand=expand))


def expands_on_cpu(config: Config) -> bool:
    """Whether packed matrices, slow on a CPU, are unpacked there: if that takes less than half of the memory."""
    return _FLOAT32_BYTES * _elements(config) < hardware.available_memory() // 2


def memory_bytes(
    config: Config, tensors: Mapping[str, StoredTensor], itemsize: int | None, *, expand: bool = False
) -> int:
    """Bytes of weights once they are read, numbers in so many bytes each or as stored, matrices unpacked or not."""
    if itemsize is not None and expand:
        return itemsize * _elements(config)
    return sum(_read_bytes(name, info, itemsize) for name, info in tensors.items())


def _read_bytes(name: str, info: StoredTensor, itemsize: int | None) -> int:
    """Bytes of a tensor once it is read; scales are never made shorter."""
    if itemsize is None or info.dtype not in _FLOATS:
        return info.nbytes
    cast = itemsize * math.prod(info.shape)
    return max(cast, info.nbytes) if name.endswith((".scales", ".biases")) else cast


def _elements(config: Config) -> int:
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def _quantization(config: Config, tensors: Mapping[str, StoredTensor]) -> str:
    origin = next((info.origin for info in tensors.values() if info.origin is not None), None)
    if origin is not None:
        return origin
    form = None if config.quantization is None else config.quantization.default
    if _is_packed(tensors) and form is not None:
        return f"{form.bits}-bit" if form.mode == "affine" else form.mode
    return tensors[EMBEDDING].dtype.lower()


def _is_packed(tensors: Mapping[str, StoredTensor]) -> bool:
    return any(name.endswith(".scales") for name in tensors)
