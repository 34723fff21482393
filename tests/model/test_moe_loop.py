"""A mixture of experts against a loop over tokens; gathered or one by one, dense or packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plain
import pytest
import tiny

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import QuantizedWeight, WeightStore
from tinyllm.config.config import Config
from tinyllm.config.layers import MLPConfig, MoeConfig, RouterConfig
from tinyllm.config.tensors import tensor_shapes
from tinyllm.errors import ConfigError
from tinyllm.model.linear import expert_linear, linear, linear_of
from tinyllm.model.mlp import MLP
from tinyllm.model.moe import Moe
from tinyllm.ops.features import ModelFeatures
from tinyllm.ops.quant import dequantize
from tinyllm.ops.routing import route

MODULE, HIDDEN, WIDTH, EXPERTS = "model.layers.0.mlp", 32, 32, 6
PACKED = {"quantization": {"bits": 4, "group_size": 32}}
WAYS = {
    "gathered": ModelFeatures(),
    "gathered, up after gate": replace(ModelFeatures(), fused_projections=False),
    "one by one": replace(ModelFeatures(), gathered_experts=False),
    "reference": ModelFeatures.reference(),
}
PLAIN = MoeConfig(RouterConfig(EXPERTS, 2, renormalise=True), MLPConfig(WIDTH, "silu"))
MIXTURES = {
    "plain": PLAIN,
    "all experts": replace(PLAIN, router=RouterConfig(EXPERTS, EXPERTS)),
    "one expert": replace(PLAIN, router=RouterConfig(EXPERTS, 1, scoring="sigmoid", scale=2.5)),
    "biased": MoeConfig(
        RouterConfig(EXPERTS, 3, scoring="chosen", bias=True), MLPConfig(WIDTH, "silu", bias=True, limit=0.7)
    ),
    "weighed before": replace(PLAIN, router=RouterConfig(EXPERTS, 2, scoring="sigmoid", scales_input=True)),
    "not gated": replace(PLAIN, expert=MLPConfig(WIDTH, "relu2", gated=False)),
    "shared": replace(PLAIN, shared=MLPConfig(64, "gelu")),
    "shared and gated": replace(PLAIN, shared=MLPConfig(64, "silu"), shared_gate=True),
    "biased for the choice": replace(
        PLAIN,
        router=RouterConfig(EXPERTS, 2, scoring="sigmoid", selection_bias=True, groups=3, top_groups=2),
    ),
}
each_mixture = pytest.mark.parametrize("mixture", MIXTURES.values(), ids=MIXTURES.keys())


def with_mixture(mixture: MoeConfig, **overrides: Any) -> Config:
    """The tiny llama with experts."""
    config = Config.from_dict(tiny.config(num_hidden_layers=1, **overrides))
    return replace(config, layers=tuple(replace(layer, feed_forward=mixture) for layer in config.layers))


def tensors_of(config: Config) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    shapes = tensor_shapes(config)
    return {name: random.normal(size=shape).astype(np.float32) / 4 for name, shape in shapes.items()}


def write(folder: Path, config: Config, tensors: dict[str, np.ndarray]) -> WeightStore:
    tiny.write_weights(folder, tensors)
    return WeightStore.from_path(folder, config).cast(mx.float32)


def pack(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the same with every matrix packed, those of experts all at once."""
    packed: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        if array.ndim == 1 or not name.endswith("weight"):
            packed[name] = array
            continue
        parts = mx.quantize(mx.array(array), group_size=32, bits=4)
        for leaf, part in zip(("weight", "scales", "biases"), parts, strict=True):
            packed[name.replace("weight", leaf)] = np.array(part)
    return packed


def unpacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    def through(name: str, array: np.ndarray) -> np.ndarray:
        if array.ndim == 1 or not name.endswith("weight"):
            return array
        return np.array(mx.dequantize(*mx.quantize(mx.array(array), group_size=32, bits=4), group_size=32, bits=4))

    return {name: through(name, array) for name, array in tensors.items()}


# ---------------------------------------------------------------- a loop

ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "gelu": lambda x: plain.wide(mx.array(x, dtype=mx.float32) * (1 + mx.erf(mx.array(x) / 2**0.5)) / 2),
}


