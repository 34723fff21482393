"""All that is known of a model, as what JSON can hold. No mlx."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from tinyllm.anatomy.counts import (
    block_kinds,
    block_parameters,
    experts_of,
    feed_forward_width,
    model_parameters,
    networks_of,
    parts,
    ungrouped_elements,
)
from tinyllm.anatomy.subject import Subject
from tinyllm.config.config import Config
from tinyllm.config.layers import AttentionConfig, LatentAttentionConfig, rope_of
from tinyllm.config.quantization import CACHE_BITS
from tinyllm.config.tensors import layer_shapes, tensor_shapes
from tinyllm.errors import UnsupportedQuantizationError
from tinyllm.kv.kinds import LayerKind, layer_kinds

__all__ = ["ITEMSIZES", "block_facts", "block_tensors", "cached_bytes", "facts", "packed_token_bytes", "tensor_facts"]

_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings", "dtype",
)  # fmt: skip
ITEMSIZES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


def facts(subject: Subject, context: int | None = None) -> dict[str, Any]:
    """Return everything but the single tensors; `context` is how many tokens the KV cache is computed for."""
    config = subject.config
    return {
        "model": subject.name,
        "family": config.model_type,
        "wrapper": None if config.wrapper is None else config.wrapper.model_type,
        "config": {name: getattr(config, name) for name in _SIZES},
        "parameters": {**asdict(model_parameters(config)), "by_part": dict(parts(config))},
        "blocks": [
            {
                "layers": list(kind.numbers),
                "parameters": asdict(block_parameters(config, kind.layer)),
                "config": _dimensions(config, kind.numbers[0]),
                "computes": _plain(kind.layer),
                "shapes": {name: list(shape) for name, shape in layer_shapes(config, kind.layer).items()},
            }
            for kind in block_kinds(config)
        ],
        "kv_cache": _cache(config, context or config.max_position_embeddings),
        "generation": {
            **asdict(subject.generation),
            "stop_tokens": {str(token): list(sources) for token, sources in subject.stop_tokens.items()},
        },
        "weights": _weights(subject),
        "problems": {kind: dict(names) for kind, names in subject.problems.items()},
    }


def block_facts(subject: Subject, number: int) -> dict[str, Any]:
    """Return one block as the config has it ("my") beside the one that the files have ("ref"), None without files."""
    mine, theirs = block_tensors(subject, number)
    return {
        "model": subject.name,
        "block": number,
        "config": _dimensions(subject.config, number),
        "my_block_params": sum(map(math.prod, mine.values())),
        "ref_layer_params": None if theirs is None else sum(map(math.prod, theirs.values())),
        "my_shapes": {name: list(shape) for name, shape in mine.items()},
        "ref_shapes": None if theirs is None else {name: list(shape) for name, shape in theirs.items()},
        "problems": {
            kind: said
            for kind, names in subject.problems.items()
            if (said := {name: text for name, text in names.items() if name.startswith(_prefix(number))})
        },
    }


def block_tensors(
    subject: Subject, number: int
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]] | None]:
    """Return a block's tensors as the config asks for them, and as the files have them, in one order."""
    mine = layer_shapes(subject.config, subject.config.layers[number])
    if subject.table is None:
        return mine, None
    prefix = _prefix(number)
    found = {name.removeprefix(prefix): shape for name, shape in subject.shapes.items() if name.startswith(prefix)}
    order = [*(name for name in mine if name in found), *sorted(found.keys() - mine.keys())]
    return mine, {name: found[name] for name in order}


def tensor_facts(subject: Subject) -> list[dict[str, Any]]:
    """Return every tensor, as it is asked for and as it is stored, None where it is not."""
    expected = tensor_shapes(subject.config)
    kinds = {name: kind for kind, names in subject.problems.items() for name in names}
    rows = []
    for name in [*expected, *sorted(subject.shapes.keys() - expected.keys())]:
        stored = subject.used.get(name)
        rows.append(
            {
                "name": name,
                "expected": list(expected[name]) if name in expected else None,
                "found": None if stored is None else list(subject.shapes[name]),
                "format": None if stored is None else subject.format_name(name),
                "problem": kinds.get(name) or kinds.get(name.removesuffix(".weight")),
            }
        )
    return rows


