"""config.json of model_type "tinyllm": what it becomes, and each thing that it may not say."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm.config.config import Config
from tinyllm.config.layers import AttentionConfig, LatentAttentionConfig, MLPConfig, NormConfig, Sandwich
from tinyllm.config.reach import Strided
from tinyllm.errors import ConfigError, MissingKeyError, UnknownKeyError


def spec() -> dict[str, Any]:
    return {
        "model_type": "tinyllm",
        "vocab_size": 48,
        "hidden_size": 16,
        "max_position_embeddings": 64,
        "final_norm": {"eps": 1e-5},
        "layers": [
            {
                "repeat": 2,
                "norm": {"eps": 1e-5},
                "attention": {
                    "num_heads": 4,
                    "head_dim": 8,
                    "rope": {"dims": 8, "theta": 100.0},
                    "reach": {"kind": "strided", "local": 4, "stride": 3},
                    "bias": {"kind": "sandwich", "dims": 4},
                },
                "feed_forward": {"intermediate_size": 32, "activation": "relu2"},
            },
            {
                "norm": {"eps": 1e-5},
                "attention": {
                    "kind": "latent",
                    "num_heads": 2,
                    "latent_rank": 4,
                    "plain_dim": 5,
                    "value_dim": 6,
                    "rope": {"dims": 4, "theta": 100.0},
                    "norm": {"eps": 1e-6},
                },
                "feed_forward": {
                    "kind": "experts",
                    "router": {"num_experts": 4, "top_k": 2},
                    "expert": {"intermediate_size": 8, "activation": "silu"},
                },
            },
        ],
    }


def changed(path: str, value: Any) -> dict[str, Any]:
    """The config with another value at a path such as "layers.0.norm.eps"; ... takes the key away."""
    config = spec()
    *parents, last = path.split(".")
    place: Any = config
    for part in parents:
        place = place[int(part) if part.isdigit() else part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return config


def test_absent_keys_have_the_defaults_of_the_dataclasses() -> None:
    config = Config.from_dict(spec())
    first, second, third = config.layers
    assert first == second
    assert first.norm == NormConfig(eps=1e-5)
    assert isinstance(first.attention, AttentionConfig)
    assert (first.attention.num_kv_heads, first.attention.scale) == (4, 8**-0.5)
    assert (first.attention.reach, first.attention.bias) == (Strided(4, 3), Sandwich(4))
    assert first.feed_forward == MLPConfig(32, "relu2")
    assert isinstance(third.attention, LatentAttentionConfig)
    assert (third.attention.query_rank, third.attention.scale) == (None, 9**-0.5)
    assert config.is_moe_layer(2)
    assert (config.num_hidden_layers, config.num_attention_heads, config.head_dim) == (3, 4, 8)


@pytest.mark.parametrize("path", ["embed_norm", "logit_softcap", "layers.1.attention.query_rank"])
def test_null_is_what_is_absent(path: str) -> None:
    assert Config.from_dict(changed(path, None)) == Config.from_dict(spec())


def test_null_is_no_norm_and_no_reach() -> None:
    assert Config.from_dict(changed("final_norm", None)).final_norm is None
    attention = Config.from_dict(changed("layers.0.attention.reach", None)).layers[0].attention
    assert isinstance(attention, AttentionConfig) and attention.reach is None


REFUSED: dict[str, tuple[str, Any, type[ConfigError], str]] = {
    "unknown key of the whole": ("rope_theta", 1.0, UnknownKeyError, "rope_theta"),
    "unknown key of a layer": ("layers.0.dropout", 0.1, UnknownKeyError, "layers[0]: tinyllm does not know"),
    "unknown key within": ("layers.1.attention.norm.epsilon", 0.1, UnknownKeyError, "layers[1].attention.norm"),
    "absent key": ("layers.0.norm.eps", ..., MissingKeyError, "layers[0].norm: the key 'eps'"),
    "absent object": ("layers.0.attention", ..., MissingKeyError, "'attention'"),
    "no final norm": ("final_norm", ..., MissingKeyError, "'final_norm'"),
    "no layers": ("layers", [], ConfigError, "'layers' is empty"),
    "no list of layers": ("layers", {}, ConfigError, "'layers' must be of type list"),
    "no object in it": ("layers", [3], ConfigError, "layers[0] must be an object"),
    "too many layers": ("layers.0.repeat", 10_001, ConfigError, "'repeat'"),
    "too many in sum": ("layers.0.repeat", 10_000, ConfigError, "more than 10000 layers"),
    "null for an object": ("layers.0.norm", None, ConfigError, "'norm' must be of type dict, not null"),
    "text for an object": ("layers.0.norm", "rms", ConfigError, "'norm' must be of type dict, not str"),
    "text for a number": ("layers.0.attention.num_heads", "4", ConfigError, "'num_heads' must be of type int"),
    "flag for a number": ("hidden_size", True, ConfigError, "'hidden_size' must be of type int"),
    "no heads": ("layers.0.attention.num_heads", 0, ConfigError, "'num_heads' is 0"),
    "no scaling": ("layers.0.attention.rope.scaling", {}, MissingKeyError, "rope.scaling: the key 'kind'"),
    "unknown kind": ("layers.0.attention.reach.kind", "spiral", ConfigError, "window, chunk, strided"),
    "unknown attention": ("layers.0.attention.kind", "hyena", ConfigError, "'kind' is 'hyena'"),
    "unknown placement": ("layers.0.placement", "nowhere", ConfigError, "'placement' is 'nowhere'"),
    "unknown activation": ("layers.0.feed_forward.activation", "selu", ConfigError, "'activation' is 'selu'"),
    "bias of RMSNorm": ("layers.0.norm.bias", True, ConfigError, "an RMSNorm has no bias"),
    "offset without weight": ("final_norm", {"eps": 0, "weight": False, "offset": 1}, ConfigError, "offset"),
    "heads in no groups": ("layers.0.attention.num_kv_heads", 3, ConfigError, "not a multiple"),
    "wide rotation": ("layers.0.attention.rope.dims", 10, ConfigError, "more than head_dim"),
    "odd rotation": ("layers.1.attention.rope.dims", 3, ConfigError, "must be even"),
    "odd sandwich": ("layers.0.attention.bias.dims", 3, ConfigError, "must be even"),
    "top of too few": ("layers.1.feed_forward.router.top_k", 5, ConfigError, "5 experts a token"),
    "groups of unequal size": ("layers.1.feed_forward.router.groups", 3, ConfigError, "make no sense"),
    "gate of nothing": ("layers.1.feed_forward.shared_gate", True, ConfigError, "shared_gate needs"),
    "limit of what is not gated": (
        "layers.0.feed_forward",
        {"intermediate_size": 8, "activation": "silu", "gated": False, "limit": 1},
        ConfigError,
        "a limit is for",
    ),
    "shared norm": ("layers.0.shared_norm", True, ConfigError, "shared_norm is for"),
    "too few positions": ("learned_positions", 63, ConfigError, "fewer than 64 positions"),
    "bias of a head's norm": (
        "layers.0.attention.qk_norm",
        {"norm": {"kind": "layer", "eps": 0.1, "bias": True}},
        ConfigError,
        "a norm of each head has no bias",
    ),
    "longrope of another length": (
        "layers.0.attention.rope.scaling",
        {
            "kind": "longrope",
            "short_factor": [1],
            "long_factor": [1, 2, 3, 4],
            "attention_factor": 1,
            "original_max_position_embeddings": 8,
        },
        ConfigError,
        "must have 4 numbers",
    ),
    "llama3 upside down": (
        "layers.0.attention.rope.scaling",
        {
            "kind": "llama3",
            "factor": 8,
            "low_freq_factor": 5,
            "high_freq_factor": 4,
            "original_max_position_embeddings": 8,
        },
        ConfigError,
        "must not be below",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_makes_no_sense_is_refused_by_name(what: str) -> None:
    path, value, error, message = REFUSED[what]
    with pytest.raises(error) as raised:
        Config.from_dict(changed(path, value), source="here.json")
    assert message in str(raised.value)
    assert str(raised.value).startswith("here.json: ")
    assert "\n" not in str(raised.value)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 70)
    | st.floats(allow_nan=True)
    | st.sampled_from(["kind", "rms", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["kind", "eps", "dims"]), inner),
    max_leaves=8,
)


def paths(value: Any, at: str = "") -> list[str]:
    """Every place in the config."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, inner in items for path in (f"{at}{key}", *paths(inner, f"{at}{key}."))]


@given(path=st.sampled_from([path for path in paths(spec()) if not path.split(".")[-1].isdigit()]), value=JSON)
def test_any_value_anywhere_is_read_or_refused(path: str, value: Any) -> None:
    config = changed(path, copy.deepcopy(value))
    if config.get("model_type") != "tinyllm":
        return
    try:
        Config.from_dict(config)
    except ConfigError as error:
        assert "\n" not in str(error)


def test_repeat_is_the_same_as_writing_the_layer_out() -> None:
    config = spec()
    again = {**config["layers"][0], "repeat": 1}
    assert Config.from_dict({**config, "layers": [again, again, config["layers"][1]]}) == Config.from_dict(config)
