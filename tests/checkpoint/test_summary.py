"""What a checkpoint is called, and the memory that its weights take, from headers alone."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import tiny

from tinyllm import hardware
from tinyllm.checkpoint.contents import read_contents
from tinyllm.checkpoint.forms import TYPES_OF_PARTS
from tinyllm.checkpoint.summary import summarize
from tinyllm.checkpoint.tensor_table import READABLE
from tinyllm.checkpoint.weights import DTYPES, WeightStore
from tinyllm.config.config import Config
from tinyllm.config.tensors import tensor_shapes
from tinyllm.errors import TokenizerError

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A checkpoint in 4 bits, as mlx-lm writes it, with a tokenizer."""
    folder = tmp_path / "packed"
    shutil.copytree(GOLDEN / "mlx-lm-4bit", folder)
    tiny.write_tokenizer(folder)
    return folder


def elements(folder: Path) -> int:
    shapes = tensor_shapes(Config.from_json_file(folder)).values()
    return sum(shape[0] * (shape[1] if len(shape) == 2 else 1) for shape in shapes)


def test_dense_weights_are_counted_as_stored_on_a_gpu_and_in_float32_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = tiny.write_checkpoint(tmp_path / "half", dtype="BF16")
    monkeypatch.setattr(hardware, "has_gpu_backend", lambda: True)
    on_gpu = summarize(read_contents(half))
    monkeypatch.setattr(hardware, "has_gpu_backend", lambda: False)
    on_cpu = summarize(read_contents(half))
    assert (on_gpu.family, on_gpu.quantization) == ("llama", "bf16")
    assert (on_gpu.memory_bytes, on_cpu.memory_bytes) == (2 * elements(half), 4 * elements(half))
    assert summarize(read_contents(half), itemsize=2).memory_bytes == 2 * elements(half)
    assert summarize(read_contents(half), itemsize=4, on_cpu=False).memory_bytes == 4 * elements(half)


def test_packed_weights_stay_packed_where_their_float32_takes_half_of_the_memory(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = WeightStore.from_path(packed)
    stored, dense = store.nbytes, 4 * elements(packed)
    scales = sum(2 * math.prod(store.shape(name)) for name in store.names if not name.endswith(".weight"))
    norms = sum(2 * math.prod(store.shape(name)) for name in store.names if name.endswith("norm.weight"))
    in_float32 = stored + scales + norms  # bfloat16 takes twice its bytes
    monkeypatch.setattr(hardware, "has_gpu_backend", lambda: False)
    for available, taken in ((2 * dense, in_float32), (2 * dense + 2, dense)):
        monkeypatch.setattr(hardware, "available_memory", lambda available=available: available)
        assert summarize(read_contents(packed)).memory_bytes == taken
    monkeypatch.setattr(hardware, "has_gpu_backend", lambda: True)
    assert summarize(read_contents(packed)).memory_bytes == stored
    assert summarize(read_contents(packed)).quantization == "4-bit"


def test_a_folder_without_tokenizer_json_is_refused_with_what_it_has_instead(packed: Path) -> None:
    (packed / "tokenizer.json").rename(packed / "tokenizer.model")
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json, only tokenizer\.model, which"):
        summarize(read_contents(packed))


def test_the_types_that_a_header_may_have_are_those_that_are_read() -> None:
    assert set(DTYPES) == READABLE | TYPES_OF_PARTS
