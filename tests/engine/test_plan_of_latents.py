"""What a plan counts for latent attention beside what it counts for any."""

from __future__ import annotations

import pytest

from tinyllm.config.config import Config
from tinyllm.engine.plan import MemoryPlan, make_plan

HEADS, CONTEXT, ITEM = 4, 2000, 4
CONFIG = Config.from_dict(
    {
        "model_type": "deepseek_v3",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
    }
)


def plan(chunk: int, *, on_gpu: bool = False) -> MemoryPlan:
    return make_plan(
        CONFIG,
        weight_bytes=2**20,
        itemsize=ITEM,
        available_bytes=2**30,
        kv_budget=2**26,
        max_context=CONTEXT,
        prefill_chunk=chunk,
        on_gpu=on_gpu,
    )


def test_a_token_leaves_one_latent_and_one_rotated_key() -> None:
    assert plan(256).token_bytes == 2 * (512 + 64) * ITEM


def test_keys_and_values_are_counted_once_they_are_made_of_latents() -> None:
    """From 171 queries on: 192 elements of a key and 128 of a value in each head."""
    before, last, first = (plan(chunk).workspace_bytes for chunk in (169, 170, 171))
    assert (first - last) - (last - before) == 2 * CONTEXT * HEADS * 320 * ITEM


@pytest.mark.parametrize("chunk", [64, 256])
def test_scores_are_counted_on_a_gpu_too(chunk: int) -> None:
    assert plan(chunk, on_gpu=True).workspace_bytes >= plan(chunk).workspace_bytes > 6 * chunk * HEADS * CONTEXT * 4
