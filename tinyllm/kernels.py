"""Where MLX keeps the kernels that it compiles on a CPU: a folder that nobody else can write to. No mlx.

On a CPU `mx.compile` writes C++, calls g++, which takes most of a second for a kernel, and loads what comes out of
`$TMPDIR/mlx/<version>/cpu`. By default that is a folder which anybody may have made: a library planted there would be
loaded, and one that another process is still writing is an error. So each process has a folder of its own, which
begins with links to all kernels that earlier ones have finished, and gives its own to those that come.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

_MOST_KERNELS = 512  # of some 15 kB each
_PREFIX, _REMEMBERED = "process-", ".compiled"


class KernelFolder:
    """The kernels of this process, for an MLX of the given `version`; `store` is where they outlast it."""

    def __init__(self, version: str, store: Path | None = None) -> None:
        self._store = (store or _default_store()) / f"mlx-{version}-{instruction_set()}"
        self._own = self._make()
        self._libraries = self._own / "mlx" / version / "cpu"
        self._libraries.mkdir(parents=True)
        weakref.finalize(self, shutil.rmtree, self._own, ignore_errors=True)  # at the end of the process, too
        for library in self._finished():
            _link(library, self._libraries)
        self._changed = self._libraries.stat().st_mtime_ns

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Have MLX compile into this folder, and keep what it has compiled."""
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = str(self._own)
        try:
            yield
        finally:
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before
        # Only where nothing was raised: that kernel may be half written.
        if self._libraries.stat().st_mtime_ns != self._changed:
            self._keep()

    def knows(self, name: str) -> bool:
        """Whether `remember` was called with this name, here or in an earlier process."""
        return (self._store / f"{name}{_REMEMBERED}").exists()

    def remember(self, name: str) -> None:
        """Note that what goes by this name has been compiled."""
        with suppress(OSError):
            (self._store / f"{name}{_REMEMBERED}").touch()

    def _keep(self) -> None:
        if self._own.parent == self._store:
            for library in self._libraries.glob("*.so"):
                _link(library, self._store)
        self._changed = self._libraries.stat().st_mtime_ns

    def _make(self) -> Path:
        """Make this process's folder, in the store if that can be trusted; clear what others that are gone left."""
        try:
            if private_store(self._store) is None:
                raise PermissionError(self._store)
            for left in self._store.glob(f"{_PREFIX}*"):
                if not _is_alive(left.name.removeprefix(_PREFIX).partition("-")[0]):
                    shutil.rmtree(left, ignore_errors=True)
            return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=self._store))
        except OSError:
            return Path(tempfile.mkdtemp(prefix="tinyllm-kernels-"))

    def _finished(self) -> list[Path]:
        """Return the kernels of the store, without the oldest ones where there are too many."""
        if self._own.parent != self._store:
            return []
        libraries = sorted(self._store.glob("*.so"), key=_modified, reverse=True)
        if len(libraries) > _MOST_KERNELS:
            for forgotten in (*libraries[_MOST_KERNELS:], *self._store.glob(f"*{_REMEMBERED}")):
                forgotten.unlink(missing_ok=True)
        return libraries[:_MOST_KERNELS]


def private_store(store: Path | None = None) -> Path | None:
    """Return the folder where what is compiled outlasts a process, if nobody else can write to it; else None."""
    folder = store or _default_store()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if _is_private(folder) else None
    except OSError:
        return None


def has_compiler() -> bool:
    """Whether there is the C++ compiler that MLX calls on a CPU."""
    return shutil.which("g++") is not None


def _default_store() -> Path:
    import platformdirs

    return platformdirs.user_cache_path("tinyllm") / "kernels"


def instruction_set() -> str:
    """Name this machine's CPU by all its features: machines that differ may share a home."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{sha256(features.encode()).hexdigest()[:8]}"


def _is_private(folder: Path) -> bool:
    found = folder.stat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _is_alive(pid: str) -> bool:
    return not Path("/proc/self").exists() or Path(f"/proc/{pid}").exists()


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process clears up
        return 0.0


def _link(library: Path, folder: Path) -> None:
    """Let a finished library be in a folder too, at once or not at all."""
    with suppress(OSError):  # it is there, or it cannot be linked: then it is compiled again
        os.link(library, folder / library.name)
