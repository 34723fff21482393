"""The network as its documents call it: block(x, offset, cache, mask=None), model(inputs, offset, cache, ...)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny

from tinyllm._mx import mx
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.kv.full import TinyKvFullCache
from tinyllm.model.block import TransformerBlock
from tinyllm.model.load import load_model
from tinyllm.model.transformer import ModelForCausalLM
from tinyllm.ops.attention import causal_mask
from tinyllm.ops.features import ModelFeatures

IDS = [[5, 6, 7, 8, 9, 10, 11, 12], [40, 30, 20, 10, 200, 100, 50, 25]]
FEATURES = {"fused": ModelFeatures(), "reference": ModelFeatures.reference()}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "windowed": {"model_type": "mistral", "sliding_window": 4},
    "half windowed": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "normed": {"model_type": "qwen3", "head_dim": 8},
    "half rotated": {"partial_rotary_factor": 0.5},
}


def close(a: mx.array, b: mx.array, tolerance: float = 1e-4) -> bool:
    return a.shape == b.shape and bool(mx.allclose(a, b, rtol=tolerance, atol=tolerance).item())


@pytest.fixture(scope="module", params=FAMILIES, ids=list(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model"), config_overrides=FAMILIES[request.param])


@pytest.fixture(scope="module")
def model(folder: Path) -> ModelForCausalLM:
    return load_model(folder, dtype=mx.float32)


def test_fused_and_reference_give_the_same_logits(folder: Path, model: ModelForCausalLM) -> None:
    reference = load_model(folder, ModelFeatures.reference(), dtype=mx.float32)
    logits = model(mx.array(IDS))
    assert logits.shape == (2, 8, 288)
    assert close(logits, reference(mx.array(IDS)))


@pytest.mark.parametrize("field", list(vars(ModelFeatures())))
def test_each_feature_alone_changes_nothing(folder: Path, model: ModelForCausalLM, field: str) -> None:
    features = ModelFeatures(**{**vars(ModelFeatures()), field: False})
    assert close(model(mx.array(IDS)), load_model(folder, features, dtype=mx.float32)(mx.array(IDS)))


@pytest.mark.parametrize("parts", [[1] * 8, [3, 5], [7, 1], [1, 7], [2, 2, 2, 2]], ids=str)
def test_pieces_of_any_size_give_what_the_whole_gives(model: ModelForCausalLM, parts: list[int]) -> None:
    ids, cache, outputs, start = mx.array(IDS), model.create_kv_cache(), [], 0
    for size in parts:
        outputs.append(model(ids[:, start : start + size], start, cache))
        start += size
    assert close(mx.concatenate(outputs, axis=1), model(ids))
    assert {layer.offset for layer in cache} == {8}


def test_after_a_trim_the_model_goes_on_as_if_the_rest_had_never_been(model: ModelForCausalLM) -> None:
    ids, cache = mx.array(IDS), model.create_kv_cache()
    model(mx.concatenate([ids[:, :5], ids[:, :3] + 1], axis=1), 0, cache)
    for layer in cache:
        layer.trim(3)
    step = [model(ids[:, i : i + 1], i, cache) for i in (5, 6)]
    assert close(mx.concatenate(step, axis=1), model(ids)[:, 5:7])
    for layer in cache:
        layer.trim(2)
    assert close(model(ids[:, 5:], 5, cache), model(ids)[:, 5:])


def test_rows_of_a_batch_do_not_see_each_other(model: ModelForCausalLM) -> None:
    ids = mx.array(IDS)
    assert close(model(ids), mx.concatenate([model(ids[i : i + 1]) for i in range(2)]))


def test_a_token_sees_none_after_it(model: ModelForCausalLM) -> None:
    ids = mx.array(IDS)
    changed = mx.concatenate([ids[:, :6], ids[:, 6:] + 1], axis=1)
    assert close(model(ids)[:, :6], model(changed)[:, :6])
    assert not close(model(ids)[:, 6], model(changed)[:, 6])


@pytest.mark.parametrize("keep", [1, 3, 8, 9, 1000])
def test_only_the_last_logits_are_kept(model: ModelForCausalLM, keep: int) -> None:
    ids = mx.array(IDS)
    assert close(model(ids, logits_to_keep=keep), model(ids)[:, -keep:])


def test_no_logits_may_be_kept_while_the_cache_fills(model: ModelForCausalLM) -> None:
    cache = model.create_kv_cache()
    assert model(mx.array(IDS), 0, cache, logits_to_keep=0).shape == (2, 0, 288)
    assert {layer.offset for layer in cache} == {8}


def test_positions_without_a_cache_start_at_the_offset(model: ModelForCausalLM) -> None:
    """Attention depends on distances alone, so that the logits are the same wherever a text starts."""
    ids = mx.array(IDS)
    assert close(model(ids, 100), model(ids), 1e-3)
    assert close(model(ids, mx.array([100, 3])), model(ids), 1e-3)
    assert close(model(ids), model(ids, 0, None))


@pytest.fixture(scope="module")
def plain(tiny_checkpoint: Path) -> ModelForCausalLM:
    return load_model(tiny_checkpoint, dtype=mx.float32)


@pytest.mark.parametrize("offset", [0, 4, 6, -5])
def test_an_offset_that_disagrees_with_the_cache_is_an_error(plain: ModelForCausalLM, offset: int) -> None:
    cache = plain.create_kv_cache()
    plain(mx.array(IDS)[:, :5], 0, cache)
    for said in (offset, mx.array(offset), mx.array([5, offset])):
        with pytest.raises(ValueError, match="disagrees with a cache that holds 5"):
            plain(mx.array(IDS)[:, 5:], said, cache)
    assert {layer.offset for layer in cache} == {5}


def test_an_array_as_offset_agrees_where_every_row_does(plain: ModelForCausalLM) -> None:
    ids = mx.array(IDS)
    for offset in (5, mx.array(5), mx.array([5, 5])):
        cache = plain.create_kv_cache()
        plain(ids[:, :5], 0, cache)
        assert close(plain(ids[:, 5:], offset, cache), plain(ids)[:, 5:])


def test_a_cache_of_another_number_of_layers_is_an_error(plain: ModelForCausalLM) -> None:
    with pytest.raises(ValueError, match="1 caches were given"):
        plain(mx.array(IDS), 0, plain.create_kv_cache()[:1])


def test_a_dense_cache_has_one_cache_a_layer(plain: ModelForCausalLM) -> None:
    for cache in (plain.create_kv_cache(), plain.create_kv_cache("dense"), plain.create_kv_cache(mode="dense")):
        assert [type(layer) for layer in cache] == [TinyKvFullCache] * 2
        assert len({id(layer) for layer in cache}) == 2


@pytest.mark.parametrize("mode", ["full", "", "DENSE", None])
def test_an_unknown_mode_of_cache_is_an_error_that_names_it(plain: ModelForCausalLM, mode: Any) -> None:
    with pytest.raises(ValueError, match=repr(mode)):
        plain.create_kv_cache(mode)


# A block alone.


@pytest.fixture(scope="module", params=FEATURES, ids=list(FEATURES))
def block(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> TransformerBlock:
    store = WeightStore.from_path(tiny_checkpoint).cast(mx.float32)
    return TransformerBlock(1, Config.from_json_file(tiny_checkpoint), store, FEATURES[request.param])


@pytest.fixture
def x() -> mx.array:
    """Six tokens of each of two rows."""
    return mx.random.normal((2, 6, 32), key=mx.random.key(4))


def test_a_block_is_two_residual_steps(block: TransformerBlock, x: mx.array) -> None:
    middle = x + block.self_attn(block.input_layernorm(x), 0, TinyKvFullCache())
    assert close(block(x, 0, TinyKvFullCache()), middle + block.mlp(block.post_attention_layernorm(middle)))


def test_a_block_without_a_cache_sees_its_input_alone(block: TransformerBlock, x: mx.array) -> None:
    assert close(block(x, 0, None), block(x, 0, TinyKvFullCache()))


def test_a_block_is_causal_unless_a_mask_is_given(block: TransformerBlock, x: mx.array) -> None:
    causal = block(x, 0, TinyKvFullCache())
    assert close(block(x, 0, TinyKvFullCache(), mask=causal_mask(6, 6)), causal)
    everything = block(x, 0, TinyKvFullCache(), mask=mx.ones((6, 6), dtype=mx.bool_))
    assert close(everything[:, -1], causal[:, -1])
    assert not close(everything[:, 0], causal[:, 0])


def test_a_block_takes_an_additive_mask(block: TransformerBlock, x: mx.array) -> None:
    additive = mx.where(causal_mask(6, 6), 0.0, -1e9)
    assert close(block(x, 0, None, mask=additive), block(x, 0, None))


def test_a_blocks_mask_spans_its_cache(block: TransformerBlock, x: mx.array) -> None:
    cache = TinyKvFullCache()
    block(x[:, :4], 0, cache)
    only_itself = mx.concatenate([mx.zeros((2, 4)), mx.eye(2)], axis=1).astype(mx.bool_)
    got = block(x[:, 4:], 4, cache, mask=only_itself)
    alone = mx.concatenate([block(x[:, i : i + 1], i, None) for i in (4, 5)], axis=1)
    assert close(got, alone)


# Faults 09 and 10: the two dialects of RoPE, and where theta stands.

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCHEMES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


def long_logits(folder: Path, **said: Any) -> mx.array:
    """Logits at the end of 1,030 tokens, with so few dimensions that every angle matters."""
    overrides = {"max_position_embeddings": 4096, "num_hidden_layers": 1, **said}
    model = load_model(tiny.write_checkpoint(folder, config_overrides=overrides), dtype=mx.float32)
    return model(mx.array([[3 + i * 7 % 250 for i in range(1030)]]), logits_to_keep=20)


@pytest.mark.parametrize("name", SCHEMES)
def test_fault_09_either_key_gives_identical_logits_and_null_the_unscaled_ones(tmp_path: Path, name: str) -> None:
    parameters = SCHEMES[name]
    old = long_logits(tmp_path, rope_scaling={"type": name, **parameters})
    for said in ({"rope_type": name}, {"type": name, "rope_type": name}):
        assert mx.array_equal(old, long_logits(tmp_path, rope_scaling={**said, **parameters})).item()
    plain = long_logits(tmp_path)
    assert mx.array_equal(plain, long_logits(tmp_path, rope_scaling=None)).item()
    assert not close(old, plain)


def test_fault_10_theta_in_rope_parameters_gives_the_logits_of_the_old_dialect(tmp_path: Path) -> None:
    old = long_logits(tmp_path, rope_theta=500000.0)
    parameters = {"rope_type": "default", "rope_theta": 500000.0}
    for said in (
        {"rope_theta": ..., "rope_parameters": parameters},
        {"rope_theta": 10000.0, "rope_parameters": parameters},
        {"rope_theta": ..., "rope_parameters": {"full_attention": parameters}},
    ):
        assert mx.array_equal(old, long_logits(tmp_path, **said)).item()
    assert not close(old, long_logits(tmp_path, rope_theta=10000.0))
