"""The engine's parts, put together by hand as textbooks write a transformer out: names, shapes and numbers agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny
from golden_cases import GOLDEN

import tinyllm
from tinyllm import (
    MLP,
    Attention,
    Config,
    Embedding,
    ModelFeatures,
    ModelForCausalLM,
    Moe,
    RMSNorm,
    TinyKvFullCache,
    TinyKvPagedCache,
    TinyKvPagedPool,
    TransformerBlock,
    WeightStore,
    linear,
    load_model,
)
from tinyllm.config.tensors import tensor_shapes

IDS = mx.array([[7, 3, 11, 2, 5, 13]])
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def close(a: mx.array, b: mx.array, tolerance: float = 1e-5) -> bool:
    return a.shape == b.shape and bool(mx.allclose(a, b, rtol=tolerance, atol=tolerance))


def is_sequential(config: Config) -> bool:
    """Whether each block is norm, attention, add; norm, feed-forward, add, and logits are the head's products."""
    plain = all(
        layer.placement == "pre" and layer.branch_scale == 1 and not layer.scalar and not layer.shared_norm
        for layer in config.layers
    )
    head = config.logit_scale == 1 and config.logit_softcap is None and config.embedding_width is None
    alone = config.layer_inputs is None and len(set(config.cache_places)) == config.num_hidden_layers
    return plain and head and alone and not (config.head_bias and config.tie_word_embeddings)


def sequential_checkpoints() -> list[Path]:
    return [
        folder
        for folder in sorted(GOLDEN.iterdir())
        if (folder / "config.json").exists() and is_sequential(Config.from_json_file(folder / "config.json"))
    ]


def forward(model: ModelForCausalLM, ids: mx.array, offset: int, cache: list[Any]) -> mx.array:
    """The forward pass written out."""
    h = model.embedding(ids, offset)
    mask = None if ids.shape[1] == 1 else "causal"
    for i in range(model.num_hidden_layers):
        h = model.layers[i](h, offset, cache[i], mask=mask)
    if model.norm is not None:
        h = model.norm(h)
    if model.w_lm_head is not None:
        return linear(h, model.w_lm_head)
    return model.embedding.as_linear(h)


@pytest.mark.parametrize("folder", sequential_checkpoints(), ids=lambda folder: folder.name)
def test_the_forward_pass_by_hand_is_the_models(folder: Path) -> None:
    model = load_model(folder)
    ids = IDS % model.vocab_size
    cache = [TinyKvFullCache() for _ in range(model.num_hidden_layers)]
    prompt, step = forward(model, ids[:, :5], 0, cache), forward(model, ids[:, 5:], 5, cache)
    assert close(mx.concatenate([prompt, step], axis=1), model(ids), 1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: [TinyKvFullCache() for _ in range(model.num_hidden_layers)],
        lambda model: [
            TinyKvPagedCache(pool=pool)
            for pool in [TinyKvPagedPool(page_size=4) for _ in range(model.num_hidden_layers)]
        ],
        lambda model: model.create_kv_cache(),
        lambda model: model.create_kv_cache(mode="dense"),
        lambda model: model.create_kv_cache(mode="paged", page_size=4),
    ],
    ids=["dense by hand", "paged by hand", "default", "dense", "paged"],
)
@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "model"])
def test_any_cache_serves_prefill_and_decode(
    make: Callable[[ModelForCausalLM], list[Any]], by_hand: bool, tmp_path: Path
) -> None:
    model = load_model(tiny.write_checkpoint(tmp_path))
    cache, parts = make(model), []
    for start, end in ((0, 4), (4, 5), (5, 6)):
        run = forward if by_hand else ModelForCausalLM.__call__
        parts.append(run(model, IDS[:, start:end], start, cache))
    assert close(mx.concatenate(parts, axis=1), model(IDS))


def test_a_model_is_made_of_config_weights_and_features(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path, config_overrides=QWEN3)
    config = Config.from_json_file(folder / "config.json")
    store = WeightStore.from_path(folder)
    model = ModelForCausalLM(config, store, ModelFeatures())
    assert (model.num_hidden_layers, model.hidden_size, model.vocab_size) == (2, 64, 320)
    assert model.config is config
    assert isinstance(model.features, ModelFeatures)
    assert model.w_lm_head is None  # tied
    assert close(model(IDS), load_model(folder)(IDS))
    assert close(model(IDS, offset=0, cache=None, logits_to_keep=1), model(IDS)[:, -1:])
    assert ModelForCausalLM(config, store)(IDS).shape == (1, 6, 320)


def test_the_names_of_config_json_are_those_of_the_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3), encoding="utf-8")
    config = Config.from_json_file(path)
    read = {name: getattr(config, name) for name in QWEN3 if name != "eos_token_id"}
    assert read == {name: value for name, value in QWEN3.items() if name != "eos_token_id"}
    assert not config.is_moe_layer(0)


def test_a_block_is_made_of_its_parts(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path)
    config, weights, features = Config.from_json_file(folder), WeightStore.from_path(folder), ModelFeatures()
    block = TransformerBlock(1, config, weights, features)
    x = mx.random.normal((2, 5, config.hidden_size), key=mx.random.key(0))
    norms = [
        RMSNorm(config.hidden_size, weights.tensor(f"model.layers.1.{name}.weight"), eps=config.rms_norm_eps)
        for name in ("input_layernorm", "post_attention_layernorm")
    ]
    attention = Attention("model.layers.1", config, weights, features)
    mlp = MLP("model.layers.1", config, weights, features)
    h = x + attention(norms[0](x), 0, TinyKvFullCache(), "causal")
    whole = h + mlp(norms[1](h))
    for mask in (None, "causal", mx.tril(mx.ones((5, 5), dtype=mx.bool_))):
        assert close(block(x, 0, TinyKvFullCache(), mask=mask), whole)
    assert close(block(x, mx.array([0, 0]), TinyKvFullCache()), whole)
    assert isinstance(block.self_attn, Attention)
    assert isinstance(block.mlp, MLP)


