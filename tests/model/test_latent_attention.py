"""Latent attention: when keys and values are made of latents, and what checkpoints have beside the network."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from golden_cases import GOLDEN, TOLERANCE, build, difference, expected

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.config.tensors import tensor_shapes
from tinyllm.errors import TensorMismatchError
from tinyllm.kv.full import TinyKvFullCache
from tinyllm.model.latent_attention import LatentAttention
from tinyllm.model.load import load_model
from tinyllm.ops.attention import AttentionSpec
from tinyllm.ops.features import ModelFeatures

V3 = GOLDEN / "deepseek_v3"
LAYER = "model.layers.0"
PREFIX = f"{LAYER}.self_attn"


class Seen(TinyKvFullCache):
    """A cache that notes what it is asked for."""

    asked: AttentionSpec
    width: int

    def attend(
        self, q: mx.array, k: mx.array, v: mx.array | None, spec: AttentionSpec, mask: mx.array | None = None
    ) -> mx.array:
        assert v is None
        self.asked, self.width = spec, q.shape[-1]
        return super().attend(q, k, v, spec, mask)


def layer(features: ModelFeatures) -> LatentAttention:
    store = WeightStore.from_path(V3).cast(mx.float32)
    return LatentAttention(LAYER, store.config, store, features)


@pytest.mark.parametrize(("queries", "expanded"), [(1, False), (36, False), (37, True)])
def test_keys_are_made_for_many_queries(queries: int, expanded: bool) -> None:
    """And kept as latents all the same: 12 of the latent and 4 rotated. The golden's heads have 8 + 4 elements."""
    cache = Seen()
    layer(ModelFeatures())(mx.ones((1, queries, 32)), 0, cache)
    assert (cache.asked.expand is not None) == expanded
    assert cache.width == (12 if expanded else 16)
    assert [array.shape[-1] for array in cache.arrays] == [16]


def test_both_forms_give_the_same_after_an_older_part() -> None:
    x = mx.random.normal((1, 90, 32), key=mx.random.key(3))
    outputs = []
    for features in (ModelFeatures(), replace(ModelFeatures(), expanded_latents=False)):
        cache, attention = Seen(), layer(features)
        parts = [attention(x[:, :50], 0, cache), attention(x[:, 50:], 50, cache)]
        assert (cache.asked.expand is None) == (not features.expanded_latents)
        outputs.append(mx.concatenate(parts, axis=1))
    assert difference(outputs[0], outputs[1]) <= TOLERANCE


def with_more(folder: Path, more: dict[str, mx.array]) -> Path:
    arrays = mx.load(str(V3 / "model.safetensors"))
    assert isinstance(arrays, dict)
    mx.save_safetensors(str(folder / "model.safetensors"), {**arrays, **more})
    (folder / "config.json").write_bytes((V3 / "config.json").read_bytes())
    return folder


def test_names_of_transformers_5_in_memory_and_of_mlx_lm_are_read(tmp_path: Path) -> None:
    """Experts in one tensor, gate above up; and each matrix of all experts in one."""
    arrays = mx.load(str(V3 / "model.safetensors"))
    assert isinstance(arrays, dict)
    prefix = "model.layers.1.mlp."
    plain = {name: array for name, array in arrays.items() if ".experts." not in name}
    stacked = {
        part: mx.stack([arrays[f"{prefix}experts.{e}.{part}_proj.weight"] for e in range(8)])
        for part in ("gate", "up", "down")
    }
    fused = {
        f"{prefix}experts.gate_up_proj": mx.concatenate([stacked["gate"], stacked["up"]], axis=1),
        f"{prefix}experts.down_proj": stacked["down"],
    }
    switched = {f"{prefix}switch_mlp.{part}_proj.weight": array for part, array in stacked.items()}
    ids, wanted = expected("deepseek_v3")
    for number, experts in enumerate((fused, switched)):
        folder = tmp_path / str(number)
        folder.mkdir()
        mx.save_safetensors(str(folder / "model.safetensors"), {**plain, **experts})
        (folder / "config.json").write_bytes((V3 / "config.json").read_bytes())
        assert difference(load_model(folder, dtype=mx.float32)(ids)[0], wanted) <= TOLERANCE


@pytest.mark.parametrize("packed", [False, True])
def test_kv_b_proj_may_stand_apart_as_mlx_lm_has_it(packed: bool, tmp_path: Path) -> None:
    """embed_q makes latents of queries, and unembed_out values of latents; each is packed along its own rows."""
    attention = {"kind": "latent", "num_heads": 2, "latent_rank": 32, "plain_dim": 64, "value_dim": 10}
    rest = {"rope": {"dims": 4, "theta": 100.0}, "norm": {"eps": 1e-6}}
    layer = {"norm": {"eps": 1e-5}, "attention": {**attention, **rest}}
    config: dict[str, Any] = {
        "model_type": "tinyllm",
        "vocab_size": 48,
        "hidden_size": 32,
        "max_position_embeddings": 64,
        "final_norm": None,
        "layers": [{**layer, "feed_forward": {"intermediate_size": 32, "activation": "silu"}}],
    }
    shapes = tensor_shapes(Config.from_dict(config))
    dense = {
        name: mx.random.normal(shape, key=mx.random.key(i)) / 4 for i, (name, shape) in enumerate(shapes.items())
    }
    form = {"group_size": 32, "bits": 4}
    apart = {name: array for name, array in dense.items() if ".kv_b_proj." not in name}
    heads = dense[f"{PREFIX}.kv_b_proj.weight"].reshape(2, 74, 32)
    parts = {"embed_q": heads[:, :64].swapaxes(1, 2), "unembed_out": heads[:, 64:]}
    for name, part in parts.items():
        apart[f"{PREFIX}.{name}.weight"] = mx.contiguous(part)
        if packed:
            made = mx.quantize(part, **form)
            leaves = zip(("weight", "scales", "biases"), made, strict=True)
            apart |= {f"{PREFIX}.{name}.{leaf}": array for leaf, array in leaves}
            parts[name] = mx.dequantize(*made, **form)
    whole = mx.concatenate([parts["embed_q"].swapaxes(1, 2), parts["unembed_out"]], axis=1)
    dense[f"{PREFIX}.kv_b_proj.weight"] = whole.reshape(148, 32)
    logits = []
    for name, tensors in (("whole", dense), ("apart", apart)):
        folder = tmp_path / name
        folder.mkdir()
        mx.save_safetensors(str(folder / "model.safetensors"), tensors)
        (folder / "config.json").write_text(json.dumps({**config, **({"quantization": form} if packed else {})}))
        model = build(Config.from_json_file(folder), folder, ModelFeatures())
        logits.append(model(mx.arange(40)[None])[0])
    assert difference(logits[1], logits[0]) <= TOLERANCE


