"""Keys that many families have, under one name and each with a default of its own. No mlx."""

from __future__ import annotations

from tinyllm.config.reader import Key

ATTENTION_BIAS = Key("attention_bias", bool, False)


def kv_heads(default: int | None) -> Key:
    """How many heads keys and values have; null is as many as queries."""
    return Key("num_key_value_heads", int, default, nullable=True, minimum=1)


def head_dim(default: int | None) -> Key:
    """How wide a head is; null is the hidden size, shared out."""
    return Key("head_dim", int, default, nullable=True, minimum=1)


def positions(default: int) -> Key:
    """The longest sequence."""
    return Key("max_position_embeddings", int, default, minimum=1)


def window(default: int | None) -> Key:
    """How far layers with a window see; null is everything."""
    return Key("sliding_window", int, default, nullable=True, minimum=1)


def rotated(default: float | None) -> Key:
    """Which part of a head is rotated; null is all of it."""
    return Key("partial_rotary_factor", float, default, nullable=True, minimum=0)


def eps(default: float, name: str = "rms_norm_eps") -> Key:
    """What is added to the variance of a norm."""
    return Key(name, float, default, minimum=0)


def tied(default: bool) -> Key:
    """Whether the head is the embeddings."""
    return Key("tie_word_embeddings", bool, default)
