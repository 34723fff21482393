"""The matrix-product library (BLAS) that MLX's CPU backend runs on under Linux. No mlx.

The mlx wheel for Linux brings the reference BLAS, whose products are up to 60 times slower than a tuned one's. It
resolves plain `cblas_*` symbols, so that a tuned library which is loaded globally before mlx takes its place; loaded
after mlx it has no effect, and nothing says so. `load_blas` is therefore called by `tinyllm._mx` alone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tinyllm.blas_rows import load_rows

logger = logging.getLogger("tinyllm")


@dataclass(frozen=True)
class Blas:
    """The library in use: its name, what it was loaded from where that is known, and whether it has few rows to do.

    It has none of them where `blas_rows` multiplies those.
    """

    name: str
    path: str | None = None
    few_rows: bool = True


def load_blas(environ: Mapping[str, str] = os.environ) -> Blas:
    """Load the best BLAS of this machine; call it before mlx is imported.

    On macOS MLX uses Accelerate, and nothing is loaded. `TINYLLM_BLAS=none` keeps the wheel's own. MKL is preferred,
    then OpenBLAS from PyPI's cmeel-openblas, then one of the system. Few rows are multiplied as `blas_rows` says,
    unless `TINYLLM_BLAS=gemm`.
    """
    if sys.platform == "darwin":
        return Blas("Accelerate")
    own = Blas("reference BLAS of the mlx wheel")
    asked = environ.get("TINYLLM_BLAS", "").lower()
    if asked == "none":
        return own
    if _resolves_cblas():
        return Blas("preloaded")
    if "mlx.core" in sys.modules:
        logger.warning("mlx was imported before tinyllm, so that no tuned BLAS can be loaded: import tinyllm first")
        return own
    for name, library in _candidates():
        found = _load(name, library, by_rows=asked != "gemm")
        if found is not None:
            return found
    return own


def _resolves_cblas() -> bool:
    """Whether some library provides `cblas_sgemm` to the whole process already (LD_PRELOAD, say)."""
    return hasattr(ctypes.CDLL(None), "cblas_sgemm")


def _candidates() -> Iterator[tuple[str, str]]:
    """Yield (name, what to load), the fastest first; those from PyPI only where their files are."""
    from_pypi = (
        ("MKL", Path(sys.prefix, "lib", "libmkl_rt.so.3")),
        ("MKL", Path(sys.prefix, "lib", "libmkl_rt.so.2")),
        ("OpenBLAS", _site_packages() / "cmeel.prefix" / "lib" / "libopenblas.so.0"),
    )
    yield from ((name, str(path)) for name, path in from_pypi if path.exists())
    yield "OpenBLAS", "libopenblas.so.0"


def _load(name: str, library: str, *, by_rows: bool) -> Blas | None:
    """Load a library for the whole process; return None where it cannot be loaded."""
    for prepare in (None, _lend_gfortran):
        try:
            if prepare is not None:
                prepare()
            others_do_rows = by_rows and load_rows(library)
            ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
        except OSError as error:
            if "libgfortran.so.5" not in str(error):
                return None
        else:
            return Blas(name, library, few_rows=not others_do_rows)
    return None


def _lend_gfortran() -> None:
    """Provide libgfortran.so.5, which cmeel-openblas expects of the system, from the copy inside the mlx wheel.

    The wheel's copy bears a name with a hash, as wheels' private libraries do; the loader looks for the plain one.
    So the copy is loaded from memory with its name restored.
    """
    folder = _site_packages() / "mlx_cpu.libs"
    renamed = next(folder.glob("libgfortran-*.so.5*"), None)
    if renamed is None:
        return
    for needed in folder.glob("libquadmath-*.so*"):
        ctypes.CDLL(str(needed), ctypes.RTLD_GLOBAL)
    hashed, plain = renamed.name.encode() + b"\0", b"libgfortran.so.5\0"
    image = renamed.read_bytes().replace(hashed, plain.ljust(len(hashed), b"\0"))
    with os.fdopen(os.memfd_create("libgfortran.so.5"), "wb") as memory:
        memory.write(image)
        memory.flush()
        ctypes.CDLL(f"/proc/self/fd/{memory.fileno()}", ctypes.RTLD_GLOBAL)


def _site_packages() -> Path:
    return Path(sysconfig.get_path("purelib"))
