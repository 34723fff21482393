"""Text at the edge: `LLM` over scripted checkpoints, whose answers are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny

from tinyllm.errors import ChatTemplateError, ConfigError, ModelNotFoundError, UnsafePathError, UsageError
from tinyllm.llm import LLM

ANSWER = " one two three"
USER = [{"role": "user", "content": "count"}]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_scripted_checkpoint(tmp_path_factory.mktemp("llm") / "scripted", ANSWER)


@pytest.fixture(scope="module")
def llm(scripted: Path) -> LLM:
    return LLM(scripted)


def test_chunks_join_to_the_answer_and_the_last_one_has_the_figures(llm: LLM) -> None:
    chunks = list(llm.chat(USER))
    assert "".join(chunk.text for chunk in chunks) == ANSWER
    assert [i for chunk in chunks for i in chunk.token_ids] == [*tiny.token_ids(ANSWER), tiny.EOS]
    assert all(chunk.finish_reason is None and chunk.statistics is None for chunk in chunks[:-1])
    assert chunks[-1].finish_reason == "stop"
    statistics = chunks[-1].statistics
    assert statistics is not None
    assert statistics.completion_tokens == len(tiny.token_ids(ANSWER)) + 1
    assert statistics.prompt_tokens == len(llm.tokenizer.encode_chat(USER))
    assert 0 < statistics.ttft_s <= statistics.total_s
    assert statistics.kv_bytes > 0 and statistics.peak_bytes > 0


def test_text_collects_an_answer(llm: LLM) -> None:
    assert llm.generate("go").text() == ANSWER


def test_generate_takes_the_prompt_as_it_is_and_chat_applies_the_template(llm: LLM) -> None:
    assert list(llm.generate("count", max_tokens=0).prompt_token_ids) == tiny.token_ids("count")
    rendered = "<|im_start|>user\ncount<|im_end|>\n<|im_start|>assistant\n"
    assert list(llm.chat(USER, max_tokens=0).prompt_token_ids) == tiny.token_ids(rendered)


def test_max_tokens_cuts_and_says_length(llm: LLM) -> None:
    chunks = list(llm.chat(USER, max_tokens=2))
    assert "".join(chunk.text for chunk in chunks) == " one two"
    assert chunks[-1].finish_reason == "length"


def test_cancel_ends_an_endless_answer(tmp_path: Path) -> None:
    overrides = {"max_position_embeddings": 10**6}
    with LLM(tiny.write_scripted_checkpoint(tmp_path, ANSWER, end=None, config_overrides=overrides)) as llm:
        answer = llm.chat(USER)
        assert next(chunk.text for chunk in answer if chunk.text) == " one"
        answer.cancel()
        assert list(answer)[-1].finish_reason == "cancelled"


def test_fault_29_without_a_seed_one_is_drawn_and_told(llm: LLM) -> None:
    seeds = {list(llm.chat(USER, temperature=1.0, max_tokens=1))[-1].statistics.sampling.seed for _ in range(3)}
    assert len(seeds) == 3


def test_fault_13_the_answer_stops_on_the_union_of_all_end_tokens(tmp_path: Path) -> None:
    """config.json says one id, generation_config.json a list, tokenizer_config.json a string."""
    two = tiny.token_ids(ANSWER)[1]
    folder = tiny.write_scripted_checkpoint(tmp_path, ANSWER)
    tiny.write_json(folder / "generation_config.json", {"eos_token_id": [1, two]})
    with LLM(folder) as llm:
        assert llm.stop_ids == {1, two, tiny.EOS}
        chunks = list(llm.chat(USER))
    assert "".join(chunk.text for chunk in chunks).startswith(" one")
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].token_ids == (two,)


def test_fault_31_an_empty_prompt_starts_from_bos_or_says_why_not(tmp_path: Path) -> None:
    folder = tiny.write_scripted_checkpoint(tmp_path, ANSWER)
    with LLM(folder) as llm, pytest.raises(UsageError, match="empty"):
        llm.generate("")


def test_a_model_without_a_template_generates_but_does_not_chat(tmp_path: Path) -> None:
    with LLM(tiny.write_scripted_checkpoint(tmp_path, ANSWER, chat_template=None)) as llm:
        assert llm.generate("go").text() == ANSWER
        with pytest.raises(ChatTemplateError):
            llm.chat(USER)


def test_a_folder_that_is_not_there_and_files_that_lead_out_of_it_are_refused(tmp_path: Path, scripted: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        LLM(tmp_path / "nowhere")
    folder = tmp_path / "linked"
    folder.mkdir()
    (folder / "config.json").symlink_to(scripted / "config.json")
    with pytest.raises(UnsafePathError, match=r"config\.json"):
        LLM(folder)


@pytest.mark.parametrize("settings", [{"dtype": "float8"}, {"device": "tpu"}])
def test_an_unknown_dtype_or_device_is_refused(scripted: Path, settings: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        LLM(scripted, **settings)


def test_a_malformed_generation_config_is_told_by_name(tmp_path: Path) -> None:
    folder = tiny.write_scripted_checkpoint(tmp_path, ANSWER)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "two"}))
    with pytest.raises(ConfigError, match=r"generation_config\.json.*eos_token_id"):
        LLM(folder)