def network(
    tensors: dict[str, np.ndarray], module: str, shape: MLPConfig, x: np.ndarray, of: Any = ...
) -> np.ndarray:
    """One network, or number `of` of several."""

    def project(part: str, y: np.ndarray) -> np.ndarray:
        bias = tensors[f"{module}.{part}_proj.bias"][of] if shape.bias else 0
        return tensors[f"{module}.{part}_proj.weight"][of] @ y + bias

    up = project("up", x)
    if not shape.gated:
        return project("down", ACTIVATIONS[shape.activation](up))
    gate = project("gate", x)
    if shape.limit is not None:
        gate, up = np.minimum(gate, shape.limit), np.clip(up, -shape.limit, shape.limit)
        return project("down", (up + 1) * gate / (1 + np.exp(-1.702 * gate)))
    return project("down", ACTIVATIONS[shape.activation](gate) * up)


def loop(tensors: dict[str, np.ndarray], mixture: MoeConfig, x: mx.array) -> np.ndarray:
    """Send each token by itself through each of its experts; their choice has a test of its own."""
    logits = plain.wide(x) @ tensors[f"{MODULE}.gate.weight"].T
    if mixture.router.bias:
        logits = logits + tensors[f"{MODULE}.gate.bias"]
    selection = tensors.get(f"{MODULE}.gate.e_score_correction_bias")
    experts, scores = route(
        mx.array(logits, dtype=mx.float32), mixture.router, None if selection is None else mx.array(selection)
    )
    out = np.zeros(x.shape)
    for token, row in enumerate(plain.wide(x)):
        for expert, score in zip(experts[token].tolist(), scores[token].tolist(), strict=True):
            before, after = (score, 1) if mixture.router.scales_input else (1, score)
            out[token] += after * network(tensors, f"{MODULE}.experts", mixture.expert, row * before, expert)
        if mixture.shared is not None:
            shared = network(tensors, f"{MODULE}.shared_expert", mixture.shared, row)
            gate = tensors[f"{MODULE}.shared_expert_gate.weight"][0] @ row if mixture.shared_gate else None
            out[token] += shared if gate is None else shared / (1 + np.exp(-gate))
    return out


@each_mixture
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_every_token_goes_through_its_experts(
    tmp_path: Path, mixture: MoeConfig, way: ModelFeatures, packed: bool
) -> None:
    config = with_mixture(mixture, **(PACKED if packed else {}))
    tensors = tensors_of(config)
    store = write(tmp_path, config, pack(tensors) if packed else tensors)
    moe = Moe(MODULE, config, store, way)
    x = mx.random.normal((14, HIDDEN), key=mx.random.key(3))
    expected = loop(unpacked(tensors) if packed else tensors, mixture, x)
    got = moe(x)
    assert got.shape == x.shape and got.dtype == x.dtype
    assert np.allclose(np.array(got), expected, rtol=1e-4, atol=1e-4 * expected.std())


def test_a_single_token_and_many_are_sent_alike(tmp_path: Path) -> None:
    config = with_mixture(PLAIN)
    moe = Moe(MODULE, config, write(tmp_path, config, tensors_of(config)), ModelFeatures())
    x = mx.random.normal((40, HIDDEN), key=mx.random.key(3))
    apart = mx.concatenate([moe(x[i : i + 1]) for i in range(40)])
    assert mx.allclose(moe(x), apart, rtol=1e-5, atol=1e-5).item()


def test_stacked_packed_weights_are_products_of_each_experts_own(tmp_path: Path) -> None:
    """A gathered product, one of a single expert, and one with the unpacked matrix."""
    config = with_mixture(PLAIN, **PACKED)
    weight = write(tmp_path, config, pack(tensors_of(config))).linear(f"{MODULE}.experts.down_proj")
    assert isinstance(weight, QuantizedWeight) and weight.packed.shape[0] == EXPERTS
    experts = mx.array([0, 0, 2, 5])
    x = mx.random.normal((4, WIDTH), key=mx.random.key(5))
    gathered = expert_linear(x, weight, experts, in_order=True)
    for row, expert in enumerate(experts.tolist()):
        one = linear_of(weight, expert)
        assert isinstance(one, QuantizedWeight)
        dense = dequantize(one.packed, one.scales, one.biases, one.form)
        for alone in (linear(x[row], one), linear(x[row], one, fused=False), x[row] @ dense.T):
            assert mx.allclose(gathered[row], alone, rtol=1e-4, atol=1e-4).item()


def test_modules_of_the_other_kind_are_refused(tmp_path: Path) -> None:
    sparse, dense = with_mixture(PLAIN), Config.from_dict(tiny.config(num_hidden_layers=1))
    assert sparse.is_moe_layer(0) and not dense.is_moe_layer(0)
    store = write(tmp_path, sparse, tensors_of(sparse))
    with pytest.raises(ConfigError, match="mixture of experts"):
        MLP(MODULE, sparse, store, ModelFeatures())
    with pytest.raises(ConfigError, match="no experts"):
        Moe(MODULE, dense, store, ModelFeatures())
