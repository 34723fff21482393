"""Each thing that decoders differ in is proven: by the logits of transformers, or by formulas in plain numpy."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from golden_cases import FOLDERS, GOLDEN
from native_models import MODELS

from tinyllm.config.config import Config

SCRIPTS = Path(__file__).parent.parent / "scripts"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(SCRIPTS))
    variants: Any = importlib.import_module("variants")


@pytest.fixture(scope="module")
def proofs() -> dict[str, Config]:
    """Every model that is held to numbers which tinyllm has not computed."""
    goldens = {name: Config.from_json_file(GOLDEN / name) for name in FOLDERS}
    return goldens | {name: Config.from_dict(spec) for name, spec in MODELS.items()}


@pytest.mark.parametrize("variant", variants.VARIANTS, ids=lambda variant: f"{variant.axis}: {variant.value}")
def test_a_variant_is_proven_and_not_by_every_model(variant: Any, proofs: dict[str, Config]) -> None:
    shown = [variant.shown(config) for config in proofs.values()]
    assert any(shown) and not all(shown)
