"""What a config of model_type "tinyllm" may not say, although each value makes sense alone. No mlx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinyllm.config.build import check_router
from tinyllm.config.layers import (
    AttentionConfig,
    DeltaConfig,
    LayerConfig,
    LayerInputs,
    MLPConfig,
    MoeConfig,
    NormConfig,
    RouterConfig,
    Sandwich,
    contradiction,
    rope_of,
    sees_source,
    source_of,
)
from tinyllm.config.reader import ConfigReader
from tinyllm.config.rope import DynamicScaling, Llama3Scaling, LongRopeScaling, ProportionalScaling, RopeConfig
from tinyllm.errors import ConfigError


def check(reader: ConfigReader, made: Any) -> None:
    """Raise ConfigError where the values of one object contradict each other."""
    problem = _problem(made)
    if problem:
        raise reader.fail(ConfigError, problem)
    if isinstance(made, RouterConfig):
        check_router(reader, made)


def check_whole(reader: ConfigReader, said: Mapping[str, Any]) -> None:
    """Raise ConfigError where the fields of a `Config` contradict each other."""
    problem = _problem_of_the_whole(said)
    if problem:
        raise reader.fail(ConfigError, problem)


def _problem_of_the_whole(said: Mapping[str, Any]) -> str | None:
    layers: tuple[LayerConfig, ...] = said["layers"]
    inputs: LayerInputs | None = said["layer_inputs"]
    positions, offset, learned = (
        said[name] for name in ("max_position_embeddings", "position_offset", "learned_positions")
    )
    if said["num_hidden_layers"] != len(layers):
        return f"num_hidden_layers is {said['num_hidden_layers']}, but there are {len(layers)} layers"
    if learned is not None and learned < positions + offset:
        return f"learned_positions ({learned}) are fewer than {positions} positions from row {offset} on"
    if inputs is not None and inputs.vocab_size < said["vocab_size"]:
        return f"layer_inputs.vocab_size ({inputs.vocab_size}) is less than vocab_size ({said['vocab_size']})"
    for i, layer in enumerate(layers):
        rope = rope_of(layer.attention)
        dynamic = rope.scaling if rope is not None and isinstance(rope.scaling, DynamicScaling) else None
        if dynamic is not None and dynamic.original_max_position_embeddings < positions:
            return f"layers: the original length of dynamic scaling is less than {positions}, the longest computed"
        if not sees_source(layers, i):
            return (
                f"layers: the source of layer {i} is {source_of(layer.attention)}, which must be an earlier layer,"
                " with keys and values of its own, as many and as wide, and with the same reach"
            )
    return None


def _problem(made: Any) -> str | None:
    match made:
        case NormConfig(kind="rms", bias=True):
            return "an RMSNorm has no bias"
        case NormConfig(weight=False) if made.offset:
            return "there is no weight for the offset to be added to"
        case LayerConfig():
            return contradiction(made)
        case AttentionConfig() if made.num_heads % made.num_kv_heads:
            return f"num_heads ({made.num_heads}) is not a multiple of num_kv_heads ({made.num_kv_heads})"
        case DeltaConfig() if made.num_value_heads % made.num_key_heads:
            return (
                f"num_value_heads ({made.num_value_heads}) is not a multiple of num_key_heads ({made.num_key_heads})"
            )
        case Sandwich() if made.dims % 2:
            return f"dims ({made.dims}) must be even: a sine and a cosine"
        case MLPConfig() if made.limit is not None and (not made.gated or made.activation != "silu"):
            return "a limit is for gated networks with silu alone"
        case MLPConfig(activation="xielu", gated=True):
            return "xielu is for networks that are not gated"
        case MoeConfig(expert=MLPConfig(activation="xielu")):
            return "experts have no xielu: its parameters are a layer's"
        case MoeConfig(shared=None, shared_gate=True):
            return "shared_gate needs what is shared"
        case RouterConfig(scoring="mixed") if made.groups > 1 or made.selection_bias:
            return "scoring 'mixed' has neither groups nor a selection_bias"
        case RopeConfig() | Llama3Scaling():
            return _problem_of_rope(made)
    return None


def _problem_of_rope(made: RopeConfig | Llama3Scaling) -> str | None:
    match made:
        case RopeConfig() if made.dims % 2:
            return f"dims ({made.dims}) must be even, for elements turn in pairs"
        case RopeConfig(dims=2, scaling=DynamicScaling()):
            return "a single pair has no dynamic scaling"
        case RopeConfig(scaling=ProportionalScaling() as scaling) if scaling.pairs > made.dims // 2:
            return f"scaling.pairs ({scaling.pairs}) are more than there are, {made.dims // 2}"
        case RopeConfig(scaling=LongRopeScaling() as scaling) if {
            len(scaling.short_factor),
            len(scaling.long_factor),
        } != {made.dims // 2}:
            return f"short_factor and long_factor must have {made.dims // 2} numbers, one for each pair"
        case Llama3Scaling() if made.high_freq_factor < made.low_freq_factor:
            return "high_freq_factor must not be below low_freq_factor"
    return None
