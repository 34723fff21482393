"""On a CPU, memory that is freed is used again, and goes back to the system when a model is closed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from tinyllm import malloc

# A process of its own: what malloc is told holds for all of it.
SCRIPT = """
import ctypes, json, sys

class Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "free", "keepcost")]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Counts

def now():
    resident = int(open("/proc/self/statm").read().split()[1]) * 4096
    counts = libc.mallinfo2()
    return {"resident": resident, "mapped_blocks": counts.hblks, "free": counts.free}

from tinyllm.llm import LLM
import tinyllm.engine.load

seen = [now()]
with LLM(sys.argv[1], device="cpu", compiled=False, max_context=400) as llm:
    llm.answer([5] * 300, max_tokens=2).text()
    seen.append(now())
seen.append(now())
print(json.dumps(seen))
"""


@pytest.mark.skipif(not malloc.is_glibc(), reason="malloc is glibc's on Linux alone")
def test_arrays_come_from_a_heap_that_is_given_back_when_the_model_is_closed(tmp_path: Path) -> None:
    overrides = {"vocab_size": 50_000, "hidden_size": 256, "max_position_embeddings": 1024}
    folder = tiny.write_checkpoint(tmp_path, config_overrides=overrides)
    weights = 2 * 50_000 * 256 * 4
    done = subprocess.run([sys.executable, "-c", SCRIPT, folder], capture_output=True, text=True, check=True)
    before, running, closed = json.loads(done.stdout)
    assert running["mapped_blocks"] <= before["mapped_blocks"]
    assert running["resident"] - before["resident"] > weights
    assert closed["resident"] - before["resident"] < weights // 4


def test_nothing_is_called_where_malloc_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: object) -> None:
        raise AssertionError("a library was opened")

    monkeypatch.setattr(malloc.ctypes, "CDLL", fail)
    for system, libc in (("darwin", ""), ("linux", "")):
        monkeypatch.setattr(malloc.sys, "platform", system)
        monkeypatch.setattr(malloc.platform, "libc_ver", lambda libc=libc: (libc, ""))
        malloc.keep_freed_memory()
        malloc.return_freed_memory()
