"""LongRoPE rotates a sequence otherwise once it is longer than some length, and then in its past too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import tiny

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.config.layers import AttentionConfig
from tinyllm.config.rope import LongRopeScaling
from tinyllm.engine.engine import Engine
from tinyllm.engine.request import Request
from tinyllm.model.transformer import ModelForCausalLM
from tinyllm.ops.features import FEATURES

BOUNDARY, ANSWER = 24, 12
PROMPTS = (BOUNDARY - 5, 3, BOUNDARY + 6, BOUNDARY, BOUNDARY - ANSWER)
MODES: dict[str, dict[str, Any]] = {
    "paged, compiled": {},
    "paged, eager": {"compiled": False},
    "dense": {"kv": "dense"},
    "small chunks": {"prefill_chunk": 5},
}


def stretched(config: Config) -> Config:
    """The same model with two lists of factors in every layer."""
    layers = []
    for layer in config.layers:
        assert isinstance(layer.attention, AttentionConfig) and layer.attention.rope is not None
        rope = layer.attention.rope
        pairs = rope.dims // 2
        short, long = ((1.0, 1.5, 2.0, 3.0)[:pairs], (3.0, 5.0, 7.0, 9.0)[:pairs])
        scaling = LongRopeScaling(short, long, attention_factor=1.2, original_max_position_embeddings=BOUNDARY)
        layers.append(replace(layer, attention=replace(layer.attention, rope=replace(rope, scaling=scaling))))
    return replace(config, layers=tuple(layers))


@pytest.fixture(scope="module", params=FEATURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelForCausalLM:
    folder = tiny.write_checkpoint(tmp_path_factory.mktemp("longrope"))
    config = Config.from_json_file(folder)
    return ModelForCausalLM(stretched(config), WeightStore.from_path(folder, config), FEATURES[request.param])


def prompt(length: int) -> tuple[int, ...]:
    return tuple(int(i * i * 7 + length) % 250 + 3 for i in range(length))


def alone(model: ModelForCausalLM, ids: Sequence[int]) -> list[int]:
    """What the whole sequence in one pass says, token by token: the reference drops its cache at the boundary."""
    said = list(ids)
    for _ in range(ANSWER):
        said.append(int(mx.argmax(model(mx.array([said]), logits_to_keep=1)[0, -1]).item()))
    return said[len(ids) :]


@pytest.mark.parametrize("mode", MODES)
def test_crossing_the_boundary_computes_everything_again(model: ModelForCausalLM, mode: str) -> None:
    """In a batch where some rows cross it, some have, and some never do; their prefixes are not mixed up."""
    engine = Engine(model, page_size=8, **MODES[mode])
    requests = [Request(prompt(length), ANSWER) for length in PROMPTS]
    wanted = [alone(model, request.prompt_ids) for request in requests]
    for _ in range(2):  # the second time with what the first has left behind
        answers = engine.run(requests)
        assert [[output.token_id for output in answer] for answer in answers] == wanted
    assert engine.preemptions


def test_it_matters(model: ModelForCausalLM) -> None:
    """A cache that is kept beyond the boundary gives other logits."""
    ids = mx.array([prompt(BOUNDARY + 1)])
    caches = model.create_kv_cache()
    model(ids[:, :BOUNDARY], 0, caches)
    stale = model(ids[:, BOUNDARY:], BOUNDARY, caches)[0, -1]
    fresh = model(ids)[0, -1]
    assert mx.abs(stale - fresh).max().item() > 0.1 * mx.std(fresh).item()
