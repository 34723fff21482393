"""Tensors that hold several canonical ones, stand transposed, or are one of many experts: each is found whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.config.fused import (
    Split,
    grouped_qkv,
    paired_gate_up,
    query_and_gate,
    stacked_gate_up,
    stacked_qkv,
)
from tinyllm.config.layers import (
    AttentionConfig,
    LatentAttentionConfig,
    MLPConfig,
    MoeConfig,
    NormConfig,
    RouterConfig,
)
from tinyllm.config.rope import RopeConfig
from tinyllm.config.tensors import tensor_shapes
from tinyllm.errors import CheckpointError, ConfigError, TensorMismatchError

ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
HEADS, KV_HEADS, DIM, WIDTH, EXPERTS = 4, 2, 8, 48, 3
Tensors = dict[str, np.ndarray]


def config_of(*, splits: tuple[Split, ...] = (), mixture: MoeConfig | None = None, **family: Any) -> Config:
    """The tiny llama of one layer, of a family that stores some things otherwise."""
    overrides = {name: family.pop(name) for name in tuple(family) if name in ("attention_bias", "mlp_bias")}
    config = Config.from_dict(tiny.config(num_hidden_layers=1, **overrides))
    [layer] = config.layers
    if mixture is not None:
        layer = replace(layer, feed_forward=mixture)
    return replace(config, layers=(layer,), family=replace(config.family, splits=splits, **family))


def turned(module: str) -> tuple[tuple[str, str], ...]:
    """Return the renames of a family whose matrices of some modules stand as (in, out)."""
    return ((rf"({module})\.weight$", r"\1.transposed"),)


def tensors_of(config: Config) -> Tensors:
    """Return every tensor that the network needs; no two elements are alike."""
    shapes = tensor_shapes(config)
    counts = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes.values())])
    numbers = np.random.default_rng(0).permutation(counts[-1]).astype(np.float32)
    return {
        name: numbers[start : start + int(np.prod(shape))].reshape(shape)
        for (name, shape), start in zip(shapes.items(), counts[:-1], strict=True)
    }


def check(folder: Path, config: Config, stored: Tensors, canonical: Tensors, shards: int = 1) -> None:
    """Read what was stored, in any order and more than once: it is what was to be."""
    tiny.write_weights(folder, stored, shards=shards)
    store = WeightStore.from_path(folder, config)
    assert store.names == canonical.keys()
    for name in (*canonical, *reversed(canonical)):
        assert store.shape(name) == canonical[name].shape
        assert np.array_equal(np.array(store.tensor(name)), canonical[name]), name
    assert store.nbytes == sum(array.nbytes for array in canonical.values())


def by_head(array: np.ndarray, heads: int) -> list[np.ndarray]:
    return list(array.reshape(heads, -1, *array.shape[1:]))


def one_below_the_other(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


def group_after_group(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The q heads of a group, their k, their v."""
    heads, out = by_head(q, HEADS), []
    for group, (key, value) in enumerate(zip(by_head(k, KV_HEADS), by_head(v, KV_HEADS), strict=True)):
        mine = heads[group * HEADS // KV_HEADS : (group + 1) * HEADS // KV_HEADS]
        out += [*mine, key, value]
    return np.concatenate(out)


def in_turns(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return np.stack([gate, up], axis=1).reshape(-1, *gate.shape[1:])


def head_and_gate(q: np.ndarray, gate: np.ndarray) -> np.ndarray:
    pairs = zip(by_head(q, HEADS), by_head(gate, HEADS), strict=True)
    return np.concatenate([each for pair in pairs for each in pair])


FUSED: dict[str, tuple[str, str, tuple[str, ...], Any, Callable[..., np.ndarray]]] = {
    "stacked q, k, v": (ATTENTION, "qkv_proj", ("q", "k", "v"), stacked_qkv, one_below_the_other),
    "grouped q, k, v": (ATTENTION, "query_key_value", ("q", "k", "v"), grouped_qkv, group_after_group),
    "stacked gate, up": (MLP, "gate_up_proj", ("gate", "up"), stacked_gate_up, one_below_the_other),
    "paired gate, up": (MLP, "gate_up_proj", ("gate", "up"), paired_gate_up, in_turns),
}


@pytest.mark.parametrize("form", FUSED)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shards", [1, 2])
def test_parts_of_a_fused_matrix_and_of_its_bias_are_found(
    tmp_path: Path, form: str, transposed: bool, shards: int
) -> None:
    parent, module, parts, pieces, fuse = FUSED[form]
    config = config_of(
        splits=(Split(f".{module}", pieces),),
        renames=turned(rf"\.{module}") if transposed else (),
        attention_bias=True,
        mlp_bias=True,
    )
    canonical = tensors_of(config)
    stored = dict(canonical)
    for leaf in ("weight", "bias"):
        fused = fuse(*(stored.pop(f"{parent}.{part}_proj.{leaf}") for part in parts))
        stored[f"{parent}.{module}.{leaf}"] = np.ascontiguousarray(fused.T) if transposed else fused
    check(tmp_path, config, stored, canonical, shards)


@pytest.mark.parametrize("bias", [False, True])
def test_a_query_and_its_gate_are_told_apart(tmp_path: Path, bias: bool) -> None:
    """Where the module keeps its name: the queries' part has the name of the whole."""
    config = config_of(splits=(Split(".q_proj", query_and_gate),), attention_bias=bias)
    [layer] = config.layers
    assert isinstance(layer.attention, AttentionConfig)
    config = replace(config, layers=(replace(layer, attention=replace(layer.attention, gate=True)),))
    canonical = tensors_of(config)
    stored = dict(canonical)
    for leaf in ("weight", "bias") if bias else ("weight",):
        q, gate = (stored.pop(f"{ATTENTION}.{part}_proj.{leaf}") for part in "qg")
        stored[f"{ATTENTION}.q_proj.{leaf}"] = head_and_gate(q, gate)
    check(tmp_path, config, stored, canonical)


def test_a_matrix_that_stands_transposed_is_turned(tmp_path: Path) -> None:
    config = config_of(renames=turned(r"mlp\.down_proj"), mlp_bias=True)
    canonical = tensors_of(config)
    name = f"{MLP}.down_proj.weight"
    check(tmp_path, config, {**canonical, name: np.ascontiguousarray(canonical[name].T)}, canonical)


def test_parts_of_a_packed_matrix_are_packed_rows(tmp_path: Path) -> None:
    config = Config.from_dict(
        tiny.config(num_hidden_layers=1, hidden_size=64, quantization={"bits": 4, "group_size": 32})
    )
    config = replace(config, family=replace(config.family, splits=(Split(".qkv_proj", stacked_qkv),)))
    whole = mx.random.normal(((4 + 2 + 2) * 16, 64), key=mx.random.key(0))
    stored = tensors_of(config)
    for part in "qkv":
        del stored[f"{ATTENTION}.{part}_proj.weight"]
    packed = mx.quantize(whole, group_size=32, bits=4)
    for leaf, array in zip(("weight", "scales", "biases"), packed, strict=True):
        stored[f"{ATTENTION}.qkv_proj.{leaf}"] = np.array(array)
    tiny.write_weights(tmp_path, stored)
    store = WeightStore.from_path(tmp_path, config)
    dense = mx.dequantize(*packed, group_size=32, bits=4)
    for part, rows in (("q", slice(0, 64)), ("k", slice(64, 96)), ("v", slice(96, 128))):
        assert mx.array_equal(store.dense(f"{ATTENTION}.{part}_proj"), dense[rows]).item()


# ---------------------------------------------------------------- experts

MIXTURE = MoeConfig(RouterConfig(EXPERTS, 2), MLPConfig(WIDTH, "silu", bias=True), MLPConfig(24, "silu"))
EACH = f"{MLP}.experts"


def one_by_one(tensors: Tensors) -> Tensors:
    """Store the tensors of experts under the number of each."""
    stored: Tensors = {}
    for name, array in tensors.items():
        if name.startswith(f"{EACH}."):
            leaf = name.removeprefix(f"{EACH}.")
            stored |= {f"{EACH}.{i}.{leaf}": array[i] for i in range(EXPERTS)}
        else:
            stored[name] = array
    return stored


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("stacked", [False, True], ids=["one by one", "stacked"])
def test_experts_are_found_one_by_one_or_stacked(tmp_path: Path, stacked: bool, shards: int) -> None:
    config = config_of(mixture=MIXTURE)
    canonical = tensors_of(config)
    check(tmp_path, config, canonical if stacked else one_by_one(canonical), canonical, shards)


@pytest.mark.parametrize("form", ["stacked gate, up", "paired gate, up"])
@pytest.mark.parametrize("stacked", [False, True], ids=["one by one", "stacked"])
@pytest.mark.parametrize("transposed", [False, True])
def test_fused_experts_are_taken_apart(tmp_path: Path, form: str, stacked: bool, transposed: bool) -> None:
    """Beside what they share, which has another width and is fused too."""
    _, module, parts, pieces, fuse = FUSED[form]
    config = config_of(
        splits=(Split(f".{module}", pieces),),
        mixture=MIXTURE,
        renames=turned(r"experts\.(?:\d+\.)?(?:gate_up|down)_proj") if transposed else (),
    )
    canonical = tensors_of(config)
    stored = dict(canonical)

    def fused(parent: str, leaf: str, *, each: bool) -> None:
        taken = [stored.pop(f"{parent}.{part}_proj.{leaf}") for part in parts]
        whole = np.stack([fuse(*own) for own in zip(*taken, strict=True)]) if each else fuse(*taken)
        stored[f"{parent}.{module}.{leaf}"] = whole

    fused(EACH, "weight", each=True)
    fused(EACH, "bias", each=True)
    fused(f"{MLP}.shared_expert", "weight", each=False)
    for name in (f"{EACH}.gate_up_proj.weight", f"{EACH}.down_proj.weight") if transposed else ():
        stored[name] = np.ascontiguousarray(stored[name].swapaxes(1, 2))
    check(tmp_path, config, stored if stacked else one_by_one(stored), canonical)


def refusal(folder: Path, config: Config, stored: Tensors, error: type[Exception] = CheckpointError) -> str:
    tiny.write_weights(folder, stored)
    with pytest.raises(error) as failure:
        WeightStore.from_path(folder, config)
    assert str(failure.value).isprintable()
    return str(failure.value)


def test_an_expert_that_is_absent_is_named(tmp_path: Path) -> None:
    config = config_of(mixture=MIXTURE)
    stored = one_by_one(tensors_of(config))
    del stored[f"{EACH}.1.up_proj.weight"]
    told = refusal(tmp_path, config, stored)
    assert f"{EACH}.up_proj.weight" in told and "expert 1 is absent" in told


def test_the_last_experts_absence_is_a_shape_that_is_wrong(tmp_path: Path) -> None:
    config = config_of(mixture=MIXTURE)
    stored = one_by_one(tensors_of(config))
    del stored[f"{EACH}.2.up_proj.weight"]
    assert f"{EACH}.up_proj.weight" in refusal(tmp_path, config, stored, TensorMismatchError)


def test_an_expert_that_is_unlike_the_others_is_refused(tmp_path: Path) -> None:
    config = config_of(mixture=MIXTURE)
    stored = one_by_one(tensors_of(config))
    stored[f"{EACH}.1.up_proj.weight"] = stored[f"{EACH}.1.up_proj.weight"][:-1]
    assert "different shapes" in refusal(tmp_path, config, stored)


def test_an_expert_that_is_fused_where_the_others_are_not_is_refused(tmp_path: Path) -> None:
    config = config_of(splits=(Split(".gate_up_proj", stacked_gate_up),), mixture=MIXTURE)
    stored = one_by_one(tensors_of(config))
    del stored[f"{EACH}.1.up_proj.weight"]
    stored[f"{EACH}.1.gate_up_proj.weight"] = stored.pop(f"{EACH}.1.gate_proj.weight")
    told = refusal(tmp_path, config, stored)
    assert f"{EACH}.1.gate_up_proj.weight" in told and "fused or turned otherwise" in told


@pytest.mark.parametrize("other", [f"{EACH}.up_proj.weight", "language_model." + f"{EACH}.1.up_proj.weight"])
def test_an_expert_that_is_there_twice_is_refused(tmp_path: Path, other: str) -> None:
    """As one of many and in a stack, or under two names that mean the same."""
    config = config_of(mixture=MIXTURE, renames=((r"^language_model\.", ""),))
    canonical = tensors_of(config)
    stored = one_by_one(canonical)
    stored[other] = canonical[f"{EACH}.up_proj.weight"][: None if other.startswith(EACH) else 1]
    assert "is there twice" in refusal(tmp_path, config, stored)


def test_a_part_that_is_there_beside_the_fused_one_is_refused(tmp_path: Path) -> None:
    config = config_of(splits=(Split(".qkv_proj", stacked_qkv),))
    stored = tensors_of(config)
    parts = [stored[f"{ATTENTION}.{part}_proj.weight"] for part in "qkv"]
    for part in "kv":
        del stored[f"{ATTENTION}.{part}_proj.weight"]
    stored[f"{ATTENTION}.qkv_proj.weight"] = np.concatenate(parts)
    assert f"{ATTENTION}.q" in (told := refusal(tmp_path, config, stored)) and "is there twice" in told


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("leaf", ["weight", "bias"])
def test_a_fused_tensor_of_another_width_is_refused(tmp_path: Path, leaf: str, transposed: bool) -> None:
    config = config_of(
        splits=(Split(".qkv_proj", stacked_qkv),),
        renames=turned(r"\.qkv_proj") if transposed else (),
        attention_bias=True,
    )
    stored = tensors_of(config)
    for each in ("weight", "bias"):
        parts = [stored.pop(f"{ATTENTION}.{part}_proj.{each}") for part in "qkv"]
        fused = np.concatenate(parts)[: -1 if each == leaf else None]
        stored[f"{ATTENTION}.qkv_proj.{each}"] = np.ascontiguousarray(fused.T) if transposed else fused
    told = refusal(tmp_path, config, stored)
    assert f"{ATTENTION}.qkv_proj.{leaf}" in told and f"{(HEADS + 2 * KV_HEADS) * DIM}" in told


def test_a_fused_number_is_refused(tmp_path: Path) -> None:
    """A tensor that has no rows at all."""
    config = config_of(splits=(Split(".qkv_proj", stacked_qkv),))
    stored = tensors_of(config)
    for part in "qkv":
        del stored[f"{ATTENTION}.{part}_proj.weight"]
    stored[f"{ATTENTION}.qkv_proj.weight"] = np.array(1.0, dtype=np.float32)
    assert f"{ATTENTION}.qkv_proj.weight" in refusal(tmp_path, config, stored)


def test_layers_after_the_last_are_left_out(tmp_path: Path) -> None:
    config = replace(config_of(), extra_layers=1)
    canonical = tensors_of(config)
    extra = {
        name.replace("layers.0.", "layers.1."): array for name, array in canonical.items() if "layers.0." in name
    }
    check(tmp_path, config, {**canonical, **extra}, canonical)
    assert "layers.1." in refusal(tmp_path, replace(config, extra_layers=0), {**canonical, **extra}, CheckpointError)


def test_fused_q_k_and_v_need_attention_of_heads() -> None:
    [layer] = config_of().layers
    latent = LatentAttentionConfig(2, None, 8, 4, 4, 0.3, RopeConfig(4, 1e4), NormConfig(1e-5))
    with pytest.raises(ConfigError, match="other attention"):
        stacked_qkv(replace(layer, attention=latent), f"{ATTENTION}.qkv_proj")
