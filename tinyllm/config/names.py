"""From the names of tensors in a checkpoint's files to canonical ones, Llama's. No mlx."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tinyllm.config.families.wrappers import Wrapper
from tinyllm.config.family import Family
from tinyllm.config.fused import Piece
from tinyllm.config.layers import LayerConfig, source_of

_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})(?:\.|$)")
_TRANSPOSED = ".transposed"  # what rows call matrices that stand as (in, out), in place of ".weight"
_KEYS_AND_VALUES = re.compile(r"\.self_attn\.[kv]_(proj|norm)$")
_PART = re.compile(r"(\.experts|\.[qk]_norm)\.(\d{1,9})\.")


@dataclass(frozen=True)
class Target:
    """What a tensor of a file is: the canonical tensor `name`, or with an `expert` that one's (or that head's) part.

    It is `transposed` first, and then a `piece` of the file's is taken; or all axes are made one, where it is `flat`.
    The kernels of a `depthwise` convolution are
    (channels, kernel), where files have an axis of 1 more: PyTorch before the last, MLX after it.
    """

    name: str
    piece: Piece | None = None
    transposed: bool = False
    expert: int | None = None
    flat: bool = False
    depthwise: bool = False


def layer_number(name: str) -> int | None:
    """Return which layer a canonical name stands in."""
    found = _LAYER.search(name)
    return None if found is None else int(found[1])


def module_of(prefix: str, name: str) -> str:
    """Return the module `name` of the layer `prefix` ("model.layers.0"), or `prefix` if it is a module's name."""
    return f"{prefix}.{name}" if prefix.rpartition(".")[2].isdigit() else prefix


def canonical_name(name: str, family: Family, wrapper: Wrapper | None) -> str | None:
    """Rename a tensor or module; None where it is of another part than the text model."""
    if wrapper is not None:
        if name.startswith(wrapper.skipped):
            return None
        for prefix in wrapper.text_prefixes:
            if name.startswith(prefix):
                name = "model." + name.removeprefix(prefix)
                break
        name = name.removeprefix("language_model.")
    name = family.canonical_name(name)
    return None if family.skipped is not None and re.search(family.skipped, name) else name


def canonical_modules(
    module: str, family: Family, wrapper: Wrapper | None, layers: Sequence[LayerConfig]
) -> frozenset[str]:
    """Rename a module as its matrix is renamed; one in which several are fused is all of them."""
    found = targets(f"{module}.weight", family, wrapper, layers, 0)
    return frozenset(target.name.removesuffix(".weight") for target in found)


def targets(
    name: str, family: Family, wrapper: Wrapper | None, layers: Sequence[LayerConfig], extra_layers: int
) -> tuple[Target, ...]:
    """Return all that a tensor of a file is; nothing where it is of another part, or of a layer after the last."""
    canonical = canonical_name(name, family, wrapper)
    if canonical is None:
        return ()
    number = layer_number(canonical)
    if number is not None and len(layers) <= number < len(layers) + extra_layers:
        return ()
    found = _PART.search(canonical)
    expert = None if found is None else int(found[2])
    canonical = _PART.sub(r"\1.", canonical, count=1)
    transposed = canonical.endswith(_TRANSPOSED)
    if transposed:
        canonical = canonical.removesuffix(_TRANSPOSED) + ".weight"
    module, _, leaf = canonical.rpartition(".")
    flat = family.flattened is not None and re.search(family.flattened, name) is not None
    if number is not None and number < len(layers):
        if source_of(layers[number].attention) is not None and _KEYS_AND_VALUES.search(module):
            return ()  # left over from training
        for split in family.splits:
            if module.endswith(split.module):
                parent = module.rpartition(".")[0]
                pieces = split.pieces(layers[number], module)
                return tuple(
                    Target(f"{parent}.{part}.{leaf}", piece, transposed, expert) for part, piece in pieces.items()
                )
    depthwise = leaf == "weight" and family.depthwise is not None and re.search(family.depthwise, module) is not None
    return (Target(canonical, None, transposed, expert, flat, depthwise),)
