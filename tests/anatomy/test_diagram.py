"""A block as it is drawn: norms where they stand, every tensor with its shape, in 80 columns."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import tiny

from tinyllm.anatomy.counts import block_kinds
from tinyllm.anatomy.diagram import draw, rope_words, shape_words
from tinyllm.config.config import Config
from tinyllm.config.layers import (
    Alibi,
    ConvConfig,
    DeltaConfig,
    LatentAttentionConfig,
    LayerConfig,
    MLPConfig,
    MoeConfig,
    NormConfig,
    Placement,
    QueryScaling,
    RouterConfig,
)
from tinyllm.config.reach import Window
from tinyllm.config.rope import LinearScaling, RopeConfig
from tinyllm.config.tensors import layer_shapes

GOLDEN = Path(__file__).parent.parent / "golden"
CONFIG = Config.from_dict(tiny.config())
LAYER = CONFIG.layers[0]
NORM = NormConfig(1e-6)


def steps(layer: LayerConfig) -> list[str]:
    """The words of a drawing that say in which order a block computes."""
    words = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return [
        word
        for line in draw(CONFIG, layer)
        for word in ("▼", "├──►", "└──►", *words, "attention,", "feed-forward,", "+◄")
        if word in line
    ]


@pytest.mark.parametrize("name", sorted(file.parent.name for file in GOLDEN.glob("*/config.json")))
def test_every_module_of_a_block_is_drawn_with_its_shape(name: str) -> None:
    config = Config.from_json_file(GOLDEN / name)
    for kind in block_kinds(config):
        lines = draw(config, kind.layer)
        assert max(map(len, lines)) <= 80
        assert lines[0] == f"x  {config.hidden_size:,}"
        for tensor, shape in layer_shapes(config, kind.layer).items():
            module, _, leaf = tensor.rpartition(".")
            names = {part.partition(".")[2] or part for part in (module, tensor) if part} | {module or tensor}
            line = next(
                line for line in lines if any(re.search(rf"^[│ ]+{name}  |\({name}\)$", line) for name in names)
            )
            assert leaf == "bias" or shape_words(tensor, shape).split()[0] in line


@pytest.mark.parametrize(
    ("placement", "wanted"),
    [
        ("pre", "├──► input_layernorm attention, +◄ ├──► post_attention_layernorm feed-forward, +◄"),
        ("branch", "├──► attention, post_attention_layernorm +◄ ├──► feed-forward, post_feedforward_layernorm +◄"),
        ("post", "├──► attention, +◄ ▼ input_layernorm ├──► feed-forward, +◄ ▼ post_attention_layernorm"),
        (
            "sandwich",
            "├──► input_layernorm attention, post_attention_layernorm +◄"
            " ├──► pre_feedforward_layernorm feed-forward, post_feedforward_layernorm +◄",
        ),
        ("parallel", "├──► input_layernorm attention, ├──► post_attention_layernorm feed-forward, +◄"),
    ],
)
def test_norms_stand_where_they_are_computed(placement: Placement, wanted: str) -> None:
    assert steps(replace(LAYER, placement=placement)) == wanted.split()


def test_parallel_branches_may_share_a_norm() -> None:
    wanted = "├──► input_layernorm ├──► attention, └──► feed-forward, +◄"
    assert steps(replace(LAYER, placement="parallel", shared_norm=True)) == wanted.split()


def test_scales_of_branches_and_residuals_are_told() -> None:
    assert any("times 0.5" in line for line in draw(CONFIG, replace(LAYER, branch_scale=0.5)))
    post = replace(LAYER, placement="post", residual_scale=1.5)
    assert any(line.endswith("the residual times 1.5") for line in draw(CONFIG, post))


def test_what_attention_does_beside_attending_is_told() -> None:
    changed = replace(
        LAYER.attention,
        rope=None,
        bias=Alibi(),
        reach=Window(4096),
        softcap=50.0,
        sinks=True,
        clip=8.0,
        gate=True,
        scale=0.5,
        query_scaling=QueryScaling(0.1, 8192),
    )
    drawn = " ".join(" ".join(line.strip("│ ") for line in draw(CONFIG, replace(LAYER, attention=changed))).split())
    for words in (
        "ALiBi",
        "sees the last 4,096 tokens",
        "scores capped at 50",
        "a sink for each head",
        "clipped at 8",
        "gated by a sigmoid",
        "scores times 0.5",
        "every 8,192",
    ):
        assert words in drawn
    plain = " ".join(draw(CONFIG, LAYER))
    assert "scores times" not in plain and "capped" not in plain and "ALiBi" not in plain


@pytest.mark.parametrize(
    ("mixer", "title"),
    [
        (
            LatentAttentionConfig(4, 24, 16, 8, 12, 0.25, RopeConfig(4, 1e4), NORM),
            "latent attention, 4 heads of 8 + 4 rotated, values of 12",
        ),
        (DeltaConfig(2, 4, 8, 8, 4, NORM), "linear attention, gated delta rule"),
        (ConvConfig(32, 3, False), "gated convolution over 3 tokens"),
    ],
)
def test_other_mixers_have_their_names(mixer: object, title: str) -> None:
    lines = draw(CONFIG, replace(LAYER, attention=mixer))  # type: ignore[arg-type]
    assert any(line.endswith(title) for line in lines)


def test_experts_are_drawn_as_many() -> None:
    router = RouterConfig(8, 2, scoring="sigmoid", renormalise=True, groups=4, top_groups=2, selection_bias=True)
    expert = MLPConfig(16, "silu")
    drawn = "\n".join(draw(CONFIG, replace(LAYER, feed_forward=MoeConfig(router, expert, shared=expert))))
    assert "8 experts, 2 for each token, together 1.5 times as wide" in drawn
    assert re.search(r"experts\.gate_proj +32 → 16  × 8$", drawn, re.MULTILINE)
    assert "from 2 of 4 groups" in drawn and "one more for all tokens" in drawn


def test_rope_is_told_with_what_is_not_plain_of_it() -> None:
    assert rope_words(RopeConfig(64, 1e6), 64) == "RoPE theta 1,000,000"
    rope = RopeConfig(32, 1e4, LinearScaling(4.0), interleaved=True)
    assert rope_words(rope, 64) == "RoPE theta 10,000, 32 of 64 elements, interleaved, linear x 4"
