"""How matrices are packed: the linear layers of a checkpoint, as config.json says it, and what is cached. No mlx."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from reprlib import repr as brief
from typing import Literal

from tinyllm.config.packings import METHODS, Stored, read_packing
from tinyllm.config.reader import ConfigReader, Key
from tinyllm.errors import ConfigError, UnsupportedQuantizationError, UsageError

# mode -> the bits and group sizes that MLX packs, its defaults first.
MODES: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((4, 2, 3, 5, 6, 8), (64, 32, 128)),
    "mxfp4": ((4,), (32,)),
    "mxfp8": ((8,), (32,)),
    "nvfp4": ((4,), (16,)),
}
CACHE_BITS = (8, 4)  # of an element of packed keys and values


@dataclass(frozen=True)
class QuantFormat:
    """One way to pack a matrix: `bits` an element, a scale for every `group_size` elements of a row."""

    bits: int
    group_size: int
    mode: str = "affine"


@dataclass(frozen=True)
class QuantizationConfig:
    """The format that matrices are computed with, and the modules that differ: another format, or None for dense.

    `default` is None where all are dense once they are read; `stored` says how the files hold them, where that is not
    MLX's own way.
    """

    default: QuantFormat | None
    overrides: Mapping[str, QuantFormat | None]
    stored: Stored | None = None

    def format_of(self, module: str) -> QuantFormat | None:
        """Return the format that config.json gives to `module` (a canonical name), or None for a dense one."""
        if self.stored is not None and self.stored.within not in module:
            return None
        return self.overrides.get(module, self.default)


Modules = Callable[[str], Iterable[str]]


def cache_format(dim: int, bits: int) -> QuantFormat:
    """Return how `dim` elements of a head's keys or values are packed: in the largest groups that divide them.

    Raises UsageError for bits that a cache does not take, UnsupportedQuantizationError where no group divides `dim`.
    """
    if bits not in CACHE_BITS:
        raise UsageError(f"keys and values are packed to {' or '.join(map(str, CACHE_BITS))} bits, not {bits}")
    groups = sorted(MODES["affine"][1], reverse=True)
    for group in groups:
        if dim % group == 0:
            return QuantFormat(bits, group)
    raise UnsupportedQuantizationError(
        f"keys and values of {dim} elements a head cannot be packed: MLX packs groups of"
        f" {', '.join(map(str, groups))}, and none divides {dim}; leave --kv-bits out"
    )


def read_quantization(reader: ConfigReader, canonical: Modules) -> QuantizationConfig | None:
    """Read `quantization` (MLX's key) or `quantization_config`; `canonical` names what a module of the files holds.

    Raises UnsupportedQuantizationError, in one line, for formats that are not read, and ConfigError where the two
    keys stand for different formats.
    """
    said = [found for found in map(reader.object, ("quantization", "quantization_config")) if found is not None]
    formats = [_read_one(found, canonical) for found in said]
    if any(form != formats[0] for form in formats):
        raise reader.fail(ConfigError, "quantization and quantization_config contradict each other")
    return formats[0] if formats else None


def _read_one(packed: ConfigReader, canonical: Modules) -> QuantizationConfig:
    method = packed.take("quant_method")
    if method is None and packed.has("quant_algo"):  # as older versions of ModelOpt write it
        method = "modelopt"
    if isinstance(method, str) and method in METHODS:
        return _read_foreign(packed, method)
    if method not in (None, "mlx") or not packed.has("bits"):
        raise UnsupportedQuantizationError(
            f"{packed.source}: weights quantised by {brief(method or 'an unnamed method')} are not read by tinyllm;"
            " look for an MLX conversion (mlx-community) or the original weights"
        )
    default = _read_format(packed)
    overrides: dict[str, QuantFormat | None] = {}
    for name, value in packed.values.items():
        if isinstance(value, dict | bool):
            form = _read_override(packed, name)
            overrides |= dict.fromkeys(canonical(name), default if form is True else form)
    packed.finish()
    return QuantizationConfig(default, overrides)


def _read_foreign(packed: ConfigReader, method: str) -> QuantizationConfig:
    """Read another library's format. No library packs the embedding, and which other modules are, the files show."""
    stored = read_packing(packed, method)
    default = None if stored.becomes is None else QuantFormat(*stored.becomes)
    return QuantizationConfig(default, {"model.embed_tokens": None}, stored)


def _read_override(packed: ConfigReader, module: str) -> QuantFormat | Literal[True] | None:
    if isinstance(packed.values[module], bool):
        return True if packed.take(module) else None
    nested = packed.object(module)
    assert nested is not None
    form = _read_format(nested)
    nested.finish()
    return form


def _read_format(reader: ConfigReader) -> QuantFormat:
    """Read one format; what it leaves out, or has as null, is MLX's default, for an override too.

    mlx-lm's mixed recipes write a null group for every module, where none was asked for.
    """
    mode = reader.read(Key("mode", str, "affine"))
    if mode not in MODES:
        raise UnsupportedQuantizationError(
            f"{reader.source}: quantisation mode {mode!r} is not one that tinyllm reads ({', '.join(MODES)})"
        )
    bits_known, groups_known = MODES[mode]
    bits = _or_default(reader.read(Key("bits", int, None, nullable=True)), bits_known)
    group_size = _or_default(reader.read(Key("group_size", int, None, nullable=True)), groups_known)
    if bits not in bits_known or group_size not in groups_known:
        raise reader.fail(
            ConfigError,
            f"{mode} quantisation of {bits} bits in groups of {group_size} does not exist in MLX"
            f" (bits {sorted(bits_known)}, groups {sorted(groups_known)})",
        )
    reader.discard(["quant_method", "linear_class"])
    return QuantFormat(bits=bits, group_size=group_size, mode=mode)


def _or_default(said: int | None, known: tuple[int, ...]) -> int:
    return known[0] if said is None else said
