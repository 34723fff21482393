"""Files that are written a tensor at a time are what the reader, and the safetensors library, take them for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tinyllm.checkpoint.files import INDEX, SINGLE, find_weight_files
from tinyllm.checkpoint.safetensors_header import read_safetensors_header
from tinyllm.convert.shards import Planned, ShardWriter

ARRAYS = {f"t{i}": np.arange(i * 10, i * 10 + 5 + i, dtype=np.float32) for i in range(6)}
PLAN = [Planned(name, "F32", array.shape) for name, array in ARRAYS.items()]


def write(folder: Path, shard_bytes: int) -> None:
    with ShardWriter(folder, PLAN, {"format": "mlx"}, shard_bytes) as writer:
        for name, array in ARRAYS.items():
            writer.write(name, array.data)


def test_one_file_has_no_index(tmp_path: Path) -> None:
    write(tmp_path, 10**9)
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    found = load_file(tmp_path / SINGLE)
    assert found.keys() == ARRAYS.keys()
    assert all(np.array_equal(found[name], array) for name, array in ARRAYS.items())


def test_many_files_are_as_large_as_allowed_and_have_an_index(tmp_path: Path) -> None:
    limit = 60
    write(tmp_path, limit)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in ARRAYS.values())
    files = find_weight_files(tmp_path).files
    assert {path.name for path in files} == set(index["weight_map"].values()) and len(files) > 2
    for path in files:
        header = read_safetensors_header(path)
        assert sum(info.nbytes for info in header.values()) <= limit or len(header) == 1
        for name, array in load_file(path).items():
            assert index["weight_map"][name] == path.name
            assert np.array_equal(array, ARRAYS[name])


def test_another_tensor_than_the_next_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="t0 of 20 bytes is next"), ShardWriter(tmp_path, PLAN, {}) as writer:
        writer.write("t1", ARRAYS["t1"].data)


def test_one_that_is_left_out_is_missed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="t1 was to be written"), ShardWriter(tmp_path, PLAN, {}) as writer:
        writer.write("t0", ARRAYS["t0"].data)
