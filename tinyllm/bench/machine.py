"""What a measurement ran on: versions, device, memory, BLAS, and how fast the memory is read."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from time import perf_counter

import tinyllm
from tinyllm import hardware
from tinyllm._mx import BLAS, mx

__all__ = ["Machine", "describe_machine", "measure_bandwidth"]

_PROBE_BYTES = 1 << 29  # more than any cache holds
_TRIES = 8


@dataclass(frozen=True)
class Machine:
    """The machine as MLX sees it. `backend` is CPU, Metal or CUDA; `blas` multiplies on a CPU."""

    date: str
    tinyllm: str
    mlx: str
    python: str
    system: str
    backend: str
    chip: str
    cores: int
    memory_bytes: int
    blas: str | None

    def __str__(self) -> str:
        memory = f"{self.memory_bytes / 2**30:.0f} GiB"
        blas = f", {self.blas}" if self.blas else ""
        return (
            f"tinyllm {self.tinyllm}, mlx {self.mlx}, Python {self.python}, {self.system}; {self.backend}{blas};"
            f" {self.chip}, {self.cores} cores, {memory}; {self.date}"
        )


def describe_machine() -> Machine:
    """Describe the default device and the machine around it, now."""
    return Machine(
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        tinyllm=tinyllm.__version__,
        mlx=version("mlx"),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        backend=_backend(),
        chip=str(mx.device_info().get("device_name", platform.machine())),
        cores=hardware.cores(),
        memory_bytes=hardware.total_memory(),
        blas=BLAS.name if _backend() == "CPU" else None,
    )


def measure_bandwidth() -> float:
    """Read a large array in two ways, several times; return the best rate in bytes a second.

    The ways are that of a decode step, a product with a vector, and the plainest there is, a sum; on a CPU each is
    done by as many streams as there are cores.
    """
    on_cpu = _backend() == "CPU"
    columns = 4096
    rows = min(_PROBE_BYTES, hardware.available_memory() // 4) // (4 * columns)
    matrix, vector = mx.ones((rows, columns)), mx.ones((1, columns))
    device = mx.default_device()
    streams = [mx.new_stream(device) for _ in range(hardware.cores())] if on_cpu else [mx.default_stream(device)]
    parts = mx.split(matrix, [rows * i // len(streams) for i in range(1, len(streams))])
    mx.eval(matrix, vector, parts)
    best = float("inf")
    for _ in range(_TRIES):
        started = perf_counter()
        mx.eval([mx.matmul(vector, part.T, stream=s) for part, s in zip(parts, streams, strict=True)])
        multiplied = perf_counter()
        mx.eval([mx.sum(part, stream=s) for part, s in zip(parts, streams, strict=True)])
        best = min(best, multiplied - started, perf_counter() - multiplied)
    return matrix.nbytes / best


def _backend() -> str:
    if mx.default_device() == mx.Device(mx.DeviceType.cpu):
        return "CPU"
    return "Metal" if platform.system() == "Darwin" else "CUDA"
