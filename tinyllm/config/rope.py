"""Rotary position parameters: both dialects of config.json become one frozen `RopeConfig`. No mlx.

transformers 4 writes `rope_theta` beside `rope_scaling` (with "type" or "rope_type"); transformers 5 writes one
object `rope_parameters`, which may be nested by layer type. Where values stand twice, the one inside wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

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
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class DynamicScaling:
    """Dynamic NTK: theta grows with the length once that is over the original one (as in transformers)."""

    factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753): each wavelength times its factor, of two lists by the length of the sequence."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    attention_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ProportionalScaling:
    """Only the first `pairs` turn, of a head that is rotated whole, by their positions divided by `factor`."""

    pairs: int
    factor: float


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | DynamicScaling | LongRopeScaling | ProportionalScaling


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of the first `dims` elements of each head: element i turns with i + dims / 2.

    Where `interleaved`, elements 2 i and 2 i + 1 turn together.
    """

    dims: int
    theta: float
    scaling: RopeScaling | None = None
    interleaved: bool = False

    @property
    def boundary(self) -> int | None:
        """The length from which on a sequence is rotated otherwise, also in its past; None where there is none."""
        scaling = self.scaling
        return scaling.original_max_position_embeddings if isinstance(scaling, LongRopeScaling) else None


_LEAST_THETA = 2  # wavelengths must grow along a head
_FACTOR = Key("factor", float, minimum=1)
_PARTIAL = Key("partial_rotary_factor", float, 1.0, nullable=True, minimum=0)
_ORIGINAL = "original_max_position_embeddings"
_NEW = "rope_parameters"


def _read_original(reader: ConfigReader, default: int | None) -> Any:
    """Read the original length, which some files write as 4096.0."""
    found = reader.read(Key(_ORIGINAL, float, default, nullable=default is None, minimum=1, maximum=2**31 - 1))
    if found is not None and found != int(found):
        raise reader.fail(ConfigError, f"{_ORIGINAL!r} must be a whole number, not {found}")
    return None if found is None else int(found)


def _read_linear(reader: ConfigReader, max_positions: int) -> LinearScaling:
    return LinearScaling(factor=reader.read(_FACTOR))


def _read_llama3(reader: ConfigReader, max_positions: int) -> Llama3Scaling:
    low = reader.read(Key("low_freq_factor", float, minimum=0))
    high = reader.read(Key("high_freq_factor", float, minimum=0))
    if high < low:
        raise reader.fail(ConfigError, f"high_freq_factor ({high}) must not be below low_freq_factor ({low})")
    return Llama3Scaling(
        factor=reader.read(_FACTOR),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_read_original(reader, max_positions),
    )


def _read_yarn(reader: ConfigReader, max_positions: int) -> YarnScaling:
    original = _read_original(reader, max_positions)
    factor = reader.read(Key("factor", float, nullable=True, minimum=1))
    return YarnScaling(
        factor=max_positions / original if factor is None else factor,
        attention_factor=reader.read(Key("attention_factor", float, None, nullable=True, minimum=0)),
        beta_fast=reader.read(Key("beta_fast", float, None, nullable=True, minimum=1e-6)) or YarnScaling.beta_fast,
        beta_slow=reader.read(Key("beta_slow", float, None, nullable=True, minimum=1e-6)) or YarnScaling.beta_slow,
        mscale=reader.read(Key("mscale", float, None, nullable=True, minimum=0)),
        mscale_all_dim=reader.read(Key("mscale_all_dim", float, None, nullable=True, minimum=0)),
        original_max_position_embeddings=original,
        truncate=reader.read(Key("truncate", bool, True)),
    )


def _read_dynamic(reader: ConfigReader, max_positions: int) -> DynamicScaling:
    reader.discard([_ORIGINAL])  # the reference does not read it
    return DynamicScaling(factor=reader.read(_FACTOR), original_max_position_embeddings=max_positions)


_SCALINGS: Mapping[str, Callable[[ConfigReader, int], RopeScaling]] = {
    "linear": _read_linear,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "dynamic": _read_dynamic,
}
_PROPORTIONAL = "proportional"
_LONGROPE = "longrope"
_SAME = {"su": _LONGROPE, "mrope": "default"}  # older names; of the sections of mrope, text has one
_IDLE = frozenset({"attn_factor", "extrapolation_factor", "finetuned", "mrope_section", "mrope_interleaved"})
_OF_SCHEMES = frozenset(
    """
    attention_factor beta_fast beta_slow high_freq_factor long_factor long_mscale low_freq_factor mscale
    mscale_all_dim original_max_position_embeddings short_factor short_mscale truncate
    """.split()
)


