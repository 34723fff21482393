"""Golden checkpoints, written as GGUF files, give the logits of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_files import ARCHITECTURES, convert_golden, golden_values
from golden_cases import FOLDERS, TOLERANCE, difference, expected, feedings, run

from tinyllm._mx import mx
from tinyllm.checkpoint.gguf_config import ARCHITECTURES as KNOWN
from tinyllm.model.load import load_model

# What GGUF has no word for, so that no file has it.
UNSPEAKABLE = {
    "gpt2-scales", "gpt2-unscaled", "falcon-alibi", "llama-partial", "llama-partial-yarn", "llama-yarn-mscale",
    "llama-yarn-attention-factor", "llama-yarn-no-truncate", "qwen2-window", "qwen3-window", "qwen3-layer-types",
    "qwen3-moe-window", "qwen3-moe-some-dense", "smollm3", "smollm3-window",
    "olmoe-biased", "mlx-lm-4bit", "mlx-lm-mixed", "llama-yarn-no-factor", "mistral-window-default",
    "olmo3-layer-types",
    "qwen3-moe-defaults", "gemma2-no-caps", "starcoder2-plain",
}  # fmt: skip
CASES = [
    name for name in FOLDERS if name not in UNSPEAKABLE and golden_values(name).get("model_type") in ARCHITECTURES
]


def test_every_architecture_has_a_case() -> None:
    assert {ARCHITECTURES[golden_values(name)["model_type"]] for name in CASES} == set(KNOWN)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    ids, wanted = expected(name)
    model = load_model(convert_golden(name, tmp_path / "model.gguf"), dtype=mx.float32)
    pieces = feedings(ids.shape[1])["one pass"]
    assert difference(run(model, ids, pieces), wanted) <= TOLERANCE
