"""What is counted of a model is what its tensors hold."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import tiny

from tinyllm.anatomy.counts import (
    block_kinds,
    block_parameters,
    feed_forward_width,
    model_parameters,
    parts,
    ungrouped_elements,
)
from tinyllm.config.config import Config
from tinyllm.config.layers import LayerConfig, MLPConfig, MoeConfig, NormConfig, RouterConfig
from tinyllm.config.tensors import layer_shapes, tensor_shapes

GOLDEN = Path(__file__).parent.parent / "golden"
FOLDERS = sorted(file.parent.name for file in GOLDEN.glob("*/config.json"))


def mixture(config: Config) -> LayerConfig:
    """A layer of eight experts, of which two are chosen, and one for all."""
    expert = MLPConfig(intermediate_size=16, activation="silu")
    shared = MLPConfig(intermediate_size=24, activation="silu")
    layer = config.layers[0]
    return LayerConfig(layer.attention, MoeConfig(RouterConfig(8, 2), expert, shared), NormConfig(1e-6))


@pytest.mark.parametrize("name", FOLDERS)
def test_parameters_are_those_of_all_tensors_and_of_all_parts(name: str) -> None:
    config = Config.from_json_file(GOLDEN / name)
    total = sum(math.prod(shape) for shape in tensor_shapes(config).values())
    assert model_parameters(config).total == sum(parts(config).values()) == total
    assert 0 < model_parameters(config).active <= total


@pytest.mark.parametrize("name", FOLDERS)
def test_kinds_of_blocks_have_every_layer_once(name: str) -> None:
    config = Config.from_json_file(GOLDEN / name)
    kinds = block_kinds(config)
    assert sorted(number for kind in kinds for number in kind.numbers) == list(range(config.num_hidden_layers))
    assert all(config.layers[number] == kind.layer for kind in kinds for number in kind.numbers)
    assert len({kind.layer for kind in kinds}) == len(kinds)


def test_a_token_meets_the_experts_that_are_chosen_and_all_else() -> None:
    config = Config.from_dict(tiny.config())
    layer = mixture(config)
    counted = block_parameters(config, layer)
    assert counted.total == sum(math.prod(shape) for shape in layer_shapes(config, layer).values())
    assert counted.total - counted.active == 6 * 3 * 16 * config.hidden_size
    assert feed_forward_width(layer) == 2 * 16 + 24


def test_heads_with_keys_of_their_own_would_keep_more() -> None:
    config = Config.from_dict(tiny.config())  # 2 layers of 4 heads of 8, which share 2 keys and values
    assert ungrouped_elements(config) == 2 * 2 * 4 * 8
