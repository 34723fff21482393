"""Whatever stands in a config.json: a Config, or a TinyllmError of one line. Nothing else, and nothing large."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm.config.config import Config
from tinyllm.config.families.table import FAMILIES
from tinyllm.config.packings import METHODS
from tinyllm.errors import TinyllmError

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**9, 10**18, 10**400, -(10**400)])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["yarn", "llama3", "linear", "default", "affine", "gelu", "relu"])
    | st.sampled_from(["full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
ROPE_KEYS = """
    type rope_type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings beta_fast
    beta_slow mscale mscale_all_dim attention_factor truncate partial_rotary_factor full_attention short_factor
    long_factor sliding_attention
""".split()
QUANT_KEYS = """
    bits group_size mode quant_method model.layers.0.mlp.up_proj lm_head weight_block_size config_groups format
    checkpoint_format zero_point version
""".split()
KEYS = [
    *tiny.CONFIG,
    *"""head_dim rope_scaling rope_parameters partial_rotary_factor sliding_window layer_types
    use_sliding_window max_window_layers attention_bias mlp_bias quantization quantization_config dtype""".split(),
]


# Of each family a config.json that is sound, of the golden folder that is called like it or else of another.
FOLDERS = sorted((Path(__file__).parents[1] / "golden").glob("*/config.json"), reverse=True)
SOUND = {
    values["model_type"]: values
    for whole in (json.loads(path.read_text()) for path in FOLDERS)
    for values in (whole.get("text_config", whole),)
    if values.get("model_type") in FAMILIES
}


def mostly(keys: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(keys), ANYTHING, max_size=6)


def check(read: Any, *arguments: Any) -> None:
    """Call `read`: it returns a Config of a size that fits, or raises one readable line."""
    try:
        config = read(*arguments)
    except TinyllmError as error:
        assert str(error).isprintable()
        str(error).encode("utf-8")
    else:
        assert len(config.layers) == config.num_hidden_layers <= 10_000
        hash(config.layers)


def test_there_is_a_sound_config_of_every_family() -> None:
    assert SOUND.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", sorted(FAMILIES))
@settings(max_examples=20)
@given(data=st.data())
def test_any_values_under_known_keys_give_a_config_or_one_line(family: str, data: st.DataObject) -> None:
    check(Config.from_dict, {**SOUND[family], **data.draw(mostly([*SOUND[family], *KEYS]))})


@pytest.mark.parametrize("family", sorted(FAMILIES))
@settings(max_examples=12)
@given(data=st.data())
def test_any_keys_that_are_absent_give_a_config_or_one_line(family: str, data: st.DataObject) -> None:
    absent = data.draw(st.sets(st.sampled_from(sorted(SOUND[family]))))
    check(Config.from_dict, {key: value for key, value in SOUND[family].items() if key not in absent})


@settings(max_examples=150)
@given(st.sampled_from(["linear", "llama3", "yarn", "default", "dynamic", "longrope"]), mostly(ROPE_KEYS))
def test_any_rope_parameters_give_a_config_or_one_line(kind: str, values: dict[str, Any]) -> None:
    check(Config.from_dict, tiny.config(rope_parameters={"rope_type": kind, "factor": 2.0, **values}))


@settings(max_examples=100)
@given(mostly(QUANT_KEYS))
def test_any_quantization_gives_a_config_or_one_line(values: dict[str, Any]) -> None:
    check(Config.from_dict, tiny.config(quantization={"bits": 4, "group_size": 64, **values}))


WEIGHT_KEYS = ["num_bits", "type", "symmetric", "group_size", "block_structure", "strategy"]


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=60)
@given(mostly(QUANT_KEYS), mostly(WEIGHT_KEYS))
def test_any_form_of_another_library_gives_a_config_or_one_line(
    method: str, values: dict[str, Any], weights: dict[str, Any]
) -> None:
    sound = {"bits": 4} if method in ("gptq", "awq") else {}
    if method == "compressed-tensors":
        sound = {"format": "int-quantized", "config_groups": {"group_0": {"weights": weights}}}
    check(Config.from_dict, tiny.config(quantization_config={**sound, **values, "quant_method": method}))


@settings(max_examples=100)
@given(st.dictionaries(st.text(), ANYTHING))
def test_any_object_gives_a_config_or_one_line(values: dict[str, Any]) -> None:
    check(Config.from_dict, values)
    check(Config.from_dict, {"model_type": "mistral3", "text_config": values})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "config.json"


@settings(max_examples=100)
@given(data=st.data())
def test_any_damage_to_the_bytes_gives_a_config_or_one_line(path: Path, data: st.DataObject) -> None:
    content = bytearray(json.dumps(tiny.config()).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        content[start : start + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    path.write_bytes(content)
    check(Config.from_json_file, path)
