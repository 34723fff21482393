#!/usr/bin/env python3
"""Convert the embedded model to fewer bits, measure what that costs, and write its parts of docs/BENCHMARKS.md.

    python scripts/quantization_table.py [-m MODEL] [--tokens 2000] [--context 512] [--rounds 3] [--answer 16]
    python scripts/quantization_table.py --gguf FILE    what is lost where a GGUF file is read, FILE being the model's

What is lost is measured on the text of the package, by `tinyllm perplexity --against` the model that was converted.
The speed of decoding is that of `tinyllm bench`, in turns: all models once, then again, so that what changes over
time befalls all alike.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmark_page import PAGE, measured_on, write_parts
from numpy.typing import NDArray

from tinyllm._mx import mx
from tinyllm.bench.report import md_table
from tinyllm.checkpoint.files import find_weight_files
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.config.tensors import tensor_shapes
from tinyllm.hub.locate import find_model, model_name
from tinyllm.hub.sizes import disk_size
from tinyllm.kv.kinds import layer_kinds

FORMS: Mapping[str, Sequence[str]] = {
    "8 bits": ["--quantize", "8"],
    "6 bits": ["--quantize", "6"],
    "5 bits": ["--quantize", "5"],
    "mixed, 4 bits": ["--quantize", "4", "--recipe", "mixed"],
    "4 bits": ["--quantize", "4"],
    "mixed, 3 bits": ["--quantize", "3", "--recipe", "mixed"],
    "3 bits": ["--quantize", "3"],
}
KV_BITS = (8, 4)


@dataclass(frozen=True)
class Measured:
    """What was found of one form: bytes of weights, bits a number, `perplexity --json`, and tokens a second."""

    title: str
    nbytes: int
    bits: float
    loss: Mapping[str, Any]
    decode: Sequence[float]


def tinyllm(*arguments: str | Path) -> str:
    """Run tinyllm and return what it prints. Raises RuntimeError with the last line of what it says if it fails."""
    done = subprocess.run([sys.executable, "-m", "tinyllm", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or "no message").splitlines()[-1])
    return done.stdout


def weights_of(folder: Path) -> tuple[int, float]:
    """Return the bytes of a folder's weights, and how many bits they have for each number of the model."""
    nbytes = sum(path.stat().st_size for path in find_weight_files(folder).files)
    store = WeightStore.from_path(folder)
    numbers = sum(map(math.prod, tensor_shapes(store.config).values()))
    return nbytes, 8 * store.nbytes / numbers


def loss_of(folder: Path, source: Path, options: argparse.Namespace, *more: str) -> dict[str, Any]:
    """Return what `perplexity --against` finds."""
    sizes = ["--limit", str(options.tokens), "--context", str(options.context)]
    text = tinyllm("perplexity", folder, "--against", source, *sizes, *more, "--json")
    found: dict[str, Any] = json.loads(text)
    return found


def decode_of(folder: Path, answer: int) -> float:
    """Return tokens a second of one answer."""
    report = json.loads(tinyllm("bench", "-m", folder, "-p", "0", "-n", str(answer), "-r", "1", "-o", "json"))
    return float(report["results"][0]["decode_tps"]["mean"])


def measure(source: Path, work: Path, options: argparse.Namespace) -> list[Measured]:
    """Convert to all forms, then measure the source and these."""
    folders = {"as it is": source}
    for title, arguments in FORMS.items():
        folders[title] = work / title.replace(" ", "-").replace(",", "")
        tinyllm("convert", source, folders[title], *arguments)
    speeds: dict[str, list[float]] = {title: [] for title in folders}
    for _ in range(options.rounds):
        for title, folder in folders.items():
            speeds[title].append(decode_of(folder, options.answer))
    found = []
    for title, folder in folders.items():
        print(f"{title} ...", file=sys.stderr, flush=True)
        loss = {} if folder == source else loss_of(folder, source, options)
        found.append(Measured(title, *weights_of(folder), loss, speeds[title]))
    return found


def measure_caches(source: Path, options: argparse.Namespace) -> Mapping[int, Mapping[str, Any]]:
    """Measure the source with its KV cache packed, against itself."""
    return {bits: loss_of(source, source, options, "--kv-bits", str(bits)) for bits in KV_BITS}


def part(
    source: Path,
    found: Sequence[Measured],
    caches: Mapping[int, Mapping[str, Any]],
    options: argparse.Namespace,
    load: float,
) -> str:
    """Return the part of the page."""
    first = found[1].loss
    loss = ["perplexity", "difference", "KL divergence", "same best"]
    header = ["form", "size", "bits a number", *loss, "decode tok/s"]
    config = Config.from_json_file(source)
    cache_rows = [
        [f"{bits} bits", f"{token_bytes(config, bits):,}", *losses(found)] for bits, found in caches.items()
    ]
    return f"""## What quantisation costs

{model_name(source)}, converted by `tinyllm convert` with groups of 64 and compared with what it was, on the first
{first["tokens"]:,} tokens of the package's text ([News from Nowhere](../tinyllm/data/README.md), 1890), of which
{first["scored"]:,} are scored, by windows of {first["context"]:,}. ± is one standard error. The difference is that of
perplexities by pairs of tokens. The KL divergence is the mean by token of sum q log(q / p), in nats, q by the model
that was converted; "same best" is the share of tokens for which both hold the same one to be the likeliest. Decoding:
answers of {options.answer} tokens, the median of {options.rounds} rounds in turns; on a CPU packed matrices are
unpacked where memory allows, so that all forms decode alike there, while a GPU reads fewer bytes for each token.

{md_table(header, [source_row(found[0], first), *(row(each) for each in found[1:])])}

The same model with its weights as they are and its KV cache packed (`--kv-bits`); a token of the dense one takes
{token_bytes(config, None):,} bytes in bfloat16:

{md_table(["KV cache", "bytes a token", *loss], cache_rows)}

The weights were published in 4 bits (Q4_1, groups of 32) and unpacked: what is lost here is lost beside that.

{measured_on(load)}"""


