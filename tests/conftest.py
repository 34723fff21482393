"""What all tests share. `tiny.py` beside this file writes small checkpoints."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import tiny
from hypothesis import HealthCheck, settings

_OF_A_SHELL = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "TINYLLM_MODEL")

# Several workers share the cores, and a BLAS whose threads wait for each other by spinning takes them away.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# What a shell says of its terminal, of models and of hubs is not meant for tests, whose hubs no proxy leads to.
for name in [*os.environ]:
    if name.startswith("HF_") or name in _OF_A_SHELL:
        del os.environ[name]
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"

# In a shell's background Ctrl-C is ignored, and processes that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples are the same in every run, and none fails for being slow, nor for being drawn slowly.
settings.register_profile(
    "tinyllm", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tinyllm")

REAL_MODEL = Path(__file__).parent.parent / "models" / "SmolLM2-135M-Instruct-from-Q4_1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs the real model where it is not fetched, and parity tests where nobody asked for them.

    What takes minutes comes first, so that no process is left alone with it at the end.
    """
    items.sort(key=lambda item: item.path.name != "test_machines.py")
    for item in items:
        if item.get_closest_marker("real_model") and not (REAL_MODEL / "model.safetensors").exists():
            item.add_marker(pytest.mark.skip(reason="the embedded model is not fetched: scripts/fetch_model.py"))
        if item.get_closest_marker("parity") and os.environ.get("TINYLLM_PARITY") != "1":
            item.add_marker(pytest.mark.skip(reason="needs torch and transformers: TINYLLM_PARITY=1"))


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of the embedded model; use it in tests marked `real_model`."""
    return REAL_MODEL


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with a chat template. Shared: a test that changes a file writes its own."""
    return tiny.write_checkpoint(tmp_path_factory.mktemp("tiny") / "llama", chat_template=tiny.CHAT_TEMPLATE)
