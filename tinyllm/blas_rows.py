"""Products of one row by OpenBLAS's `sgemv`, where MLX asks for its `sgemm`. No mlx.

Before it multiplies, OpenBLAS's `sgemm` copies the whole matrix into an order of its own, even for a single row, as
all products of a decode step have: they get a quarter of the memory's bandwidth. `sgemv` reads a matrix where it
stands. MLX calls `sgemm` alone; so a library with a `cblas_sgemm` that hands single rows to the other one is loaded
before OpenBLAS. It is compiled once, by the compiler that MLX calls for its kernels.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from tinyllm.kernels import has_compiler, private_store

__all__ = ["load_rows"]

_SOURCE = """\
#include <string.h>

enum { ROW_MAJOR = 101, AS_IT_IS = 111, TURNED = 112 };

typedef void Gemm(
    int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
typedef void Gemv(int, int, int, int, float, const float *, int, const float *, int, float, float *, int);

static Gemm *gemm;
static Gemv *gemv;

extern "C" void tinyllm_use(Gemm *whole, Gemv *row) {
    gemm = whole;
    gemv = row;
}

/* c (m, n) = alpha * a (m, k) @ b (k, n) + beta * c */
extern "C" void cblas_sgemm(
    int order, int a_form, int b_form, int m, int n, int k,
    float alpha, const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc) {
    if (order != ROW_MAJOR || m != 1) {
        gemm(order, a_form, b_form, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
        return;
    }
    if (beta == 0)
        memset(c, 0, n * sizeof(float)); /* it need not hold numbers, and zero times none is none */
    int step = a_form == AS_IT_IS ? 1 : lda;
    if (b_form == AS_IT_IS)
        gemv(ROW_MAJOR, TURNED, k, n, alpha, b, ldb, a, step, beta, c, 1);
    else
        gemv(ROW_MAJOR, AS_IT_IS, n, k, alpha, b, ldb, a, step, beta, c, 1);
}
"""


def load_rows(openblas: str, store: Path | None = None) -> bool:
    """Load the library for all that is loaded later, to call `openblas`; it is kept in `store`, by default the cache.

    Returns False where it can be neither found nor compiled, or OpenBLAS was built without what it is to call. Raises
    OSError where OpenBLAS cannot be loaded.
    """
    blas = ctypes.CDLL(openblas)
    callees = [getattr(blas, name, None) for name in ("cblas_sgemm", "cblas_sgemv")]
    library = _library(store)
    if library is None or None in callees:
        return False
    try:
        rows = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    rows.tinyllm_use(*callees)
    return True


def _library(store: Path | None) -> Path | None:
    """Return where the compiled library is, after compiling it if it is not there."""
    folder = private_store(store)
    if folder is None:
        return None
    library = folder / f"rows-{platform.machine()}-{sha256(_SOURCE.encode()).hexdigest()[:16]}.so"
    if not library.exists() and has_compiler():
        with suppress(OSError, subprocess.CalledProcessError):
            _compile(library)
    return library if library.exists() else None


def _compile(library: Path) -> None:
    """Compile it beside its place, and put it there whole: other processes may do the same."""
    number, name = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(number)
    compiler = shutil.which("g++") or "g++"
    try:
        subprocess.run(
            [compiler, "-x", "c++", "-O2", "-shared", "-fPIC", "-o", name, "-"],
            input=_SOURCE,
            text=True,
            capture_output=True,
            check=True,
        )
        Path(name).replace(library)
    finally:
        Path(name).unlink(missing_ok=True)
