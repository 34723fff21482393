#!/usr/bin/env python3
"""Be one engine of a comparison, or measure tinyllm against itself; `compare_peers.py` runs this.

    python scripts/peer_worker.py ENGINE CHECKPOINT SETTINGS

An engine says what it is when it has loaded, and then answers each line of JSON on stdin, a prompt for each row and
how many tokens to decode after the first, with times. A measurement takes its SETTINGS and prints what it found. The
Python that runs it is that of the engine's own environment, which need not have tinyllm.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyllm.engine.engine import Engine
    from tinyllm.engine.request import Output

ROOT = Path(__file__).resolve().parents[1]
ON_MAC = sys.platform == "darwin"

Prompts = Sequence[Sequence[int]]
# Prompts and a count in; seconds to the first token of all rows, and for so many more tokens of each, out.
Generate = Callable[[Prompts, int], tuple[float, float]]


def timed(steps: Iterator[Any], count: int) -> tuple[float, float]:
    """Take the first step, then `count` more, of an engine that yields them as they come."""
    started = time.perf_counter()
    next(steps)
    first = time.perf_counter()
    taken = sum(1 for _ in islice(steps, count))
    if taken != count:
        raise RuntimeError(f"{taken} tokens came, not {count}")
    return first - started, time.perf_counter() - first


# ---------------------------------------------------------------- the engines


def load_tinyllm(path: str, settings: Mapping[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """Run the engine as `tinyllm bench` does."""
    from tinyllm._mx import BLAS, dtype_name, mx
    from tinyllm.bench.measure import run_once
    from tinyllm.bench.workload import Workload
    from tinyllm.checkpoint.contents import read_contents
    from tinyllm.engine.load import EngineSettings, load_engine

    dtype = getattr(mx, settings["dtype"]) if "dtype" in settings else None
    engine = load_engine(read_contents(path), EngineSettings(share=False, dtype=dtype))

    def generate(prompts: Prompts, count: int) -> tuple[float, float]:
        length, rows = len(prompts[0]), len(prompts)
        first_s = run_once(engine, Workload(length, 0, batch=rows), prompts).timed_s
        if not count:
            return first_s, 0.0
        return first_s, run_once(engine, Workload(0, count, depth=length, batch=rows), prompts).timed_s

    name = dtype_name(engine.model.dtype)
    blas = f"{BLAS.name} and its own rows" if BLAS.own_rows else BLAS.name
    about = {"version": version("tinyllm-mlx"), "dtype": name if ON_MAC else f"{name}, {blas}"}
    return generate, about


def load_mlx_lm(path: str, settings: Mapping[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """Run mlx_lm's generate_step for one row, and its BatchGenerator for more; neither decodes text, nor stops."""
    blas = load_mlx_lm_blas(settings.get("blas"))
    import mlx.core as mx
    from mlx_lm.generate import BatchGenerator, generate_step
    from mlx_lm.utils import load_model

    model, _ = load_model(Path(path))
    if "dtype" in settings:
        model.set_dtype(getattr(mx, settings["dtype"]))
    mx.eval(model.parameters())
    dtype = str(model.model.embed_tokens.weight.dtype).removeprefix("mlx.core.")

    def batches(prompts: Prompts, count: int) -> Iterator[Any]:
        generator = BatchGenerator(model, max_tokens=count + 1)
        generator.insert([list(prompt) for prompt in prompts])
        while responses := generator.next_generated():
            if len(responses) != len(prompts):
                raise RuntimeError(f"{len(responses)} rows ran, not {len(prompts)}")
            yield responses
        generator.close()

    def generate(prompts: Prompts, count: int) -> tuple[float, float]:
        if len(prompts) > 1:
            return timed(batches(prompts, count), count)
        return timed(generate_step(mx.array(prompts[0]), model, max_tokens=count + 1), count)

    return generate, {"version": version("mlx-lm"), "dtype": dtype if ON_MAC else f"{dtype}, {blas}"}


def load_mlx_lm_blas(wanted: str | None) -> str:
    """Load the BLAS that mlx-lm's MLX is to find, as tinyllm does or from a path; return its name."""
    if wanted is None:
        return "the wheel's BLAS"
    if wanted == "openblas":
        sys.path.insert(0, str(ROOT))
        from tinyllm.blas import load_blas

        return load_blas({}).name
    ctypes.CDLL(wanted, ctypes.RTLD_GLOBAL)
    return "MKL"


