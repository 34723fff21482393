"""docs/BENCHMARKS.md in parts: each is measured and written by itself, and leaves the others as they are."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tinyllm.bench.machine import describe_machine

PAGE = Path(__file__).resolve().parents[1] / "docs" / "BENCHMARKS.md"
PARTS: Mapping[str, str] = {
    "peers": "scripts/compare_peers.py",
    "pages": "scripts/compare_peers.py",
    "reuse": "scripts/compare_peers.py",
    "step": "scripts/compare_peers.py",
    "quantization": "scripts/quantization_table.py",
    "gguf": "scripts/quantization_table.py",
    "method": "scripts/compare_peers.py",
}
HEAD = """# Benchmarks

Every figure here was measured by a script of this repository, on one machine, each part in one run; `--only PART`
measures one again. Figures are medians ± standard deviation unless a part says otherwise, of repetitions in which
what is compared took turns after a warm-up of each. They speak of that machine and that model alone."""


def measured_on(load: float, blas: str | None = None) -> str:
    """Say what a part was measured with: `load` is the load average when it began, `blas` another than this one's."""
    machine = describe_machine()
    machine = replace(machine, blas=blas or machine.blas)
    return f"*{machine}; {os.cpu_count()} threads each; load average {load:.1f} at the start.*"


def write_parts(page: Path, parts: Mapping[str, str]) -> None:
    """Put parts in a page in place of what it has of them; a page that is not there has none yet."""
    there = page.read_text(encoding="utf-8") if page.exists() else ""
    texts = {name: parts.get(name) or _part(there, name) for name in PARTS}
    written = [f"{_begin(name)}\n{text.strip()}\n{_end(name)}" for name, text in texts.items() if text]
    page.write_text("\n\n".join([HEAD, *written]) + "\n", encoding="utf-8")


def _part(page: str, name: str) -> str:
    found = re.search(f"{re.escape(_begin(name))}\n(.*?)\n{re.escape(_end(name))}", page, re.DOTALL)
    return found[1] if found else ""


def _begin(name: str) -> str:
    return f"<!-- {name}: made by {PARTS[name]}, run it and do not change it -->"


def _end(name: str) -> str:
    return f"<!-- end of {name} -->"
