"""The only module that imports mlx: after the BLAS, since one that is loaded later has no effect.

Everything else says `from tinyllm._mx import mx`.
"""

from __future__ import annotations

import sys

from tinyllm.blas import load_blas
from tinyllm.errors import BackendError

BLAS = load_blas()

try:
    import mlx.core as mx
except ImportError as error:
    _hint = (
        "install the package's extra for this machine: pip install -e '.[cpu]' (or cuda12, cuda13)"
        if sys.platform == "linux"
        else "on a Mac it needs Apple Silicon and a Python built for arm64: pip install mlx"
    )
    raise BackendError(f"MLX cannot be loaded ({str(error).splitlines()[0]}); {_hint}") from error

__all__ = ["BLAS", "mx"]
