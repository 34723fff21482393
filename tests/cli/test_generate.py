"""`tinyllm generate` through a real process: stdout is the answer and nothing else, failures are one line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from process import tinyllm

from tinyllm.checkpoint import locate
from tinyllm.errors import ModelNotFoundError

ANSWER = " one two three"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_scripted_checkpoint(tmp_path_factory.mktemp("cli") / "scripted", ANSWER)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that never stops: its context is far longer than a test waits."""
    return tiny.write_scripted_checkpoint(
        tmp_path_factory.mktemp("cli") / "endless",
        ANSWER,
        end=None,
        config_overrides={"max_position_embeddings": 10**6},
    )


def test_stdout_is_exactly_the_answer(scripted: Path) -> None:
    done = tinyllm("generate", "count", "-m", scripted)
    assert (done.stdout, done.stderr, done.returncode) == (f"{ANSWER}\n".encode(), b"", 0)


def test_json_is_one_object_with_everything(scripted: Path) -> None:
    done = tinyllm("generate", "count", "-m", scripted, "--json", "-n", "2", "--seed", "7")
    report = json.loads(done.stdout)
    assert done.stdout.count(b"\n") == 1
    assert report["model"] == str(scripted)
    assert report["text"] == " one two"
    assert report["token_ids"] == tiny.token_ids(" one two")
    assert report["finish_reason"] == "length"
    assert report["prompt_tokens"] == len(report["prompt_token_ids"])
    assert report["completion_tokens"] == 2
    assert report["seed"] == 7
    assert (report["reasoning"], report["stop"], report["logprobs"]) == ("", None, None)
    assert report["sampling"]["temperature"] == 0
    assert set(report["timings"]) == {"load_s", "ttft_s", "prefill_tps", "decode_tps", "total_s"}
    assert set(report["memory"]) == {"peak_bytes", "kv_bytes"}
    assert all(value > 0 for value in (*report["timings"].values(), *report["memory"].values()))


def prompt_ids(*arguments: str | Path, stdin: str | None = None) -> list[int]:
    return json.loads(tinyllm("generate", *arguments, "--json", "-n", "0", stdin=stdin).stdout)["prompt_token_ids"]


def test_the_template_is_applied_unless_raw(scripted: Path) -> None:
    rendered = "<|im_start|>user\ncount<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_ids("count", "-m", scripted) == tiny.token_ids(rendered)
    assert prompt_ids("count", "-m", scripted, "-s", "be brief") == tiny.token_ids(
        "<|im_start|>system\nbe brief<|im_end|>\n" + rendered
    )
    assert prompt_ids("count", "-m", scripted, "--raw") == tiny.token_ids("count")


def test_a_piped_prompt_is_read_and_follows_one_that_is_given(scripted: Path) -> None:
    raw = ("-m", scripted, "--raw")
    assert prompt_ids(*raw, stdin="piped\n") == tiny.token_ids("piped")
    assert prompt_ids("-", *raw, stdin="piped\n") == tiny.token_ids("piped")
    assert prompt_ids("first", *raw, stdin="piped\n") == tiny.token_ids("first\n\npiped")
    assert prompt_ids("first", *raw) == tiny.token_ids("first")


def test_a_random_answer_repeats_with_its_seed(tiny_checkpoint: Path) -> None:
    def ask(seed: int) -> bytes:
        return tinyllm(
            "generate", "x", "-m", tiny_checkpoint, "-n", "12", "--temperature", "2", "--seed", str(seed)
        ).stdout

    assert ask(0) == ask(0) != ask(1)


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["-m", "nowhere"], 1, "nowhere: there is no such folder"),
        (["-m", "{scripted}/config.json"], 1, "not a folder"),
        (["-m", "{scripted}", "--dtype", "int3"], 2, "dtype must be one of"),
        (["-m", "{scripted}", "--device", "tpu"], 2, "device must be one of"),
        (["-m", "{scripted}", "--device", "gpu"], 1, "MLX has no GPU"),
        (["-m", "{scripted}", "--raw", "-s", "x"], 2, "--raw"),
    ],
)
def test_a_failure_is_one_line_and_its_code(scripted: Path, arguments: list[str], code: int, told: str) -> None:
    if "gpu" in arguments and sys.platform == "darwin":
        pytest.skip("a Mac has a GPU")
    done = tinyllm("generate", "x", *(argument.format(scripted=scripted) for argument in arguments))
    assert done.returncode == code
    assert done.stdout == b""
    assert done.stderr.startswith(b"tinyllm: ") and done.stderr.count(b"\n") == 1
    assert told in done.stderr.decode()


def test_fault_12_a_missing_key_is_one_line_with_key_and_path(tmp_path: Path) -> None:
    folder = tiny.write_scripted_checkpoint(tmp_path, ANSWER)
    values = json.loads((folder / "config.json").read_text())
    del values["intermediate_size"]
    tiny.write_json(folder / "config.json", values)
    done = tinyllm("generate", "x", "-m", folder)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode().count("\n") == 1
    assert f"{folder}/config.json" in done.stderr.decode() and "intermediate_size" in done.stderr.decode()


def test_debug_shows_the_traceback_before_the_line() -> None:
    done = tinyllm("generate", "x", "-m", "nowhere", "--debug")
    lines = done.stderr.decode().splitlines()
    assert lines[0].startswith("Traceback") and lines[-1].startswith("tinyllm: ")
    assert done.returncode == 1


@pytest.mark.parametrize("arguments", [["--temperature", "-1"], ["--seed", "-1"], ["-n", "-3"], ["--nonsense"], []])
def test_usage_errors_exit_with_2(scripted: Path, arguments: list[str]) -> None:
    prompt = ["x"] if arguments else []
    assert tinyllm("generate", *prompt, "-m", scripted, *arguments).returncode == 2


def test_the_embedded_model_when_it_is_not_fetched_is_one_line_that_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate, "models_folder", lambda: tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"not been fetched.*fetch_model\.py") as failure:
        locate.find_model(None)
    assert "\n" not in str(failure.value)


def start(folder: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tinyllm", "generate", "x", "-m", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(5) == b" one "  # it streams: the answer has no end
    return process


def test_ctrl_c_ends_with_130_and_no_traceback(endless: Path) -> None:
    process = start(endless)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, b"")


def test_a_closed_pipe_ends_quietly(endless: Path) -> None:
    process = start(endless)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) in (0, 1)
