"""The only module that imports mlx: after the BLAS, since one that is loaded later has no effect.

Everything else says `from tinyllm._mx import mx`.
"""

from __future__ import annotations

import sys

from tinyllm import backends
from tinyllm.blas import load_blas
from tinyllm.errors import BackendError

BLAS = load_blas()

try:
    import mlx.core as mx
except ImportError as error:
    raise BackendError(backends.explain_absence(error)) from error

backends.refuse_several(sys.path)


def dtype_name(dtype: mx.Dtype) -> str:
    """Return what people call a dtype: "bfloat16"."""
    return str(dtype).removeprefix("mlx.core.")


__all__ = ["BLAS", "dtype_name", "mx"]
