"""A decode step is counted as a GPU would run it, from the graph that the engine builds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinyllm._mx import mx
from tinyllm.bench.ops import count_ops, host_seconds, layer_ops, step_ops
from tinyllm.bench.subject import load_subject

LAYER = {
    "matrix product": 4,  # q|k|v, output, gate|up, down
    "mx.fast.rms_norm": 2,
    "mx.fast.rope": 2,
    "mx.fast.scaled_dot_product_attention": 1,
    "cache write": 2,
    "element-wise or reduction": 5,  # two residual adds; sigmoid and two products
}


def test_a_layer_is_what_the_documents_say(tiny_checkpoint: Path) -> None:
    _, engine = load_subject("tiny", tiny_checkpoint, "fused")
    assert layer_ops(engine) == LAYER


def test_a_step_is_its_layers_and_the_ends(tiny_checkpoint: Path) -> None:
    _, engine = load_subject("tiny", tiny_checkpoint, "fused")
    step = step_ops(engine)
    for kind, count in LAYER.items():
        step[kind] -= 2 * count
    choice = step.pop("element-wise or reduction")
    assert choice > 0  # the choice of the token, and whether all logits are finite
    assert +step == {"lookup": 1, "matrix product": 1, "mx.fast.rms_norm": 1}  # embedding, head, last norm


def test_reference_kernels_are_more(tiny_checkpoint: Path) -> None:
    _, engine = load_subject("tiny", tiny_checkpoint, "reference")
    layer = layer_ops(engine)
    assert not any(kind.startswith("mx.fast") for kind in layer)
    assert layer["matrix product"] == 7 + 2  # every projection, scores and their sum of values
    assert layer.total() > 40


def test_counting_leaves_everything_as_it_was(tiny_checkpoint: Path) -> None:
    before = mx.fast.rope, mx.fast.rms_norm, mx.async_eval, mx.eval
    _, engine = load_subject("tiny", tiny_checkpoint, "fused")
    first = step_ops(engine)
    assert not engine.has_work
    assert host_seconds(engine) > 0
    assert not engine.has_work
    assert step_ops(engine) == first
    assert (mx.fast.rope, mx.fast.rms_norm, mx.async_eval, mx.eval) == before


@pytest.mark.parametrize("features", ["fused", "reference"])
def test_the_table_says_that_it_is_modelled(tiny_checkpoint: Path, features: str) -> None:
    text = count_ops("tiny", tiny_checkpoint, features)
    assert f"tiny, {features} kernels" in text and "(modelled from its graph)" in text
    assert "| all " in text
