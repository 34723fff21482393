#!/usr/bin/env python3
"""Measure how far tinyllm is from the logits of each golden checkpoint, and write tests/golden/measured.json.

    python scripts/measure_golden.py [NAME ...]

Each is run in float32 on this machine: fused and in plain operations, in one pass, one by one and in chunks, over
dense buffers and over pages (tests/test_golden.py feeds pieces of each kind in turn). What counts is the worst, in
standard deviations of the expected logits. With names, only these are measured; docs/MODELS.md has the figures when
scripts/docs has run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from golden_cases import FEATURES, FOLDERS, GOLDEN, TOLERANCE, difference, expected, feedings, run  # noqa: E402

from tinyllm._mx import mx  # noqa: E402
from tinyllm.model.load import load_model  # noqa: E402

MEASURED = GOLDEN / "measured.json"
PAGE_SIZE = 16


def measure(name: str) -> float:
    """Return the worst difference of all ways to run a checkpoint."""
    ids, wanted = expected(name)
    worst = 0.0
    for features, page_size in [(FEATURES["fused"], None), (FEATURES["reference"], None), (None, PAGE_SIZE)]:
        model = load_model(GOLDEN / name, features, dtype=mx.float32)
        for pieces in feedings(ids.shape[1], each=True).values():
            worst = max(worst, difference(run(model, ids, pieces, page_size), wanted))
    return worst


def main() -> int:
    """Measure, tell and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="folders to measure; all of them if none is named")
    names = parser.parse_args().names
    known = json.loads(MEASURED.read_text(encoding="utf-8")) if names and MEASURED.exists() else {}
    for name in names or FOLDERS:
        known[name] = float(f"{measure(name):.1e}")
        print(f"{name:32} {known[name]:.1e}{'' if known[name] <= TOLERANCE else '  over the tolerance'}")
    there = {name: known[name] for name in sorted(known) if name in FOLDERS}
    MEASURED.write_text(json.dumps(there, indent=2) + "\n", encoding="utf-8")
    return 0 if max(there.values()) <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