@pytest.mark.parametrize("name", ["granite", "gemma2", "olmo2", "cohere", "opt-post-norm", "gemma4_text-experts"])
def test_a_block_of_another_family_is_of_the_class_that_its_config_asks_for(name: str) -> None:
    store = WeightStore.from_path(GOLDEN / name)
    block = TransformerBlock(0, store.config, store, ModelFeatures())
    assert type(block) is not TransformerBlock and isinstance(block, TransformerBlock)
    x = mx.ones((2, 3, store.config.hidden_size))
    assert block(x, 0, TinyKvFullCache()).shape == x.shape


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_a_mask_added_to_scores_may_be_float32(tmp_path: Path, dtype: mx.Dtype) -> None:
    store = WeightStore.from_path(tiny.write_checkpoint(tmp_path)).cast(dtype)
    block = TransformerBlock(0, store.config, store, ModelFeatures())
    x = mx.random.normal((1, 6, 32), key=mx.random.key(2)).astype(dtype)
    added = mx.where(mx.tril(mx.ones((6, 6), dtype=mx.bool_)), 0.0, -mx.inf)
    for cache in (TinyKvFullCache, lambda: TinyKvPagedCache(TinyKvPagedPool(page_size=4))):
        assert close(block(x, 0, cache(), mask=added), block(x, 0, cache(), mask="causal"), 0.02)
    with pytest.raises(ValueError, match="sideways"):
        block(x, 0, None, mask="sideways")


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral-window", "gemma2", "gemma4_text-experts", "gpt2"])
def test_a_config_has_the_names_that_not_every_model_has(name: str) -> None:
    config = Config.from_json_file(GOLDEN / name)
    values = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    assert config.num_experts == values.get("num_experts", values.get("num_local_experts"))
    assert config.num_experts_per_tok == values.get("num_experts_per_tok", values.get("top_k_experts"))
    if name != "mixtral-window":
        assert config.moe_intermediate_size == values.get("moe_intermediate_size")
    if name != "qwen3-moe":  # which has one that is not used
        assert config.sliding_window == values.get("sliding_window")


def test_a_layer_of_experts_is_a_moe() -> None:
    folder = GOLDEN / "mixtral"
    config, weights = Config.from_json_file(folder), WeightStore.from_path(folder)
    assert config.is_moe_layer(0)
    moe = Moe("model.layers.0", config, weights, ModelFeatures())
    x = mx.random.normal((2, 3, config.hidden_size), key=mx.random.key(1))
    apart = mx.stack([mx.concatenate([moe(x[i : i + 1, j : j + 1])[0] for j in range(3)]) for i in range(2)])
    assert close(moe(x), apart, 1e-4)


def test_an_embedding_and_a_tied_head_share_a_matrix(tmp_path: Path) -> None:
    store = WeightStore.from_path(tiny.write_checkpoint(tmp_path))
    weight = store.linear("model.embed_tokens")
    embedding = Embedding(vocab_size=288, embedding_dim=32, weight=weight)
    table = store.tensor("model.embed_tokens.weight")
    h = embedding(IDS)
    assert close(h, table[IDS])
    assert close(embedding.as_linear(h), linear(h, table))
    assert close(linear(h, weight), h @ table.T)
    assert store.has("lm_head.weight")
    assert not store.has("lm_head.bias")
    with pytest.raises(ValueError, match=r"\(289, 32\)"):
        Embedding(vocab_size=289, embedding_dim=32, weight=weight)
    with pytest.raises(ValueError, match="33 elements"):
        RMSNorm(33, store.tensor("model.norm.weight"), eps=1e-5)


def test_a_quantized_weight_serves_as_embedding_and_in_products() -> None:
    store = WeightStore.from_path(GOLDEN.parent.parent / "tinyllm" / "doctor_data" / "mlx-lm-4bit").cast(mx.float32)
    config = store.config
    weight = store.linear("model.embed_tokens")
    embedding = Embedding(vocab_size=config.vocab_size, embedding_dim=config.hidden_size, weight=weight)
    table = weight.dequantize()
    assert close(embedding(IDS), table[IDS])
    h = embedding(IDS).astype(mx.float32)
    assert close(linear(h, weight), h @ table.T, 1e-4)


def test_a_block_has_the_parameters_that_its_config_counts() -> None:
    """Grouped queries make keys and values narrower; the norms of q and k are one head wide."""
    shapes = tensor_shapes(Config.from_dict(QWEN3))
    prefix = "model.layers.0."
    block = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
    assert block == {
        "input_layernorm.weight": (64,),
        "self_attn.q_proj.weight": (64, 64),
        "self_attn.k_proj.weight": (32, 64),
        "self_attn.v_proj.weight": (32, 64),
        "self_attn.o_proj.weight": (64, 64),
        "self_attn.q_norm.weight": (16,),
        "self_attn.k_norm.weight": (16,),
        "post_attention_layernorm.weight": (64,),
        "mlp.gate_proj.weight": (192, 64),
        "mlp.up_proj.weight": (192, 64),
        "mlp.down_proj.weight": (64, 192),
    }


def test_every_name_is_found_at_the_top() -> None:
    assert all(getattr(tinyllm, name) is not None for name in tinyllm.__all__)