def load_transformers(path: str, settings: Mapping[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """Run a plain loop over the model and its cache, which is faster than `generate`."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, settings["dtype"])).eval()

    def steps(prompts: Prompts) -> Iterator[list[int]]:
        feed, cache = torch.tensor(prompts), None
        while True:
            out = model(feed, past_key_values=cache, use_cache=True, logits_to_keep=1)
            feed, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            yield feed.flatten().tolist()

    def generate(prompts: Prompts, count: int) -> tuple[float, float]:
        with torch.inference_mode():
            return timed(steps(prompts), count)

    return generate, {"version": version("transformers"), "dtype": settings["dtype"]}


def load_llama_cpp(path: str, settings: Mapping[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """Run llama.cpp's server in this process for one row, and take its own times."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.warmup = settings["context"], 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
    server = xllamacpp.Server(params)

    def generate(prompts: Prompts, count: int) -> tuple[float, float]:
        [prompt] = prompts
        request = {"prompt": list(prompt), "n_predict": count + 1, "ignore_eos": True, "cache_prompt": False}
        timings = server.handle_completions({**request, "temperature": 0})["timings"]
        if (timings["prompt_n"], timings["predicted_n"]) != (len(prompt), count + 1):
            raise RuntimeError(f"other counts than were asked for: {timings}")
        return timings["prompt_ms"] / 1000, timings["predicted_ms"] / 1000

    return generate, {"version": f"xllamacpp {version('xllamacpp')}", "dtype": "its own, from Q4_1"}


ENGINES = {
    "tinyllm": load_tinyllm,
    "mlx-lm": load_mlx_lm,
    "transformers": load_transformers,
    "llama.cpp": load_llama_cpp,
}


# ---------------------------------------------------------------- tinyllm against itself


def measure_turns(path: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Time the first token of a conversation's second turn, and of as many tokens that nothing is known of.

    Of `settings`: "history" tokens are answered with "answer" of them, "message" come after that; "repetitions", and
    one more before them. Returns seconds, and how many tokens of the turn were there already.
    """
    from tinyllm.checkpoint.contents import read_contents
    from tinyllm.engine.load import load_engine

    engine = load_engine(read_contents(path))
    draw, vocab = random.Random(0), engine.model.config.vocab_size
    cold, warm, cached = [], [], 0
    for _ in range(settings["repetitions"] + 1):
        history, message = draw_ids(draw, vocab, settings["history"]), draw_ids(draw, vocab, settings["message"])
        answer, _ = first_token(engine, history, settings["answer"])
        turn, turn_s = first_token(engine, (*history, *(output.token_id for output in answer), *message), 1)
        _, cold_s = first_token(engine, draw_ids(draw, vocab, turn[0].prefilled), 1)
        warm.append(turn_s)
        cold.append(cold_s)
        cached = turn[0].cached
    return {"cold_s": cold[1:], "warm_s": warm[1:], "cached": cached, "tokens": turn[0].prefilled}


def draw_ids(draw: random.Random, vocab: int, count: int) -> tuple[int, ...]:
    """Draw `count` token ids."""
    return tuple(draw.choices(range(vocab), k=count))


def first_token(engine: Engine, prompt: Sequence[Any], count: int) -> tuple[list[Output], float]:
    """Generate `count` tokens; return them, and the seconds that the first took."""
    from tinyllm.engine.request import Request

    started = time.perf_counter()
    [tokens] = engine.run([Request(tuple(prompt), max_tokens=count)])
    return tokens, tokens[0].at - started


def measure_crowd(path: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Run many requests at once on fewer pages than they take alone, and hold each against itself alone.

    Of `settings`: half of "requests" begin with the same "prefix" tokens and go on with up to "own" ones, which are
    all that the others have; "answer" tokens each; "share" of the pages that all take when none is shared.
    """
    from tinyllm.engine.engine import Engine
    from tinyllm.engine.request import Request
    from tinyllm.kv.paged import PAGE_SIZE
    from tinyllm.model.load import load_model

    model = load_model(path)
    draw, vocab = random.Random(0), model.config.vocab_size
    prefix = draw_ids(draw, vocab, settings["prefix"])
    requests = []
    for i in range(settings["requests"]):
        own = draw_ids(draw, vocab, draw.randrange(1, settings["own"] + 1))
        requests.append(Request((*prefix, *own) if i % 2 else own, settings["answer"], logprobs=2))
    dense = sum(-(-(len(request.prompt_ids) + settings["answer"]) // PAGE_SIZE) for request in requests)
    pages = int(settings["share"] * dense)

    engine = Engine(model, max_rows=len(requests), ceilings=(1 + pages,))
    started = time.perf_counter()
    together = engine.run(requests)
    together_s = time.perf_counter() - started
    alone_engine = Engine(model, kv="dense", max_rows=1)
    started = time.perf_counter()
    alone = [alone_engine.run([request])[0] for request in requests]
    return {
        "requests": len(requests),
        "prefix": settings["prefix"],
        "finished": sum(len(tokens) == settings["answer"] for tokens in together),
        "agree": sum(agree(wanted, said) for wanted, said in zip(alone, together, strict=True)),
        "pages": pages,
        "dense_pages": dense,
        "preemptions": engine.preemptions,
        "together_s": together_s,
        "alone_s": time.perf_counter() - started,
    }


def agree(wanted: Sequence[Output], said: Sequence[Output]) -> bool:
    """Whether ids are the same, or first differ where the two best logits are within 0.001 of each other."""
    from tinyllm.doctor import ids_gap

    return ids_gap(wanted, said) <= 1e-3


def measure_products(path: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Time the matrix products of a decode step alone, in turns with whole steps: a floor for any engine's step.

    Of `settings`: "prompt" tokens come before the steps; "repetitions". Returns pairs of seconds, by the clock and of
    all processors together; the bytes that the products read, and the bytes a second that the memory gives.
    """
    from tinyllm._mx import mx
    from tinyllm.bench.machine import measure_bandwidth
    from tinyllm.checkpoint.contents import read_contents
    from tinyllm.checkpoint.weights import DenseWeight
    from tinyllm.engine.load import load_engine
    from tinyllm.engine.request import Request

    engine = load_engine(read_contents(path))
    model = engine.model
    looked_up = None if model.config.tie_word_embeddings else model.embedding.table
    parts = (part for own in vars(model).values() if own is not looked_up for part in parts_of(own))
    matrices = list({id(part.weight): part for part in parts if isinstance(part, DenseWeight)}.values())
    vectors = [mx.ones((1, matrix.weight.shape[1])) for matrix in matrices]
    mx.eval(vectors)
    engine.add(Request((1,) * settings["prompt"], 20 * (settings["repetitions"] + 2)))

    def multiply() -> None:
        mx.eval([x @ matrix.transposed for x, matrix in zip(vectors, matrices, strict=True)])

    def step() -> None:
        while not any(output.token_id is not None for output in engine.step()):
            pass

    step()  # which reads the prompt
    products, steps = [], []
    for _ in range(settings["repetitions"]):
        for work, times in ((multiply, products), (step, steps)):
            work()
            for _ in range(10):
                worked, started = time.process_time(), time.perf_counter()
                work()
                times.append((time.perf_counter() - started, time.process_time() - worked))
    read = sum(matrix.weight.nbytes for matrix in matrices)
    return {"products": products, "steps": steps, "bytes": read, "bandwidth": measure_bandwidth()}


def parts_of(part: object) -> Iterator[object]:
    """Yield the parts of a network that are of tinyllm's own classes."""
    if isinstance(part, (list, tuple)):
        for each in part:
            yield from parts_of(each)
    elif type(part).__module__.startswith("tinyllm."):
        yield part
        for each in vars(part).values():
            yield from parts_of(each)


MEASUREMENTS = {"turns": measure_turns, "crowd": measure_crowd, "products": measure_products}


def main() -> None:
    """Be what the command line says."""
    name, path, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    if name in MEASUREMENTS:
        print(json.dumps(MEASUREMENTS[name](path, settings)), file=answers)
        return
    generate, about = ENGINES[name](path, settings)
    print(json.dumps(about), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        first_s, decode_s = generate(asked["prompts"], asked["count"])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if ON_MAC else 1024)
        print(json.dumps({"first_s": first_s, "decode_s": decode_s, "peak_bytes": peak}), file=answers)


if __name__ == "__main__":
    main()
