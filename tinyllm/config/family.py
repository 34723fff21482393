"""What a row of the table of families is made of, and the rules that several rows have in common. No mlx.

A field of a row is a constant of the architecture, a `Key` to be read, or something computed `of` one or several. The
defaults of keys are those of the config classes of transformers 5.24, since config.json may leave out what equals
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tinyllm.config.fused import Split
from tinyllm.config.layers import Alibi, Mixer, Placement, QueryScaling
from tinyllm.config.reach import Chunk, Pattern, Window
from tinyllm.config.reader import ConfigReader, Key
from tinyllm.errors import ConfigError, UnsupportedModelError

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR, CONV = "linear_attention", "conv"

LayerRule = Callable[[ConfigReader, int], tuple[Any, ...]]


@dataclass(frozen=True)
class Found:
    """What a function makes of keys, which it reads itself."""

    read: Callable[[ConfigReader], Any]


def of(function: Callable[..., Any], *keys: Key) -> Found:
    """Return what a function makes of what keys say, in their order."""
    return Found(lambda reader: function(*(reader.read(key) for key in keys)))


def when(name: str, value: Any, default: bool = False) -> Found:
    """Return what is `value` where the flag `name` is true, else None."""
    return of(lambda flag: value if flag else None, Key(name, bool, default))


def scaling_by_position(absent: Mapping[str, Any], longest: Key) -> Found:
    """Return what `llama_4_scaling_beta` asks for, which stands among the rotary parameters, or in those of `absent`.

    Steps are as long as the original context, by default as the `longest`.
    """

    def read(reader: ConfigReader) -> QueryScaling | None:
        said = [found for found in map(reader.object, ("rope_scaling", "rope_parameters")) if found is not None]
        rope = said[0] if said else ConfigReader(absent, reader.source, "rope_parameters")
        beta = rope.read(Key("llama_4_scaling_beta", float, None, nullable=True))
        positions = reader.read(longest)
        original = rope.read(Key("original_max_position_embeddings", int, positions, minimum=1))
        return QueryScaling(beta, original) if beta else None

    return Found(read)


def resolve(row: Any, reader: ConfigReader) -> dict[str, Any]:
    """Read what is to be read of a row's fields; constants pass through."""
    return {name: _resolved(value, reader) for name, value in vars(row).items()}


def _resolved(value: Any, reader: ConfigReader) -> Any:
    if isinstance(value, Key):
        return reader.read(value)
    return value.read(reader) if isinstance(value, Found) else value


# ---------------------------------------------------------------- which layer is of which kind


