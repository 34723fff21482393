"""How the linear layers of a checkpoint are packed, as config.json says it. No mlx."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from reprlib import repr as brief
from typing import Literal

from tinyllm.config.reader import ConfigReader, Key
from tinyllm.errors import ConfigError, UnsupportedQuantizationError

# mode -> the bits and group sizes that MLX packs, its defaults first.
MODES: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((4, 2, 3, 5, 6, 8), (64, 32, 128)),
    "mxfp4": ((4,), (32,)),
    "mxfp8": ((8,), (32,)),
    "nvfp4": ((4,), (16,)),
}


@dataclass(frozen=True)
class QuantFormat:
    """One way to pack a matrix: `bits` an element, a scale for every `group_size` elements of a row."""

    bits: int
    group_size: int
    mode: str = "affine"


@dataclass(frozen=True)
class QuantizationConfig:
    """The checkpoint's format, and the modules that differ from it: another format, or None for a dense one."""

    default: QuantFormat
    overrides: Mapping[str, QuantFormat | None]

    def format_of(self, module: str) -> QuantFormat | None:
        """Return the format that config.json gives to `module` (a canonical name), or None for a dense one."""
        return self.overrides.get(module, self.default)


def read_quantization(reader: ConfigReader, canonical: Callable[[str], str]) -> QuantizationConfig | None:
    """Read `quantization` (MLX's key) or `quantization_config`, renaming per-layer overrides with `canonical`.

    Raises UnsupportedQuantizationError, in one line, for the formats of other libraries, and ConfigError where the
    two keys stand for different formats.
    """
    said = [found for found in map(reader.object, ("quantization", "quantization_config")) if found is not None]
    formats = [_read_one(found, canonical) for found in said]
    if any(form != formats[0] for form in formats):
        raise reader.fail(ConfigError, "quantization and quantization_config contradict each other")
    return formats[0] if formats else None


def _read_one(packed: ConfigReader, canonical: Callable[[str], str]) -> QuantizationConfig:
    method = packed.take("quant_method")
    if method not in (None, "mlx") or not packed.has("bits"):
        raise UnsupportedQuantizationError(
            f"{packed.source}: weights quantised by {brief(method or 'an unnamed method')} are not read by tinyllm;"
            " look for an MLX conversion (mlx-community) or the original weights"
        )
    overrides = {
        canonical(module): _read_override(packed, module)
        for module, value in packed.values.items()
        if isinstance(value, (dict, bool))
    }
    default = _read_format(packed)
    return QuantizationConfig(
        default, {module: default if value is True else value for module, value in overrides.items()}
    )


def _read_override(packed: ConfigReader, module: str) -> QuantFormat | Literal[True] | None:
    if isinstance(packed.values[module], bool):
        return True if packed.take(module) else None
    nested = packed.object(module)
    assert nested is not None
    return _read_format(nested)


def _read_format(reader: ConfigReader) -> QuantFormat:
    """Read one format; what it leaves out is MLX's default, for an override too (not the checkpoint's format)."""
    mode = reader.read(Key("mode", str, "affine"))
    if mode not in MODES:
        raise UnsupportedQuantizationError(
            f"{reader.source}: quantisation mode {mode!r} is not one that tinyllm reads ({', '.join(MODES)})"
        )
    bits_known, groups_known = MODES[mode]
    bits = reader.read(Key("bits", int, bits_known[0]))
    group_size = reader.read(Key("group_size", int, groups_known[0]))
    if bits not in bits_known or group_size not in groups_known:
        raise reader.fail(
            ConfigError,
            f"{mode} quantisation of {bits} bits in groups of {group_size} does not exist in MLX"
            f" (bits {sorted(bits_known)}, groups {sorted(groups_known)})",
        )
    reader.discard(["quant_method", "linear_class"])
    reader.finish()
    return QuantFormat(bits=bits, group_size=group_size, mode=mode)
