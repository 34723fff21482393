"""Checkpoints that ModelOpt wrote give the logits of the matrices that ModelOpt makes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tinyllm._mx import mx
from tinyllm.model.load import load_model
from tinyllm.ops.features import ModelFeatures

FOLDER = Path(__file__).parent / "modelopt"  # by scripts/make_modelopt_golden.py
TOLERANCE = 1e-4  # of the logits' standard deviation, in float32


def silent(folder: Path, target: Path) -> Path:
    """Copy a checkpoint whose config.json says nothing of the format, as older versions of ModelOpt wrote them."""
    shutil.copytree(folder, target)
    values = json.loads((folder / "config.json").read_text())
    del values["quantization_config"]
    (target / "config.json").write_text(json.dumps(values))
    return target


@pytest.mark.parametrize("mentioned", [True, False], ids=["in config.json", "in hf_quant_config.json alone"])
@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_the_logits_are_the_references(name: str, mentioned: bool, tmp_path: Path) -> None:
    folder = FOLDER / name if mentioned else silent(FOLDER / name, tmp_path / name)
    assert (folder / "hf_quant_config.json").exists()
    expected = mx.load(str(folder / "expected.safetensors"))
    wanted = np.array(expected["logits"])
    for features in (ModelFeatures(), ModelFeatures.reference()):
        model = load_model(folder, features, dtype=mx.float32)
        found = np.array(model(expected["ids"][None])[0])
        assert np.abs(found - wanted).max() < TOLERANCE * wanted.std()
