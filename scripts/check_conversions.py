#!/usr/bin/env python3
"""Load what `tinyllm convert` writes in mlx-lm and in transformers, and hold the logits against tinyllm's own.

    python scripts/check_conversions.py [--mlx-lm PYTHON] [--transformers PYTHON] [CHECKPOINT ...]

A CHECKPOINT is a folder, or the name of a golden one; without any, all golden ones. Of each are made: a copy in
float32, one of 8 bits in groups of 32, that one unpacked again, and of a golden one whose family has GGUF files the
folders that are made of one, dense and packed. Each PYTHON is of an environment with that engine; an engine without
one is left out. mlx-lm reads the copy as well, and packs it itself: where its own folder gives other logits than
tinyllm's do, or none, the fault is not the layout's. What it packed is unpacked by tinyllm, for transformers to read.
Prints a line for each folder that is read, and ends with 1 where the layout is at fault.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from gguf_files import convert_golden  # noqa: E402
from golden_cases import FOLDERS, GOLDEN, expected  # noqa: E402
from test_golden_gguf import CASES as IN_GGUF  # noqa: E402

from tinyllm._mx import mx  # noqa: E402
from tinyllm.checkpoint.weights import WeightStore  # noqa: E402
from tinyllm.config.quantization import QuantFormat  # noqa: E402
from tinyllm.convert.convert import convert  # noqa: E402
from tinyllm.convert.recipe import Recipe  # noqa: E402
from tinyllm.errors import TinyllmError  # noqa: E402
from tinyllm.model.transformer import ModelForCausalLM  # noqa: E402

WORKER = Path(__file__).with_name("conversion_worker.py")
FORM = QuantFormat(8, 32)
ROUNDING = 1e-3  # of the logits' standard deviation, between two engines in float32
OTHER_PARTS = 0.1  # mlx-lm packs some matrices that tinyllm leaves dense
IDS = 24
OLDER = ("config.hub.json", "config.v4.json")  # the same config in the words that mlx-lm knows
ERRORS = (TinyllmError, OSError)


@dataclass(frozen=True)
class Try:
    """A folder that an engine loads; `what` it is of which checkpoint, and whether the engine packs it first."""

    engine: str
    checkpoint: str
    what: str
    folder: Path
    own: bool = False

    @property
    def packed(self) -> Path:
        """Where the engine writes what it packs."""
        return self.folder.with_name(f"{self.folder.name}-{self.engine}")

    @property
    def out(self) -> Path:
        """Where its logits go."""
        return self.folder.with_name(f"{self.folder.name}-{self.engine}-{self.what.replace(' ', '-')}.npy")


def made(checkpoint: str, work: Path) -> Iterator[Try]:
    """Convert one checkpoint to all that is tried, but what mlx-lm packs."""
    source = GOLDEN / checkpoint if checkpoint in FOLDERS else Path(checkpoint)
    name = source.name if checkpoint in FOLDERS else f"{source.name}-folder"
    copy, older, packed, dense = (work / f"{name}-{part}" for part in ("copy", "older", "packed", "dense"))
    convert(source, copy, dequantize=True, dtype=mx.float32)
    convert(copy, older)
    (older / "config.json").write_text(json.dumps(older_config(source, copy)), encoding="utf-8")
    convert(older, packed, recipe=Recipe(FORM))
    convert(packed, dense, dequantize=True)
    yield Try("mlx-lm", checkpoint, "copy", older)
    yield Try("mlx-lm", checkpoint, "own", older, own=True)
    yield Try("mlx-lm", checkpoint, "packed", packed)
    yield Try("transformers", checkpoint, "copy", copy)
    yield Try("transformers", checkpoint, "unpacked", dense)
    if checkpoint in IN_GGUF:
        file = convert_golden(checkpoint, work / f"{name}.gguf", tokenizer=True)
        convert(file, work / f"{name}-gguf", dtype=mx.float32)
        convert(file, work / f"{name}-gguf-packed", recipe=Recipe(FORM), dtype=mx.float32)
        yield Try("transformers", checkpoint, "GGUF", work / f"{name}-gguf")
        yield Try("mlx-lm", checkpoint, "GGUF packed", work / f"{name}-gguf-packed")


def older_config(source: Path, copy: Path) -> dict[str, Any]:
    """Return a checkpoint's config.json in the words of transformers 4 where there is such a one, or its copy's."""
    found = [json.loads((source / file).read_text(encoding="utf-8")) for file in OLDER if (source / file).exists()]
    if not found:
        return dict(json.loads((copy / "config.json").read_text(encoding="utf-8")))
    return {name: value for values in found for name, value in values.items()}


def unpacked(own: Try) -> Iterator[Try]:
    """Unpack what mlx-lm packed."""
    folder = own.packed.with_name(f"{own.packed.name}-dense")
    try:
        convert(own.packed, folder, dequantize=True)
    except ERRORS as error:
        print(f"{own.checkpoint}: what mlx-lm packed is not unpacked: {error}", file=sys.stderr)
    else:
        yield Try("transformers", own.checkpoint, "of mlx-lm", folder)


def load_all(engine: str, python: str, tries: Sequence[Try], work: Path) -> dict[str, str]:
    """Have an engine load them; return why it did not, by where their logits were to go."""
    jobs = [
        {
            "folder": str(each.folder),
            "ids": ids_of(each.checkpoint),
            "out": str(each.out),
            "packed": str(each.packed) if each.own else None,
        }
        for each in tries
    ]
    (work / f"{engine}-jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    quiet = subprocess.DEVNULL
    subprocess.run([python, WORKER, engine, work], check=True, stdout=quiet, stderr=quiet)
    told: dict[str, str] = json.loads((work / f"{engine}.json").read_text(encoding="utf-8"))
    return told


def ids_of(checkpoint: str) -> list[int]:
    """Return ids to compare at."""
    if checkpoint in FOLDERS:
        found: list[int] = expected(checkpoint)[0][0].tolist()
        return found[:IDS]
    return [(7 * i * i + 3) % 96 for i in range(IDS)]


def ours(folder: Path, ids: Sequence[int]) -> np.ndarray:
    """Return tinyllm's logits, every matrix unpacked, in float32."""
    store = WeightStore.from_path(folder)
    model = ModelForCausalLM(store.config, store.cast(mx.float32, expand=True))
    return np.array(model(mx.array([list(ids)]))[0])


