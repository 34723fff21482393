"""Bytes are counted from the config as the caches and weights really hold them."""

from __future__ import annotations

import pytest
import tiny

from tinyllm import hardware
from tinyllm.bench.memory import check_memory, kv_bytes_per_token, kv_bytes_read
from tinyllm.bench.modes import MEASURED
from tinyllm.bench.subject import load_subject
from tinyllm.bench.workload import Workload
from tinyllm.checkpoint.contents import read_contents
from tinyllm.config.config import Config
from tinyllm.errors import DoesNotFitError

# 2 layers, 2 kv heads of 8, keys and values.
A_TOKEN = 2 * 2 * 8 * 2


def test_kv_bytes_a_token() -> None:
    config = Config.from_dict(tiny.config())
    assert kv_bytes_per_token(config, 4) == A_TOKEN * 4
    assert kv_bytes_read(config, 2, 100) == A_TOKEN * 2 * 100


def test_a_window_is_all_that_is_read() -> None:
    config = Config.from_dict(tiny.config(model_type="mistral", sliding_window=16))
    assert kv_bytes_read(config, 4, 10) == A_TOKEN * 4 * 10
    assert kv_bytes_read(config, 4, 100) == A_TOKEN * 4 * 16


def test_the_test_that_does_not_fit_is_named_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.from_dict(tiny.config(max_position_embeddings=2**20))
    workloads = [Workload(8, 0), Workload(0, 100_000, batch=64), Workload(64, 0)]
    cache = 64 * 100_065 * A_TOKEN * 4
    monkeypatch.setattr(hardware, "available_memory", lambda: 20 * cache)
    check_memory(workloads, config, "tiny", weight_bytes=5000, itemsize=4, chunk=256)
    monkeypatch.setattr(hardware, "available_memory", lambda: cache)
    with pytest.raises(
        DoesNotFitError, match=r"^tg100000 on tiny needs .* for 64 sequences of 100,065 tokens .* fit$"
    ):
        check_memory(workloads, config, "tiny", weight_bytes=5000, itemsize=4, chunk=256)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("features", ["fused", "reference"])
def test_held_bytes_are_those_of_the_tensors(tmp_path, tied: bool, features: str) -> None:
    overrides = {"tie_word_embeddings": tied}
    tensors = tiny.random_tensors(tiny.config(**overrides))
    folder = tiny.write_checkpoint(tmp_path, config_overrides=overrides, tensors=tensors)
    subject, engine = load_subject("tiny", read_contents(folder), MEASURED[features])
    weights = sum(array.nbytes for array in tensors.values())
    rope = 2 * (8 // 2) * 4  # each layer has its wavelengths
    embedding = tensors["model.embed_tokens.weight"].nbytes
    assert subject.size_bytes == weights + rope
    assert subject.read_bytes == weights + rope - (0 if tied else embedding)
    assert subject.params == weights // 4
    assert (subject.dtype, subject.quantization, subject.features) == ("float32", "f32", features)
    assert engine.model.config.vocab_size == 288
