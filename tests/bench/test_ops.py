"""A decode step is counted as a GPU would run it, from the graph that the engine builds."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from golden_cases import GOLDEN

from tinyllm._mx import mx
from tinyllm.bench.modes import MEASURED
from tinyllm.bench.ops import count_ops, host_time, layer_ops, load_as_on_gpu, step_ops
from tinyllm.bench.subject import load_subject
from tinyllm.checkpoint.contents import read_contents
from tinyllm.engine.load import MODES
from tinyllm.model.transformer import ModelForCausalLM
from tinyllm.ops.features import ModelFeatures

LAYER = {
    "matrix product": 4,  # q|k|v, output, gate|up, down
    "mx.fast.rms_norm": 2,
    "mx.fast.rope": 1,  # of q and k at once
    "mx.fast.scaled_dot_product_attention": 1,
    "cache write": 2,
    "element-wise or reduction": 2,  # residual sums
    "compiled region": 1,  # SwiGLU
}
ENDS = {
    "lookup": 1,  # the embedding
    "matrix product": 1,  # the head
    "mx.fast.rms_norm": 1,
    "element-wise or reduction": 3,  # positions that the mask is made of, argmax, the sum of the logits
    "compiled region": 2,  # the mask, and whether that sum is finite
}
FUSED = MODES["fused"]


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> ModelForCausalLM:
    return load_as_on_gpu(read_contents(tiny_checkpoint), ModelFeatures())


def test_a_layer_is_what_the_documents_say(model: ModelForCausalLM) -> None:
    assert layer_ops(model, FUSED) == LAYER
    for mode in ("eager", "dense"):
        assert layer_ops(model, MODES[mode]) == LAYER


def test_a_step_is_its_layers_and_the_ends(model: ModelForCausalLM) -> None:
    step = step_ops(model, FUSED)
    step.subtract({kind: 2 * count for kind, count in LAYER.items()})
    assert +step == ENDS


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("layers", [1, 5])
def test_a_step_is_at_most_13_kernels_a_layer_and_12_more(tmp_path: Path, layers: int, dtype: str) -> None:
    folder = tiny.write_checkpoint(tmp_path, config_overrides={"num_hidden_layers": layers}, dtype=dtype)
    assert step_ops(load_as_on_gpu(read_contents(folder), ModelFeatures()), FUSED).total() <= 13 * layers + 12


def test_what_is_compiled_is_less(model: ModelForCausalLM) -> None:
    assert step_ops(model, FUSED).total() < step_ops(model, MODES["dense"]).total()
    assert step_ops(model, FUSED).total() < step_ops(model, MODES["eager"]).total()


def test_reference_kernels_are_more(tiny_checkpoint: Path) -> None:
    settings = MODES["reference"]
    layer = layer_ops(load_as_on_gpu(read_contents(tiny_checkpoint), settings.features), settings)
    assert not any(kind.startswith("mx.fast") for kind in layer)
    assert layer["matrix product"] == 7 + 2  # every projection, scores and their sum of values
    assert layer.total() > 40


def test_a_packed_model_is_counted_as_it_is_packed() -> None:
    packed = load_as_on_gpu(read_contents(GOLDEN / "mlx-lm-4bit"), ModelFeatures())
    assert layer_ops(packed, FUSED)["matrix product"] == 4
    assert step_ops(packed, FUSED)["lookup"] == 3  # of the embedding's numbers, scales and biases


def test_counting_leaves_everything_as_it_was(model: ModelForCausalLM, tiny_checkpoint: Path) -> None:
    before = mx.fast.rope, mx.fast.rms_norm, mx.async_eval, mx.eval
    first = step_ops(model, FUSED)
    _, engine = load_subject("tiny", read_contents(tiny_checkpoint))
    taken = host_time(engine)
    assert taken.worked > 0 and taken.passed > 0
    assert not engine.has_work
    assert step_ops(model, FUSED) == first
    assert (mx.fast.rope, mx.fast.rms_norm, mx.async_eval, mx.eval) == before


@pytest.mark.parametrize("features", ["fused", "reference"])
def test_the_table_says_that_it_is_modelled(tiny_checkpoint: Path, features: str) -> None:
    text = count_ops("tiny", read_contents(tiny_checkpoint), MEASURED[features])
    assert f"tiny, mode {features}, paged KV cache, 2 layers in float32" in text
    assert "(modelled from its graph)" in text and "| all " in text
