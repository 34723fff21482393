"""What a person is told when MLX cannot be used: one line, with what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from tinyllm.backends import explain_absence, refuse_several
from tinyllm.errors import BackendError


def generate(folder: Path, first_on_path: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "tinyllm", "generate", "x", "-m", str(folder)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(first_on_path)},
    )


def test_an_mlx_without_a_backend_is_one_line_that_names_the_extra(tmp_path: Path, tiny_checkpoint: Path) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "core.py").write_text("raise ImportError('libmlx.so: cannot open shared object file')")
    done = generate(tiny_checkpoint, tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (1, b"", 1)
    assert b"libmlx.so" in done.stderr and b"[cpu]" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the backends that exclude each other are Linux's")
def test_two_backends_at_once_are_refused_by_name(tmp_path: Path, tiny_checkpoint: Path) -> None:
    for name in ("mlx_cpu", "mlx_cuda_12"):
        (tmp_path / f"{name}-0.32.4.dist-info").mkdir()
    done = generate(tiny_checkpoint, tmp_path)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert b"mlx-cpu and mlx-cuda-12" in done.stderr
    refuse_several([str(tmp_path / "nowhere"), "file.zip"])


@pytest.mark.parametrize(
    ("system", "machine", "told"),
    [("darwin", "x86_64", "Apple Silicon"), ("darwin", "arm64", "pip install mlx"), ("linux", "x86_64", r"\[cpu\]")],
)
def test_the_absence_of_mlx_is_explained_for_each_machine(system: str, machine: str, told: str) -> None:
    with pytest.raises(BackendError, match=told):
        raise BackendError(explain_absence(ImportError("No module named 'mlx'\nmore"), system, machine))


def test_a_scripted_checkpoint_runs_where_one_backend_is(tmp_path: Path) -> None:
    done = generate(tiny.write_scripted_checkpoint(tmp_path / "m", " one"), tmp_path)
    assert (done.returncode, done.stdout) == (0, b" one\n")
