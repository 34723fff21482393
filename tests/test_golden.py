"""Every golden checkpoint gives the logits of transformers, however config.json is written and the ids are fed.

Among them are the two ways to say the kind of RoPE (fault 09), a theta that is inside `rope_parameters` alone, or
nested, or overruling a stale one (fault 10), absent keys (fault 12), and a model that only its nested config ties
(fault 02).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden_cases
import pytest
from golden_cases import FEATURES, FOLDERS, GOLDEN, TOLERANCE, build, difference, expected, feedings, run
from golden_mutants import mutants
from safetensors import safe_open

from tinyllm._mx import mx
from tinyllm.config.config import Config
from tinyllm.config.reach import Window
from tinyllm.model.load import load_model

FAR = 100
OTHER_DIALECTS = [
    (name, dialect) for name in FOLDERS for dialect in golden_cases.dialects(name) if dialect != "config.json"
]


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("name", FOLDERS)
def test_logits_are_those_of_transformers(name: str, features: str) -> None:
    """Fed at once, and in pieces of one token and of several."""
    ids, wanted = expected(name)
    model = load_model(GOLDEN / name, FEATURES[features], dtype=mx.float32)
    off = {how: difference(run(model, ids, pieces), wanted) for how, pieces in feedings(ids.shape[1]).items()}
    assert max(off.values()) <= TOLERANCE, off


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_are_those_of_transformers_through_pages(name: str) -> None:
    """Of a size that pieces do not fill, and windows fall behind."""
    ids, wanted = expected(name)
    model = load_model(GOLDEN / name, dtype=mx.float32)
    ways = feedings(ids.shape[1]).items()
    off = {how: difference(run(model, ids, pieces, page_size=16), wanted) for how, pieces in ways}
    assert max(off.values()) <= TOLERANCE, off


@pytest.mark.parametrize(("name", "dialect"), OTHER_DIALECTS)
def test_dialects_are_the_same_model(name: str, dialect: str) -> None:
    """What is read of them is equal, and nothing else of them reaches a model."""
    assert Config.from_json_file(GOLDEN / name / dialect) == Config.from_json_file(GOLDEN / name)


# ---------------------------------------------------------------- that they could fail


def with_attention(config: Config, **changes: Any) -> Config:
    """The same model with other attention in every layer."""
    layers = (replace(layer, attention=replace(layer.attention, **changes)) for layer in config.layers)
    return replace(config, layers=tuple(layers))


@pytest.mark.parametrize("name", FOLDERS)
def test_golden_would_show_a_fault(name: str) -> None:
    """Each golden is off by far more than the tolerance when one thing that its config says is not done.

    Those that are long, and take that much longer, are there for what depends on positions.
    """
    ids, wanted = expected(name)
    config = Config.from_json_file(GOLDEN / name)
    off = {
        what: difference(build(mutant, GOLDEN / name, FEATURES["fused"])(ids)[0], wanted)
        for what, mutant in mutants(config)
        if ids.shape[1] < 1000 or what.startswith("attention.")
    }
    assert off
    assert not {what: value for what, value in off.items() if not value > FAR * TOLERANCE}


def test_null_window_is_not_the_default_window() -> None:
    """Fault 12: in Mistral an absent `sliding_window` is 4096, and a null one is none."""
    assert {layer.attention.reach for layer in Config.from_json_file(GOLDEN / "mistral-no-window").layers} == {None}
    sparse = Config.from_json_file(GOLDEN / "mistral-window-default" / "config.sparse.json")
    assert {layer.attention.reach for layer in sparse.layers} == {Window(4096)}
    ids, wanted = expected("mistral-no-window")
    windowed = with_attention(Config.from_json_file(GOLDEN / "mistral-no-window"), reach=Window(4096))
    model = build(windowed, GOLDEN / "mistral-no-window", FEATURES["fused"])
    assert difference(model(ids)[0], wanted) > FAR * TOLERANCE


# ---------------------------------------------------------------- the folders themselves


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_is_small(name: str) -> None:
    assert sum(file.stat().st_size for file in (GOLDEN / name).iterdir()) < 150_000


def test_sharded_golden_has_shards() -> None:
    assert len(list((GOLDEN / "llama-sharded").glob("model-*.safetensors"))) > 1


def test_other_towers_are_left_out_with_one_notice(caplog: pytest.LogCaptureFixture) -> None:
    with safe_open(GOLDEN / "mistral3" / "model.safetensors", "np") as file:
        others = sum(name.startswith(("vision_tower.", "multi_modal_projector.")) for name in file.keys())  # noqa: SIM118 (it is no dict)
    with caplog.at_level(logging.WARNING, "tinyllm"):
        load_model(GOLDEN / "mistral3")
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        f"{others} tensors that the text model has no use for are left out"
    ]


def test_transformers_5_names_of_a_nested_model_are_read(tmp_path: Path) -> None:
    """The same weights under model.language_model., as transformers 5 has them in memory and some files too."""
    source = GOLDEN / "mistral3"
    arrays = mx.load(str(source / "model.safetensors"))
    renamed = {
        name.replace("language_model.lm_head.", "lm_head.").replace(
            "language_model.model.", "model.language_model."
        ): a
        for name, a in arrays.items()
    }
    mx.save_safetensors(str(tmp_path / "model.safetensors"), renamed)
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    ids, wanted = expected("mistral3")
    assert difference(load_model(tmp_path, dtype=mx.float32)(ids)[0], wanted) <= TOLERANCE
