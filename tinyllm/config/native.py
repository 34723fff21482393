"""A config.json of model_type "tinyllm": the normalised form itself, to compose blocks without code. No mlx.

An object stands for each frozen dataclass, its keys for their fields, and absent keys for the fields' defaults. Where
several classes may stand, `kind` says which. All of it is derived from the classes, `Config` and what it holds: what
they can say can be written. docs/NATIVE.md describes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from itertools import chain, groupby
from reprlib import repr as brief
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from tinyllm.config.family import Family
from tinyllm.config.layers import (
    AttentionConfig,
    ConvConfig,
    DeltaConfig,
    DualConfig,
    FeedForward,
    LatentAttentionConfig,
    Mixer,
    MLPConfig,
    MoeConfig,
    rope_of,
)
from tinyllm.config.native_checks import check, check_whole
from tinyllm.config.quantization import QuantizationConfig
from tinyllm.config.reader import REQUIRED, ConfigReader, Key
from tinyllm.errors import ConfigError

if TYPE_CHECKING:
    from tinyllm.config.config import Config

__all__ = ["MAX_LAYERS", "NATIVE", "kind_name", "read_native", "write_native"]

NATIVE = Family("tinyllm")
MAX_LAYERS = 10_000

# Fields of a Config that every other config.json says in the same way, or that the native form fixes.
_OF_THE_FILE = ("model_type", "eos_token_ids", "dtype", "quantization", "family", "wrapper")
_NAMED: Mapping[type, str] = {AttentionConfig: "heads", MoeConfig: "experts"}
_UNSAID = (AttentionConfig, MLPConfig)  # what an object is that does not say its kind
# Least values, by the names of fields: of whole numbers 1, of others none, but for these.
_LEAST: Mapping[str, float] = {
    **dict.fromkeys(("shift", "source", "position_offset", "extra_layers", "pairs"), 0),
    **dict.fromkeys(("eps", "epsilon", "jitter", "low_freq_factor", "high_freq_factor"), 0),
    **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim", "rms_norm_eps"), 0),
    **dict.fromkeys(("factor", "softcap", "logit_softcap", "clip", "limit", "most", "beta_fast", "beta_slow"), 1e-6),
    **dict.fromkeys(("theta", "rope_theta", "kernel"), 2),
}

Said = Mapping[str, Any]


def _heads_of(said: Said) -> tuple[int, int, int]:
    """Return heads, key/value heads and head_dim of the first layer that attends, or else of the first."""
    mixers: list[Mixer] = [layer.attention for layer in said["layers"]]
    match min(mixers, key=lambda mixer: get_args(Mixer).index(type(mixer))):
        case AttentionConfig() as shape:
            return shape.num_heads, shape.num_kv_heads, shape.head_dim
        case LatentAttentionConfig() as shape:
            return shape.num_heads, shape.num_heads, shape.rope.dims
        case DeltaConfig() as shape:
            return shape.num_value_heads, shape.num_key_heads, shape.key_dim
        case ConvConfig() as shape:
            return 1, 1, shape.width


def _width(network: FeedForward) -> int:
    match network:
        case MLPConfig():
            return network.intermediate_size
        case MoeConfig():
            return network.expert.intermediate_size
        case DualConfig():
            return network.dense.intermediate_size


def _theta(said: Said) -> float:
    ropes = (rope_of(layer.attention) for layer in said["layers"])
    return next((rope.theta for rope in ropes if rope is not None), NATIVE.rope_theta)


# By a class's name, what the absence of fields means that have no default: something of the other fields.
_DERIVED: Mapping[str, Mapping[str, Callable[[Said], Any]]] = {
    "AttentionConfig": {
        "num_kv_heads": lambda said: said["num_heads"],
        "scale": lambda said: said["head_dim"] ** -0.5,
        "rope": lambda said: None,
    },
    "LatentAttentionConfig": {
        "query_rank": lambda said: None,
        "scale": lambda said: (said["plain_dim"] + said["rope"].dims) ** -0.5,
    },
    "ConvConfig": {"biased": lambda said: False},
    "Config": {
        "intermediate_size": lambda said: _width(said["layers"][0].feed_forward),
        "num_hidden_layers": lambda said: len(said["layers"]),
        "num_attention_heads": lambda said: _heads_of(said)[0],
        "num_key_value_heads": lambda said: _heads_of(said)[1],
        "head_dim": lambda said: _heads_of(said)[2],
        "rms_norm_eps": lambda said: said["layers"][0].norm.eps,
        "rope_theta": _theta,
        "tie_word_embeddings": lambda said: False,
    },
}


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def kind_name(cls: type) -> str:
    """Return what `kind` calls a class: its name without what classes of its sort have in common."""
    return _NAMED.get(cls) or re.sub("(Attention)?Config$|Scaling$", "", cls.__name__).lower()


def _options(hint: Any) -> tuple[Any, ...]:
    """Return the types that a field may have, None's left out."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(option for option in options if option is not NoneType)


def _derived(cls: type) -> Mapping[str, Callable[[Said], Any]]:
    return _DERIVED.get(cls.__name__, {})


# ---------------------------------------------------------------- reading


def read_native(reader: ConfigReader, cls: type[Config]) -> dict[str, Any]:
    """Return the fields of a `Config` from the normalised form. Raises ConfigError, which names the key."""
    said = _fields(reader, cls, left_out=_OF_THE_FILE)
    check_whole(reader, said)
    return said


def _read(reader: ConfigReader, cls: type) -> Any:
    """Read one object as a frozen dataclass, each of its fields checked, and then all together."""
    made = cls(**_fields(reader, cls))
    check(reader, made)
    reader.finish(strict=True)
    return made


