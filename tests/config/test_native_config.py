"""config.json of model_type "tinyllm": what it becomes, and each thing that it may not say."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from golden_cases import FOLDERS, GOLDEN
from hypothesis import given
from hypothesis import strategies as st

import tinyllm.config.layers as layers_module
import tinyllm.config.reach as reach_module
import tinyllm.config.rope as rope_module
from tinyllm.config import native
from tinyllm.config.config import Config
from tinyllm.config.layers import AttentionConfig, LatentAttentionConfig, MLPConfig, NormConfig, Sandwich
from tinyllm.config.native import write_native
from tinyllm.config.reach import Strided
from tinyllm.config.reader import ConfigReader
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


DELTA = {"kind": "delta", "num_key_heads": 2, "num_value_heads": 4, "key_dim": 4, "value_dim": 6, "kernel": 4}
DELTA |= {"norm": {"eps": 1e-6}}
CONVOLUTION = {"kind": "conv", "width": 16, "kernel": 3}
MLP, EXPERTS = (layer["feed_forward"] for layer in spec()["layers"])


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
    "unknown key of the whole": ("rotary_theta", 1.0, UnknownKeyError, "rotary_theta"),
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
    "another number of layers": ("num_hidden_layers", 2, ConfigError, "num_hidden_layers is 2, but there are 3"),
    "inputs of too few tokens": (
        "layer_inputs",
        {"vocab_size": 47, "width": 4, "activation": "gelu"},
        ConfigError,
        "layer_inputs.vocab_size (47) is less than",
    ),
    "inputs that are not named": (
        "layer_inputs",
        {"width": 4},
        MissingKeyError,
        "layer_inputs: the key 'vocab_size'",
    ),
    "a kernel of nothing before": ("layers.0.attention", {**CONVOLUTION, "kernel": 1}, ConfigError, "'kernel' is 1"),
    "key of another kind": (
        "layers.0.attention",
        {**CONVOLUTION, "gate": True},
        UnknownKeyError,
        "attention: tinyllm",
    ),
    "values in no groups": (
        "layers.0.attention",
        {**DELTA, "num_value_heads": 3},
        ConfigError,
        "not a multiple of num_k",
    ),
    "xielu within a rule": (
        "layers.0.attention",
        {**DELTA, "activation": "xielu"},
        ConfigError,
        "'activation' is 'x",
    ),
    "xielu with a gate": ("layers.0.feed_forward.activation", "xielu", ConfigError, "not gated"),
    "xielu of experts": (
        "layers.1.feed_forward.expert",
        {"intermediate_size": 8, "activation": "xielu", "gated": False},
        ConfigError,
        "layers[1].feed_forward: experts have no xielu",
    ),
    "scale of parallel branches": (
        "layers",
        [{**spec()["layers"][0], "placement": "parallel", "branch_scale": 0.5}],
        ConfigError,
        "layers[0]: norms of placement 'parallel' and scaled branches",
    ),
    "alpha before norms": ("layers.0.residual_scale", 2.0, ConfigError, "scaled branches do not go together"),
    "groups of a mixed choice": (
        "layers.1.feed_forward.router",
        {"num_experts": 4, "top_k": 2, "scoring": "mixed", "selection_bias": True},
        ConfigError,
        "feed_forward.router: scoring 'mixed'",
    ),
    "experts beside a dense network": (
        "layers.0.feed_forward",
        {"kind": "dual", "dense": MLP, "experts": {"router": EXPERTS["router"], "expert": EXPERTS["expert"]}},
        ConfigError,
        "layers[0]: experts beside a dense network have norms before and after",
    ),
    "more pairs than there are": (
        "layers.0.attention.rope.scaling",
        {"kind": "proportional", "pairs": 5, "factor": 1},
        ConfigError,
        "scaling.pairs (5) are more than there are, 4",
    ),
    "values of others": (
        "layers.0.attention",
        {"num_heads": 4, "head_dim": 8, "source": 0, "values_are_keys": True},
        ConfigError,
        "sees another's values",
    ),
    "dynamic scaling beyond its length": (
        "layers.0.attention.rope.scaling",
        {"kind": "dynamic", "factor": 2, "original_max_position_embeddings": 63},
        ConfigError,
        "less than 64, the longest computed",
    ),
    "itself as a source": ("layers.0.attention.source", 0, ConfigError, "layers: the source of layer 0 is 0"),
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


# ---------------------------------------------------------------- that all can be written


def heads(**more: Any) -> dict[str, Any]:
    return {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, **more}


@pytest.mark.parametrize(
    ("later", "fault"),
    [
        (heads(source=0), None),
        (heads(source=0, num_heads=2, gate=True), None),
        (heads(source=0, num_kv_heads=4), "as many"),
        (heads(source=0, head_dim=4), "as wide"),
        (heads(source=0, reach={"kind": "window", "size": 3}), "the same reach"),
        (heads(source=1), "an earlier layer"),
        (heads(source=2), "an earlier layer"),
        (heads(source=3), "an earlier layer"),
    ],
)
def test_a_source_has_what_is_looked_for(later: dict[str, Any], fault: str | None) -> None:
    """Layer 0 has keys, 1 is a convolution, 2 sees the keys of 0, and what 3 may see is asked."""
    mixers = (heads(), CONVOLUTION, heads(source=0), later)
    layers = [{"norm": {"eps": 1e-5}, "feed_forward": MLP, "attention": mixer} for mixer in mixers]
    config = {**spec(), "layers": layers}
    if fault is None:
        assert Config.from_dict(config).cache_places == (0, 1, 0, 0)
        return
    with pytest.raises(ConfigError, match=f"layers: the source of layer 3 is .*{fault}"):
        Config.from_dict(config)


def options(hint: Any) -> tuple[Any, ...]:
    """What a field may be."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def samples(hint: Any) -> Iterator[Any]:
    """Values of a type: each of its classes, each of its words, and of numbers one that is no default."""
    for option in options(hint):
        if is_dataclass(option):
            yield minimal(option)
        elif get_origin(option) is Literal:
            yield from get_args(option)
        elif get_origin(option) is tuple:
            [first, *_] = samples(get_args(option)[0])
            yield (first, first)
        else:
            yield from {bool: (False, True), int: (3,), float: (3.5,), NoneType: (None,)}[option]


