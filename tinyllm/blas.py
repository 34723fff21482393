"""The matrix-product library (BLAS) that MLX's CPU backend runs on under Linux. No mlx.

The mlx wheel for Linux brings the reference BLAS, whose products are up to 60 times slower than a tuned one's. It
resolves plain `cblas_*` symbols, so that a tuned library which is loaded globally before mlx takes its place; loaded
after mlx it has no effect, and nothing says so. `load_blas` is therefore called by `tinyllm._mx` alone.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tinyllm.blas_rows import load_rows

logger = logging.getLogger("tinyllm")


@dataclass(frozen=True)
class Blas:
    """The library in use, the file that it was loaded from, and whether `blas_rows` multiplies few rows instead."""

    name: str
    path: str | None = None
    own_rows: bool = False


def load_blas(environ: Mapping[str, str] = os.environ) -> Blas:
    """Load the best BLAS of this machine; call it before mlx is imported.

    On macOS MLX uses Accelerate, and nothing is loaded. `TINYLLM_BLAS=none` keeps the wheel's own. MKL is preferred,
    then OpenBLAS from PyPI's scipy-openblas32, then the system's: all three choose their kernels by the CPU that they
    run on. `blas_rows` multiplies few rows itself.
    """
    if sys.platform == "darwin":
        return Blas("Accelerate")
    own = Blas("reference BLAS of the mlx wheel")
    if environ.get("TINYLLM_BLAS", "").lower() == "none":
        return own
    if _resolves_cblas():
        return Blas("preloaded")
    if "mlx.core" in sys.modules:
        logger.warning("mlx was imported before tinyllm, so that no tuned BLAS can be loaded: import tinyllm first")
        return own
    for name, library in _candidates():
        found = _load(name, library)
        if found is not None:
            return found
    return own


def _resolves_cblas() -> bool:
    """Whether some library provides `cblas_sgemm` to the whole process already (LD_PRELOAD, say)."""
    return hasattr(ctypes.CDLL(None), "cblas_sgemm")


def _candidates() -> Iterator[tuple[str, str]]:
    """Yield (name, what to load), the fastest first; those from PyPI only where their files are."""
    scipy = importlib.util.find_spec("scipy_openblas32")
    folders = [] if scipy is None else scipy.submodule_search_locations or []
    from_pypi = (
        ("MKL", Path(sys.prefix, "lib", "libmkl_rt.so.3")),
        ("MKL", Path(sys.prefix, "lib", "libmkl_rt.so.2")),
        *(("OpenBLAS", Path(folder, "lib", "libscipy_openblas.so")) for folder in folders),
    )
    yield from ((name, str(path)) for name, path in from_pypi if path.exists())
    yield "OpenBLAS", "libopenblas.so.0"


def _load(name: str, library: str) -> Blas | None:
    """Load a library for the whole process; return None if it cannot be loaded, or MLX would not find its products.

    scipy-openblas32 prefixes its names (`scipy_cblas_sgemm`), so it needs the library of `blas_rows` in front of it.
    """
    try:
        own_rows = load_rows(library)
        loaded = ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    except OSError:
        return None
    return Blas(name, library, own_rows) if own_rows or hasattr(loaded, "cblas_sgemm") else None