def _fields(reader: ConfigReader, cls: type, left_out: Iterable[str] = ()) -> dict[str, Any]:
    said: dict[str, Any] = {}
    derived = _derived(cls)
    for field in fields(cls):
        if field.name not in left_out and (field.name in reader.values or field.name not in derived):
            default = REQUIRED if field.default is MISSING else field.default
            said[field.name] = _field(reader, field.name, _hints(cls)[field.name], default)
    for name, find in derived.items():
        if name not in said:
            said[name] = find(said)
    return said


def _field(reader: ConfigReader, name: str, hint: Any, default: Any) -> Any:
    """Read a field. Raises TypeError where no JSON stands for what it may be."""
    options = _options(hint)
    kind, nullable = options[0], NoneType in get_args(hint)
    if all(map(is_dataclass, options)):
        return _nested(reader, name, options, nullable=nullable, default=default)
    if all(get_origin(option) is Literal for option in options):
        return _chosen(reader, name, tuple(chain.from_iterable(map(get_args, options))), default)
    if len(options) == 1 and get_origin(kind) is tuple:
        items: type = get_args(kind)[0]
        return tuple(_repeated(reader, name, items)) if is_dataclass(items) else _numbers(reader, name)
    if options in ((bool,), (int,), (float,)):
        least = _LEAST.get(name, 1 if kind is int else None)
        return reader.read(Key(name, kind, default, nullable=nullable, minimum=least))
    raise TypeError(f"nothing in JSON stands for {name}, which is {hint}")


def _nested(reader: ConfigReader, name: str, classes: tuple[type, ...], *, nullable: bool, default: Any) -> Any:
    """Read an object as the one of some dataclasses that its `kind` says."""
    if reader.read(Key(name, dict, default, nullable=nullable)) is default:
        return default
    nested = reader.object(name)
    if nested is None:
        return None
    if len(classes) == 1:
        return _read(nested, classes[0])
    known = {kind_name(cls): cls for cls in classes}
    unsaid = next((kind for kind, cls in known.items() if cls in _UNSAID), REQUIRED)
    return _read(nested, known[_chosen(nested, "kind", tuple(known), unsaid)])


def _chosen(reader: ConfigReader, name: str, options: tuple[str, ...], default: Any) -> str:
    said: str = reader.read(Key(name, str, default))
    if said not in options:
        raise reader.fail(ConfigError, f"{name!r} is {brief(said)}, and tinyllm knows {', '.join(options)}")
    return said


def _repeated(reader: ConfigReader, name: str, cls: type) -> list[Any]:
    """Read a list of objects, each as often as its `repeat` says."""
    made: list[Any] = []
    for item in reader.objects(name):
        repeat = item.read(Key("repeat", int, 1, minimum=1, maximum=MAX_LAYERS))
        made += [_read(item, cls)] * repeat
        if len(made) > MAX_LAYERS:
            raise reader.fail(ConfigError, f"there are more than {MAX_LAYERS} {name}")
    if not made:
        raise reader.fail(ConfigError, f"{name!r} is empty")
    return made


def _numbers(reader: ConfigReader, name: str) -> tuple[float, ...]:
    said = reader.read(Key(name, list))
    if not all(isinstance(n, (int, float)) and not isinstance(n, bool) and 0 < n < 1e6 for n in said):
        raise reader.fail(ConfigError, f"{name!r} must be a list of numbers above 0")
    return tuple(map(float, said))


# ---------------------------------------------------------------- writing


def write_native(config: Config) -> dict[str, Any]:
    """Return a config.json of model_type "tinyllm" for what a config of any family computes.

    Reading it gives the same `Config`, but for the family: tensors have canonical names. How other libraries have
    packed the files is left out.
    """
    said = _written(config, left_out=_OF_THE_FILE)
    layers = said.pop("layers")
    ids = list(config.eos_token_ids)
    of_the_file = {
        "eos_token_id": ids[0] if len(ids) == 1 else ids or None,
        "dtype": config.dtype,
        "quantization": _quantization(config.quantization),
    }
    present = {name: value for name, value in of_the_file.items() if value is not None}
    return {"model_type": NATIVE.model_type, **present, **said, "layers": layers}


def _quantization(config: QuantizationConfig | None) -> dict[str, Any] | None:
    if config is None or config.default is None or config.stored is not None:
        return None
    overrides = {name: form is not None and asdict(form) for name, form in config.overrides.items()}
    return {**asdict(config.default), **overrides}


def _written(made: Any, left_out: Iterable[str] = ()) -> dict[str, Any]:
    """Write the fields that are not what their absence means."""
    cls: type = type(made)
    values = {field.name: getattr(made, field.name) for field in fields(made)}
    derived = _derived(cls)
    said = {}
    for field in fields(made):
        name, value = field.name, values[field.name]
        if name not in left_out and value != (derived[name](values) if name in derived else field.default):
            said[name] = _plain(value, _hints(cls)[name])
    return said


def _plain(value: Any, hint: Any) -> Any:
    if is_dataclass(value):
        cls = type(value)
        said = cls in _UNSAID or len(_options(hint)) == 1
        return {**({} if said else {"kind": kind_name(cls)}), **_written(value)}
    return list(_items(value)) if isinstance(value, tuple) else value


def _items(values: tuple[Any, ...]) -> Iterator[Any]:
    """Yield numbers as they are, and objects that follow their like as one that is repeated."""
    for value, alike in groupby(values):
        count = len(list(alike))
        if not is_dataclass(value):
            yield from [value] * count
        else:
            yield {**({"repeat": count} if count > 1 else {}), **_written(value)}
