"""An absent key means what it means to transformers, whose defaults golden/reference_defaults.json records."""

from __future__ import annotations

import json
from typing import Any

import pytest
from golden_cases import GOLDEN

from tinyllm.config.config import Config
from tinyllm.config.families import FAMILIES
from tinyllm.config.reader import REQUIRED, Key

RECORD: dict[str, dict[str, Any]] = json.loads((GOLDEN / "reference_defaults.json").read_text())
# Shapes that tinyllm does not guess: transformers' are those of one size of the family.
REQUIRED_KEYS = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}


def test_every_family_is_recorded() -> None:
    assert set(RECORD) == set(FAMILIES)


def test_record_is_worth_comparing_with() -> None:
    """Families disagree in it."""
    assert {name: row["num_key_value_heads"] for name, row in RECORD.items()} == {
        "llama": None,
        "mistral": 8,
        "qwen2": 32,
        "qwen3": 32,
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_those_of_transformers(name: str) -> None:
    """Fault 12, for each key of the family's row; a key that the reference does not have is null to it."""
    keys = [value for value in vars(FAMILIES[name]).values() if isinstance(value, Key)]
    ours = {key.name: key.default for key in keys if key.default is not REQUIRED}
    assert ours == {key: RECORD[name].get(key) for key in ours}
    assert {key.name for key in keys if key.default is REQUIRED} == REQUIRED_KEYS
    assert FAMILIES[name].rope_theta == RECORD[name]["rope_theta"]


@pytest.mark.parametrize("name", FAMILIES)
def test_config_of_shapes_alone_is_the_default_model(name: str) -> None:
    """Fault 12, seen from outside: what a config.json of nothing but shapes becomes."""
    record = RECORD[name]
    config = Config.from_dict({"model_type": name, **{key: record[key] for key in REQUIRED_KEYS}})
    attention = config.layers[0].attention
    heads = record["num_attention_heads"]
    assert attention.num_kv_heads == (record["num_key_value_heads"] or heads)
    assert attention.head_dim == (record.get("head_dim") or record["hidden_size"] // heads)
    assert attention.window == (record["sliding_window"] if name == "mistral" else None)
    assert attention.rope.theta == record["rope_theta"]
    assert config.rms_norm_eps == record["rms_norm_eps"]
    assert config.max_position_embeddings == record["max_position_embeddings"]
    assert config.tie_word_embeddings == record["tie_word_embeddings"]


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_windows_of_qwen_start_where_transformers_starts_them(name: str) -> None:
    record = RECORD[name]
    shapes = {key: record[key] for key in REQUIRED_KEYS}
    config = Config.from_dict({"model_type": name, "use_sliding_window": True, **shapes})
    windows = [layer.attention.window for layer in config.layers]
    first = record["max_window_layers"]
    assert windows == [None] * first + [record["sliding_window"]] * (record["num_hidden_layers"] - first)
