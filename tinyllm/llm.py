"""A model that answers: text or chat messages in, chunks of text with statistics out.

The only place where text meets the engine. `LLM` may be used from several threads at once.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypedDict, cast, overload

from tinyllm._mx import mx
from tinyllm.answer import Answer as Answer
from tinyllm.answer import Chunk as Chunk
from tinyllm.answer import Meter
from tinyllm.answer import Statistics as Statistics
from tinyllm.arguments import check_chat, check_limits, check_prompts, check_settings, stop_strings, token_ids
from tinyllm.checkpoint.contents import Contents, read_contents
from tinyllm.checkpoint.gguf_header import is_gguf
from tinyllm.config.generation import GenerationConfig
from tinyllm.engine.engine import Engine
from tinyllm.engine.load import EngineSettings, load_engine
from tinyllm.engine.plan import MemoryPlan
from tinyllm.engine.prefix_file import Fingerprint, load_prefix, save_prefix
from tinyllm.engine.request import MAX_SEED, Request, SamplingParams
from tinyllm.engine.worker import EngineWorker, Ticket
from tinyllm.errors import BackendError, ModelNotFoundError, UsageError
from tinyllm.ops.features import ModelFeatures
from tinyllm.text.stream import TextStream
from tinyllm.text.tokenizer import Tokenizer

logger = logging.getLogger("tinyllm")

if TYPE_CHECKING:
    from typing_extensions import Unpack

DTYPES: Mapping[str, mx.Dtype] = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
DEVICES: Mapping[str, mx.DeviceType] = {"cpu": mx.DeviceType.cpu, "gpu": mx.DeviceType.gpu}


class Sampling(TypedDict, total=False):
    """The fields of `SamplingParams`; those that are absent or None are the model's own (generation_config.json)."""

    repetition_penalty: float | None
    repetition_window: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None


