"""What files of Gemma's relatives say, and what they leave out."""

from __future__ import annotations

from typing import Any

import pytest

from tinyllm.config.config import Config
from tinyllm.config.layers import AttentionConfig, DualConfig
from tinyllm.config.reach import Window
from tinyllm.config.rope import LinearScaling, ProportionalScaling
from tinyllm.errors import ConfigError, UnknownKeyError, UnsupportedModelError
from tinyllm.kv.kinds import layer_kinds

SHAPES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GEMMA4 = {
    **SHAPES,
    "model_type": "gemma4_text",
    "head_dim": 8,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}


def attentions(config: Config) -> list[AttentionConfig]:
    """Return the attention of each layer."""
    found = [layer.attention for layer in config.layers]
    assert all(isinstance(attention, AttentionConfig) for attention in found)
    return found  # type: ignore[return-value]


def test_larger_gemma_3_leave_out_what_equals_the_defaults() -> None:
    """Even the number of heads, and the size of the vocabulary (gemma-3-4b-it)."""
    config = Config.from_dict(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "boi_token_index": 255999,
            "eoi_token_index": 256000,
            "eos_token_id": [1, 106],
            "image_token_index": 262144,
            "initializer_range": 0.02,
            "mm_tokens_per_image": 256,
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
        }
    )
    assert (config.vocab_size, config.num_attention_heads, config.tie_word_embeddings) == (262208, 8, True)
    assert config.eos_token_ids == (1, 106)
    for i, attention in enumerate(attentions(config)):
        assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (8, 4, 256)
        assert attention.scale == 256**-0.5 and attention.rope is not None
        if i % 6 == 5:
            assert (attention.reach, attention.rope.theta) == (None, 1e6)
            assert attention.rope.scaling == LinearScaling(8.0)
        else:
            assert (attention.reach, attention.rope.theta, attention.rope.scaling) == (Window(1024), 1e4, None)


def test_gemma_4_without_rope_parameters_has_those_of_its_class() -> None:
    config = Config.from_dict({**GEMMA4, "global_head_dim": 16})
    sliding, _, full, *_ = attentions(config)
    assert sliding.rope is not None and full.rope is not None
    assert (sliding.rope.dims, sliding.rope.theta, sliding.rope.scaling) == (8, 1e4, None)
    assert (full.rope.dims, full.rope.theta, full.rope.scaling) == (16, 1e6, ProportionalScaling(2, 1.0))


def test_layers_of_gemma_4_that_share_keys_have_no_cache() -> None:
    """The last layers see the last of their kind before them, and keep nothing."""
    config = Config.from_dict({**GEMMA4, "num_kv_shared_layers": 3, "use_double_wide_mlp": True})
    assert [attention.source for attention in attentions(config)] == [None, None, None, 1, 1, 2]
    assert config.cache_places == (0, 1, 2, 1, 1, 2)
    kinds, places = layer_kinds(config)
    assert [kind.layers for kind in kinds] == [2, 1] and len(places) == 3
    assert [layer.feed_forward.intermediate_size for layer in config.layers] == [48] * 3 + [96] * 3  # type: ignore[union-attr]


def test_sharing_needs_a_layer_of_each_kind() -> None:
    with pytest.raises(ConfigError, match="without keys and values"):
        Config.from_dict({**GEMMA4, "num_kv_shared_layers": 4})


def test_layers_of_gemma_4_may_stand_by_their_numbers() -> None:
    """As transformers 5 writes what differs from layer to layer, and as the first files do."""
    fewer = {"attention_k_eq_v": True, "global_head_dim": 16, "num_global_key_value_heads": 1}
    by_number = {str(i): {"head_dim": 16, "num_key_value_heads": 1} for i in (2, 5)}
    first = Config.from_dict({**GEMMA4, **fewer})
    assert first == Config.from_dict({**GEMMA4, "attention_k_eq_v": True, "per_layer_config": by_number})
    full = attentions(first)[2]
    assert (full.head_dim, full.num_kv_heads, full.values_are_keys) == (16, 1, True)
    for wrong in ({"7": {"head_dim": 16}}, {"x": {"head_dim": 16}}, {"0": None}, {"-1": {"head_dim": 16}}):
        with pytest.raises(ConfigError, match="the number of no layer"):
            Config.from_dict({**GEMMA4, "per_layer_config": wrong})
    with pytest.raises(UnknownKeyError, match="sliding_window"):
        Config.from_dict({**GEMMA4, "per_layer_config": {"2": {"sliding_window": 3}}})
    with pytest.raises(UnsupportedModelError, match="different sizes"):
        Config.from_dict({**GEMMA4, "per_layer_config": {"2": {"head_dim": 16}}})


def test_experts_of_gemma_4_stand_beside_a_dense_network() -> None:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
    config = Config.from_dict({**GEMMA4, **experts})
    for layer in config.layers:
        assert isinstance(layer.feed_forward, DualConfig)
        assert layer.feed_forward.dense.intermediate_size == 48
        assert layer.feed_forward.experts.expert.intermediate_size == 8
    assert Config.from_dict({**GEMMA4, **dict.fromkeys(experts), "enable_moe_block": False})
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        with pytest.raises(ConfigError, match=name):
            Config.from_dict({**GEMMA4, **experts, name: None})


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gemma2", "use_bidirectional_attention": True},
        {"model_type": "gemma3_text", "use_bidirectional_attention": True},
        {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
        {"model_type": "gemma3_text", "rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0}},
        {"model_type": "olmo3", "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"model_type": "gemma4_text", "use_bidirectional_attention": "all"},
        {"model_type": "gemma", "hidden_activation": "silu"},
        {"model_type": "phi3", "lm_head_bias": True},
        {"model_type": "cohere2", "use_parallel_block": False},
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any]) -> None:
    name = next(key for key in changes if key != "model_type")
    with pytest.raises(UnsupportedModelError, match=name):
        Config.from_dict({**SHAPES, **changes})
