"""The table of model families: how each `model_type` writes its config.json and names its tensors. No mlx."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from tinyllm.config.families import experts, gemma, gpt, hybrid, latent, llama
from tinyllm.config.families.wrappers import WRAPPERS
from tinyllm.config.family import Family
from tinyllm.config.native import NATIVE
from tinyllm.config.reader import ConfigReader, Key
from tinyllm.errors import UnsupportedModelError

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (*llama.ROWS, *gemma.ROWS, *gpt.ROWS, *experts.ROWS, *latent.ROWS, *hybrid.ROWS)
}


def family_of(reader: ConfigReader) -> Family:
    """Find the row for the file's `model_type`; UnsupportedModelError names the nearest known ones."""
    model_type = reader.read(Key("model_type", str))
    if model_type not in FAMILIES:
        names = sorted({*FAMILIES, *WRAPPERS, NATIVE.model_type})
        near = get_close_matches(model_type.lower(), names, n=3, cutoff=0.5)
        known = f"the nearest that it does: {', '.join(near)}" if near else f"it does: {', '.join(names)}"
        raise reader.fail(UnsupportedModelError, f"model_type {model_type!r} is not one that tinyllm runs; {known}")
    return FAMILIES[model_type]