def apart(a: np.ndarray, b: np.ndarray) -> float:
    """Return the greatest difference of logits, in standard deviations of the second."""
    return float(np.abs(a - b).max() / b.std())


def judged(each: Try, told: Mapping[str, str], others: Mapping[str, Try]) -> tuple[str, str]:
    """Say whether a conversion is read right, and what was seen of it."""
    read = {what for what, other in others.items() if not told[str(other.out)]}
    error = told[str(each.out)]
    if error:
        return ("WRONG" if read & {"copy", "own"} else "not the copy either"), error
    found = np.load(each.out)
    distance = apart(found, ours(each.folder, ids_of(each.checkpoint)))
    if distance <= ROUNDING:
        return "right", f"{distance:.0e}"
    if "own" in read and "packed" in each.what:
        from_own = apart(found, np.load(others["own"].out))
        said = f"{distance:.0e} from tinyllm's, {from_own:.0e} from what it packs itself"
        return ("as what it packs itself" if from_own <= OTHER_PARTS else "WRONG"), said
    if "copy" in read and each.what != "copy":
        right = apart(np.load(others["copy"].out), ours(others["copy"].folder, ids_of(each.checkpoint))) <= ROUNDING
        return ("WRONG" if right else "nor the copy"), f"{distance:.0e}"
    return "of itself", f"{distance:.0e}"


def main() -> int:
    """Convert, have them read, and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mlx-lm", metavar="PYTHON")
    parser.add_argument("--transformers", metavar="PYTHON")
    parser.add_argument("checkpoints", nargs="*", metavar="CHECKPOINT")
    options = parser.parse_args()
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        tries = [each for checkpoint in options.checkpoints or FOLDERS for each in made(checkpoint, work)]
        for engine, python in (("mlx-lm", options.mlx_lm), ("transformers", options.transformers)):
            if python is None:
                continue
            chosen = [each for each in tries if each.engine == engine]
            told = load_all(engine, python, chosen, work)
            tries += [one for each in chosen if each.own and not told[str(each.out)] for one in unpacked(each)]
            by_checkpoint: dict[str, dict[str, Try]] = defaultdict(dict)
            for each in chosen:
                by_checkpoint[each.checkpoint][each.what] = each
            for each in chosen:
                if engine == "mlx-lm" and each.what in ("copy", "own"):
                    continue
                verdict, seen = judged(each, told, by_checkpoint[each.checkpoint])
                verdicts[f"{engine}, {each.what}: {verdict}"] += 1
                print(f"{engine:13}{Path(each.checkpoint).name:28}{each.what:12}{verdict:24}{seen[:160]}")
    for verdict, count in sorted(verdicts.items()):
        print(f"{count:4} {verdict}")
    return 1 if any(verdict.endswith("WRONG") for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