def minimal(cls: Any) -> Any:
    """An object of what has no default."""
    hints = get_type_hints(cls)
    needed = [field.name for field in fields(cls) if field.default is MISSING]
    return cls(**{name: next(samples(hints[name])) for name in needed})


def reachable(cls: Any) -> list[Any]:
    """The class, and those of all that its fields may hold."""
    found: list[Any] = []
    left = [cls]
    while left:
        each = left.pop()
        if is_dataclass(each) and each not in found:
            found.append(each)
            names = [field.name for field in fields(each) if each is not Config or field.name not in OF_THE_FILE]
            inner = [option for name in names for option in options(get_type_hints(each)[name])]
            left += [arg for option in inner for arg in (option, *get_args(option))]
    return found


OF_THE_FILE = {"model_type", "eos_token_ids", "dtype", "quantization", "family", "wrapper"}
FIELDS = [
    (cls, field.name)
    for cls in reachable(Config)
    for field in fields(cls)
    if cls is not Config or field.name not in OF_THE_FILE
]


def test_the_walk_reaches_all_that_a_layer_can_be() -> None:
    modules = (layers_module, reach_module, rope_module)
    classes = {
        cls
        for module in modules
        for cls in vars(module).values()
        if is_dataclass(cls) and cls.__module__ == module.__name__ and not cls.__name__.startswith("_")
    }
    assert classes - {reach_module.State} == set(reachable(Config)) - {Config}  # a state is no layer's to choose


@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_every_value_of_every_field_can_be_written_and_read(
    cls: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it makes sense beside the other fields is not asked here."""
    for check in ("check", "check_whole"):
        monkeypatch.setattr(native, check, lambda reader, made: None)
    values = list(samples(get_type_hints(cls)[name]))
    if cls is Config:
        base = Config.from_dict(spec())
        made = [replace(base, **{name: value}) for value in values]
        again = [Config.from_dict(through_json(write_native(each))) for each in made]
    else:
        made = [replace(minimal(cls), **{name: value}) for value in values]
        again = [native._read(ConfigReader(through_json(native._written(each)), "here.json"), cls) for each in made]
    assert again == made and len({repr(each) for each in made}) == len(values) > 0


def test_kinds_have_names_of_their_own() -> None:
    for cls in reachable(Config):
        for hint in get_type_hints(cls).values():
            kinds = [native.kind_name(option) for option in options(hint) if is_dataclass(option)]
            assert len(set(kinds)) == len(kinds)


def test_the_page_names_every_field_every_kind_and_every_word() -> None:
    page = (Path(__file__).parents[2] / "docs" / "NATIVE.md").read_text(encoding="utf-8")
    named = {name for _, name in FIELDS}
    for cls, name in FIELDS:
        for option in options(get_type_hints(cls)[name]):
            named |= {native.kind_name(option)} if is_dataclass(option) and len(kinds_of(cls, name)) > 1 else set()
            named |= set(get_args(option)) if get_origin(option) is Literal else set()
    said = set(re.findall(r'[`"]([\w ]+)[`"]', page))
    assert named - said == set()


def kinds_of(cls: Any, name: str) -> list[Any]:
    return [option for option in options(get_type_hints(cls)[name]) if is_dataclass(option)]


def through_json(values: Any) -> Any:
    return json.loads(json.dumps(values, allow_nan=False))


@pytest.mark.parametrize("name", FOLDERS)
def test_every_family_can_be_written_natively(name: str) -> None:
    config = Config.from_json_file(GOLDEN / name)
    wanted = replace(config, model_type="tinyllm", family=native.NATIVE, wrapper=None)
    if config.quantization is not None and config.quantization.stored is not None:
        wanted = replace(wanted, quantization=None)
    assert Config.from_dict(through_json(write_native(config))) == wanted


def test_what_is_written_says_no_more_than_it_must() -> None:
    assert write_native(Config.from_dict(spec())) == spec()