@dataclass(frozen=True)
class _Defaults:
    """What holds where the object on RoPE itself says nothing."""

    head_dim: int
    max_positions: int
    original: int | None
    theta: float
    partial: float
    whole: bool
    dims: int | None
    interleaved: bool
    inert: frozenset[str]
    alpha: bool


def read_rope(
    reader: ConfigReader,
    *,
    head_dim: int,
    max_positions: int,
    layer_types: tuple[str, ...],
    default_theta: float,
    original: int | None = None,
    head_dims: Mapping[str, int] | None = None,
    local_theta: float | None = None,
    local_kind: str = "",
    partial: float | None = 1.0,
    whole: bool = False,
    dims: int | None = None,
    interleaved: bool = False,
    absent: Mapping[str, Any] | None = None,
    inert: frozenset[str] = frozenset(),
    alpha: bool = False,
) -> tuple[RopeConfig, ...]:
    """Read the rotary parameters of each layer from config.json, in either dialect.

    Layers of `local_kind` have `local_theta`, and no scaling, where that is not None and the parameters are those of
    transformers 4; those of transformers 5 must then be nested by layer type. `dims` of a head are rotated, or the
    `partial` one, or the `whole`, and then a factor other than 1 is refused; `head_dims` are of kinds of layers that
    have their own. Where config.json has no parameters they are those of `absent`; keys that are `inert` in them have
    no effect. `alpha` allows the dynamic scheme an alpha (HunYuan): theta stretched once, whatever the length. Raises
    UnsupportedModelError for a scheme that is not computed here, and ConfigError for one that makes no sense.
    """
    theta = reader.read(Key("rope_theta", float, default_theta, nullable=True, minimum=_LEAST_THETA))
    if whole:
        partial = reader.read(_PARTIAL)
    defaults = _Defaults(
        head_dim,
        max_positions,
        original,
        theta or default_theta,
        1.0 if partial is None else partial,
        whole and dims is None,
        dims,
        interleaved,
        inert,
        alpha,
    )
    dialects = [found for found in map(reader.object, ("rope_scaling", _NEW)) if found is not None]
    if local_theta is not None and _is_flat(reader.values.get(_NEW)):
        raise reader.fail(
            UnsupportedModelError,
            f"{_NEW} must have an object for each kind of layer, where alone transformers looks in this family",
        )
    otherwise = {} if absent is None or reader.has(_NEW) else absent
    said = [dialect for dialect in dialects if dialect.values]
    said = said or [ConfigReader(otherwise, reader.source, _NEW)]
    local = None if local_theta is None else (local_kind, replace(defaults, theta=local_theta))
    first, *others = [_read_layers(dialect, layer_types, defaults, head_dims or {}, local) for dialect in said]
    if any(other != first for other in others):
        raise reader.fail(ConfigError, "rope_scaling and rope_parameters contradict each other")
    return first


def _is_flat(parameters: Any) -> bool:
    return bool(parameters) and not any(isinstance(value, dict) for value in parameters.values())


def _read_layers(
    reader: ConfigReader,
    layer_types: tuple[str, ...],
    defaults: _Defaults,
    head_dims: Mapping[str, int],
    local: tuple[str, _Defaults] | None,
) -> tuple[RopeConfig, ...]:
    """Read one dialect's object, which is for all layers alike or has one inside for each kind of layer."""
    nested = {
        kind: reader.object(kind) for kind in sorted(set(layer_types)) if isinstance(reader.values.get(kind), dict)
    }
    if nested:
        reader.discard(kind for kind, value in reader.values.items() if kind.endswith("_attention"))
        reader.finish()
    by_type: dict[str, RopeConfig] = {}
    for kind in sorted(set(layer_types)):
        own = local[1] if local is not None and local[0] == kind else defaults
        if nested:
            found = nested.get(kind)
            if found is None:
                raise reader.fail(MissingKeyError, f"{kind!r} is absent, and there are layers of that kind")
        else:
            found = reader if own is defaults else ConfigReader({}, reader.source, _NEW)
        by_type[kind] = _read_one(found, replace(own, head_dim=head_dims.get(kind, own.head_dim)))
    return tuple(by_type[kind] for kind in layer_types)


