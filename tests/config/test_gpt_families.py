"""The families that came before Llama: names that the files on the hub have, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tinyllm.config.config import Config
from tinyllm.config.reach import Window
from tinyllm.config.tensors import tensor_shapes
from tinyllm.errors import ConfigError, UnsupportedModelError

OLD = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4}
COMMON = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": OLD,
    "gpt_bigcode": OLD,
    "gptj": {**OLD, "rotary_dim": 4},
    "codegen": {**OLD, "rotary_dim": 4},
    "gpt_neo": {**COMMON, "attention_types": [[["global", "local"], 1]]},
    "bloom": COMMON,
    "falcon": COMMON,
    "gpt_neox": {**COMMON, "intermediate_size": 48},
    "opt": {**COMMON, "ffn_dim": 48},
    "biogpt": {**COMMON, "intermediate_size": 48},
    "mpt": {"vocab_size": 96, "d_model": 32, "n_layers": 2, "n_heads": 4},
}


def read(model_type: str, **more: Any) -> Config:
    return Config.from_dict({"model_type": model_type, **SHAPES[model_type], **more})


@pytest.mark.parametrize(
    ("model_type", "name", "same"),
    [
        ("gpt2", "h.1.attn.c_attn.weight", "transformer.h.1.attn.c_attn.weight"),
        ("gpt2", "wpe.weight", "transformer.wpe.weight"),
        ("bloom", "word_embeddings_layernorm.bias", "transformer.word_embeddings_layernorm.bias"),
        ("bloom", "h.0.self_attention.dense.bias", "transformer.h.0.self_attention.dense.bias"),
        ("gpt_neox", "embed_out.weight", "lm_head.weight"),
        ("opt", "decoder.layers.0.fc1.weight", "model.decoder.layers.0.fc1.weight"),
        ("opt", "decoder.final_layer_norm.bias", "model.decoder.final_layer_norm.bias"),
    ],
)
def test_prefixes_may_be_absent(model_type: str, name: str, same: str) -> None:
    config = read(model_type)
    assert config.targets(name) == config.targets(same) != ()
    assert {target.name for target in config.targets(name)} <= tensor_shapes(config).keys() | {"lm_head.weight"}


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("gpt2", "h.0.attn.bias"),
        ("gptj", "transformer.h.1.attn.masked_bias"),
        ("gpt_neo", "transformer.h.1.attn.attention.bias"),
        ("gpt_neox", "gpt_neox.layers.0.attention.bias"),
        ("gpt_bigcode", "transformer.bias"),
        ("codegen", "transformer.h.0.attn.causal_mask"),
    ],
)
def test_masks_are_no_weights(model_type: str, name: str) -> None:
    assert read(model_type).targets(name) == ()


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("mpt", {"attn_config": {"alibi": False}}),
        ("mpt", {"attn_config": {"qk_ln": True}}),
        ("mpt", {"attn_config": {"prefix_lm": True}}),
        ("mpt", {"attn_config": {"alibi_bias_max": 16}}),
        ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}),
        ("mpt", {"no_bias": False}),
        ("mpt", {"logit_scale": 0.5}),
        ("mpt", {"expansion_ratio": 2}),
        ("bloom", {"apply_residual_connection_post_layernorm": True}),
        ("gptj", {"rotary": False}),
        ("gptj", {"rope_theta": 500.0}),
        ("gptj", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        ("codegen", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
        ("codegen", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ],
)
def test_what_would_change_the_numbers_is_refused(model_type: str, more: dict[str, Any]) -> None:
    read(model_type)
    with pytest.raises(UnsupportedModelError, match="not computed"):
        read(model_type, **more)


def test_unknown_keys_of_mpts_attention_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"attn_config: .*rope = True"):
        read("mpt", attn_config={"rope": True})


def test_two_names_of_one_key_must_agree() -> None:
    assert read("gpt2", hidden_size=32) == read("gpt2")
    with pytest.raises(ConfigError, match="'hidden_size' and 'n_embd' contradict"):
        read("gpt2", hidden_size=64)


def test_the_base_of_gptj_may_be_said() -> None:
    parameters = {"rope_type": "default", "rope_theta": 10000.0}
    assert read("gptj", rope_theta=10000, rope_scaling=None, rope_parameters=parameters) == read("gptj")


@pytest.mark.parametrize(
    ("key", "other", "value"),
    [("rotary_emb_base", "rope_theta", 700.0), ("rotary_pct", "partial_rotary_factor", 0.5)],
)
def test_what_gpt_neox_does_not_read_may_only_repeat_what_it_does(key: str, other: str, value: float) -> None:
    said, repeated = {key: value}, {other: value}
    assert read("gpt_neox", **said, **repeated) == read("gpt_neox", **said)
    with pytest.raises(ConfigError, match=f"'{other}' is .*'{key}', which counts"):
        read("gpt_neox", **repeated)
    inside = {"rope_type": "default", **repeated}
    assert read("gpt_neox", rope_parameters=inside, **repeated) == read("gpt_neox", **said)


@pytest.mark.parametrize(
    "types",
    [
        [[["global"], 3]],
        [[["global"], 1]],
        [[["global", "sparse"], 1]],
        [[[], 2]],
        [["global", 2]],
        [[["local"], 0]],
        7,
    ],
)
def test_attention_types_that_list_no_layers_are_refused(types: Any) -> None:
    with pytest.raises(ConfigError, match="attention_types"):
        read("gpt_neo", attention_types=types)


def test_attention_types_are_repeated() -> None:
    config = read("gpt_neo", num_hidden_layers=5, attention_types=[[["global", "local"], 2], [["local"], 1]])
    reaches = [layer.attention.reach for layer in config.layers]
    assert reaches == [None, Window(256), None, Window(256), Window(256)]


def test_learned_positions_are_the_context() -> None:
    """The engine refuses what is longer than `max_position_embeddings`: no row is read past the table's end."""
    gpt2, opt = read("gpt2", n_positions=40), read("opt", max_position_embeddings=40)
    assert gpt2.max_position_embeddings == gpt2.learned_positions == 40
    assert (opt.max_position_embeddings, opt.learned_positions, opt.position_offset) == (40, 42, 2)


def test_matrices_of_gpt2_are_transposed_but_in_conversions_of_mlx_lm() -> None:
    config = read("gpt2")
    for module in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        stored, converted = config.targets(f"h.1.{module}.weight"), config.targets(f"model.h.1.{module}.weight")
        assert [target.transposed for target in stored] == [True] * len(stored)
        assert [target.transposed for target in converted] == [False] * len(stored)
        assert [target.name for target in stored] == [target.name for target in converted]
