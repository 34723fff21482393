"""An absent key means what it means to transformers, whose defaults golden/reference_defaults.json records."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from golden_cases import GOLDEN

from tinyllm.config.config import Config
from tinyllm.config.families.table import FAMILIES
from tinyllm.config.family import Found
from tinyllm.config.layers import AttentionConfig
from tinyllm.config.reach import Window
from tinyllm.config.reader import REQUIRED, ConfigReader, Key

RECORD: dict[str, dict[str, Any]] = json.loads((GOLDEN / "reference_defaults.json").read_text())
# Shapes that tinyllm does not guess: transformers' are those of one size of the family.
SHAPES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
# Where those do not make a model, even to transformers.
INSTEAD: dict[str, dict[str, int]] = {
    "glm4_moe": {"num_attention_heads": 32},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
}
# What our default may be where the reference has no such field, beside null: what changes nothing.
NEUTRAL: dict[str, Any] = {
    "partial_rotary_factor": 1.0,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "seq_length": 2048,
}
# Defaults that the reference has in its code, and not in a field of its class.
IN_CODE: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window_pattern": 4},
    "gemma3_text": {"sliding_window_pattern": 6, "rope_local_base_freq": 10000.0},
    "gpt_neox": {"rotary_emb_base": 10000.0, "rotary_pct": 0.25, "partial_rotary_factor": 0.25},
    "phi": {"partial_rotary_factor": 0.5},
    "gemma4_text": {"global_head_dim": 512},
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {"partial_rotary_factor": 0.5},
    "nemotron": {"partial_rotary_factor": 0.5},
    "stablelm": {"partial_rotary_factor": 0.25},
    "qwen3_next": {"partial_rotary_factor": 0.25, "full_attention_interval": 4},
    "qwen3_5_text": {"partial_rotary_factor": 0.25, "full_attention_interval": 4},
    "qwen3_5_moe_text": {"partial_rotary_factor": 0.25, "full_attention_interval": 4},
    "glm4_moe_lite": {"first_k_dense_replace": 1},  # as `mlp_layer_types`
}

Reading = Callable[[str], tuple[Config, list[Key]]]


@pytest.fixture
def of_shapes_alone(monkeypatch: pytest.MonkeyPatch) -> Reading:
    """Read a config.json of nothing but what has no default, which the record says; return the keys too."""
    keys: list[Key] = []
    original = ConfigReader.read

    def read(self: ConfigReader, key: Key) -> Any:
        if self.values is values:
            keys.append(key)
            if key.default is REQUIRED and key.name not in values:
                values[key.name] = recorded(values["model_type"], key)
        return original(self, key)

    values: dict[str, Any] = {}
    monkeypatch.setattr(ConfigReader, "read", read)

    def reading(name: str) -> tuple[Config, list[Key]]:
        values["model_type"] = name
        config = Config.from_dict(values)
        return config, [key for key in dict.fromkeys(keys) if key.name != "model_type"]

    return reading


def recorded(name: str, key: Key) -> Any:
    """Return the reference's default of a key, under any of its names; None where there is none."""
    record = RECORD[name] | IN_CODE.get(name, {}) | INSTEAD.get(name, {})
    return next((record[one] for one in (key.name, *key.also) if one in record), None)


def test_every_family_is_recorded() -> None:
    assert set(RECORD) == set(FAMILIES)


def test_record_is_worth_comparing_with() -> None:
    """Families disagree in it."""
    heads = {name: RECORD[name]["num_key_value_heads"] for name in ("llama", "mistral", "qwen2", "qwen3")}
    assert heads == {"llama": None, "mistral": 8, "qwen2": 32, "qwen3": 32}


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_those_of_transformers(name: str, of_shapes_alone: Reading) -> None:
    """Fault 12, for each key that is read of the family's config.json, by its row or by a rule that the row names."""
    _, keys = of_shapes_alone(name)
    optional = [key for key in keys if key.default is not REQUIRED]
    differing = {
        key.name: (key.default, recorded(name, key))
        for key in optional
        if key.default != recorded(name, key)
        and not (recorded(name, key) is None and key.default == NEUTRAL.get(key.name))
        and not (key.name == "rope_theta" and RECORD[name]["rope_theta"] is None)
    }
    assert not differing, "ours, and that of transformers"


@pytest.mark.parametrize("name", FAMILIES)
def test_only_shapes_have_no_default(name: str, of_shapes_alone: Reading) -> None:
    _, keys = of_shapes_alone(name)
    required = {key for key in keys if key.default is REQUIRED}
    assert all(type(recorded(name, key)) is int for key in required)
    fields = [getattr(FAMILIES[name], field) for field in SHAPES]
    if name != "gemma3_text":  # whose larger checkpoints leave some out
        assert {field for field in fields if isinstance(field, Key)} <= required


@pytest.mark.parametrize("name", FAMILIES)
def test_theta_is_that_of_transformers(name: str) -> None:
    theta = FAMILIES[name].rope_theta
    if RECORD[name]["rope_theta"] is not None and not isinstance(theta, Found):  # whose keys are held to it above
        assert (theta.default if isinstance(theta, Key) else theta) == RECORD[name]["rope_theta"]


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_config_of_shapes_alone_is_the_default_model(name: str, of_shapes_alone: Reading) -> None:
    """Fault 12, seen from outside: what a config.json of nothing but shapes becomes."""
    record, (config, keys) = RECORD[name], of_shapes_alone(name)
    assert {key.name for key in keys if key.default is REQUIRED} == {*SHAPES, "intermediate_size"}
    attention = config.layers[0].attention
    assert isinstance(attention, AttentionConfig) and attention.rope is not None
    heads = record["num_attention_heads"]
    assert attention.num_kv_heads == (record["num_key_value_heads"] or heads)
    assert attention.head_dim == (record.get("head_dim") or record["hidden_size"] // heads)
    assert attention.reach == (Window(record["sliding_window"]) if name == "mistral" else None)
    assert attention.rope.theta == record["rope_theta"]
    assert config.rms_norm_eps == record["rms_norm_eps"]
    assert config.max_position_embeddings == record["max_position_embeddings"]
    assert config.tie_word_embeddings == record["tie_word_embeddings"]


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_windows_of_qwen_start_where_transformers_starts_them(name: str) -> None:
    record = RECORD[name]
    shapes = {key: record[key] for key in (*SHAPES, "intermediate_size")}
    config = Config.from_dict({"model_type": name, "use_sliding_window": True, **shapes})
    reaches = [layer.attention.reach for layer in config.layers]
    first, window = record["max_window_layers"], Window(record["sliding_window"])
    assert reaches == [None] * first + [window] * (record["num_hidden_layers"] - first)
