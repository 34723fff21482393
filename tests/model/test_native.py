"""Models of model_type "tinyllm" compute what papers say: held to a decoder in plain numpy, in every mode."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy_decoder
import pytest
from golden_cases import FEATURES, TOLERANCE, difference, feedings, run

from tinyllm._mx import mx
from tinyllm.config.config import Config
from tinyllm.config.tensors import tensor_shapes
from tinyllm.doctor import ids_gap
from tinyllm.engine.engine import Engine
from tinyllm.engine.request import Request
from tinyllm.model.load import load_model

DOCS = Path(__file__).parents[2] / "docs" / "NATIVE.md"
LENGTH, NEAR = 40, 1e-3
LAYER_NORM = {"kind": "layer", "eps": 0.1, "bias": True}
RMS = {"eps": 0.1}
ROPE = {"dims": 8, "theta": 500.0}
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
MLP = {"intermediate_size": 24, "activation": "silu"}


def model(*layers: dict[str, Any], **whole: Any) -> dict[str, Any]:
    return {
        "model_type": "tinyllm",
        "vocab_size": 48,
        "hidden_size": 20,
        "max_position_embeddings": 64,
        "final_norm": RMS,
        **whole,
        "layers": list(layers),
    }


def layer(attention: dict[str, Any], feed_forward: dict[str, Any] = MLP, **more: Any) -> dict[str, Any]:
    return {"attention": attention, "feed_forward": feed_forward, "norm": RMS, **more}


ROUTER = {"num_experts": 6, "top_k": 2, "groups": 3, "top_groups": 2}
MODELS = {
    "DeepNorm with Sandwich": model(
        layer(
            {**HEADS, "bias": {"kind": "sandwich", "dims": 12}, "qkv_bias": True, "output_bias": True},
            {"intermediate_size": 24, "activation": "gelu", "gated": False, "bias": True},
            norm=LAYER_NORM,
            placement="post",
            residual_scale=1.7,
            repeat=2,
        ),
        final_norm=None,
        learned_positions=66,
        position_offset=2,
    ),
    "strided sparse attention and squared ReLU": model(
        layer(
            {**HEADS, "rope": ROPE, "reach": {"kind": "strided", "local": 5, "stride": 7}},
            {"intermediate_size": 24, "activation": "relu2", "gated": False},
            repeat=2,
        ),
    ),
    "strided, as far as a page and further": model(
        layer({**HEADS, "rope": ROPE, "reach": {"kind": "strided", "local": 1, "stride": 19}}),
        layer({**HEADS, "rope": ROPE, "reach": {"kind": "strided", "local": 18, "stride": 3}}),
    ),
    "ReGLU, weightless norms, learned positions": model(
        layer(HEADS, {"intermediate_size": 24, "activation": "relu"}, norm={"eps": 0.1, "weight": False}, repeat=2),
        learned_positions=64,
        final_norm={"kind": "layer", "eps": 0.1, "weight": False},
        tie_word_embeddings=True,
        head_bias=True,
    ),
    "GeGLU and ALiBi, norms of branches": model(
        layer(
            {**HEADS, "bias": {"kind": "alibi", "most": 6.0, "factor": 0.7}, "scale": 0.5},
            {"intermediate_size": 24, "activation": "gelu_tanh"},
            placement="branch",
        ),
        layer({**HEADS, "bias": {"kind": "alibi"}, "reach": {"kind": "window", "size": 9}}, placement="branch"),
        embed_norm=LAYER_NORM,
    ),
    "chunks and windows in turn, four norms a layer": model(
        layer(
            {**HEADS, "rope": ROPE, "reach": {"kind": "chunk", "size": 11}, "softcap": 2.0},
            norm={"eps": 0.1, "offset": 1.0},
            placement="sandwich",
        ),
        layer(
            {
                **HEADS,
                "rope": {"dims": 4, "theta": 300.0, "interleaved": True},
                "reach": {"kind": "window", "size": 6},
                "qk_norm": {"norm": {"eps": 0.05}, "over": "whole"},
            },
            placement="sandwich",
        ),
        embedding_scale=1.5,
        logit_scale=0.8,
        logit_softcap=3.0,
    ),
    "parallel branches, sinks, gates": model(
        layer(
            {
                **HEADS,
                "rope": {**ROPE, "scaling": {"kind": "linear", "factor": 3.0}},
                "sinks": True,
                "clip": 1.5,
                "qk_norm": {"norm": {"eps": 0.05}, "over": "heads", "after_rope": True},
            },
            placement="parallel",
            shared_norm=True,
        ),
        layer(
            {**HEADS, "gate": True, "query_scaling": {"beta": 0.3, "every": 8, "shift": 1}},
            {**MLP, "limit": 1.2},
            placement="parallel",
        ),
        embedding_width=12,
    ),
    "experts in groups beside latent attention": model(
        layer(
            {
                "kind": "latent",
                "num_heads": 3,
                "query_rank": 10,
                "latent_rank": 9,
                "plain_dim": 6,
                "value_dim": 5,
                "rope": {"dims": 4, "theta": 500.0, "interleaved": True},
                "norm": RMS,
                "reach": {"kind": "window", "size": 15},
            },
            {
                "kind": "experts",
                "router": {
                    **ROUTER,
                    "scoring": "sigmoid",
                    "group_score": "two best",
                    "selection_bias": True,
                    "renormalise": True,
                    "scale": 1.7,
                },
                "expert": MLP,
                "shared": {**MLP, "intermediate_size": 16},
                "shared_gate": True,
            },
            branch_scale=0.6,
        ),
        layer(
            {
                "kind": "latent",
                "num_heads": 2,
                "latent_rank": 9,
                "plain_dim": 6,
                "value_dim": 7,
                "rope": {"dims": 4, "theta": 500.0},
                "norm": RMS,
            },
            {"kind": "experts", "router": {**ROUTER, "bias": True}, "expert": {**MLP, "bias": True}},
        ),
    ),
}
EXAMPLE = re.findall(r"```json\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)[0]
MODELS["the example of the page"] = json.loads(EXAMPLE)
Made = tuple[Path, list[int], mx.array]


def random_tensors(config: Config) -> dict[str, np.ndarray]:
    """Values that matter: attention far from uniform, no norm of ones, no bias of zeros."""
    random = np.random.default_rng(7)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        noise = random.standard_normal(shape)
        if "norm" in name:
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
    """At once, token by token and in chunks."""
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
