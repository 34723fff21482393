"""Experts are the same, however they are computed and however a checkpoint names, fuses and stacks them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from golden_cases import GOLDEN, TOLERANCE, difference, expected

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.errors import CheckpointError
from tinyllm.model.load import load_model
from tinyllm.model.moe import Moe
from tinyllm.model.transformer import ModelForCausalLM
from tinyllm.ops.features import ModelFeatures

Arrays = dict[str, mx.array]

# From canonical names to those of mlx-lm's conversions, and to those that transformers 5 has in memory.
SWITCH = ((r"\.mlp\.experts\.", ".mlp.switch_mlp."),)
SPARSE = ((r"\.mlp\.experts\.", ".block_sparse_moe.switch_mlp."), (r"\.mlp\.gate\.", ".block_sparse_moe.gate."))
ROUTER = ((r"\.mlp\.gate\.", ".mlp.router."),)
FEED_FORWARD = ((r"\.mlp\.gate\.", ".feed_forward.router."), (r"\.mlp\.", ".feed_forward."))
SHARED = ((r"\.shared_expert\.", ".shared_experts."),)
MLX_LM = {
    "qwen3-moe": SWITCH,
    "qwen3-moe-some-dense": SWITCH,
    "qwen2-moe": SWITCH,
    "olmoe": SWITCH,
    "mixtral": SPARSE,
    "phimoe": SPARSE,
    "minimax-m2": (*SPARSE, (r"\.gate\.e_score", ".e_score")),
    "granitemoe": (*SPARSE, (r"\.gate\.weight", ".router.layer.weight")),
    "gpt-oss": ROUTER,
    "llama4": FEED_FORWARD,
    "glm4-moe": (*SWITCH, *SHARED),
    "dots1": SHARED,
    "hunyuan-v1-moe": (
        *SWITCH,
        (r"\.gate\.weight", ".gate.wg.weight"),
        (r"\.shared_expert\.", ".shared_mlp."),
        (r"\.q_norm\.", ".query_layernorm."),
        (r"\.k_norm\.", ".key_layernorm."),
    ),
}
IN_MEMORY = {
    "qwen3-moe": (),
    "qwen2-moe": (),
    "olmoe": (),
    "mixtral": (),
    "flex-olmo": (),
    "phimoe": ROUTER,
    "minimax-m2": ((r"\.gate\.e_score", ".e_score"),),
    "granitemoe": ((r"\.mlp\.gate\.", ".block_sparse_moe.router."), (r"\.mlp\.", ".block_sparse_moe.")),
    "glm4-moe": SHARED,
    "dots1": SHARED,
    "ernie4-5-moe": (*SHARED, (r"\.gate\.e_score", ".gate.moe_statics.e_score")),
}


def canonical_tensors(folder: Path) -> Arrays:
    store = WeightStore.from_path(folder)
    return {name: store.tensor(name) for name in sorted(store.names)}


def fused(arrays: Arrays) -> Arrays:
    """All experts' gate and up as one tensor, without `.weight`."""
    done = {}
    for name, array in arrays.items():
        if name.endswith(".experts.gate_proj.weight"):
            up = arrays[name.replace("gate_proj", "up_proj")]
            done[name.replace("gate_proj.weight", "gate_up_proj")] = mx.concatenate([array, up], axis=1)
        elif not name.endswith(".experts.up_proj.weight"):
            done[name.replace(".experts.down_proj.weight", ".experts.down_proj")] = array
    return done


def write(source: Path, folder: Path, arrays: Arrays, names: tuple[tuple[str, str], ...]) -> Path:
    """Write a folder of other names beside the config.json of `source`."""
    renamed = {}
    for name, array in arrays.items():
        for pattern, replacement in names:
            name = re.sub(pattern, replacement, name)
        renamed[name] = array
    assert len(renamed) == len(arrays)
    mx.save_safetensors(str(folder / "model.safetensors"), renamed)
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


def logits_are_the_golden_ones(name: str, folder: Path) -> bool:
    ids, wanted = expected(name)
    return difference(load_model(folder, dtype=mx.float32)(ids)[0], wanted) <= TOLERANCE


@pytest.mark.parametrize("name", MLX_LM)
def test_conversions_of_mlx_lm_are_read(name: str, tmp_path: Path) -> None:
    arrays = canonical_tensors(GOLDEN / name)
    assert logits_are_the_golden_ones(name, write(GOLDEN / name, tmp_path, arrays, MLX_LM[name]))


@pytest.mark.parametrize("name", IN_MEMORY)
def test_fused_experts_are_read(name: str, tmp_path: Path) -> None:
    arrays = fused(canonical_tensors(GOLDEN / name))
    assert logits_are_the_golden_ones(name, write(GOLDEN / name, tmp_path, arrays, IN_MEMORY[name]))


