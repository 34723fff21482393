"""Models that differ in one thing from what a config says: a golden that is worth having tells each of them apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

from tinyllm.config.config import Config
from tinyllm.config.layers import (
    AttentionConfig,
    LatentAttentionConfig,
    LayerConfig,
    MLPConfig,
    NormConfig,
    QkNorm,
    RouterConfig,
)
from tinyllm.config.reach import Chunk, Strided, Window
from tinyllm.config.rope import Llama3Scaling, LongRopeScaling, RopeConfig, YarnScaling
from tinyllm.config.tensors import tensor_shapes
from tinyllm.errors import UnsupportedModelError
from tinyllm.model.block import block_of
from tinyllm.ops.rope import rope_attention_factor, rope_wavelengths

Path = tuple[str, ...]
Others = Mapping[str, Any]  # what is said of them -> other values

# Whose defaults are not tried. Of the first two no numbers come: layers that are not read, and what keeps a sum from
# being zero. The others may mean the same as their defaults do.
OTHERWISE = {
    (Config, "extra_layers"),
    (RouterConfig, "epsilon"),
    (RouterConfig, "scoring"),
    (RouterConfig, "renormalise"),
    (QkNorm, "after_rope"),
    *((YarnScaling, name) for name in ("beta_fast", "beta_slow", "truncate")),  # pairs are few: see `_ropes`
}
LEAST_EPS = 1e-3  # smaller ones do not show


def mutants(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield, under a name, each model that is computed from tensors of the same shapes and of no others."""
    met = [config]
    for what, mutant in _all(config):
        if mutant not in met and _is_computed(mutant, config):
            met.append(mutant)
            yield what, mutant


def _all(config: Config) -> Iterator[tuple[str, Config]]:
    values = _values_by_path(config.layers)
    for path, owners in values.items():
        for value, owner in owners.items():
            for what, other in _others(owner, path[-1], value).items():
                layers = tuple(_changed(layer, path, value, other) for layer in config.layers)
                yield f"{'.'.join(path)}: {what}", replace(config, layers=layers)
        if len(owners) > 1 and not _are_alike(list(owners)):
            for value in owners:
                layers = tuple(_changed(layer, path, ..., value) for layer in config.layers)
                yield f"{'.'.join(path)}: {value} everywhere", replace(config, layers=layers)
    yield "layers: in reverse", replace(config, layers=config.layers[::-1])
    for name in ("final_norm", "embed_norm"):
        norm = getattr(config, name)
        for field in fields(NormConfig) if norm is not None else ():
            for what, other in _others(norm, field.name, getattr(norm, field.name)).items():
                yield f"{name}.{field.name}: {what}", replace(config, **{name: replace(norm, **{field.name: other})})
    for field in fields(Config):
        for what, other in _others(config, field.name, getattr(config, field.name)).items():
            yield f"{field.name}: {what}", replace(config, **{field.name: other})


def _values_by_path(layers: tuple[LayerConfig, ...]) -> dict[Path, dict[Any, Any]]:
    """Return of each path of fields into layers the values that stand there, each with one that it is a field of."""
    found: dict[Path, dict[Any, Any]] = {}
    for layer in dict.fromkeys(layers):
        for path, owner, value in _walk(layer):
            found.setdefault(path, {}).setdefault(value, owner)
    return found


def _walk(owner: Any, above: Path = ()) -> Iterator[tuple[Path, Any, Any]]:
    for field in fields(owner):
        value = getattr(owner, field.name)
        yield (*above, field.name), owner, value
        if is_dataclass(value):
            yield from _walk(value, (*above, field.name))


def _are_alike(values: list[Any]) -> bool:
    """Whether values differ in fields of one class, which are met one by one."""
    return is_dataclass(values[0]) and len({type(value) for value in values}) == 1


def _changed(owner: Any, path: Path, value: Any, other: Any) -> Any:
    """Return `owner` with another value at a path, if what stands there is `value` (or anything, for `...`)."""
    name, *rest = path
    if not hasattr(owner, name):
        return owner
    inner = getattr(owner, name)
    if rest:
        return replace(owner, **{name: _changed(inner, tuple(rest), value, other)}) if is_dataclass(inner) else owner
    return replace(owner, **{name: other}) if value is ... or inner == value else owner


def _is_computed(mutant: Config, config: Config) -> bool:
    try:
        for layer in mutant.layers:
            block_of(layer)
        return tensor_shapes(mutant).items() <= tensor_shapes(config).items()
    except UnsupportedModelError:
        return False


# ---------------------------------------------------------------- other values


