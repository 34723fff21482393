"""What the makers of a model say about generating with it: generation_config.json, or a GGUF file's metadata.

Nothing here refuses a model: what cannot be used, or is not computed, is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from tinyllm.config.reader import is_there, read_json_object
from tinyllm.errors import ConfigError

FILE = "generation_config.json"
METADATA = "the GGUF file's metadata"

_NEVER = -1000.0  # added to a logit: the token is not chosen
_DEFAULT_TOP_K = 50  # of transformers, where `do_sample` is true
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
_COUNTS = ("max_new_tokens", "max_length", "min_new_tokens", "min_length")
# Keys that would change an answer and are not computed, with the values at which they do not.
_NOT_COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "constraints": (None,), "diversity_penalty": (0,), "dola_layers": (None,), "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (None,), "force_words_ids": (None,), "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,), "guidance_scale": (None, 1), "max_time": (None,), "no_repeat_ngram_size": (0,),
    "num_beams": (1,), "penalty_alpha": (None, 0), "stop_strings": (None,), "top_h": (None,), "typical_p": (1,),
    "watermarking_config": (None,),
}  # fmt: skip
_GGUF = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_GGUF |= {"penalty_repeat": "repetition_penalty", "penalty_last_n": "repetition_window"}
_GGUF_OFF = {"mirostat": 0, "xtc_probability": 0}  # keys that are not computed, at the value that switches them off


@dataclass(frozen=True)
class GenerationConfig:
    """Sampling defaults, limits and stop tokens of a model, and where they are from (`source`).

    `sampling` has the names of `SamplingParams`' fields, and only those that are stated. Tokens of
    `begin_suppress_tokens` are never the first of an answer. `max_length` and `min_length` count the prompt too.
    """

    source: str = FILE
    eos_token_ids: tuple[int, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    begin_suppress_tokens: tuple[int, ...] = ()
    max_new_tokens: int | None = None
    max_length: int | None = None
    min_new_tokens: int = 0
    min_length: int = 0
    problems: tuple[str, ...] = ()

    @classmethod
    def from_folder(cls, folder: Path) -> GenerationConfig:
        """Read the file of a checkpoint; one that is absent states nothing."""
        path = folder / FILE
        if not is_there(path):
            return cls()
        try:
            return _Reader(read_json_object(path), str(path)).read()
        except ConfigError as error:
            return cls(problems=(f"{error} (the file is not used)",))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> GenerationConfig:
        """Read the keys `general.sampling.*`."""
        stated = {name.removeprefix("general.sampling."): value for name, value in metadata.items()}
        stated = {name: value for name, value in stated.items() if f"general.sampling.{name}" in metadata}
        reader = _Reader({new: stated[old] for old, new in _GGUF.items() if old in stated}, METADATA)
        unused = [f"{name} = {stated[name]}" for name, off in _GGUF_OFF.items() if stated.get(name, off) != off]
        return reader.read(unused)

    def held_back(self, prompt: int, stop_ids: frozenset[int]) -> dict[int, int]:
        """Return the tokens that an answer to a prompt of so many tokens may not have before a certain index."""
        least = max(self.min_new_tokens, self.min_length - prompt)
        held = dict.fromkeys(stop_ids, least) if least > 0 else {}
        return {**dict.fromkeys(self.begin_suppress_tokens, 1), **held}

    def limit(self, prompt: int) -> int | None:
        """Return how many tokens an answer to a prompt of so many has at most, if that is stated."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        return None if self.max_length is None or self.max_length <= prompt else self.max_length - prompt


class _Reader:
    """Takes the values that can be used, and notes what cannot."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._source = source
        self._problems: list[str] = []

    def read(self, unused: list[str] | None = None) -> GenerationConfig:
        values = self._values
        unused = [*(unused or []), *self._not_computed()]
        sampling = self._sampling()
        bias = {**dict.fromkeys(self._ids("suppress_tokens"), _NEVER), **dict(self._biases(unused))}
        if bias:
            sampling["logit_bias"] = bias
        counts = {name: self._number(name, whole=True, least=0) for name in _COUNTS if name in values}
        if unused:
            self._problems.append(f"asks for {', '.join(sorted(unused))}, which tinyllm does not compute")
        return GenerationConfig(
            source=METADATA if self._source == METADATA else FILE,
            eos_token_ids=self._ids("eos_token_id"),
            sampling=sampling,
            begin_suppress_tokens=self._ids("begin_suppress_tokens"),
            max_new_tokens=counts.get("max_new_tokens"),
            max_length=counts.get("max_length"),
            min_new_tokens=counts.get("min_new_tokens") or 0,
            min_length=counts.get("min_length") or 0,
            problems=tuple(f"{self._source}: {problem}" for problem in self._problems),
        )

    def _sampling(self) -> dict[str, Any]:
        """`do_sample: false` means greedy, whatever else is there; `true` means transformers' defaults."""
        samples = self._values.get("do_sample")
        read = {name: self._number(name) for name in _NUMBERS}
        read["top_k"] = self._number("top_k", whole=True)
        read["repetition_window"] = self._number("repetition_window", whole=True)
        if read["top_k"] is not None and read["top_k"] < 1:
            read["top_k"] = None  # off
        if read["repetition_window"] == 0:  # in a GGUF file, no token
            read["repetition_penalty"] = None
        if (read["repetition_window"] or 0) < 1:  # and less, all tokens
            read["repetition_window"] = None
        if samples is False:
            read |= {"temperature": 0.0, "top_k": None, "top_p": None, "min_p": None}
        elif samples is True:
            read["temperature"] = 1.0 if read["temperature"] is None else read["temperature"]
            if "top_k" not in self._values:
                read["top_k"] = _DEFAULT_TOP_K
        return {name: value for name, value in read.items() if value is not None}

    def _number(self, name: str, *, whole: bool = False, least: float | None = None) -> Any:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or (whole and value != int(value)):
            return self._unusable(name)
        if least is not None and value < least:
            return self._unusable(name)
        return int(value) if whole else float(value)

    def _ids(self, name: str) -> tuple[int, ...]:
        """Read a token id, or a list of them, or null."""
        value = self._values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            self._unusable(name)
            return ()
        return tuple(dict.fromkeys(ids))

    def _biases(self, unused: list[str]) -> Iterator[tuple[int, float]]:
        """Yield what is added to the logits of single tokens; sequences of several are not computed."""
        pairs = [(ids, _NEVER) for ids in self._listed("bad_words_ids")]
        pairs += [tuple(pair) for pair in self._listed("sequence_bias") if len(pair) == 2]
        longer = set()
        for ids, bias in pairs:
            if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids) or not ids:
                self._unusable("bad_words_ids" if bias == _NEVER else "sequence_bias")
            elif len(ids) > 1:
                longer.add("bad_words_ids" if bias == _NEVER else "sequence_bias")
            elif isinstance(bias, int | float):
                yield ids[0], max(-1000.0, min(float(bias), 1000.0))
        unused += [f"{name} of several tokens" for name in sorted(longer)]

    def _listed(self, name: str) -> list[Any]:
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(each, list) for each in value):
            self._unusable(name)
            return []
        return value

    def _not_computed(self) -> list[str]:
        present = ((name, off) for name, off in _NOT_COMPUTED.items() if name in self._values)
        return [f"{name} = {brief(self._values[name])}" for name, off in present if self._values[name] not in off]

    def _unusable(self, name: str) -> None:
        problem = f"{name} = {brief(self._values[name])} is not used, since it makes no sense"
        if problem not in self._problems:
            self._problems.append(problem)
