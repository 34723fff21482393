"""A model that answers: text or chat messages in, chunks of text with statistics out.

The only place where text meets the engine. `LLM` may be used from several threads at once.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from tinyllm._mx import mx
from tinyllm.checkpoint.files import checked_file
from tinyllm.config.config import Config
from tinyllm.config.generation import GenerationConfig
from tinyllm.engine.engine import Engine
from tinyllm.engine.request import MAX_SEED, FinishReason, Output, Request, SamplingParams
from tinyllm.engine.worker import EngineWorker, Ticket
from tinyllm.errors import BackendError, ModelNotFoundError, UsageError
from tinyllm.model.load import load_model
from tinyllm.ops.features import ModelFeatures
from tinyllm.text.tokenizer import Tokenizer

DTYPES: Mapping[str, mx.Dtype] = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
DEVICES: Mapping[str, mx.DeviceType] = {"cpu": mx.DeviceType.cpu, "gpu": mx.DeviceType.gpu}


@dataclass(frozen=True)
class Statistics:
    """One answer in figures. Times are in seconds; `ttft_s` is from the request to its first token.

    `prefill_tps` and `decode_tps` are tokens per second over the prompt and over the tokens after the first one,
    0 where there were none. `peak_bytes` is the most memory that MLX has held, loading included; `kv_bytes` is the
    size of the answer's cache.
    """

    prompt_tokens: int
    completion_tokens: int
    seed: int
    load_s: float
    ttft_s: float
    prefill_tps: float
    decode_tps: float
    total_s: float
    peak_bytes: int
    kv_bytes: int


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer: text that is final, and the ids behind it. The last one has the reason and statistics."""

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    statistics: Statistics | None = None


class Answer:
    """An answer as it is made: iterate over it for its chunks. `cancel` ends it, as does leaving the iteration.

    `text` collects the whole of it, from where the iteration stands.
    """

    def __init__(self, ticket: Ticket, chunks: Iterator[Chunk]) -> None:
        self.prompt_token_ids = ticket.request.prompt_ids
        self._ticket = ticket
        self._chunks = chunks

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def text(self) -> str:
        """Wait for the end, and return the text of all chunks that were not taken yet."""
        return "".join(chunk.text for chunk in self)

    def cancel(self) -> None:
        """Let the engine forget the request; its last chunk then has the reason "cancelled"."""
        self._ticket.cancel()


class LLM:
    """A loaded checkpoint. Use it as a context manager, or `close` it, to give its memory back at once.

    `path` is the folder of a checkpoint; `dtype` is "float32", "float16" or "bfloat16" (by default the stored one on
    a GPU, float32 on a CPU); `device` is "cpu" or "gpu" (by default MLX's choice). Raises TinyllmError, by name, for
    whatever cannot be loaded.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        features: ModelFeatures | None = None,
        dtype: str | None = None,
        device: str | None = None,
    ) -> None:
        started = perf_counter()
        self.path = Path(path)
        if not self.path.is_dir():
            raise ModelNotFoundError(f"{self.path}: there is no such folder")
        for name in ("config.json", "tokenizer.json"):
            checked_file(self.path, name)
        self.config = Config.from_json_file(self.path)
        generation = GenerationConfig.from_folder(self.path)
        self.tokenizer = Tokenizer.from_path(self.path)
        self.stop_ids = frozenset(self.config.eos_token_ids) | set(generation.eos_token_ids) | self.tokenizer.eos_ids
        chosen_dtype = _choose("dtype", dtype, DTYPES)
        chosen_device = _choose("device", device, DEVICES)
        self._worker = EngineWorker(lambda: _load(self.path, features, chosen_dtype, chosen_device))
        self.load_s = perf_counter() - started

    def generate(
        self, prompt: str, *, max_tokens: int | None = None, temperature: float = 0.0, seed: int | None = None
    ) -> Answer:
        """Continue `prompt`, taken as it is. The answer's last chunk has a `finish_reason` and `statistics`.

        Without `max_tokens` it ends where the model or the context ends. `temperature` 0 is greedy. Without a `seed`
        one is drawn.
        """
        return self._stream(self.tokenizer.encode(prompt), max_tokens, temperature, seed)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> Answer:
        """Answer a conversation, [{"role": ..., "content": ...}, ...], through the model's chat template.

        Raises ChatTemplateError if the model has none or it rejects the messages. Otherwise as `generate`.
        """
        return self._stream(self.tokenizer.encode_chat(messages), max_tokens, temperature, seed)

    def close(self) -> None:
        """Stop the engine and give back its memory; twice is no error."""
        self._worker.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _stream(
        self, prompt_ids: Sequence[int], max_tokens: int | None, temperature: float, seed: int | None
    ) -> Answer:
        seed = secrets.randbelow(MAX_SEED + 1) if seed is None else seed
        request = Request(tuple(prompt_ids), max_tokens, self.stop_ids, SamplingParams(temperature, seed))
        ticket = self._worker.submit(request)
        return Answer(ticket, self._chunks(ticket))

    def _chunks(self, ticket: Ticket) -> Iterator[Chunk]:
        detokenizer = self.tokenizer.detokenizer()
        meter = _Meter(ticket, self.load_s)
        try:
            for output in ticket:
                meter.add(output)
                ids = () if output.token_id is None else (output.token_id,)
                text = "".join(map(detokenizer.add, ids))
                if output.finish_reason is None:
                    yield Chunk(text, ids)
                else:
                    yield Chunk(text + detokenizer.finish(), ids, output.finish_reason, meter.statistics())
        finally:
            ticket.cancel()


class _Meter:
    """Takes the times of one request from its outputs."""

    def __init__(self, ticket: Ticket, load_s: float) -> None:
        self._ticket = ticket
        self._load_s = load_s
        self._tokens = 0
        self._first_at = self._last_at = ticket.submitted_at
        self._prefill_s = 0.0
        self._kv_bytes = 0

    def add(self, output: Output) -> None:
        self._last_at = output.at
        self._kv_bytes = output.kv_bytes
        if output.token_id is None:
            return
        self._tokens += 1
        if self._tokens == 1:
            self._first_at, self._prefill_s = output.at, output.prefill_s

    def statistics(self) -> Statistics:
        request = self._ticket.request
        decode_s = self._last_at - self._first_at
        return Statistics(
            prompt_tokens=len(request.prompt_ids),
            completion_tokens=self._tokens,
            seed=request.sampling.seed,
            load_s=self._load_s,
            ttft_s=self._first_at - self._ticket.submitted_at,
            prefill_tps=len(request.prompt_ids) / self._prefill_s if self._prefill_s else 0.0,
            decode_tps=(self._tokens - 1) / decode_s if self._tokens > 1 else 0.0,
            total_s=self._last_at - self._ticket.submitted_at,
            peak_bytes=mx.get_peak_memory(),
            kv_bytes=self._kv_bytes,
        )


def _choose(what: str, name: str | None, known: Mapping[str, Any]) -> Any:
    if name is not None and name not in known:
        raise UsageError(f"{what} must be one of {', '.join(known)}, not {name!r}")
    return None if name is None else known[name]


def _load(path: Path, features: ModelFeatures | None, dtype: mx.Dtype | None, device: mx.DeviceType | None) -> Engine:
    if device is not None:
        if not mx.is_available(mx.Device(device)):
            raise BackendError("MLX has no GPU on this machine: leave --device out, or say cpu")
        mx.set_default_device(mx.Device(device))
    return Engine(load_model(path, features, dtype=dtype))