def cached_bytes(kind: LayerKind, tokens: int, itemsize: int) -> int:
    """Bytes that so many tokens leave in all layers of a kind, which need not see all of them, or keep a state."""
    if kind.states:
        return kind.page_bytes(tokens, itemsize)
    held = None if kind.reach is None else kind.reach.held(1)
    return (tokens if held is None else min(tokens, held)) * kind.token_bytes(itemsize)


def _prefix(number: int) -> str:
    return f"model.layers.{number}."


def _dimensions(config: Config, number: int) -> dict[str, Any]:
    """Return the sizes of a layer, by Hugging Face's names."""
    layer = config.layers[number]
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    if isinstance(layer.attention, AttentionConfig):
        heads, kv_heads, head_dim = (
            layer.attention.num_heads, layer.attention.num_kv_heads, layer.attention.head_dim,
        )  # fmt: skip
    if isinstance(layer.attention, LatentAttentionConfig):
        heads = kv_heads = layer.attention.num_heads
        head_dim = layer.attention.plain_dim + layer.attention.rope.dims
    rope, mixture = rope_of(layer.attention), experts_of(layer.feed_forward)
    experts: dict[str, Any] = {}
    if mixture is not None:
        experts = {"num_experts": mixture.router.num_experts, "num_experts_per_tok": mixture.router.top_k}
    network = next(network for network, _ in networks_of(layer.feed_forward))
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": network.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "gqa_group_size": heads // kv_heads,
        "ffn_ratio": feed_forward_width(layer) / config.hidden_size,
        "rope_theta": None if rope is None else rope.theta,
        **experts,
    }


def packed_token_bytes(config: Config, itemsize: int) -> dict[int, int]:
    """Bytes that one token leaves in all layers by the bits that it is packed to, none where it cannot be."""
    try:
        return {bits: _token_bytes(layer_kinds(config, bits)[0], itemsize) for bits in CACHE_BITS}
    except UnsupportedQuantizationError:
        return {}


def _token_bytes(kinds: Iterable[LayerKind], itemsize: int) -> int:
    return sum(kind.token_bytes(itemsize) for kind in kinds)


def _cache(config: Config, context: int) -> dict[str, Any]:
    kinds = layer_kinds(config)[0]
    return {
        "token_bytes": {dtype: _token_bytes(kinds, size) for dtype, size in ITEMSIZES.items()},
        "packed_token_bytes": packed_token_bytes(config, ITEMSIZES["bfloat16"]),
        "ungrouped_token_bytes": {dtype: size * ungrouped_elements(config) for dtype, size in ITEMSIZES.items()},
        "context": context,
        "context_bytes": {
            dtype: sum(cached_bytes(kind, context, size) for kind in kinds) for dtype, size in ITEMSIZES.items()
        },
        "kinds": [{**kind._asdict(), "reach": _plain(kind.reach)} for kind in kinds],
    }


def _weights(subject: Subject) -> dict[str, Any] | None:
    if subject.table is None or subject.comparison is None:
        return None
    formats = subject.formats
    return {
        "files": subject.files,
        "tensors": subject.filed,
        "bytes": sum(form.nbytes for form in formats),
        "bits_per_weight": 8 * sum(f.nbytes for f in formats) / max(1, sum(f.parameters for f in formats)),
        "formats": [{**asdict(form), "bits_per_weight": form.bits_per_weight} for form in formats],
        "other_parts": subject.table.skipped,
        "of_no_use": sorted(subject.comparison.ignored),
    }


def _plain(value: Any) -> Any:
    """Turn frozen dataclasses into objects that say their type."""
    if is_dataclass(value):
        named = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return {"type": type(value).__name__.removesuffix("Config"), **named}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
