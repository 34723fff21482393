"""Packed caches, dense and paged: they remember alike, and what is packed once stays as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from tinyllm._mx import mx
from tinyllm.config.config import Config
from tinyllm.config.layers import Alibi
from tinyllm.config.reach import Chunk, Window
from tinyllm.errors import UnsupportedQuantizationError
from tinyllm.kv.full import TinyKvFullCache
from tinyllm.kv.paged import TinyKvPagedCache, TinyKvPagedPool
from tinyllm.kv.paged_step import Placement, TinyKvPagedStep, find_places
from tinyllm.kv.pools import KvPools
from tinyllm.model.load import load_model
from tinyllm.model.transformer import ModelForCausalLM
from tinyllm.ops.attention import AttentionSpec, attention_reference, causal_mask, with_bias
from tinyllm.ops.packed_kv import packed_heads, stored_form
from tinyllm.ops.position_bias import PositionBias

HEADS, KV_HEADS, DIM, LENGTH = 4, 2, 32, 13
SPECS = {
    "everything": AttentionSpec(0.2),
    "a window": AttentionSpec(0.2, Window(4)),
    "chunks": AttentionSpec(0.2, Chunk(5)),
    "a soft cap": AttentionSpec(0.2, softcap=0.5),
    "sinks": AttentionSpec(0.2, sinks=mx.array([1.0, -1.0, 0.0, 2.0])),
    "ALiBi": AttentionSpec(0.2, bias=PositionBias(Alibi(), HEADS)),
}
BITS = pytest.mark.parametrize("bits", [8, 4])


def close(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and bool(mx.allclose(a, b, rtol=1e-4, atol=1e-5).item())


def qkv(seq: int, seed: int = 0) -> tuple[mx.array, mx.array, mx.array]:
    keys = mx.random.split(mx.random.key(seed), 3)
    shapes = ((1, HEADS, seq, DIM), (1, KV_HEADS, seq, DIM), (1, KV_HEADS, seq, DIM))
    q, k, v = (mx.random.normal(shape, key=key) for shape, key in zip(shapes, keys, strict=True))
    return q, k, v


def whole(q: mx.array, k: mx.array, v: mx.array, spec: AttentionSpec, bits: int) -> mx.array:
    """All positions at once, over keys and values that were packed and unpacked."""
    keys, values = (heads.unpacked() for heads in packed_heads(stored_form([k, v], bits), bits))
    mask = causal_mask(LENGTH, LENGTH, spec.reach)
    if spec.bias is not None:
        mask = with_bias(spec.bias, mx.arange(LENGTH)[:, None], mx.arange(LENGTH), mask, mx.float32)
    return attention_reference(q, keys, values, replace(spec, bias=None), mask)


@BITS
@pytest.mark.parametrize("rows", [0, 9])
@pytest.mark.parametrize("parts", [[LENGTH], [1] * LENGTH, [5, 1, 7]], ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_pieces_of_any_size_give_what_the_whole_gives(
    spec: AttentionSpec, parts: list[int], rows: int, bits: int
) -> None:
    spec, arrays = replace(spec, packed_rows=rows), qkv(LENGTH)
    expected = whole(*arrays, spec, bits)
    for cache in (TinyKvFullCache(step=5, bits=bits), TinyKvPagedCache(TinyKvPagedPool(4, bits=bits))):
        start, outputs = 0, []
        for size in parts:
            outputs.append(cache.attend(*(array[:, :, start : start + size] for array in arrays), spec))
            start += size
        assert close(mx.concatenate(outputs, axis=2), expected)


@BITS
@pytest.mark.parametrize("lengths", [[5], [9, 2, 4]], ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_rows_of_a_step_see_their_own_sequence(spec: AttentionSpec, lengths: list[int], bits: int) -> None:
    spec, pool = replace(spec, packed_rows=9), TinyKvPagedPool(4, bits=bits)
    caches, news, expected = [], [], []
    for i, length in enumerate(lengths):
        alone, before, new = TinyKvFullCache(bits=bits), qkv(length, i), qkv(1, 100 + i)
        caches.append(TinyKvPagedCache(pool))
        caches[-1].attend(*before, spec)
        alone.attend(*before, spec)
        caches[-1].sequence.reserve(length, length + 1)
        news.append(new)
        expected.append(alone.attend(*new, spec))
    pool.make_room(pool.arrays[0])
    tables = [cache.sequence.tables.by_kind[0] for cache in caches]
    places = find_places(pool, tables, lengths, rows=len(lengths), reach=spec.reach)
    pages = None if places.pages is None else mx.array(places.pages)
    placement = Placement(mx.array(places.slots), mx.array(places.first), pages, places.span)
    positions = mx.array(lengths)
    seen = placement.mask(positions, spec.reach, 4)
    step = TinyKvPagedStep(pool.arrays[0], placement, positions, seen, 4, bits=bits)
    got = step.attend(*(mx.concatenate(parts) for parts in zip(*news, strict=True)), spec)
    assert close(got, mx.concatenate(expected))
    assert [array.dtype for array in step.arrays] == [mx.uint32, mx.float32, mx.float32] * 2


@BITS
def test_what_is_packed_once_stays_bit_by_bit(bits: int) -> None:
    arrays, spec = qkv(LENGTH), SPECS["everything"]
    full, pool = TinyKvFullCache(bits=bits), TinyKvPagedPool(4, bits=bits)
    paged = TinyKvPagedCache(pool)
    kept: list[mx.array] = []
    for start in (0, 6, 7, 8):
        part = [array[:, :, start : start + (6 if start == 0 else 1)] for array in arrays]
        full.attend(*part, spec)
        paged.attend(*part, spec)
        pages = paged.sequence.tables.by_kind[0].pages
        now = pool.read(0, pages, 0, paged.offset)
        for dense, page in zip(full.arrays, now, strict=True):
            assert mx.array_equal(dense[:, :, : full.offset], page)
        for old, new in zip(kept, now, strict=bool(kept)):
            assert mx.array_equal(old, new[:, :, : old.shape[2]])
        kept = [array + 0 for array in now]


@BITS
def test_bytes_are_those_of_what_is_packed(bits: int) -> None:
    """Of each of 4 heads of 32: words, a scale and a bias."""
    full, pool = TinyKvFullCache(step=8, bits=bits), TinyKvPagedPool(4, bits=bits)
    paged = TinyKvPagedCache(pool)
    for cache in (full, paged):
        cache.attend(*qkv(5), SPECS["everything"])
    position = 4 * (32 * bits // 8 + 2 * 4)
    assert full.nbytes == 8 * position
    assert pool.page_bytes == 4 * position
    full.trim(5)
    assert full.offset == 0


@pytest.fixture(scope="module", params=["heads", "latents"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelForCausalLM:
    latents: dict[str, Any] = {
        "model_type": "deepseek_v3",
        "head_dim": ...,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 2,
    }
    overrides = latents if request.param == "latents" else {"head_dim": 32}
    return load_model(tiny.write_checkpoint(tmp_path_factory.mktemp("model"), config_overrides=overrides))


@BITS
def test_forks_and_trims_of_packed_pages_are_those_of_plain_ones(model: ModelForCausalLM, bits: int) -> None:
    ids = mx.array([[(7 * i) % 90 + 40 for i in range(30)]])

    def dense(*parts: mx.array) -> mx.array:
        caches, start = model.create_kv_cache(kv_bits=bits), 0
        for part in parts:
            logits = model(part, start, caches)
            start += part.shape[1]
        return logits[:, -1]

    caches = model.create_kv_cache("paged", page_size=8, kv_bits=bits)
    model(ids[:, :19], 0, caches)
    fork = caches.fork()
    assert close(model(ids[:, 19:26], 19, fork)[:, -1], dense(ids[:, :19], ids[:, 19:26]))
    assert close(model(ids[:, 4:9], 19, caches)[:, -1], dense(ids[:, :19], ids[:, 4:9]))  # on a copy of page 3
    fork.trim(9)
    assert close(model(ids[:, 20:21], 17, fork)[:, -1], dense(ids[:, :17], ids[:, 20:21]))
    assert not close(dense(ids[:, :9]), model(ids[:, :9])[:, -1])


def test_fault_38_heads_that_cannot_be_packed_are_refused_where_a_cache_is_made(tmp_path: Path) -> None:
    model = load_model(tiny.write_checkpoint(tmp_path, config_overrides={"head_dim": 80, "hidden_size": 32}))
    for mode in ("dense", "paged"):
        with pytest.raises(UnsupportedQuantizationError, match="80 elements"):
            model.create_kv_cache(mode, kv_bits=8)  # type: ignore[call-overload]
    with pytest.raises(UnsupportedQuantizationError, match="80 elements"):
        KvPools(Config.from_dict(tiny.config(head_dim=80)), 8, kv_bits=4)
