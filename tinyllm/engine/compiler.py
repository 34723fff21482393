"""Whether and where `mx.compile` compiles."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext

from tinyllm._mx import mx
from tinyllm.kernels import KernelFolder, has_compiler
from tinyllm.model.load import on_cpu

logger = logging.getLogger("tinyllm")


class Compiler:
    """The compiler of the default device. A GPU's is MLX's own; on a CPU it is the machine's, if it has one.

    Arrays for which kernels may have to be compiled are to be evaluated within `in_use()`.
    """

    def __init__(self, *, wanted: bool = True) -> None:
        self._folder: KernelFolder | None = None
        self.available = wanted
        if wanted and on_cpu():
            self.available = has_compiler()
            if self.available:
                self._folder = KernelFolder(mx.__version__)  # type: ignore[attr-defined]
            else:
                logger.warning("there is no C++ compiler (g++): decode steps are not compiled, and are slower")

    def is_cold(self, name: str) -> bool:
        """Whether what goes by `name` takes a pause for compiling, since no process has warmed up with it."""
        return self._folder is not None and not self._folder.knows(name)

    def warmed_up(self, name: str) -> None:
        """Note that what goes by `name` has been compiled."""
        if self._folder is not None:
            self._folder.remember(name)

    def in_use(self) -> AbstractContextManager[None]:
        """Have kernels compiled where they are kept."""
        return self._folder.in_use() if self._folder else nullcontext()
