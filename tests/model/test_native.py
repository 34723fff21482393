"""Models of model_type "tinyllm" compute what papers say: held to a decoder in plain numpy, in every mode."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import numpy_decoder
import pytest
from golden_cases import FEATURES, TOLERANCE, build, difference, feedings, run
from golden_mutants import mutants
from native_models import MODELS

from tinyllm._mx import mx
from tinyllm.config.config import Config
from tinyllm.config.tensors import tensor_shapes
from tinyllm.doctor import ids_gap
from tinyllm.engine.engine import Engine
from tinyllm.engine.request import Request
from tinyllm.model.load import load_model

LENGTH, NEAR = 40, 1e-3
FIXED = {"beta": 0.5, "eps": -1e-6}  # of xIELU
Made = tuple[Path, list[int], mx.array]


def random_tensors(config: Config) -> dict[str, np.ndarray]:
    """Values that matter: attention far from uniform, no norm of ones, no bias of zeros."""
    random = np.random.default_rng(7)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        noise = random.standard_normal(shape)
        leaf = name.rpartition(".")[2]
        if leaf in FIXED:
            value = np.full(shape, FIXED[leaf])
        elif "norm" in name or "scal" in name:
            value = 0.3 * noise if name.endswith("bias") else 1 + 0.3 * noise
        elif len(shape) == 1:
            value = 0.5 * noise
        else:
            gain = (
                0.7 * shape[-1] ** 0.5 if "embed" in name else 1.7 if re.search("[qk]_.*proj|gate.w", name) else 1.2
            )
            value = noise * gain / shape[-1] ** 0.5
        tensors[name] = value.astype(np.float32)
    return tensors


@pytest.fixture(scope="module", params=MODELS)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[int], mx.array]:
    """A checkpoint's folder, ids, and the logits (n, vocab) that numpy computes."""
    spec = MODELS[request.param]
    folder = tmp_path_factory.mktemp("native")
    (folder / "config.json").write_text(json.dumps(spec))
    config = Config.from_json_file(folder)
    tensors = random_tensors(config)
    mx.save_safetensors(str(folder / "model.safetensors"), {name: mx.array(value) for name, value in tensors.items()})
    ids = np.random.default_rng(11).integers(config.vocab_size, size=LENGTH).tolist()
    logits = numpy_decoder.logits_of(spec, tensors, ids)
    assert 0.1 < logits.std() < 20
    return folder, ids, mx.array(logits.astype(np.float32))


@pytest.mark.parametrize("page_size", [None, 16], ids=["dense", "paged"])
@pytest.mark.parametrize("features", FEATURES)
def test_logits_are_those_of_the_papers(made: Made, features: str, page_size: int | None) -> None:
    """At once, and in pieces of one token and of several."""
    folder, ids, wanted = made
    network = load_model(folder, FEATURES[features], dtype=mx.float32)
    off = {
        how: difference(run(network, mx.array([ids]), pieces, page_size), wanted)
        for how, pieces in feedings(len(ids)).items()
    }
    assert max(off.values()) <= TOLERANCE, off


def test_a_batch_in_pages_says_what_each_says_alone(made: Made) -> None:
    """Of unequal lengths, in small chunks, and again over the pages that are there."""
    folder, ids, _ = made
    network = load_model(folder, dtype=mx.float32)
    requests = [Request(tuple(ids[start : start + n]), 8, logprobs=2) for start, n in enumerate((30, 5, 21, 16))]
    alone = Engine(network, kv="dense", compiled=False, max_rows=1)
    wanted = [alone.run([request])[0] for request in requests]
    engine = Engine(network, compiled=False, page_size=16, prefill_chunk=7)
    for _ in range(2):
        gaps = [ids_gap(*pair) for pair in zip(wanted, engine.run(requests), strict=True)]
        assert max(gaps) <= NEAR and sum(gap > 0 for gap in gaps) < 2, gaps
    assert engine.pools.manager.hit_tokens > 0


def test_it_would_show_a_fault(made: Made) -> None:
    """Each is far off when one thing that its config says is not done."""
    folder, ids, wanted = made
    config = Config.from_json_file(folder)
    off = {
        what: difference(build(mutant, folder, FEATURES["fused"])(mx.array([ids]))[0], wanted)
        for what, mutant in mutants(config)
    }
    assert off
    assert not {what: value for what, value in off.items() if not value > 100 * TOLERANCE}
