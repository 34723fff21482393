"""Recipes: which matrix gets which form, and what stays dense."""

from __future__ import annotations

import re

import pytest
import tiny

from tinyllm.config.config import Config
from tinyllm.config.quantization import QuantFormat
from tinyllm.convert.recipe import Recipe, choose, read_format, read_recipe
from tinyllm.errors import UsageError

FOUR, FIVE, SIX, EIGHT = (QuantFormat(bits, 64) for bits in (4, 5, 6, 8))
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 16}


def config(**overrides: object) -> Config:
    return Config.from_dict(tiny.config(**{**SIZES, **overrides}))


def test_the_first_pattern_that_fits_decides() -> None:
    recipe = read_recipe("lm_head=8,layers.*.mlp.down=6,layers.3.*=false,*=4", QuantFormat(4, 64))
    forms = choose(config(), recipe).forms
    assert forms["lm_head"] == EIGHT
    assert forms["model.layers.3.mlp.down_proj"] == SIX
    assert forms["model.layers.3.mlp.up_proj"] is None
    assert forms["model.layers.4.mlp.up_proj"] == FOUR
    assert forms["model.embed_tokens"] == FOUR


def test_a_tied_embedding_is_the_head_too() -> None:
    forms = choose(config(tie_word_embeddings=True), read_recipe("lm_head=8", FOUR)).forms
    assert forms["model.embed_tokens"] == EIGHT


@pytest.mark.parametrize("name", ["layers.0.self_attn.q", "layers.0.self_attn.q_proj", "model.layers.0.*.q_proj"])
def test_a_module_goes_by_several_names(name: str) -> None:
    forms = choose(config(), read_recipe(f"{name}=8", FOUR)).forms
    assert [module for module, form in forms.items() if form == EIGHT] == ["model.layers.0.self_attn.q_proj"]


def test_bits_that_a_mode_has_not_are_affine_and_modes_have_their_own() -> None:
    forms = choose(config(), read_recipe("lm_head=8,embed_tokens=nvfp4", QuantFormat(4, 32, "mxfp4"))).forms
    assert forms["lm_head"] == QuantFormat(8, 64)
    assert forms["model.embed_tokens"] == QuantFormat(4, 16, "nvfp4")
    assert forms["model.layers.0.mlp.up_proj"] == QuantFormat(4, 32, "mxfp4")


def test_what_stays_dense_is_said_with_the_reason() -> None:
    moe = config(
        model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, hidden_size=96, num_hidden_layers=1
    )
    dense = choose(moe, Recipe(FOUR)).dense
    assert dense["model.layers.0.mlp.gate"] == "it decides much and is small"
    assert "do not divide its 96 columns" in dense["model.layers.0.self_attn.q_proj"]
    assert "model.layers.0.mlp.experts.down_proj" not in dense
    assert not choose(moe, read_recipe("*=false", FOUR)).dense


def test_norms_of_heads_are_no_matrices() -> None:
    cohere = config(model_type="cohere", use_qk_norm=True, hidden_act="silu", layer_norm_eps=1e-5, rms_norm_eps=...)
    choice = choose(cohere, Recipe(FOUR))
    assert choice.forms["model.layers.0.self_attn.q_norm"] is None


def test_mixed_spends_bits_on_values_down_projections_and_the_head() -> None:
    forms = choose(config(), read_recipe("mixed", FOUR)).forms
    for i in range(16):
        layer = f"model.layers.{i}"
        assert forms[f"{layer}.self_attn.v_proj"] == SIX
        assert forms[f"{layer}.mlp.down_proj"] == FIVE
        assert {forms[f"{layer}.{name}"] for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")} == {
            FOUR
        }
    assert forms["lm_head"] == FIVE and forms["model.embed_tokens"] == FOUR
    assert choose(config(tie_word_embeddings=True), read_recipe("mixed", FOUR)).forms["model.embed_tokens"] == FIVE


@pytest.mark.parametrize(("base", "more", "values"), [(2, 3, 4), (3, 4, 5), (4, 5, 6), (6, 8, 8), (8, 8, 8)])
def test_mixed_has_more_bits_than_its_base(base: int, more: int, values: int) -> None:
    forms = choose(config(), read_recipe("mixed", QuantFormat(base, 64))).forms
    assert forms["model.layers.0.mlp.down_proj"] == QuantFormat(more, 64)
    assert forms["model.layers.0.self_attn.v_proj"] == QuantFormat(values, 64)


def test_patterns_come_before_mixed() -> None:
    forms = choose(config(), read_recipe("layers.0.mlp.down=false,mixed", FOUR)).forms
    assert forms["model.layers.0.mlp.down_proj"] is None and forms["model.layers.1.mlp.down_proj"] == FIVE


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "says nothing"),
        ("lm_head", "PATTERN=BITS"),
        ("=4", "PATTERN=BITS"),
        ("*=7", "not '7'"),
        ("*=int4", "not 'int4'"),
        ("*=²", "not '²'"),
    ],
)
def test_what_is_no_recipe_is_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        read_recipe(text, FOUR)


def test_a_pattern_that_fits_nothing_is_refused_by_name() -> None:
    with pytest.raises(
        UsageError, match=r"no matrix .* layers\.\*\.mlp\.dwon: it has .*layers\.\*\.mlp\.down"
    ) as told:
        choose(config(), read_recipe("layers.*.mlp.dwon=8,*=4", FOUR))
    assert "layers.0" not in str(told.value), "those of all layers once"


def test_a_pattern_that_others_leave_nothing_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"lm_head changes nothing"):
        choose(config(), read_recipe("*=4,lm_head=8", FOUR))
    choose(config(), read_recipe("layers.0.*=8,layers.*=6,*=4", FOUR))


def test_mixed_needs_bits() -> None:
    with pytest.raises(UsageError, match="only the mode affine"):
        choose(config(), read_recipe("mixed", QuantFormat(4, 32, "mxfp4")))


def test_forms_have_the_defaults_of_their_mode() -> None:
    assert read_format(None, None, "affine") == FOUR
    assert read_format(None, None, "mxfp8") == QuantFormat(8, 32, "mxfp8")
    for wrong, told in (
        ((7, None, "affine"), "--quantize"),
        ((4, 16, "affine"), "--group-size"),
        ((8, None, "mxfp4"), "--quantize"),
    ):
        with pytest.raises(UsageError, match=told):
            read_format(*wrong)
    with pytest.raises(UsageError, match="--mode"):
        read_format(4, 64, "q4_k")
