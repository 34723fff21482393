"""What a GGUF file says of its model: each value read once, and none left unread. No mlx.

Names are those of the gguf library's tables (gguf.constants); values get the names that config.json has for them.
"""

from __future__ import annotations

import math
import re
import struct
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from tinyllm.checkpoint.gguf_header import GgufHeader
from tinyllm.config.family import FULL, SLIDING
from tinyllm.config.reader import REQUIRED, ConfigReader, Key
from tinyllm.errors import CheckpointError, UnsupportedModelError

__all__ = [
    "FACTORS", "Facts", "attention_bias", "layer_eps", "llama_like", "renamed", "rotation", "shape", "sizes",
    "windows", "with_head_dim",
]  # fmt: skip

# Tensors that are part of what a file says of its model: factors of wavelengths.
FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_MOST_LAYERS = 10_000
_NOT_BEYOND = 1e-4  # relative: factors are stored in float32
_SCORES = ("softmax", "sigmoid")  # as `expert_gating_func` counts them, from 1 on
_PATTERN = "attention.sliding_window_pattern"  # of ones and zeros, or one number that is something else
_OF_LAYER = re.compile(r"^blk\.(\d{1,6})\.(.+)$")


class Facts:
    """The values of an architecture, of which none may be left unread, and the tensors that there are."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        prefix = f"{architecture}."
        values = {
            name.removeprefix(prefix): value if name.endswith(_PATTERN) else _same_in_all(value)
            for name, value in header.metadata.items()
            if name.startswith(prefix)
        }
        self.reader = ConfigReader(values, str(header.file))
        self._header = header
        self._layers: dict[str, list[int]] = defaultdict(list)
        for name in header.tensors:
            if found := _OF_LAYER.match(name):
                self._layers[found[2]].append(int(found[1]))

    def count(self, name: str, default: Any = REQUIRED, *, least: int = 0, most: int | None = None) -> Any:
        """Read a whole number, of at least 0."""
        return self.reader.read(Key(name, int, default, minimum=least, maximum=most))

    def number(self, name: str, default: float | None) -> Any:
        """Read a number, of at least 0."""
        return self.reader.read(Key(name, float, default, minimum=0))

    def flag(self, name: str, default: bool) -> bool:
        """Read what is true or false."""
        return bool(self.reader.read(Key(name, bool, default)))

    def theta(self, default: float = 10000.0, name: str = "rope.freq_base") -> float:
        """Read the base of rotation."""
        found: float = self.reader.read(Key(name, float, default, minimum=2))
        return found

    def has(self, tensor: str) -> bool:
        """Whether any layer, or the file, has a tensor of that name."""
        return tensor in self._layers or tensor in self._header.tensors

    def layers_with(self, tensor: str) -> frozenset[int]:
        """Return the numbers of the layers that have a tensor of that name."""
        return frozenset(self._layers.get(tensor, ()))

    def width(self, name: str, tensor: str) -> int:
        """Read how wide a network is, which older files leave to the rows of its matrix (or matrices) `tensor`."""
        said = self.count(name, None)
        layers = self._layers.get(tensor)
        if said is not None or not layers:
            return int(said or 0)
        matrix = self._header.tensors[f"blk.{layers[0]}.{tensor}"].shape
        return matrix[-2] if len(matrix) > 1 else 0

    def scores(self, known: tuple[str, ...], default: str) -> str:
        """Return how experts are scored, in one of the `known` ways. Raises UnsupportedModelError for another one."""
        said = self.count("expert_gating_func", 0)
        name = default if said == 0 else dict(enumerate(_SCORES, 1)).get(said, "")
        if name not in known:
            raise self.reader.fail(UnsupportedModelError, f"expert_gating_func {said} is not computed by tinyllm")
        return name

    def factors(self, tensor: str) -> list[float] | None:
        """Read a short tensor of float32, if there is one."""
        found = self._header.tensors.get(tensor)
        if found is None:
            return None
        if found.type.name != "F32" or len(found.shape) != 1 or found.shape[0] > 1 << 12:
            raise CheckpointError(f"{found.file}: {tensor!r} is no list of factors")
        with found.file.open("rb") as file:
            file.seek(found.start)
            return list(struct.unpack(f"<{found.shape[0]}f", file.read(found.end - found.start)))

    @property
    def rows(self) -> int:
        """Rows of the embedding."""
        found = self._header.tensors.get("token_embd.weight")
        if found is None or len(found.shape) != 2:
            raise CheckpointError(f"{self._header.file}: has no matrix 'token_embd.weight': not a language model")
        return found.shape[0]


def _same_in_all(value: Any) -> Any:
    """Return what is said alike of every layer, or of every one that has any of it, once."""
    if not isinstance(value, tuple) or not value or isinstance(value[0], (str, bool, tuple)):
        return value
    found = set(value) - {0} or {0}
    return found.pop() if len(found) == 1 else value


# ---------------------------------------------------------------- what architectures have in common


def sizes(facts: Facts) -> dict[str, Any]:
    """Return all sizes but those of keys and values. Layers that predict further tokens are not counted."""
    further = facts.count("nextn_predict_layers", 0, most=_MOST_LAYERS)
    return {
        "vocab_size": facts.rows,
        "hidden_size": facts.count("embedding_length", least=1),
        "intermediate_size": facts.count("feed_forward_length", 0),
        "num_hidden_layers": facts.count("block_count", least=1 + further, most=_MOST_LAYERS) - further,
        "num_attention_heads": facts.count("attention.head_count", least=1),
        "max_position_embeddings": facts.count("context_length"),
        "tie_word_embeddings": not facts.has("output.weight"),
    }


def shape(facts: Facts) -> dict[str, Any]:
    """Return sizes, by the names that most families have for them."""
    found = sizes(facts)
    heads, hidden = found["num_attention_heads"], found["hidden_size"]
    head_dim = facts.count("attention.key_length", None)
    values = facts.count("attention.value_length", None)
    if values is not None and values != (head_dim or hidden // heads):
        raise facts.reader.fail(UnsupportedModelError, "its keys and values are of different lengths")
    return {
        **found,
        "num_key_value_heads": facts.count("attention.head_count_kv", heads),
        **({} if head_dim is None or head_dim * heads == hidden else {"head_dim": head_dim}),
    }


def with_head_dim(values: dict[str, Any]) -> dict[str, Any]:
    """Say the size of a head, whose default in some families is a number of its own."""
    return {**values, "head_dim": values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]}


def renamed(values: Mapping[str, Any], **names: str | None) -> dict[str, Any]:
    """Give values other names, or take them away."""
    return {names.get(name, name) or "": value for name, value in values.items() if names.get(name, name) is not None}


def layer_eps(facts: Facts, name: str) -> dict[str, Any]:
    """Return the epsilon of LayerNorms, by the name that a family has for it."""
    return {name: facts.number("attention.layer_norm_epsilon", 1e-5)}


def llama_like(facts: Facts, theta: float = 10000.0) -> dict[str, Any]:
    """Return what a Llama's config.json says: sizes, the epsilon of RMSNorms, rotation."""
    found = shape(facts)
    eps = facts.number("attention.layer_norm_rms_epsilon", 1e-5)
    return {**found, "rms_norm_eps": eps, "rope_parameters": rotation(facts, found, theta)}


