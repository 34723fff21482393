#!/usr/bin/env python3
"""Load folders in another engine and write the logits that it computes; `check_conversions.py` runs this.

    python scripts/conversion_worker.py ENGINE FOLDER

FOLDER/ENGINE-jobs.json has an object for each folder to load: its path, ids, where the logits go, and where the
engine (mlx-lm) is to write what it packs itself first, or null. What became of each is written to FOLDER/ENGINE.json:
"", or an error.
The Python that runs it is that of the engine's own environment, which need not have tinyllm.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

GROUP, BITS = 32, 8
Logits = Callable[[Path, Sequence[int], Path | None], np.ndarray]


def mlx_lm() -> Logits:
    """Return what loads with mlx-lm, packed by itself where it is given a folder to write that to."""
    import mlx.core as mx
    from mlx_lm import utils

    mx.set_default_device(mx.cpu)

    def packable(path: str, module: Any) -> bool:
        return hasattr(module, "weight") and module.weight.shape[-1] % GROUP == 0

    def logits(folder: Path, ids: Sequence[int], packed: Path | None) -> np.ndarray:
        if packed is not None:
            model, config = utils.load_model(folder)
            model, config = utils.quantize_model(model, config, GROUP, BITS, quant_predicate=packable)
            packed.mkdir()
            utils.save_model(packed, model)
            utils.save_config(config, packed / "config.json")
            folder = packed
        model, _ = utils.load_model(folder)
        return np.array(model(mx.array([list(ids)]))[0].astype(mx.float32))

    return logits


def transformers() -> Logits:
    """Return what loads with transformers, which must find each of a model's tensors, and no other one."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)

    def logits(folder: Path, ids: Sequence[int], packed: Path | None) -> np.ndarray:
        model, told = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
        )
        astray = {kind: sorted(names) for kind, names in told.items() if names}
        if astray:
            raise ValueError(f"tensors are not those of the model: {astray}")
        with torch.no_grad():
            found: np.ndarray = model.eval()(torch.tensor([list(ids)])).logits[0].float().numpy()
        return found

    return logits


def main() -> int:
    """Load all, and say what became of each."""
    engine, work = sys.argv[1], Path(sys.argv[2])
    logits = {"mlx-lm": mlx_lm, "transformers": transformers}[engine]()
    jobs: list[dict[str, Any]] = json.loads((work / f"{engine}-jobs.json").read_text(encoding="utf-8"))
    told: dict[str, str] = {}
    for job in jobs:
        packed = Path(job["packed"]) if job["packed"] else None
        try:
            np.save(job["out"], logits(Path(job["folder"]), job["ids"], packed))
        except (Exception, SystemExit) as error:  # a module of mlx-lm ends the process for want of another one
            told[job["out"]] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        else:
            told[job["out"]] = ""
    (work / f"{engine}.json").write_text(json.dumps(told), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