def _others(owner: Any, name: str, value: Any) -> dict[str, Any]:
    """Return, under names, other values of a field: what is the default of its class, and what is not so plain."""
    which = type(owner), name
    [default] = [field.default for field in fields(owner) if field.name == name]
    found = {} if which in OTHERWISE or default in (MISSING, value) else {"not done": default}
    return {**found, **OTHERS.get(which, _none)(owner)}


def _none(owner: Any) -> Others:
    return {}


def _scale(owner: AttentionConfig) -> Others:
    return {"plain": owner.head_dim**-0.5}


def _latent_scale(owner: LatentAttentionConfig) -> Others:
    return {"plain": (owner.plain_dim + owner.rope.dims) ** -0.5, "not of rotated": owner.plain_dim**-0.5}


def _eps(owner: NormConfig) -> Others:
    return {"little": 1e-6} if owner.eps > LEAST_EPS else {}


def _activation(owner: MLPConfig) -> Others:
    return {} if owner.limit is not None else {"other": "silu" if owner.activation.startswith("relu") else "relu"}


def _after_rope(owner: QkNorm) -> Others:
    """Where there is no weight, a rotation changes no norm."""
    return {"other": not owner.after_rope} if owner.norm.weight and owner.over != "whole" else {}


def _top_k(owner: RouterConfig) -> Others:
    return {"one other": owner.top_k - 1 if owner.top_k > 1 else min(2, owner.num_experts)}


def _scoring(owner: RouterConfig) -> Others:
    if owner.top_k == 1 and (owner.renormalise or owner.scoring == "chosen"):
        return {}  # all weights are 1
    return {"other": "softmax" if owner.scoring == "sigmoid" else "sigmoid"}


def _renormalise(owner: RouterConfig) -> Others:
    return {} if owner.scoring == "chosen" else {"other": not owner.renormalise}


def _rope(owner: AttentionConfig | LatentAttentionConfig) -> Others:
    if owner.rope is None:
        return {}
    found = dict(_ropes(owner.rope))
    if isinstance(owner, AttentionConfig) and not isinstance(owner.rope.scaling, LongRopeScaling):
        found["whole heads"] = replace(owner.rope, dims=owner.head_dim)
    return found


def _ropes(rope: RopeConfig) -> Iterator[tuple[str, RopeConfig]]:
    def scaled(**changes: Any) -> RopeConfig:
        return replace(rope, scaling=replace(rope.scaling, **changes))

    yield "theta", replace(rope, theta=rope.theta * 1.2)
    match rope.scaling:
        case None:
            return
        case LongRopeScaling(short, long, factor):
            yield "short and long", scaled(short_factor=long, long_factor=short)
            if factor != 1:
                yield "attention_factor", scaled(attention_factor=1.0)
            return
        case scaling:
            yield "factor", scaled(factor=scaling.factor * 1.2)
    if isinstance(scaling, Llama3Scaling):
        yield "low_freq_factor", scaled(low_freq_factor=2.0)
        yield "high_freq_factor", scaled(high_freq_factor=3.0)
    if isinstance(scaling, YarnScaling):
        other = scaled(truncate=not scaling.truncate)
        if rope_wavelengths(other) != rope_wavelengths(rope):  # ends may lie beyond a head either way
            yield "truncate", other
        yield "beta_slow", scaled(beta_slow=0.2)
        yield "original", scaled(original_max_position_embeddings=256)
        if rope_attention_factor(rope) != 1:
            yield "attention_factor", scaled(attention_factor=1.0)
        if scaling.mscale is not None:
            yield "mscale", scaled(mscale=None)


OTHERS: Mapping[tuple[type, str], Callable[[Any], Others]] = {
    (AttentionConfig, "scale"): _scale,
    (AttentionConfig, "rope"): _rope,
    (LatentAttentionConfig, "scale"): _latent_scale,
    (LatentAttentionConfig, "rope"): _rope,
    (NormConfig, "eps"): _eps,
    (MLPConfig, "activation"): _activation,
    (QkNorm, "after_rope"): _after_rope,
    (RouterConfig, "top_k"): _top_k,
    (RouterConfig, "scoring"): _scoring,
    (RouterConfig, "renormalise"): _renormalise,
    (Window, "size"): lambda owner: {"wider": owner.size + max(1, owner.size // 64)},
    (Chunk, "size"): lambda owner: {"larger": owner.size + 1},
    (Strided, "local"): lambda owner: {"more": owner.local + 1},
    (Strided, "stride"): lambda owner: {"longer": owner.stride + 1},
    (Config, "tie_word_embeddings"): lambda owner: {"tied": True},
}