def source_row(found: Measured, other: Mapping[str, Any]) -> list[str]:
    """Return the cells of the model that was converted, whose perplexity came with another one's."""
    sizes = [found.title, disk_size(found.nbytes), f"{found.bits:.2f}", plain(other["against"]["perplexity"], 2)]
    return [*sizes, "-", "-", "-", f"{statistics.median(found.decode):.1f}"]


def row(found: Measured) -> list[str]:
    """Return the cells of one form."""
    sizes = [found.title, disk_size(found.nbytes), f"{found.bits:.2f}"]
    return [*sizes, *losses(found.loss), f"{statistics.median(found.decode):.1f}"]


def losses(found: Mapping[str, Any]) -> list[str]:
    """Return the cells of what `perplexity --against` found."""
    against = found["against"]
    return [
        plain(found["perplexity"], 2),
        plain(against["difference"], 2, sign="+"),
        plain(against["divergence"]["mean"], 4),
        f"{plain(against['agreement'], 1, scale=100)} %",
    ]


def token_bytes(config: Config, kv_bits: int | None) -> int:
    """Return what a token takes in the KV cache, whose numbers or scales are bfloat16."""
    return sum(kind.token_bytes(2) for kind in layer_kinds(config, kv_bits)[0])


def plain(estimate: Mapping[str, float], digits: int, *, sign: str = "", scale: float = 1) -> str:
    """Write a figure and its standard error."""
    return f"{scale * estimate['value']:{sign}.{digits}f} ± {scale * estimate['error']:.{digits}f}"


def gguf_part(source: Path, file: Path, options: argparse.Namespace, load: float) -> str:
    """Measure what reading GGUF files loses, and return the part of the page."""
    with tempfile.TemporaryDirectory() as work:
        rounded, packed = Path(work) / "rounded", Path(work) / "packed"
        write_as_q6_k(source, rounded)
        tinyllm("convert", rounded, packed, "--quantize", "8", "--group-size", "32")
        anew = loss_of(packed, rounded, options)["against"]
    folder = loss_of(source, file, options)["against"]
    return f"""## GGUF files

On the same text as above, {model_name(source)} as its GGUF file has it (Q4_1) and as the folder that was made of it,
whose bfloat16 holds a quarter of these values exactly: KL divergence {plain(folder["divergence"]["mean"], 5)},
the same best token {plain(folder["agreement"], 1, scale=100)} %. The model rounded to Q6_K, and that packed anew in 8
bits and groups of 32, as blocks with a scale for 16 elements are on a GPU: KL divergence
{plain(anew["divergence"]["mean"], 5)}, the same best token {plain(anew["agreement"], 1, scale=100)} %.

{measured_on(load)}"""


def write_as_q6_k(source: Path, folder: Path) -> None:
    """Copy a folder, its matrices rounded to what Q6_K can hold, in float32."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.gguf"))
    tensors = {name: array for file in find_weight_files(source).files for name, array in mx.load(str(file)).items()}
    for name, array in tensors.items():
        values = np.array(array.astype(mx.float32))
        tensors[name] = mx.array(as_q6_k(values) if values.ndim == 2 else values)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)


def as_q6_k(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to whole numbers from -32 to 31, times a scale for 16, which is one of 256 parts of a scale for 256."""
    groups = matrix.reshape(-1, 16, 16)
    scales = np.abs(groups).max(axis=-1, keepdims=True) / 32
    whole = (scales.max(axis=1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    steps = whole * np.round(np.divide(scales, whole, out=np.zeros_like(scales), where=whole > 0))
    rounded = np.round(np.divide(groups, steps, out=np.zeros_like(groups), where=steps > 0)).clip(-32, 31)
    return (rounded * steps).reshape(matrix.shape)


def main() -> int:
    """Measure, and write a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="default")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answer", type=int, default=16)
    parser.add_argument(
        "--gguf", type=Path, help="the file that the model was made of; measures only what that loses"
    )
    parser.add_argument("--output", type=Path, default=PAGE)
    options = parser.parse_args()
    source, load = find_model(options.model), os.getloadavg()[0]
    if options.gguf is not None:
        write_parts(options.output, {"gguf": gguf_part(source, options.gguf, options, load)})
        return 0
    with tempfile.TemporaryDirectory() as work:
        found = measure(source, Path(work), options)
    text = part(source, found, measure_caches(source, options), options, load)
    write_parts(options.output, {"quantization": text})
    return 0


if __name__ == "__main__":
    sys.exit(main())