class Settings(Sampling, total=False):
    """What may be asked of an answer; see `LLM.generate`."""

    max_tokens: int | None
    stop: str | Sequence[str]
    logprobs: int | None


Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """A loaded checkpoint. Use it as a context manager, or `close` it, to give its memory back at once.

    `path` is the folder of a checkpoint or a GGUF file; `dtype` is "float32", "float16" or "bfloat16" (by default
    float32 on a CPU and the stored one on a GPU, but bfloat16 for float16); `device` is "cpu" or "gpu" (by default
    MLX's choice). `batch` is how many requests run at once, `kv_budget` the most bytes that the KV cache may take (or
    which share of what is left), `max_context` the most tokens of a request; `kv_bits`, 8 or 4, packs what is cached;
    with `wired` the memory of a model that needs most of a Mac's stays resident until `close`. Decode steps are
    `compiled`, where there is a compiler. Raises TinyllmError, by name, for whatever cannot be loaded, and
    DoesNotFitError before any weight is read.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        features: ModelFeatures | None = None,
        dtype: str | None = None,
        device: str | None = None,
        batch: int | None = None,
        kv_budget: int | Fraction | None = None,
        max_context: int | None = None,
        kv_bits: int | None = None,
        wired: bool = True,
        compiled: bool = True,
    ) -> None:
        started = perf_counter()
        check_limits(kv_budget=kv_budget, batch=batch, max_context=max_context, kv_bits=kv_bits)
        self.path = Path(path)
        if not self.path.is_dir() and not is_gguf(self.path):
            raise ModelNotFoundError(f"{self.path}: there is no such folder, nor a GGUF file")
        contents = read_contents(self.path)
        self.config = contents.config
        self.tokenizer = Tokenizer.of(contents)
        if self.tokenizer.chat_template is not None:
            self.tokenizer.chat_template.worker.start()  # while the weights are read
        header = contents.header
        self._generation = (
            GenerationConfig.from_folder(self.path) if header is None else GenerationConfig.from_gguf(header.metadata)
        )
        ends = {*self.config.eos_token_ids, *self._generation.eos_token_ids, *self.tokenizer.eos_ids}
        self.stop_ids = frozenset(ends)
        self._defaults, problems = SamplingParams.usable(self._generation.sampling)
        unusable = [f"{self.path}: {problem} (in {self._generation.source})" for problem in problems]
        for problem in (*self._generation.problems, *unusable):
            logger.warning("%s", problem)
        settings = EngineSettings(
            batch=batch,
            kv_budget=kv_budget,
            max_context=max_context,
            kv_bits=kv_bits,
            wired=wired,
            compiled=compiled,
            features=features or ModelFeatures(),
            dtype=_choose("dtype", dtype, DTYPES),
        )
        chosen_device = _choose("device", device, DEVICES)
        # Bound to values: one that referred to `self` would let the engine's thread keep this object alive.
        self._worker = EngineWorker(partial(_load, contents, settings, chosen_device))
        self.plan = self._worker.call(_plan_of)
        self.load_s = perf_counter() - started

    @property
    def sampling(self) -> Mapping[str, Any]:
        """The sampling values that the model's makers state, by their names in `SamplingParams`."""
        return dict(self._defaults)

    @property
    def context(self) -> int:
        """How many tokens a prompt and its answer may have together."""
        return self.plan.context

    @overload
    def generate(self, prompt: str, *, parse_special: bool = False, **settings: Unpack[Settings]) -> Answer: ...

    @overload
    def generate(
        self, prompt: list[str] | tuple[str, ...], *, parse_special: bool = False, **settings: Unpack[Settings]
    ) -> list[Answer]: ...

    def generate(
        self,
        prompt: str | list[str] | tuple[str, ...],
        *,
        parse_special: bool = False,
        **settings: Unpack[Settings],
    ) -> Answer | list[Answer]:
        """Continue `prompt`, taken as it is; an empty one starts from the model's first token, where it has one.

        Several prompts, in a list, are submitted at once, and have an answer each, in their order.

        With `parse_special`, control tokens that are written in a prompt ("<|im_start|>") count as such.

        Without `max_tokens` the answer ends where the model or the context ends; one of the `stop` strings ends it
        before. With `logprobs` N, chunks carry the log-probabilities of their tokens and of the N likeliest. Sampling
        values are those of `SamplingParams`; what is left out is as the model's makers state it, else greedy.
        Without a `seed` one is drawn, for each answer.
        """
        check_prompts(prompt)
        if not isinstance(prompt, str):
            return [self.generate(each, parse_special=parse_special, **settings) for each in prompt]
        bos = self.tokenizer.bos_id
        prompt_ids = self.tokenizer.encode(prompt, parse_special=parse_special) or ([] if bos is None else [bos])
        return self.answer(prompt_ids, **settings)

    @overload
    def chat(
        self,
        messages: Conversation,
        *,
        template_args: Mapping[str, Any] | None = None,
        **settings: Unpack[Settings],
    ) -> Answer: ...

    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        *,
        template_args: Mapping[str, Any] | None = None,
        **settings: Unpack[Settings],
    ) -> list[Answer]: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        *,
        template_args: Mapping[str, Any] | None = None,
        **settings: Unpack[Settings],
    ) -> Answer | list[Answer]:
        """Answer a conversation, [{"role": ..., "content": ...}, ...], through the model's chat template.

        Several conversations, in a list, are submitted at once, and have an answer each, in their order.

        `template_args` are further variables of the template (`enable_thinking`, `tools`, ...). Raises
        ChatTemplateError if the model has no template or it rejects the messages. Otherwise as `generate`.
        """
        if isinstance(messages, (list, tuple)) and messages and isinstance(messages[0], (list, tuple)):
            several = cast(Sequence[Conversation], messages)
            return [self.chat(each, template_args=template_args, **settings) for each in several]
        check_chat(messages, template_args or {})
        conversation = cast(Conversation, messages)
        prompt_ids = self.tokenizer.encode_chat(conversation, **(template_args or {}))
        return self.answer(prompt_ids, tells_reasoning=True, **settings)

    def answer(
        self, prompt_ids: Sequence[int], *, tells_reasoning: bool = False, **settings: Unpack[Settings]
    ) -> Answer:
        """Continue a prompt that is tokens already, as `tokenizer` makes them: `generate` and `chat` end here.

        With `tells_reasoning`, what the model marks as its thoughts is `Chunk.reasoning` and no part of the text.
        """
        check_settings(settings, {**Sampling.__annotations__, **Settings.__annotations__})
        prompt_ids = token_ids(prompt_ids)
        given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
        max_tokens, logprobs = given.pop("max_tokens", None), given.pop("logprobs", None)
        stops = stop_strings(given.pop("stop", ()))
        text = TextStream(self.tokenizer, prompt_ids, stops=stops, tells_reasoning=tells_reasoning)
        ends = {i: stop for stop in stops if (i := self.tokenizer.special_id(stop)) is not None}
        held_back = self._generation.held_back(len(prompt_ids), self.stop_ids)
        values = {"seed": secrets.randbelow(MAX_SEED + 1), "held_back": held_back, **self._defaults, **given}
        if isinstance(given.get("logit_bias"), Mapping):
            values["logit_bias"] = {**self._defaults.get("logit_bias", {}), **given["logit_bias"]}
        if max_tokens is None:
            max_tokens = self._generation.limit(len(prompt_ids))
        sampling = SamplingParams(**values)
        request = Request(prompt_ids, max_tokens, self.stop_ids | ends.keys(), sampling, logprobs)
        ticket = self._worker.submit(request)
        return Answer(ticket, self._chunks(ticket, text, ends))

    def save_prefix(self, prompt_token_ids: Sequence[int], path: str | Path) -> int:
        """Write the keys and values of a prompt that was answered (or is being answered), for `load_prefix`.

        Returns how many tokens they are of. The file, in place of any that is there, is readable for its owner alone.
        Raises PrefixFileError if nothing of the prompt is computed, or still kept, or the file cannot be written.
        """
        return self._worker.call(partial(_save_prefix, self.path, tuple(prompt_token_ids), Path(path)))

    def load_prefix(self, path: str | Path) -> tuple[int, ...]:
        """Let prompts that begin like a saved one take over its keys and values, up to where they part.

        Returns the tokens of the saved prompt, as many as the KV cache has room for. Raises PrefixFileError, by name,
        for a file that is damaged, or was made with another model or other settings.
        """
        return self._worker.call(partial(_load_prefix, self.path, Path(path)))

    def close(self) -> None:
        """Stop the engine and give back its memory; twice is no error."""
        self._worker.close()
        if self.tokenizer.chat_template is not None:
            self.tokenizer.chat_template.worker.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _chunks(self, ticket: Ticket, text: TextStream, ends: Mapping[int, str]) -> Iterator[Chunk]:
        meter = Meter(ticket, self.load_s, self.plan)
        try:
            for output in ticket:
                meter.add(output)
                reasoning = answer = ""
                if output.token_id is not None:
                    reasoning, answer = text.add(output.token_id)
                reason = output.finish_reason
                if reason is not None or text.stop is not None:
                    last = text.finish()
                    reasoning, answer = reasoning + last.reasoning, answer + last.answer
                if text.stop is not None:
                    reason = "stop"
                yield Chunk(
                    text=answer,
                    reasoning=reasoning,
                    token_ids=() if output.token_id is None else (output.token_id,),
                    logprobs=() if output.logprobs is None else (output.logprobs,),
                    prefilled=output.prefilled,
                    finish_reason=reason,
                    stop=text.stop or (None if output.token_id is None else ends.get(output.token_id)),
                    statistics=None if reason is None else meter.statistics(),
                )
                if reason is not None:
                    return
        finally:
            ticket.cancel()


def _plan_of(engine: Engine) -> MemoryPlan:
    assert engine.plan is not None
    return engine.plan


def _choose(what: str, name: str | None, known: Mapping[str, Any]) -> Any:
    if name is not None and name not in known:
        raise UsageError(f"{what} must be one of {', '.join(known)}, not {name!r}")
    return None if name is None else known[name]


def _load(contents: Contents, settings: EngineSettings, device: mx.DeviceType | None) -> Engine:
    if device is not None:
        if not mx.is_available(mx.Device(device)):
            raise BackendError("MLX has no GPU on this machine: leave --device out, or say cpu")
        mx.set_default_device(mx.Device(device))
    return load_engine(contents, settings)


def _save_prefix(folder: Path, prompt_token_ids: tuple[int, ...], path: Path, engine: Engine) -> int:
    return save_prefix(engine, prompt_token_ids, path, Fingerprint.of(engine, folder))


def _load_prefix(folder: Path, path: Path, engine: Engine) -> tuple[int, ...]:
    return load_prefix(engine, path, Fingerprint.of(engine, folder))