def _read_one(reader: ConfigReader, defaults: _Defaults) -> RopeConfig:
    old, new = (reader.read(Key(name, str, None, nullable=True)) for name in ("type", "rope_type"))
    old, new = (_SAME.get(name or "", name) for name in (old, new))
    if old and new and old != new:
        raise reader.fail(ConfigError, f"'type' is {old!r}, but 'rope_type' is {new!r}")
    kind = new or old or "default"
    theta = reader.read(Key("rope_theta", float, defaults.theta, minimum=_LEAST_THETA))
    partial = reader.read(replace(_PARTIAL, default=defaults.partial, nullable=False))
    if defaults.whole and partial != 1 and kind != _PROPORTIONAL:
        raise reader.fail(
            UnsupportedModelError,
            f"partial_rotary_factor = {partial:g} is not computed: transformers rotates whole heads in this family",
        )
    dims = int(defaults.head_dim * partial) if defaults.dims is None else defaults.dims
    if kind == _PROPORTIONAL:
        dims = defaults.head_dim
    if not 0 < dims <= defaults.head_dim or dims % 2:
        raise reader.fail(
            ConfigError, f"partial_rotary_factor {partial:g} of head_dim {defaults.head_dim} rotates {dims} elements"
        )
    reader.discard(defaults.inert | _IDLE)
    alpha = reader.read(Key("alpha", float, None, nullable=True, minimum=0, maximum=1e6)) if defaults.alpha else None
    if kind == "dynamic" and dims == 2:
        raise reader.fail(ConfigError, "RoPE of type 'dynamic' needs more than one pair to rotate")
    if kind == "default":
        reader.discard(["factor"] if reader.values.get("factor") in (None, 1, 1.0) else [])
        scaling: RopeScaling | None = None
    elif kind == "dynamic" and alpha:
        theta *= alpha ** (dims / (dims - 2))
        reader.discard(["factor"])
        scaling = None
    elif kind == _PROPORTIONAL:
        pairs = int(partial * defaults.head_dim // 2)
        scaling = ProportionalScaling(pairs, factor=reader.read(Key("factor", float, 1.0, minimum=1)))
    elif kind == _LONGROPE:
        scaling = _read_longrope(reader, defaults, dims // 2)
    elif kind in _SCALINGS:
        scaling = _SCALINGS[kind](reader, defaults.max_positions)
    else:
        known = ", ".join(["default", *_SCALINGS, _LONGROPE, _PROPORTIONAL])
        raise reader.fail(
            UnsupportedModelError, f"RoPE of type {kind!r} is not computed by tinyllm (it knows {known})"
        )
    reader.discard(_OF_SCHEMES)  # of the others
    reader.finish()
    return RopeConfig(dims=dims, theta=theta, scaling=scaling, interleaved=defaults.interleaved)


def _read_longrope(reader: ConfigReader, defaults: _Defaults, pairs: int) -> LongRopeScaling:
    inside = _read_original(reader, None)
    original = inside if defaults.original is None else defaults.original  # in Phi-3 what stands outside comes first
    if original is None:
        raise reader.fail(MissingKeyError, f"the key {_ORIGINAL!r} is absent, and longrope needs it")
    factors = {}
    for name in ("short_factor", "long_factor"):
        factors[name] = tuple(reader.read(Key(name, list)))
        numbers = all(isinstance(f, (int, float)) and not isinstance(f, bool) and 0 < f < 1e6 for f in factors[name])
        if len(factors[name]) != pairs or not numbers:
            raise reader.fail(ConfigError, f"{name!r} must be {pairs} numbers above 0, one for each pair of a head")
    ratio = defaults.max_positions / original
    said = reader.read(Key("factor", float, None, nullable=True, minimum=1))
    attention = reader.read(Key("attention_factor", float, None, nullable=True, minimum=0))
    if attention is None:
        stretch = ratio if said is None else said
        attention = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    short, long = (reader.read(Key(f"{part}_mscale", float, None, nullable=True)) for part in ("short", "long"))
    if short != long:
        raise reader.fail(UnsupportedModelError, f"a short_mscale ({short}) that is not the long_mscale ({long})")
    attention = attention if short is None else short
    return LongRopeScaling(attention_factor=attention, original_max_position_embeddings=original, **factors)
