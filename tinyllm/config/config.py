"""config.json as one frozen `Config`, holding one frozen `LayerConfig` a layer. No mlx."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from tinyllm.config.families import FULL, GENERATION, HARMLESS, INERT, WRAPPERS, Family, Wrapper, family_of
from tinyllm.config.quantization import QuantizationConfig, read_quantization
from tinyllm.config.reader import ConfigReader, Key, read_json_object
from tinyllm.config.rope import RopeConfig, read_rope
from tinyllm.errors import ConfigError, UnsupportedModelError

ACTIVATIONS = ("silu",)
_ACTIVATION_ALIASES = {"swish": "silu"}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


@dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention of one layer; `window` counts the keys that a query sees, itself included."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig
    window: int | None
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool


@dataclass(frozen=True)
class MLPConfig:
    """A gated feed-forward network: down(activation(gate(x)) * up(x))."""

    intermediate_size: int
    activation: str
    bias: bool


@dataclass(frozen=True)
class LayerConfig:
    """All that one block computes."""

    attention: AttentionConfig
    feed_forward: MLPConfig
    norm_eps: float


@dataclass(frozen=True)
class Config:
    """A decoder, normalised: Hugging Face's names for the whole, and `layers` for what each block computes."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    quantization: QuantizationConfig | None
    layers: tuple[LayerConfig, ...]
    family: Family
    wrapper: Wrapper | None

    @classmethod
    def from_json_file(cls, path: str | Path) -> Config:
        """Read a config.json, or the one in a folder.

        Raises ConfigError (or a class below it) that names the key and the file: an absent key without a default,
        a key that asks for something unknown, a model_type or variant that is not computed here.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        return cls.from_dict(read_json_object(path), source=str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "config.json") -> Config:
        """Read the contents of a config.json; `source` is what errors call it."""
        outer = ConfigReader(values, source)
        wrapper = WRAPPERS.get(str(values.get("model_type")))
        if wrapper is None:
            return _read(outer, outer, None)
        text = outer.object("text_config")
        if text is None:
            raise outer.fail(ConfigError, f"model_type {wrapper.model_type!r} needs a text_config, which is absent")
        config = _read(text, outer, wrapper)
        outer.discard(wrapper.inert)
        _finish(outer, config.family)
        return config

    def is_moe_layer(self, i: int) -> bool:
        """Whether layer `i` routes its tokens to experts."""
        return not isinstance(self.layers[i].feed_forward, MLPConfig)

    def layer_at(self, prefix: str) -> LayerConfig:
        """Return the layer that a canonical name such as "model.layers.3.self_attn" stands in."""
        found = _LAYER.search(prefix)
        if found is None or int(found[1]) >= self.num_hidden_layers:
            raise ConfigError(f"{prefix!r} names none of this model's {self.num_hidden_layers} layers")
        return self.layers[int(found[1])]

    def canonical_name(self, name: str) -> str | None:
        """Translate a tensor's name in the files to the canonical one; None where it is of another part."""
        return _canonical_name(name, self.family, self.wrapper)


def _canonical_name(name: str, family: Family, wrapper: Wrapper | None) -> str | None:
    if wrapper is not None:
        if name.startswith(wrapper.skipped):
            return None
        for prefix in wrapper.text_prefixes:
            if name.startswith(prefix):
                name = "model." + name.removeprefix(prefix)
                break
        name = name.removeprefix("language_model.")
    return family.canonical_name(name)


def _read(reader: ConfigReader, outer: ConfigReader, wrapper: Wrapper | None) -> Config:
    """Normalise the text model's keys in `reader`; `outer` is the whole file's reader, and the same unless nested."""
    family = family_of(reader)
    row = family.values(reader)
    heads, kv_heads, head_dim = _read_heads(reader, row)
    layer_types = family.layer_types(reader, row["num_hidden_layers"])
    ropes = read_rope(
        reader,
        head_dim=head_dim,
        max_positions=row["max_position_embeddings"],
        layer_types=layer_types,
        default_theta=family.rope_theta,
    )
    feed_forward = MLPConfig(row["intermediate_size"], _activation(reader, row["activation"]), row["mlp_bias"])
    layers = tuple(
        LayerConfig(
            attention=AttentionConfig(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                rope=rope,
                window=None if layer_type == FULL else row["sliding_window"],
                qkv_bias=row["qkv_bias"],
                output_bias=row["output_bias"],
                qk_norm=row["qk_norm"],
            ),
            feed_forward=feed_forward,
            norm_eps=row["rms_norm_eps"],
        )
        for layer_type, rope in zip(layer_types, ropes, strict=True)
    )
    quantized = reader if reader.has("quantization") or reader.has("quantization_config") else outer
    config = Config(
        model_type=family.model_type,
        vocab_size=row["vocab_size"],
        hidden_size=row["hidden_size"],
        intermediate_size=row["intermediate_size"],
        num_hidden_layers=row["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=row["max_position_embeddings"],
        rms_norm_eps=row["rms_norm_eps"],
        rope_theta=ropes[0].theta,
        tie_word_embeddings=_tied(reader, outer, wrapper, row["tie_word_embeddings"]),
        eos_token_ids=tuple(
            dict.fromkeys(read_token_ids(reader, "eos_token_id") + read_token_ids(outer, "eos_token_id"))
        ),
        dtype=_stored_dtype(reader) or _stored_dtype(outer),
        quantization=read_quantization(quantized, lambda module: _canonical_name(module, family, wrapper) or module),
        layers=layers,
        family=family,
        wrapper=wrapper,
    )
    _finish(reader, family)
    return config


def _read_heads(reader: ConfigReader, row: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return (heads, key/value heads, head_dim), derived where config.json has null or nothing."""
    heads, hidden = row["num_attention_heads"], row["hidden_size"]
    kv_heads = row["num_key_value_heads"] or heads
    if heads % kv_heads:
        raise reader.fail(
            ConfigError,
            f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})",
        )
    if row["head_dim"] is None and hidden % heads:
        raise reader.fail(
            ConfigError,
            f"hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads}), and head_dim is absent",
        )
    return heads, kv_heads, row["head_dim"] or hidden // heads


def _activation(reader: ConfigReader, name: str) -> str:
    name = _ACTIVATION_ALIASES.get(name, name)
    if name not in ACTIVATIONS:
        raise reader.fail(
            UnsupportedModelError,
            f"the activation {name!r} is not computed by tinyllm ({', '.join(ACTIVATIONS)})",
        )
    return name


def _tied(reader: ConfigReader, outer: ConfigReader, wrapper: Wrapper | None, inner: bool) -> bool:
    """Whether the head is the embedding: a wrapper's own word comes first, as in transformers."""
    key = "tie_word_embeddings"
    if wrapper is None or (key in reader.values and key not in outer.values):
        return inner
    tied: bool = outer.read(Key(key, bool, wrapper.tie_word_embeddings))
    return tied


def read_token_ids(reader: ConfigReader, name: str) -> tuple[int, ...]:
    """Read a token id, or a list of them, or null."""
    value = reader.take(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise reader.fail(ConfigError, f"{name!r} must be a token id or a list of them, not {brief(value)}")
    return tuple(ids)


def _stored_dtype(reader: ConfigReader) -> str | None:
    old, new = reader.take("torch_dtype"), reader.take("dtype")
    value = new or old
    return value.removeprefix("torch.") if isinstance(value, str) else None


def _finish(reader: ConfigReader, family: Family) -> None:
    reader.discard(INERT | GENERATION | family.inert)
    reader.discard_where(HARMLESS)
    reader.finish()
