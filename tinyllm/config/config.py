"""config.json as one frozen `Config`, holding one frozen `LayerConfig` a layer. No mlx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from tinyllm.config.build import read_model
from tinyllm.config.families.table import family_of
from tinyllm.config.families.wrappers import WRAPPERS, Wrapper
from tinyllm.config.family import Family
from tinyllm.config.inert import GENERATION, HARMLESS, INERT
from tinyllm.config.layers import (
    AttentionConfig,
    DualConfig,
    LayerConfig,
    LayerInputs,
    MLPConfig,
    MoeConfig,
    NormConfig,
    rope_of,
    sees_source,
    source_of,
)
from tinyllm.config.names import Target, canonical_modules, canonical_name, layer_number, targets
from tinyllm.config.native import NATIVE, read_native
from tinyllm.config.quantization import QuantizationConfig, read_quantization
from tinyllm.config.reach import Window
from tinyllm.config.reader import ConfigReader, Key, read_json_object
from tinyllm.errors import ConfigError, UnsupportedModelError


@dataclass(frozen=True)
class Config:
    """A decoder, normalised: Hugging Face's names for the whole, and `layers` for what each block computes.

    `learned_positions` are the rows of a table that is added to the embeddings, from row `position_offset` on.
    `embedding_width` is set where a projection stands between the embeddings and the layers, and before the head.
    Logits are multiplied by `logit_scale`, then `softcap` tanh(logits / softcap). `extra_layers` come after the last
    one, and predict more than one token: they are not read.
    """

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
    final_norm: NormConfig | None
    embed_norm: NormConfig | None = None
    embedding_scale: float = 1.0
    embedding_width: int | None = None
    learned_positions: int | None = None
    position_offset: int = 0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    head_bias: bool = False
    extra_layers: int = 0
    layer_inputs: LayerInputs | None = None

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

    @property
    def rope_boundary(self) -> int | None:
        """The length beyond which some layer rotates a whole sequence otherwise; see `RopeConfig`."""
        ropes = [rope_of(layer.attention) for layer in self.layers]
        boundaries = {rope.boundary for rope in ropes if rope is not None and rope.boundary is not None}
        if len(boundaries) > 1:
            raise ConfigError(f"layers are rotated otherwise from different lengths on: {sorted(boundaries)}")
        return min(boundaries, default=None)

    @property
    def hidden_act(self) -> str:
        """The activation of the first layer's feed-forward network, or of its experts."""
        match self.layers[0].feed_forward:
            case MLPConfig(activation=activation):
                return activation
            case MoeConfig(expert=expert):
                return expert.activation
            case DualConfig(dense=dense):
                return dense.activation

    @property
    def sliding_window(self) -> int | None:
        """How many positions layers with a sliding window see; None if no layer has one."""
        reaches = (layer.attention.reach for layer in self.layers if isinstance(layer.attention, AttentionConfig))
        return next((reach.size for reach in reaches if isinstance(reach, Window)), None)

    @property
    def num_experts(self) -> int | None:
        """How many experts the layers that have some have; None if no layer has any."""
        return None if (moe := self._first_moe) is None else moe.router.num_experts

    @property
    def num_experts_per_tok(self) -> int | None:
        """How many experts each token goes through; None if no layer has any."""
        return None if (moe := self._first_moe) is None else moe.router.top_k

    @property
    def moe_intermediate_size(self) -> int | None:
        """The width of an expert; None if no layer has any."""
        return None if (moe := self._first_moe) is None else moe.expert.intermediate_size

    @property
    def _first_moe(self) -> MoeConfig | None:
        networks = (layer.feed_forward for layer in self.layers)
        found = (network.experts if isinstance(network, DualConfig) else network for network in networks)
        return next((network for network in found if isinstance(network, MoeConfig)), None)

    def is_moe_layer(self, i: int) -> bool:
        """Whether layer `i` routes its tokens to experts."""
        return isinstance(self.layers[i].feed_forward, MoeConfig)

    @property
    def cache_places(self) -> tuple[int, ...]:
        """Of each layer, which cache is its: there is one for each layer that has keys and values of its own.

        Raises UnsupportedModelError where a layer's source has none that suit it, or comes after it.
        """
        sources = [source_of(layer.attention) for layer in self.layers]
        owners = {i: n for n, i in enumerate(i for i, source in enumerate(sources) if source is None)}
        for i, source in enumerate(sources):
            if not sees_source(self.layers, i):
                raise UnsupportedModelError(f"layer {i} sees the keys of layer {source}, which has none for it")
        return tuple(owners[i if source is None else source] for i, source in enumerate(sources))

    def layer_at(self, prefix: str) -> LayerConfig:
        """Return the layer that a canonical name such as "model.layers.3.self_attn" stands in."""
        number = layer_number(prefix)
        if number is None or number >= self.num_hidden_layers:
            raise ConfigError(f"{prefix!r} names none of this model's {self.num_hidden_layers} layers")
        return self.layers[number]

    def canonical_name(self, name: str) -> str | None:
        """Translate a tensor's name in the files to the canonical one; None where it is of another part."""
        return canonical_name(name, self.family, self.wrapper)

    def targets(self, name: str) -> tuple[Target, ...]:
        """Return the canonical tensors that a tensor of the files holds, none where it is of another part."""
        return targets(name, self.family, self.wrapper, self.layers, self.extra_layers)


def _read(reader: ConfigReader, outer: ConfigReader, wrapper: Wrapper | None) -> Config:
    """Normalise the text model's keys in `reader`; `outer` is the whole file's reader, and the same unless nested."""
    native = reader.values.get("model_type") == NATIVE.model_type
    family = NATIVE if native else family_of(reader)
    model = read_native(reader, Config) if native else read_model(reader, family)
    quantized = reader if reader.has("quantization") or reader.has("quantization_config") else outer
    config = Config(
        **{**model, "tie_word_embeddings": _tied(reader, outer, wrapper, model["tie_word_embeddings"])},
        model_type=family.model_type,
        eos_token_ids=tuple(
            dict.fromkeys(read_token_ids(reader, "eos_token_id") + read_token_ids(outer, "eos_token_id"))
        ),
        dtype=next(filter(None, [_stored_dtype(each) for each in (reader, outer)]), None),
        quantization=read_quantization(
            quantized, lambda module: canonical_modules(module, family, wrapper, model["layers"])
        ),
        family=family,
        wrapper=wrapper,
    )
    _finish(reader, family)
    return config


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
