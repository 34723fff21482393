"""Which BLAS mlx runs on under Linux: in real processes, since a library cannot be unloaded."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinyllm import blas
from tinyllm.blas import Blas, load_blas
from tinyllm.kernels import has_compiler

SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
OPENBLAS = SITE_PACKAGES / "scipy_openblas32" / "lib" / "libscipy_openblas.so"
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="on macOS mlx uses Accelerate")
with_openblas = pytest.mark.skipif(not OPENBLAS.exists(), reason="scipy-openblas32 is not installed")

IS_OPENBLAS = "hasattr(ctypes.CDLL(None), 'scipy_openblas_get_config')"
REPORT = f"import ctypes; from tinyllm._mx import BLAS, mx; print(BLAS.name, {IS_OPENBLAS})"
PRODUCTS = """
import numpy as np
from tinyllm._mx import mx
mx.set_default_device(mx.cpu)
random = np.random.default_rng(0)
for shape in ((1, 64, 96), (1, 576, 1536), (33, 128, 65), (256, 300, 40), (7, 1, 5), (5, 700, 300)):
    rows, inner, columns = shape
    a, b = random.standard_normal((rows, inner)), random.standard_normal((columns, inner))
    product = mx.array(a, dtype=mx.float32) @ mx.array(b, dtype=mx.float32).T
    assert np.allclose(np.array(product), a @ b.T, rtol=1e-4, atol=1e-4), shape
    as_it_is = mx.contiguous(mx.array(b, dtype=mx.float32).T)
    assert np.allclose(np.array(mx.array(a, dtype=mx.float32) @ as_it_is), a @ b.T, rtol=1e-4, atol=1e-4), shape
    spread = mx.array(a.T, dtype=mx.float32)[:, :1].T  # a row whose elements are not side by side
    assert np.allclose(np.array(spread @ as_it_is), a[:1] @ b.T, rtol=1e-4, atol=1e-4), shape
    product = mx.array(b, dtype=mx.float32) @ mx.array(a, dtype=mx.float32).T
    assert np.allclose(np.array(product), b @ a.T, rtol=1e-4, atol=1e-4), shape
print("equal")
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("LD_PRELOAD", "TINYLLM_BLAS")}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={**clean, **environment}, capture_output=True, text=True, check=True)


@on_linux
@pytest.mark.parametrize("value", ["none", "NONE"])
def test_none_keeps_the_wheels_own(value: str) -> None:
    assert run(REPORT, TINYLLM_BLAS=value).stdout == "reference BLAS of the mlx wheel False\n"


@on_linux
@with_openblas
def test_openblas_from_pypi_is_loaded_before_mlx_where_it_is_installed() -> None:
    ran = run(REPORT)
    assert ran.stdout in ("OpenBLAS True\n", "MKL False\n")  # MKL is preferred, where it is installed too
    assert ran.stderr == ""


@on_linux
@pytest.mark.parametrize("value", ["", "none"])
def test_products_are_numpys_on_whatever_blas(value: str) -> None:
    assert run(PRODUCTS, TINYLLM_BLAS=value).stdout == "equal\n"


HAS_ROWS = "from tinyllm._mx import BLAS; import ctypes; print(hasattr(ctypes.CDLL(None), 'tinyllm_use'))"


def libraries(cache: Path) -> list[Path]:
    return sorted((cache / "tinyllm" / "kernels").glob("rows-*.so"))


@on_linux
@with_openblas
@pytest.mark.skipif(not has_compiler(), reason="needs g++")
def test_few_rows_have_a_library_that_is_compiled_once(tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    assert run(PRODUCTS, **cache).stdout == "equal\n"
    [library] = libraries(tmp_path)
    made = library.stat()  # when it was last read, which is part of this, changes
    assert run(HAS_ROWS, **cache, PATH="").stdout == "True\n"
    assert (library.stat().st_ino, library.stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)
    library.write_bytes(b"none")
    assert run(PRODUCTS, **cache).stdout == "equal\n"


@on_linux
@with_openblas
@pytest.mark.parametrize("mode", [0o777, 0o500], ids=["others may write", "not even its owner may"])
def test_without_a_place_or_a_compiler_rows_are_multiplied_like_all_else(mode: int, tmp_path: Path) -> None:
    assert run(PRODUCTS, XDG_CACHE_HOME=str(tmp_path), PATH="").stdout == "equal\n"
    assert not libraries(tmp_path)
    (tmp_path / "tinyllm" / "kernels").chmod(mode)
    assert run(PRODUCTS, XDG_CACHE_HOME=str(tmp_path)).stdout == "equal\n"
    assert not libraries(tmp_path) or (mode == 0o500 and os.getuid() == 0)


@on_linux
@pytest.mark.skipif(not has_compiler(), reason="needs g++")
def test_a_library_without_products_is_not_called(tmp_path: Path) -> None:
    code = f"""
import ctypes
from pathlib import Path
from tinyllm.blas_rows import load_rows
print(load_rows("libc.so.6", Path({str(tmp_path)!r})), hasattr(ctypes.CDLL(None), "tinyllm_use"))
"""
    assert run(code).stdout == "False False\n"


@on_linux
def test_mlx_imported_first_gives_one_warning_and_keeps_the_wheels_own() -> None:
    ran = run(f"import mlx.core; {REPORT}; import tinyllm.model.load")
    assert ran.stdout == "reference BLAS of the mlx wheel False\n"
    [warning] = ran.stderr.splitlines()
    assert "import tinyllm first" in warning


@on_linux
def test_mlx_imported_first_is_no_warning_where_nobody_wants_another() -> None:
    assert run(f"import mlx.core; {REPORT}", TINYLLM_BLAS="none").stderr == ""


@on_linux
@with_openblas
@pytest.mark.skipif(not has_compiler(), reason="needs g++")
def test_a_preloaded_blas_is_respected(tmp_path: Path) -> None:
    run(PRODUCTS, XDG_CACHE_HOME=str(tmp_path))
    [rows] = libraries(tmp_path)  # a library with a plain `cblas_sgemm`
    ran = run(REPORT, LD_PRELOAD=str(rows))
    assert ran.stdout == "preloaded False\n"


def test_a_mac_uses_accelerate_and_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(blas, "_candidates", lambda: pytest.fail("looked for a library"))
    assert load_blas({}) == Blas("Accelerate")


@pytest.fixture
def before_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to be a Linux process in which neither a BLAS nor mlx has been loaded."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.setattr(blas, "_resolves_cblas", lambda: False)


@pytest.mark.usefixtures("before_mlx")
def test_a_library_that_cannot_be_loaded_gives_way_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "libmkl_rt.so.3"
    broken.write_bytes(b"\x7fELF, and no more")

    def candidates() -> Iterator[tuple[str, str]]:
        yield "MKL", str(broken)
        yield "OpenBLAS", str(tmp_path / "absent.so")
        yield "this process", ""

    def load_or_pretend(name: str, library: str) -> Blas | None:
        return load(name, library) if library else Blas(name, library)

    load = blas._load
    monkeypatch.setattr(blas, "_candidates", candidates)
    monkeypatch.setattr(blas, "_load", load_or_pretend)
    assert load_blas({}) == Blas("this process", "")


@pytest.mark.usefixtures("before_mlx")
def test_without_any_library_the_wheels_own_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_candidates", lambda: iter(()))
    assert load_blas({}).path is None