def test_one_half_of_kv_b_proj_is_not_enough(tmp_path: Path) -> None:
    arrays = mx.load(str(V3 / "model.safetensors"))
    assert isinstance(arrays, dict)
    del arrays[f"{PREFIX}.kv_b_proj.weight"]
    arrays[f"{PREFIX}.embed_q.weight"] = mx.ones((1, 1, 1))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
    (tmp_path / "config.json").write_bytes((V3 / "config.json").read_bytes())
    with pytest.raises(TensorMismatchError, match=r"missing 1: .*unembed_out.*embed_q\.weight is \[1, 1, 1\]"):
        WeightStore.from_path(tmp_path)


def test_packed_latents_are_those_that_they_stand_for(tmp_path: Path) -> None:
    """kv_b_proj is taken apart by head, so it is unpacked when it is read; others stay packed."""
    attention = {"kind": "latent", "num_heads": 2, "latent_rank": 32, "plain_dim": 6, "value_dim": 10}
    config = {
        "model_type": "tinyllm",
        "vocab_size": 48,
        "hidden_size": 32,
        "max_position_embeddings": 64,
        "final_norm": None,
        "layers": [
            {
                "norm": {"eps": 1e-5},
                "attention": {**attention, "rope": {"dims": 4, "theta": 100.0}, "norm": {"eps": 1e-6}},
                "feed_forward": {"intermediate_size": 32, "activation": "silu"},
            }
        ],
    }
    form = {"group_size": 32, "bits": 4}
    shapes = tensor_shapes(Config.from_dict(config))
    dense = {
        name: mx.random.normal(shape, key=mx.random.key(i)) / 4 for i, (name, shape) in enumerate(shapes.items())
    }
    packed = dict(dense)
    for module in (f"{PREFIX}.kv_b_proj", f"{PREFIX}.q_proj"):
        parts = mx.quantize(dense[f"{module}.weight"], **form)
        packed |= {f"{module}.{leaf}": part for leaf, part in zip(("weight", "scales", "biases"), parts, strict=True)}
        dense[f"{module}.weight"] = mx.dequantize(*parts, **form)
    logits = []
    for name, tensors, more in (("dense", dense, {}), ("packed", packed, {"quantization": form})):
        folder = tmp_path / name
        folder.mkdir()
        mx.save_safetensors(str(folder / "model.safetensors"), tensors)
        (folder / "config.json").write_text(json.dumps({**config, **more}))
        model = build(Config.from_json_file(folder), folder, ModelFeatures())
        logits.append(model(mx.arange(40)[None])[0])
    assert difference(logits[1], logits[0]) <= TOLERANCE


def test_layers_that_predict_further_tokens_are_left_out_with_one_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("eh_proj.weight", "enorm.weight", "self_attn.q_a_proj.weight", "shared_head.head.weight")
    folder = with_more(tmp_path, {f"model.layers.2.{name}": mx.ones((3, 3)) for name in names})
    ids, wanted = expected("deepseek_v3")
    with caplog.at_level(logging.WARNING, "tinyllm"):
        model = load_model(folder, dtype=mx.float32)
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "4 tensors that the text model has no use for are left out"
    ]
    assert difference(model(ids)[0], wanted) <= TOLERANCE


def test_scales_of_blocks_are_refused_by_name(tmp_path: Path) -> None:
    """As the authors' own files have them, beside matrices in 8 bits."""
    name = f"{PREFIX}.o_proj.weight_scale_inv"
    with pytest.raises(TensorMismatchError, match="surplus 1: " + name.replace(".", r"\.")) as raised:
        WeightStore.from_path(with_more(tmp_path, {name: mx.ones((1, 1))}))
    assert "\n" not in str(raised.value)


def test_selection_bias_chooses_and_does_not_weigh() -> None:
    """The golden's matters: without it other experts are chosen."""
    ids, wanted = expected("deepseek_v3")
    config = Config.from_json_file(V3)
    network = config.layers[-1].feed_forward
    plain = replace(network, router=replace(network.router, selection_bias=False))
    layers = (*config.layers[:-1], replace(config.layers[-1], feed_forward=plain))
    model = build(replace(config, layers=layers), V3, ModelFeatures())
    assert difference(model(ids)[0], wanted) > 100 * TOLERANCE
