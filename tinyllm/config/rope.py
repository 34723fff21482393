"""Rotary position parameters: both dialects of config.json become one frozen `RopeConfig`. No mlx.

transformers 4 writes `rope_theta` beside `rope_scaling` (with "type" or "rope_type"); transformers 5 writes one
object `rope_parameters`, which may be nested by layer type. Where values stand twice, the one inside wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tinyllm.config.families import FULL, SLIDING
from tinyllm.config.reader import ConfigReader, Key
from tinyllm.errors import ConfigError, MissingKeyError, UnsupportedModelError


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's: long wavelengths divided by `factor`, short ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071). `attention_factor` multiplies the rotated part of q and of k."""

    factor: float
    attention_factor: float | None
    beta_fast: float
    beta_slow: float
    mscale: float | None
    mscale_all_dim: float | None
    original_max_position_embeddings: int
    truncate: bool


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of the first `dims` elements of each head, in half-split order."""

    dims: int
    theta: float
    scaling: RopeScaling | None = None


_LEAST_THETA = 2  # wavelengths must grow along a head
_FACTOR = Key("factor", float, minimum=1)
_ORIGINAL = "original_max_position_embeddings"


def _read_linear(reader: ConfigReader, max_positions: int) -> LinearScaling:
    return LinearScaling(factor=reader.read(_FACTOR))


def _read_llama3(reader: ConfigReader, max_positions: int) -> Llama3Scaling:
    low = reader.read(Key("low_freq_factor", float, minimum=0))
    high = reader.read(Key("high_freq_factor", float, minimum=0))
    if high <= low:
        raise reader.fail(ConfigError, f"high_freq_factor ({high}) must be above low_freq_factor ({low})")
    return Llama3Scaling(
        factor=reader.read(_FACTOR),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=reader.read(Key(_ORIGINAL, int, max_positions, minimum=1)),
    )


def _read_yarn(reader: ConfigReader, max_positions: int) -> YarnScaling:
    original = reader.read(Key(_ORIGINAL, int, max_positions, minimum=1))
    factor = reader.read(Key("factor", float, nullable=True, minimum=1))
    return YarnScaling(
        factor=max_positions / original if factor is None else factor,
        attention_factor=reader.read(Key("attention_factor", float, None, nullable=True, minimum=0)),
        beta_fast=reader.read(Key("beta_fast", float, None, nullable=True, minimum=1e-6)) or 32.0,
        beta_slow=reader.read(Key("beta_slow", float, None, nullable=True, minimum=1e-6)) or 1.0,
        mscale=reader.read(Key("mscale", float, None, nullable=True, minimum=0)),
        mscale_all_dim=reader.read(Key("mscale_all_dim", float, None, nullable=True, minimum=0)),
        original_max_position_embeddings=original,
        truncate=reader.read(Key("truncate", bool, True)),
    )


_SCALINGS: Mapping[str, Callable[[ConfigReader, int], RopeScaling]] = {
    "linear": _read_linear,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
}


def read_rope(
    reader: ConfigReader,
    *,
    head_dim: int,
    max_positions: int,
    layer_types: tuple[str, ...],
    default_theta: float,
) -> tuple[RopeConfig, ...]:
    """Read the rotary parameters of each layer from config.json, in either dialect.

    Raises UnsupportedModelError for a scheme that is not computed here, and ConfigError for one that makes no sense.
    """
    theta = reader.read(Key("rope_theta", float, default_theta, nullable=True, minimum=_LEAST_THETA))
    partial = reader.read(Key("partial_rotary_factor", float, 1.0, nullable=True, minimum=0))
    outer: Mapping[str, Any] = {
        "rope_theta": theta or default_theta,
        "partial_rotary_factor": 1.0 if partial is None else partial,
    }
    dialects = [found for found in map(reader.object, ("rope_scaling", "rope_parameters")) if found is not None]
    said = [dialect for dialect in dialects if dialect.values] or [ConfigReader({}, reader.source, "rope_parameters")]
    first, *others = [_read_layers(dialect, layer_types, outer, head_dim, max_positions) for dialect in said]
    if any(other != first for other in others):
        raise reader.fail(ConfigError, "rope_scaling and rope_parameters contradict each other")
    return first


def _read_layers(
    reader: ConfigReader,
    layer_types: tuple[str, ...],
    outer: Mapping[str, Any],
    head_dim: int,
    max_positions: int,
) -> tuple[RopeConfig, ...]:
    """Read one dialect's object, which is for all layers alike or has one inside for each kind of layer."""
    nested = {kind: reader.object(kind) for kind in (FULL, SLIDING) if reader.has(kind)}
    if nested:
        reader.finish()
    by_type: dict[str, RopeConfig] = {}
    for kind in set(layer_types):
        found = nested.get(kind) if nested else reader
        if found is None:
            raise reader.fail(MissingKeyError, f"{kind!r} is absent, and there are layers of that kind")
        by_type[kind] = _read_one(found, outer, head_dim=head_dim, max_positions=max_positions)
    return tuple(by_type[kind] for kind in layer_types)


def _read_one(reader: ConfigReader, outer: Mapping[str, Any], *, head_dim: int, max_positions: int) -> RopeConfig:
    old, new = (reader.read(Key(name, str, None, nullable=True)) for name in ("type", "rope_type"))
    if old and new and old != new:
        raise reader.fail(ConfigError, f"'type' is {old!r}, but 'rope_type' is {new!r}")
    kind = new or old or "default"
    theta = reader.read(Key("rope_theta", float, outer["rope_theta"], minimum=_LEAST_THETA))
    partial = reader.read(Key("partial_rotary_factor", float, outer["partial_rotary_factor"], minimum=0))
    if kind == "default":
        reader.discard(["factor"] if reader.values.get("factor") in (None, 1, 1.0) else [])
        scaling: RopeScaling | None = None
    elif kind in _SCALINGS:
        scaling = _SCALINGS[kind](reader, max_positions)
    else:
        known = ", ".join(["default", *_SCALINGS])
        raise reader.fail(
            UnsupportedModelError, f"RoPE of type {kind!r} is not computed by tinyllm (it knows {known})"
        )
    reader.finish()
    dims = int(head_dim * partial)
    if not 0 < dims <= head_dim or dims % 2:
        raise reader.fail(
            ConfigError, f"partial_rotary_factor {partial:g} of head_dim {head_dim} rotates {dims} elements"
        )
    return RopeConfig(dims=dims, theta=theta, scaling=scaling)