def all_full(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    """Every layer attends to everything before it."""
    return (FULL,) * layers


def all_sliding(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    """Every layer has the window, where there is one."""
    return (SLIDING,) * layers


def listed(otherwise: LayerRule, kinds: tuple[str, ...] = (FULL, SLIDING)) -> LayerRule:
    """As `layer_types` says, of these kinds; where it is absent, by another rule."""

    def rule(reader: ConfigReader, layers: int) -> tuple[str, ...]:
        said = read_layer_types(reader, layers, kinds)
        computed = otherwise(reader, layers)
        return said or computed

    return rule


def every(n: int | Key, last: str = FULL, others: str = SLIDING) -> LayerRule:
    """Every n-th layer is of one kind (n may be a key), the others of another."""

    def rule(reader: ConfigReader, layers: int) -> tuple[str, ...]:
        period = reader.read(n) if isinstance(n, Key) else n
        return tuple(others if (i + 1) % period else last for i in range(layers))

    return rule


def sliding_from_max_window_layers(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    """Qwen's rule: only if `use_sliding_window`, then as `layer_types` says, else from `max_window_layers` on."""
    windowed = reader.read(Key("use_sliding_window", bool, False))
    first = reader.read(Key("max_window_layers", int, 28, minimum=0))
    said = read_layer_types(reader, layers)
    if not windowed:
        if said and SLIDING in said:
            raise reader.fail(
                ConfigError, f"layer_types lists {SLIDING!r} layers, but use_sliding_window is not true"
            )
        return (FULL,) * layers
    return said or tuple(SLIDING if i >= first else FULL for i in range(layers))


def read_layer_types(
    reader: ConfigReader, layers: int, kinds: tuple[str, ...] = (FULL, SLIDING)
) -> tuple[str, ...] | None:
    """Read the list `layer_types`, one known kind a layer; None where it is absent."""
    said = reader.read(Key("layer_types", list, None, nullable=True))
    if said is None:
        return None
    if len(said) != layers:
        raise reader.fail(ConfigError, f"layer_types has {len(said)} entries, but num_hidden_layers is {layers}")
    unknown = sorted({str(kind) for kind in said} - set(kinds))
    if unknown:
        raise reader.fail(
            UnsupportedModelError, f"layer_types asks for {', '.join(unknown)}, not computed by tinyllm"
        )
    return tuple(said)


def all_layers(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Every layer."""
    return (True,) * layers


def no_layers(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    """No layer."""
    return (False,) * layers


def flags(name: str, otherwise: Callable[[ConfigReader, int], tuple[bool, ...]]) -> LayerRule:
    """As a list of zeros and ones says, at least one a layer; by another rule where it is absent or empty."""

    def rule(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
        said = reader.read(Key(name, list, None, nullable=True))
        computed = otherwise(reader, layers)
        if not said:
            return computed
        if len(said) < layers:
            raise reader.fail(ConfigError, f"{name} has {len(said)} entries, but num_hidden_layers is {layers}")
        return tuple(bool(flag) for flag in said[:layers])

    return rule


def mlp_kinds(otherwise: LayerRule) -> LayerRule:
    """As the list `mlp_layer_types` says; by another rule where it is absent."""

    def rule(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
        said = reader.read(Key("mlp_layer_types", list, None, nullable=True))
        computed = otherwise(reader, layers)
        if said is None:
            return computed
        if len(said) != layers or not all(kind in ("dense", "sparse") for kind in said):
            raise reader.fail(ConfigError, f"mlp_layer_types must be 'dense' or 'sparse' for each of {layers} layers")
        return tuple(kind == "sparse" for kind in said)

    return rule


def all_but_every(n: int | Key) -> Callable[[ConfigReader, int], tuple[bool, ...]]:
    """All layers but every n-th; n may be a key."""

    def rule(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
        period = reader.read(n) if isinstance(n, Key) else n
        return tuple((i + 1) % period != 0 for i in range(layers))

    return rule


def alike(reader: ConfigReader, layers: int) -> tuple[float, ...]:
    """All layers scale their scores alike."""
    return (1.0,) * layers


def reach_of(kind: str, row: Mapping[str, Any]) -> Pattern | None:
    """Return what queries of a layer of that kind see."""
    if kind == SLIDING and row["sliding_window"] is not None:
        return Window(row["sliding_window"])
    if kind == CHUNKED and row["attention_chunk_size"] is not None:
        return Chunk(row["attention_chunk_size"])
    return None


# ---------------------------------------------------------------- rows


@dataclass(frozen=True)
class Experts:
    """The part of a row on mixtures of experts; see `RouterConfig` and `MoeConfig`."""

    layers: LayerRule = all_layers
    num_experts: Any = Key("num_experts", int, minimum=1)
    top_k: Any = Key("num_experts_per_tok", int, minimum=1)
    intermediate_size: Any = Key("moe_intermediate_size", int, minimum=1)
    scoring: Any = "softmax"
    renormalise: Any = True
    scale: Any = 1.0
    groups: Any = 1
    top_groups: Any = 1
    group_score: Any = "best"
    selection_bias: Any = False
    router_bias: Any = False
    bias: Any = False
    scales_input: Any = False
    epsilon: Any = 0.0
    jitter: Any = 0.0
    expert_scale: Any = False
    beside_dense: bool = False
    shared_size: Any = None
    shared_experts: Any = None
    shared_gate: Any = False


@dataclass(frozen=True)
class Family:
    """One row: how a family's config.json is read, and which of its tensor names differ from Llama's."""

    model_type: str
    vocab_size: Any = Key("vocab_size", int, minimum=1)
    hidden_size: Any = Key("hidden_size", int, minimum=1)
    num_hidden_layers: Any = Key("num_hidden_layers", int, minimum=1, maximum=10_000)
    num_attention_heads: Any = Key("num_attention_heads", int, minimum=1)
    num_key_value_heads: Any = Key("num_key_value_heads", int, None, nullable=True, minimum=1)
    head_dim: Any = Key("head_dim", int, None, nullable=True, minimum=1)
    intermediate_size: Any = Key("intermediate_size", int, minimum=1)  # None is four times the hidden size
    max_position_embeddings: Any = Key("max_position_embeddings", int, 2048, minimum=1)
    tie_word_embeddings: Any = Key("tie_word_embeddings", bool, False)

    head_dims: LayerRule | None = None  # of each layer, where they differ
    key_value_heads: LayerRule | None = None
    intermediate_sizes: LayerRule | None = None

    layer_types: LayerRule = all_full
    sliding_window: Any = None
    attention_chunk_size: Any = None
    mixers: Mapping[str, Callable[[ConfigReader, Mapping[str, Any]], Mixer]] = field(default_factory=dict)
    qkv_bias: Any = False
    output_bias: Any = False
    qk_norm: Any = None  # "head", "heads" or "whole"
    qk_norm_weight: Any = True
    qk_norm_bias: Any = True  # where the other norms have one
    qk_norm_after_rope: Any = False
    qk_norm_layers: LayerRule = all_layers
    attention_scale: Any = None  # 1 / sqrt(head_dim)
    attention_scale_layers: LayerRule = alike  # what it is multiplied by
    softcap: Any = None
    sinks: Any = False
    clip: Any = None
    gate: Any = False
    query_scaling: Any = None
    query_scaling_layers: LayerRule = all_layers
    value_norm: Any = False  # of no weight
    values_are_keys: LayerRule = no_layers
    sources: LayerRule | None = None  # of each layer the one whose keys and values it sees, or None

    position: str = "rope"  # or "alibi", "learned"
    rope_layers: LayerRule = all_layers
    rope_theta: Any = 10000.0
    layer_thetas: LayerRule | None = None  # of each layer, where they have their own
    local_theta: Any = None  # of windowed layers, where they have one of their own
    rope_interleaved: Any = False
    rotary_dims: Any = None  # of a head; else by the factor
    partial_rotary_factor: Any = None  # heads are rotated whole, and another factor is refused
    original_max_position_embeddings: Any = None
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)  # where config.json has none
    rope_inert: frozenset[str] = frozenset()  # keys in these that are read elsewhere, or have no effect
    rope_alpha: bool = False  # whether "dynamic" may mean an `alpha`
    alibi: Alibi | Found | None = None
    position_offset: int = 0  # of learned positions

    activation: Any = Key("hidden_act", str, "silu")
    gated: Any = True
    limit: Any = None
    mlp_bias: Any = False
    experts: Experts | None = None

    norm: Any = "rms"
    norm_eps: Any = Key("rms_norm_eps", float, 1e-6, minimum=0)
    norm_weight: Any = True
    norm_bias: Any = False
    norm_offset: Any = 0.0
    placement: Placement | Found = "pre"
    shared_norm: Any = False
    embed_norm: Any = False
    final_norm: Any = True

    branch_scale: Any = 1.0
    layer_scalar: Any = False
    layer_input_size: Any = None
    layer_input_vocab_size: Any = None
    embedding_scale: Any = 1.0
    embedding_width: Any = None  # where it is not the hidden size
    logit_scale: Any = 1.0
    logit_softcap: Any = None
    head_bias: Any = False
    extra_layers: Any = 0  # after the last: they predict further tokens

    inert: frozenset[str] = frozenset()
    refused: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)  # accepted values of keys
    renames: tuple[tuple[str, str], ...] = ()  # regular expressions over tensor names, applied in order
    flattened: str | None = None  # regular expression of a file's tensors with more axes than they need
    depthwise: str | None = None  # regular expression of convolutions of each channel by itself: see `Target`
    splits: tuple[Split, ...] = ()
    skipped: str | None = None  # regular expression of tensors that are not the text model's

    def canonical_name(self, name: str) -> str:
        """Translate a tensor's (or module's) name in the file to the canonical one, Llama's."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name
