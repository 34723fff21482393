"""A config.json of model_type "tinyllm": the normalised form itself, to compose blocks without code. No mlx.

An object stands for each frozen dataclass of `layers`, its keys for their fields. Absent keys have the field's
default. Where several dataclasses may stand, `kind` says which; docs/NATIVE.md lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from reprlib import repr as brief
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tinyllm.config.build import ACTIVATIONS, check_router
from tinyllm.config.family import Family
from tinyllm.config.layers import (
    Alibi,
    AttentionConfig,
    DualConfig,
    LatentAttentionConfig,
    LayerConfig,
    MLPConfig,
    MoeConfig,
    NormConfig,
    QkNorm,
    RouterConfig,
    Sandwich,
    rope_of,
)
from tinyllm.config.reach import Chunk, Strided, Window
from tinyllm.config.reader import REQUIRED, ConfigReader, Key
from tinyllm.config.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeConfig,
    YarnScaling,
)
from tinyllm.errors import ConfigError

NATIVE = Family("tinyllm")

MAX_LAYERS = 10_000
_KINDS: Mapping[type, str] = {
    AttentionConfig: "heads",
    LatentAttentionConfig: "latent",
    MLPConfig: "mlp",
    MoeConfig: "experts",
    DualConfig: "dual",
    Window: "window",
    Chunk: "chunk",
    Strided: "strided",
    Alibi: "alibi",
    Sandwich: "sandwich",
    LinearScaling: "linear",
    Llama3Scaling: "llama3",
    YarnScaling: "yarn",
    DynamicScaling: "dynamic",
    LongRopeScaling: "longrope",
    ProportionalScaling: "proportional",
}
_UNSAID = ("heads", "mlp")  # what an object is that does not say its kind
# Least values: of whole numbers 1, of others none, but for these.
_LEAST: Mapping[str, float] = {
    "shift": 0,
    "source": 0,
    "factor": 1e-6,
    **dict.fromkeys(
        ("eps", "epsilon", "jitter", "low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim"), 0
    ),
    **dict.fromkeys(("softcap", "clip", "limit", "beta_fast", "beta_slow", "attention_factor", "most"), 1e-6),
    "theta": 2,
}


# Fields without a default whose absence means something all the same, by the other fields.
_DERIVED: Mapping[tuple[type, str], Callable[[Mapping[str, Any]], Any]] = {
    (AttentionConfig, "num_kv_heads"): lambda said: said["num_heads"],
    (AttentionConfig, "scale"): lambda said: said["head_dim"] ** -0.5,
    (AttentionConfig, "rope"): lambda said: None,
    (LatentAttentionConfig, "query_rank"): lambda said: None,
    (LatentAttentionConfig, "scale"): lambda said: (said["plain_dim"] + said["rope"].dims) ** -0.5,
}


def read_native(reader: ConfigReader) -> dict[str, Any]:
    """Return the fields of a `Config` from the normalised form. Raises ConfigError, which names the key."""
    layers = _read_layers(reader)
    positions = reader.read(Key("max_position_embeddings", int, minimum=1))
    learned = reader.read(Key("learned_positions", int, None, nullable=True, minimum=1))
    offset = reader.read(Key("position_offset", int, 0, minimum=0))
    if learned is not None and learned < positions + offset:
        raise reader.fail(
            ConfigError, f"learned_positions ({learned}) are fewer than {positions} positions from row {offset} on"
        )
    return {
        "vocab_size": reader.read(Key("vocab_size", int, minimum=1)),
        "hidden_size": reader.read(Key("hidden_size", int, minimum=1)),
        "max_position_embeddings": positions,
        "tie_word_embeddings": reader.read(Key("tie_word_embeddings", bool, False)),
        "layers": layers,
        "final_norm": _nested(reader, "final_norm", (NormConfig,), nullable=True),
        "embed_norm": _nested(reader, "embed_norm", (NormConfig,), nullable=True, default=None),
        "embedding_scale": reader.read(Key("embedding_scale", float, 1.0)),
        "embedding_width": reader.read(Key("embedding_width", int, None, nullable=True, minimum=1)),
        "learned_positions": learned,
        "position_offset": offset,
        "logit_scale": reader.read(Key("logit_scale", float, 1.0)),
        "logit_softcap": reader.read(Key("logit_softcap", float, None, nullable=True, minimum=1e-6)),
        "head_bias": reader.read(Key("head_bias", bool, False)),
        **_of_the_whole(layers),
    }


def _of_the_whole(layers: tuple[LayerConfig, ...]) -> dict[str, Any]:
    """Return what other families say once for all layers, of the first layer that has it."""
    first = layers[0]
    network = first.feed_forward
    network = network.dense if isinstance(network, DualConfig) else network
    shape = network if isinstance(network, MLPConfig) else network.expert
    ropes = [rope for rope in (rope_of(layer.attention) for layer in layers) if rope is not None]
    heads = [layer.attention for layer in layers if isinstance(layer.attention, AttentionConfig)]
    latent = [layer.attention for layer in layers if isinstance(layer.attention, LatentAttentionConfig)]
    if heads:
        counts = (heads[0].num_heads, heads[0].num_kv_heads, heads[0].head_dim)
    else:
        counts = (latent[0].num_heads, latent[0].num_heads, latent[0].rope.dims)
    return {
        "num_hidden_layers": len(layers),
        "intermediate_size": shape.intermediate_size,
        "rms_norm_eps": first.norm.eps,
        "rope_theta": ropes[0].theta if ropes else NATIVE.rope_theta,
        **dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), counts, strict=True)),
    }


def _read_layers(reader: ConfigReader) -> tuple[LayerConfig, ...]:
    """Read the list of layers, each as often as its `repeat` says."""
    layers: list[LayerConfig] = []
    for i, values in enumerate(reader.read(Key("layers", list))):
        if not isinstance(values, dict):
            raise reader.fail(ConfigError, f"layers[{i}] must be an object, not {type(values).__name__}")
        item = ConfigReader(values, reader.source, f"layers[{i}]")
        repeat = item.read(Key("repeat", int, 1, minimum=1, maximum=MAX_LAYERS))
        layers += [_read(item, LayerConfig)] * repeat
        if len(layers) > MAX_LAYERS:
            raise reader.fail(ConfigError, f"there are more than {MAX_LAYERS} layers")
    if not layers:
        raise reader.fail(ConfigError, "'layers' is empty")
    return tuple(layers)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _read(reader: ConfigReader, cls: type) -> Any:
    """Read one object as a frozen dataclass, each of its fields checked."""
    said = {
        field.name: _field(reader, field, _hints(cls)[field.name])
        for field in fields(cls)
        if field.name in reader.values or (cls, field.name) not in _DERIVED
    }
    derived = {name: find(said) for (of, name), find in _DERIVED.items() if of is cls and name not in said}
    made = cls(**said, **derived)
    _check(reader, made)
    reader.finish()
    return made


def _field(reader: ConfigReader, field: Field[Any], hint: Any) -> Any:
    name = field.name
    default = REQUIRED if field.default is MISSING else field.default
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = tuple(option for option in options if option is not NoneType)
    kind, nullable = kinds[0], NoneType in options
    if is_dataclass(kind):
        return _nested(reader, name, kinds, nullable=nullable, default=default)
    if get_origin(kind) is Literal:
        return _chosen(reader, name, get_args(kind), default)
    if get_origin(kind) is tuple:
        return _numbers(reader, name)
    if name == "activation":
        return _chosen(reader, name, ACTIVATIONS, default)
    least = _LEAST.get(name, 1 if kind is int else None)
    return reader.read(Key(name, kind, default, nullable=nullable, minimum=least))


def _nested(
    reader: ConfigReader, name: str, classes: tuple[type, ...], *, nullable: bool, default: Any = REQUIRED
) -> Any:
    """Read an object as the one of some dataclasses that its `kind` says."""
    if reader.read(Key(name, dict, default, nullable=nullable)) is default:
        return default
    nested = reader.object(name)
    if nested is None:
        return None
    if len(classes) == 1:
        return _read(nested, classes[0])
    known = {_KINDS[cls]: cls for cls in classes if cls in _KINDS}
    unsaid = next((kind for kind in _UNSAID if kind in known), REQUIRED)
    return _read(nested, known[_chosen(nested, "kind", tuple(known), unsaid)])


def _chosen(reader: ConfigReader, name: str, options: tuple[str, ...], default: Any) -> str:
    said: str = reader.read(Key(name, str, default))
    if said not in options:
        raise reader.fail(ConfigError, f"{name!r} is {brief(said)}, and tinyllm knows {', '.join(options)}")
    return said


def _numbers(reader: ConfigReader, name: str) -> tuple[float, ...]:
    said = reader.read(Key(name, list))
    if not all(isinstance(n, (int, float)) and not isinstance(n, bool) and 0 < n < 1e6 for n in said):
        raise reader.fail(ConfigError, f"{name!r} must be a list of numbers above 0")
    return tuple(map(float, said))


def _check(reader: ConfigReader, made: Any) -> None:
    """Raise ConfigError for values that make sense alone, but not together."""
    problem = _problem(made)
    if problem:
        raise reader.fail(ConfigError, problem)
    if isinstance(made, RouterConfig):
        check_router(reader, made)


def _problem(made: Any) -> str | None:
    match made:
        case NormConfig(kind="rms", bias=True):
            return "an RMSNorm has no bias"
        case NormConfig(weight=False) if made.offset:
            return "there is no weight for the offset to be added to"
        case LayerConfig(shared_norm=True) if made.placement != "parallel":
            return "shared_norm is for norms of placement 'parallel' alone"
        case QkNorm() if made.norm.bias and made.over != "whole":
            return "a norm of each head has no bias"
        case AttentionConfig() if made.num_heads % made.num_kv_heads:
            return f"num_heads ({made.num_heads}) is not a multiple of num_kv_heads ({made.num_kv_heads})"
        case AttentionConfig() if made.rope is not None and made.rope.dims > made.head_dim:
            return f"rope.dims ({made.rope.dims}) are more than head_dim ({made.head_dim})"
        case RopeConfig() if made.dims % 2:
            return f"dims ({made.dims}) must be even, for elements turn in pairs"
        case RopeConfig(dims=2, scaling=DynamicScaling()):
            return "a single pair has no dynamic scaling"
        case RopeConfig(scaling=LongRopeScaling() as scaling) if {
            len(scaling.short_factor),
            len(scaling.long_factor),
        } != {made.dims // 2}:
            return f"short_factor and long_factor must have {made.dims // 2} numbers, one for each pair"
        case Llama3Scaling() if made.high_freq_factor < made.low_freq_factor:
            return "high_freq_factor must not be below low_freq_factor"
        case Sandwich() if made.dims % 2:
            return f"dims ({made.dims}) must be even: a sine and a cosine"
        case MLPConfig() if made.limit is not None and (not made.gated or made.activation != "silu"):
            return "a limit is for gated networks with silu alone"
        case MoeConfig(shared=None, shared_gate=True):
            return "shared_gate needs what is shared"
    return None