def attention_bias(facts: Facts) -> dict[str, Any]:
    """Return whether projections of attention have biases, as the tensors show."""
    return {"attention_bias": facts.has("attn_q.bias")}


def windows(facts: Facts, layers: int, period: int) -> list[str]:
    """Return the kind of each layer: as a list says which are windowed, else every so many-th is full."""
    said = facts.reader.take(_PATTERN)
    if isinstance(said, tuple):
        return [SLIDING if windowed else FULL for windowed in said[:layers]]
    period = said if isinstance(said, int) and said > 0 else period
    return [SLIDING if (i + 1) % period else FULL for i in range(layers)]


def rotation(
    facts: Facts,
    sizes: Mapping[str, Any],
    theta: float = 10000.0,
    *,
    head_dim: int | None = None,
    usual: float = 1.0,
) -> dict[str, Any]:
    """Return the rotary parameters of heads of these sizes, or of `head_dim`, `usual` being the part that turns."""
    whole: int = head_dim or sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    dims = facts.count("rope.dimension_count", whole)
    rope = {"rope_type": "default", "rope_theta": facts.theta(theta)}
    if dims != whole * usual:
        rope["partial_rotary_factor"] = min(1.0, math.nextafter(dims / max(whole, 1), math.inf))  # it is rounded down
    return {**rope, **_scaling(facts, sizes["max_position_embeddings"])}


def _scaling(facts: Facts, context: int) -> dict[str, Any]:
    kind = facts.reader.read(Key("rope.scaling.type", str, "none"))
    factor = facts.number("rope.scaling.factor", None)
    factors = {name: facts.factors(f"rope_factors_{name}.weight") for name in ("short", "long")}
    if factors["short"] and factors["long"]:
        return {
            "rope_type": "longrope",
            "short_factor": factors["short"],
            "long_factor": factors["long"],
            "attention_factor": facts.number("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": facts.count("rope.scaling.original_context_length", context),
        }
    stretched = facts.factors("rope_freqs.weight")
    if stretched is not None:
        return _stretched(stretched, facts, context)
    if kind == "linear" and factor is not None:
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        betas = {
            name: facts.number(f"rope.scaling.yarn_{name}", 0.0)
            for name in ("beta_fast", "beta_slow")
            if facts.reader.has(f"rope.scaling.yarn_{name}")
        }
        original = facts.count("rope.scaling.original_context_length", context)
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **betas}
    if kind != "none" and factor not in (None, 1.0, 0.0):
        raise facts.reader.fail(UnsupportedModelError, f"rope.scaling.type {kind!r} is not computed by tinyllm")
    return {}


def _stretched(factors: list[float], facts: Facts, context: int) -> dict[str, Any]:
    """Name the scheme that gives these factors of wavelengths: Llama 3's, else any.

    The converter writes the factors alone, and of Llama 3's numbers but one never differs between its models.
    """
    theta = facts.theta()
    factor, original = max(factors), _LLAMA3["original_max_position_embeddings"]
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]

    def llama3(pair: int) -> float:
        turns: float = original / (2 * math.pi * theta ** (pair / len(factors)))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        return 1 / ((1 - smooth) / factor + smooth)

    if factor >= 1 and all(math.isclose(llama3(i), f, rel_tol=_NOT_BEYOND) for i, f in enumerate(factors)):
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    lists = {"short_factor": factors, "long_factor": factors}
    return {"rope_type": "longrope", **lists, "attention_factor": 1.0, "original_max_position_embeddings": context}
