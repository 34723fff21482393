"""Compiled kernels are this user's own, outlast the process that made them, and do not pile up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tinyllm import kernels
from tinyllm.kernels import KernelFolder, has_compiler

COMPILE = """
import sys
from pathlib import Path
from tinyllm._mx import mx
from tinyllm.kernels import KernelFolder

folder = KernelFolder(mx.__version__, Path(sys.argv[1]))
mx.set_default_device(mx.Device(mx.DeviceType.cpu))
with folder.in_use():
    print(mx.compile(lambda x: (x * 2 + 1) * x)(mx.arange(4.0)).tolist())
"""


def library(folder: KernelFolder, name: str = "libmade.so") -> Path:
    return folder._libraries / name


def compile_into(folder: KernelFolder, content: bytes) -> None:
    """Write a kernel. The folder's time goes on by a second: a compiler is not done within the tick of a clock."""
    library(folder).write_bytes(content)
    later = folder._changed + 10**9
    os.utime(folder._libraries, ns=(later, later))


def stored(store: Path) -> list[str]:
    return sorted(path.name for path in store.glob("*/*.so"))


def test_kernels_that_were_finished_are_there_for_the_next_process(tmp_path: Path) -> None:
    first = KernelFolder("1.0", tmp_path)
    with first.in_use():
        compile_into(first, b"kernel")
    assert stored(tmp_path) == ["libmade.so"]
    second = KernelFolder("1.0", tmp_path)
    assert library(second).read_bytes() == b"kernel"
    assert not library(KernelFolder("2.0", tmp_path)).exists(), "another MLX has others"


def test_what_was_compiled_is_remembered_by_name(tmp_path: Path) -> None:
    folder = KernelFolder("1.0", tmp_path)
    assert not folder.knows("llama")
    folder.remember("llama")
    assert folder.knows("llama") and KernelFolder("1.0", tmp_path).knows("llama")
    assert not KernelFolder("2.0", tmp_path).knows("llama")


def test_what_a_step_that_failed_left_is_not_kept(tmp_path: Path) -> None:
    folder = KernelFolder("1.0", tmp_path)

    def fail() -> None:
        with folder.in_use():
            compile_into(folder, b"half a ker")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert stored(tmp_path) == []


@pytest.mark.parametrize("before", [None, "/somewhere"])
def test_the_environment_is_as_it_was_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    if before:
        monkeypatch.setenv("TMPDIR", before)
    folder = KernelFolder("1.0", tmp_path)
    with folder.in_use():
        assert os.environ["TMPDIR"].startswith(str(tmp_path))
    assert os.environ.get("TMPDIR") == before


def test_nobody_else_can_write_where_kernels_come_from(tmp_path: Path) -> None:
    own = KernelFolder("1.0", tmp_path / "new")
    for folder in (own._own, own._store):
        assert folder.stat().st_mode & 0o077 == 0
    store = own._store
    (store / "libplanted.so").write_bytes(b"evil")
    store.chmod(0o777)
    wary = KernelFolder("1.0", tmp_path / "new")
    assert not library(wary, "libplanted.so").exists()
    assert wary._own.parent != store
    with wary.in_use():
        compile_into(wary, b"kernel")
    assert "libmade.so" not in stored(tmp_path / "new")


def test_a_store_that_cannot_be_made_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = KernelFolder("1.0", tmp_path / "file")
    with folder.in_use():
        compile_into(folder, b"kernel")


def test_folders_of_processes_that_are_gone_are_cleared(tmp_path: Path) -> None:
    live = KernelFolder("1.0", tmp_path)
    gone = live._store / "process-999999999-abc"
    gone.mkdir()
    KernelFolder("1.0", tmp_path)
    assert not gone.exists() and live._own.exists()


def test_there_are_never_more_than_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = KernelFolder("1.0", tmp_path)
    for i in range(6):
        (folder._store / f"lib{i}.so").write_bytes(b"")
        os.utime(folder._store / f"lib{i}.so", (i, i))
    monkeypatch.setattr(kernels, "_MOST_KERNELS", 2)
    folder.remember("llama")
    assert not KernelFolder("1.0", tmp_path).knows("llama")
    assert stored(tmp_path) == ["lib4.so", "lib5.so"]


@pytest.mark.skipif(not has_compiler(), reason="needs g++")
def test_mlx_compiles_there_and_the_process_leaves_nothing_but_kernels(tmp_path: Path) -> None:
    elsewhere = tmp_path / "tmp"
    elsewhere.mkdir()
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", COMPILE, str(tmp_path / "store")],
            env={**os.environ, "TMPDIR": str(elsewhere)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == "[0.0, 3.0, 10.0, 21.0]"
        assert len(stored(tmp_path / "store")) == 1
        assert [path.suffix for path in (tmp_path / "store").glob("*/*")] == [".so"]
    assert list(elsewhere.iterdir()) == []