@pytest.mark.parametrize("features", [ModelFeatures(), ModelFeatures.reference()], ids=["fused", "reference"])
@pytest.mark.parametrize("mode", [("affine", 4, 32), ("mxfp4", 4, 32)], ids=lambda mode: str(mode[0]))
def test_packed_experts_are_what_they_unpack_to(
    mode: tuple[str, int, int], features: ModelFeatures, tmp_path: Path
) -> None:
    kind, bits, size = mode
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2}
    values = tiny.config(model_type="qwen3_moe", head_dim=16, num_hidden_layers=1, **sizes)
    arrays = {name: mx.array(array) for name, array in tiny.random_tensors(values).items()}
    packed, unpacked = dict(arrays), dict(arrays)
    for name in [name for name in arrays if ".experts." in name]:
        parts = mx.quantize(arrays[name], group_size=size, bits=bits, mode=kind)
        unpacked[name] = mx.dequantize(*parts, group_size=size, bits=bits, mode=kind).astype(mx.float32)
        module = name.removesuffix("weight").replace(".experts.", ".switch_mlp.")
        del packed[name]
        packed |= {module + leaf: part for leaf, part in zip(("weight", "scales", "biases"), parts, strict=False)}
    quantization = {"bits": bits, "group_size": size, "mode": kind}
    logits = []
    for tensors, more in ((packed, {"quantization": quantization}), (unpacked, {})):
        mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
        config = Config.from_dict({**values, **more})
        store = WeightStore.from_path(tmp_path, config).cast(mx.float32)
        logits.append(ModelForCausalLM(config, store, features)(mx.array([[3, 1, 4, 1, 5]])))
        mx.eval(logits[-1])
    assert mx.abs(logits[0] - logits[1]).max().item() < 1e-4 * mx.std(logits[1]).item()


def test_llama_4_is_read_out_of_its_multimodal_checkpoint(tmp_path: Path) -> None:
    arrays = mx.load(str(GOLDEN / "llama4" / "model.safetensors"))
    assert isinstance(arrays, dict)
    wrapped = {f"language_model.{name}": array for name, array in arrays.items()}
    towers = {
        "vision_model.class_embedding": mx.zeros((8,)),
        "multi_modal_projector.linear_1.weight": mx.zeros((8, 8)),
    }
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {**wrapped, **towers})
    text = json.loads((GOLDEN / "llama4" / "config.json").read_text())
    indices = {"boi_token_index": 90, "eoi_token_index": 91, "image_token_index": 92}
    config = {"model_type": "llama4", "text_config": text, "vision_config": {"hidden_size": 8}, **indices}
    config["dtype"] = text["dtype"]  # files say it twice
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert logits_are_the_golden_ones("llama4", tmp_path)


def test_an_absent_expert_is_refused(tmp_path: Path) -> None:
    arrays = mx.load(str(GOLDEN / "qwen3-moe" / "model.safetensors"))
    assert isinstance(arrays, dict)
    del arrays["model.layers.1.mlp.experts.2.up_proj.weight"]
    with pytest.raises(CheckpointError, match="expert 2 is absent"):
        WeightStore.from_path(write(GOLDEN / "qwen3-moe", tmp_path, arrays, ()))


def test_layers_after_the_last_are_left_out(tmp_path: Path) -> None:
    """They predict further tokens (GLM 4.5)."""
    arrays = mx.load(str(GOLDEN / "glm4-moe" / "model.safetensors"))
    assert isinstance(arrays, dict)
    extra = {"model.layers.3.eh_proj.weight": mx.zeros((32, 64)), "model.layers.3.enorm.weight": mx.zeros((32,))}
    assert logits_are_the_golden_ones("glm4-moe", write(GOLDEN / "glm4-moe", tmp_path, {**arrays, **extra}, ()))


def test_a_bias_for_the_choice_is_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision it would choose other experts; so the router's logits are float32 too."""
    seen: list[tuple[mx.Dtype, mx.Dtype]] = []

    def spy(route: Callable[..., tuple[mx.array, mx.array]]) -> Callable[..., tuple[mx.array, mx.array]]:
        def spied(logits: mx.array, router: object, bias: mx.array) -> tuple[mx.array, mx.array]:
            seen.append((logits.dtype, bias.dtype))
            return route(logits, router, bias)

        return spied

    from tinyllm.model import moe

    monkeypatch.setattr(moe, "route", spy(moe.route))
    config = Config.from_json_file(GOLDEN / "glm4-moe")
    weights = WeightStore.from_path(GOLDEN / "glm4-moe", config).cast(mx.float16)
    Moe("model.layers.1.mlp", config, weights, ModelFeatures())(mx.ones((3, 32), dtype=mx.float16))
    assert seen == [(mx.float32, mx.bfloat16)]


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "llama4"])
@pytest.mark.parametrize("tokens", [1, 2, 9, 75])
def test_gathered_experts_are_the_experts_one_by_one(name: str, tokens: int) -> None:
    config = Config.from_json_file(GOLDEN / name)
    weights = WeightStore.from_path(GOLDEN / name, config).cast(mx.float32)
    x = mx.random.normal((tokens, 32), key=mx.random.key(5))
    fast, slow = (
        Moe("model.layers.1.mlp", config, weights, features)(x)
        for features in (ModelFeatures(), ModelFeatures.reference())
    )
    assert fast.shape == (tokens, 32)
    assert mx.abs(fast - slow).max().item() < 1e-5
