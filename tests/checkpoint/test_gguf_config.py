"""What a GGUF file's metadata states about ending and sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tinyllm.checkpoint.gguf_config import special_ids
from tinyllm.config.generation import METADATA, GenerationConfig

NORMAL, CONTROL, USER = 1, 3, 4


def metadata(tokens: Mapping[str, int], **stated: Any) -> dict[str, Any]:
    said = {"tokens": tuple(tokens), "token_type": tuple(tokens.values()), **stated}
    return {f"tokenizer.ggml.{name}": value for name, value in said.items()}


@pytest.mark.parametrize(
    ("tokens", "stated", "ends"),
    [
        ({"a": NORMAL, "<|im_end|>": CONTROL, "<|endoftext|>": CONTROL}, {"eos_token_id": 2}, [2, 1]),
        ({"a": NORMAL, "<end_of_turn>": USER}, {"eos_token_id": 0}, [0, 1]),
        ({"a": NORMAL, "<|im_end|>": NORMAL}, {"eos_token_id": 0}, 0),
        (
            {"a": NORMAL, "b": NORMAL, "c": NORMAL},
            {"eos_token_id": 0, "eot_token_id": 1, "eom_token_id": 2},
            [0, 1, 2],
        ),
        ({"a": NORMAL, "b": NORMAL}, {"eos_token_ids": (1, 0)}, [1, 0]),
        ({"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL}, {}, [1, 2]),
        ({"<|end|>": CONTROL, "a": NORMAL}, {}, 0),
    ],
)
def test_an_answer_ends_at_all_tokens_that_the_file_or_convention_names(
    tokens: dict[str, int], stated: dict[str, Any], ends: Any
) -> None:
    assert special_ids(metadata(tokens, **stated))["eos_token_id"] == ends


def test_sampling_values_are_defaults() -> None:
    stated = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "penalty_repeat": 1.05, "penalty_last_n": 64}
    found = GenerationConfig.from_gguf({f"general.sampling.{name}": value for name, value in stated.items()})
    assert found.sampling == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
        "repetition_window": 64,
    }
    assert (found.source, found.problems) == (METADATA, ())


def test_sampling_that_is_not_computed_is_a_warning() -> None:
    found = GenerationConfig.from_gguf({"general.sampling.mirostat": 2, "general.sampling.xtc_probability": 0.0})
    [problem] = found.problems
    assert "asks for mirostat = 2" in problem
    assert GenerationConfig.from_gguf({"general.name": "x"}).sampling == {}
