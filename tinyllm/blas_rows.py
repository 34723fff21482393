"""Products of few rows where MLX asks a BLAS for its `sgemm`, by a library of our own. No mlx.

A decode step multiplies a row, or a few, by every matrix: what counts is how fast these are read. Yet OpenBLAS's
`sgemm` first copies the whole matrix into an order of its own, MKL's is slow from three rows on, and the threads of
either keep a core busy while they wait for each other, which the host needs to build the next step. So a library
whose `cblas_sgemm` multiplies up to eight rows itself (blas_rows.cpp), and hands all else to the other one, is loaded
before the BLAS. It is compiled once, by the compiler that MLX calls for its kernels.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from tinyllm.kernels import has_compiler, instruction_set, private_store

__all__ = ["load_rows"]

_FLAGS = ("-x", "c++", "-std=gnu++17", "-O2", "-Wno-psabi", "-pthread", "-shared", "-fPIC")
_MOST_THREADS = 8  # some cores read as fast as the memory gives
_LIMITS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


def load_rows(blas: str, store: Path | None = None, environ: Mapping[str, str] = os.environ) -> bool:
    """Load the library for all that is loaded later, to call `blas`; it is kept in `store`, by default the cache.

    It takes as many threads as there are cores, eight at most, or as a variable for the threads of a BLAS allows.
    Returns False where it can be neither found nor compiled, or `blas` has no `sgemm`. Raises OSError where
    that cannot be loaded.
    """
    loaded = ctypes.CDLL(blas)
    callee = getattr(loaded, "cblas_sgemm", None) or getattr(loaded, "scipy_cblas_sgemm", None)
    library = None if callee is None else _library(store)
    if library is None:
        return False
    try:
        rows = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    rows.tinyllm_use(callee, _threads(environ))
    return True


def _threads(environ: Mapping[str, str]) -> int:
    """Return how many threads share a product."""
    asked = [int(environ[name]) for name in _LIMITS if environ.get(name, "").isdecimal()]
    return max(1, min([*asked, _MOST_THREADS, len(os.sched_getaffinity(0))]))


def _library(store: Path | None) -> Path | None:
    """Return where the compiled library is, after compiling it if it is not there."""
    folder = private_store(store)
    if folder is None:
        return None
    source = Path(__file__).with_suffix(".cpp").read_text(encoding="utf-8")
    name = sha256("\0".join((*_FLAGS, source)).encode()).hexdigest()[:16]
    library = folder / f"rows-{instruction_set()}-{name}.so"
    if not library.exists() and has_compiler():
        with suppress(OSError, subprocess.CalledProcessError):
            _compile(source, library)
    return library if library.exists() else None


def _compile(source: str, library: Path) -> None:
    """Compile it beside its place, and put it there whole: other processes may do the same."""
    number, name = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(number)
    compiler = shutil.which("g++") or "g++"
    try:
        subprocess.run([compiler, *_FLAGS, "-o", name, "-"], input=source, text=True, capture_output=True, check=True)
        Path(name).replace(library)
    finally:
        Path(name).unlink(missing_ok=True)
