"""Kernels of convolutions as PyTorch lays them out and as MLX does, which tells whether norms have their offset."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from golden_cases import GOLDEN, TOLERANCE, difference, expected

from tinyllm._mx import mx
from tinyllm.errors import TensorMismatchError
from tinyllm.model.load import load_model

_KERNELS = re.compile(r"(conv1d|conv\.conv)\.weight$")
_OFFSET = re.compile(r"(layernorm|[qk]_norm|model\.norm)\.weight$")


def converted(name: str, folder: Path, *, turned: bool, added: bool) -> Path:
    """Write a golden checkpoint in float32 as mlx-lm converts it."""
    arrays = {
        key: array.astype(mx.float32) for key, array in mx.load(str(GOLDEN / name / "model.safetensors")).items()
    }
    for key, array in arrays.items():
        if _KERNELS.search(key) and turned:
            arrays[key] = mx.contiguous(array.swapaxes(1, 2))
        if _OFFSET.search(key) and added:
            arrays[key] = array + 1
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    (folder / "config.json").write_bytes((GOLDEN / name / "config.json").read_bytes())
    return folder


@pytest.mark.parametrize(("name", "added"), [("qwen3-next", True), ("lfm2", False)])
def test_a_conversion_by_mlx_lm_is_the_same_model(tmp_path: Path, name: str, added: bool) -> None:
    ids, wanted = expected(name)
    folder = converted(name, tmp_path / "converted", turned=True, added=added)
    assert difference(load_model(folder, dtype=mx.float32)(ids)[0], wanted) <= TOLERANCE


def test_offsets_alone_would_be_another_model(tmp_path: Path) -> None:
    ids, wanted = expected("qwen3-next")
    folder = converted("qwen3-next", tmp_path / "converted", turned=False, added=True)
    assert difference(load_model(folder, dtype=mx.float32)(ids)[0], wanted) > 100 * TOLERANCE


def test_kernels_of_another_length_are_refused(tmp_path: Path) -> None:
    folder = converted("lfm2", tmp_path / "converted", turned=False, added=False)
    arrays = dict(mx.load(str(folder / "model.safetensors")))
    name = next(name for name in arrays if _KERNELS.search(name))
    arrays[name] = mx.concatenate([arrays[name]] * 2, axis=2)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    with pytest.raises(TensorMismatchError, match=r"conv\.conv\.weight is \[32, 6\], not \[32, 3\]"):
        load_model(folder)
