"""`tinyllm generate --prompt-cache FILE` through real processes: a long text is computed once, asked often."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from process import tinyllm
from terminal import tinyllm_on_a_terminal

DOCUMENT = " ".join(f"{i} {i * i} {i * i * i}" for i in range(60))  # several pages, a token for each character
LONG = {"max_position_embeddings": 4096}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LONG,
    "windows": {
        **LONG,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    },
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / request.param
    return tiny.write_checkpoint(folder, config_overrides=MODELS[request.param], chat_template=tiny.CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("cli") / "llama", config_overrides=LONG)


@pytest.fixture(scope="module")
def saved(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "doc.safetensors"
    assert tinyllm("generate", DOCUMENT, "-m", llama, "-n", "1", "--prompt-cache", path).returncode == 0
    return path


def report(*arguments: str | Path) -> dict[str, Any]:
    done = tinyllm("generate", *arguments, "--json", "-n", "12")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("sampling", [[], ["--temperature", "1.5", "--seed", "3"]], ids=["greedy", "sampled"])
def test_warm_ids_equal_cold_ones_in_another_process(model: Path, tmp_path: Path, sampling: list[str]) -> None:
    path = tmp_path / "doc"
    first, second = ([f"{DOCUMENT} {question}?", "-m", model, *sampling] for question in ("one", "two"))
    made = tinyllm("generate", *first, "--json", "-n", "12", "--prompt-cache", path)
    cold = json.loads(made.stdout)
    count = cold["prompt_tokens"]
    assert f"tinyllm: {path}: {count:,} tokens of the prompt saved, ".encode() in made.stderr
    assert (cold["cached_tokens"], stat.S_IMODE(path.stat().st_mode)) == (0, 0o600)
    before = path.read_bytes()

    again = report(*first, "--prompt-cache", path)
    assert again["token_ids"] == cold["token_ids"]
    assert again["cached_tokens"] == count - 1
    warm, expected = report(*second, "--prompt-cache", path), report(*second)
    assert warm["token_ids"] == expected["token_ids"]
    assert warm["cached_tokens"] == len(tiny.token_ids(f"<|im_start|>user\n{DOCUMENT}"))
    assert expected["cached_tokens"] == 0
    assert path.read_bytes() == before


def test_figures_tell_what_came_from_the_file(llama: Path, saved: Path) -> None:
    done = tinyllm("generate", DOCUMENT, "-m", llama, "-n", "2", "--stats", "--prompt-cache", saved)
    count = len(tiny.token_ids(DOCUMENT))
    assert f"prompt {count:,} tokens ({count - 1:,} from the cache), " in done.stderr.decode()
    assert b"from the cache" not in tinyllm("generate", DOCUMENT, "-m", llama, "-n", "2", "--stats").stderr


def test_a_terminal_shows_the_line_before_the_answer(tmp_path: Path) -> None:
    folder = tiny.write_scripted_checkpoint(tmp_path / "model", " one two three")
    shown = tinyllm_on_a_terminal("generate", "x", "-m", folder, "--prompt-cache", tmp_path / "x")
    assert shown.index("tokens of the prompt saved") < shown.index(" one two three")


def test_an_answer_that_is_interrupted_has_its_prompt_saved(tmp_path: Path) -> None:
    folder = tiny.write_scripted_checkpoint(
        tmp_path / "model", " one two three", end=None, config_overrides={"max_position_embeddings": 10**6}
    )
    path = tmp_path / "x"
    process = subprocess.Popen(
        [sys.executable, "-m", "tinyllm", "generate", "x", "-m", str(folder), "--prompt-cache", str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.read(5) == b" one "
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert sorted(tmp_path.iterdir()) == [tmp_path / "model", path]
    assert report("x", "-m", folder, "--prompt-cache", path)["cached_tokens"] > 0


def test_another_text_is_refused_and_a_template_is_nothing_in_common(llama: Path, saved: Path) -> None:
    done = tinyllm("generate", DOCUMENT[:50] + "other", "-m", llama, "--prompt-cache", saved)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode().count("\n") == 1
    assert f"{saved}: made of another text" in done.stderr.decode() and "part at token 51:" in done.stderr.decode()
    assert report(DOCUMENT[:50], "-m", llama, "--prompt-cache", saved)["cached_tokens"] == 49
    assert report(DOCUMENT[:200] + "other", "-m", llama, "--prompt-cache", saved)["cached_tokens"] == 200


def test_fault_42_another_model_of_the_same_shape_is_refused_in_one_line(
    llama: Path, saved: Path, tmp_path: Path
) -> None:
    other = tiny.write_checkpoint(tmp_path / "other", config_overrides=LONG, seed=1)
    wrong = {
        ("-m", str(other)): "made with weights ",
        ("-m", str(llama), "--dtype", "float16"): "made with dtype float32, and this is float16",
    }
    for arguments, told in wrong.items():
        done = tinyllm("generate", DOCUMENT, *arguments, "--prompt-cache", saved)
        assert (done.returncode, done.stdout) == (1, b"")
        assert told in done.stderr.decode() and done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "."])
def test_what_is_no_saved_prompt_is_refused_and_left_alone(llama: Path, name: str) -> None:
    before = (llama / "model.safetensors").read_bytes()
    done = tinyllm("generate", "x", "-m", llama, "--prompt-cache", llama / name)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (1, b"", 1)
    assert b"not a prefix that tinyllm saved" in done.stderr
    assert (llama / "model.safetensors").read_bytes() == before


def test_a_file_of_prompts_shares_it(llama: Path, saved: Path, tmp_path: Path) -> None:
    texts = [f"{DOCUMENT} {word}" for word in ("one", "two")]
    (tmp_path / "prompts").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    many = ("generate", "--prompts", tmp_path / "prompts", "-m", llama, "-n", "12", "--in-order", "--batch", "2")
    warm, cold = tinyllm(*many, "--prompt-cache", saved), tinyllm(*many)
    assert (warm.returncode, warm.stderr) == (0, b"")
    assert warm.stdout == cold.stdout and warm.stdout.count(b"\n") == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["x", "--prompt-cache", "{tmp}/absent/x"], "there is no folder {tmp}/absent"),
        (["x", "--prompt-cache", "{tmp}/x", "-n", "0"], "--prompt-cache needs --max-tokens 1 or more"),
        (["--prompts", "{tmp}/prompts", "--prompt-cache", "{tmp}/x"], "{tmp}/x: make it with a single prompt"),
        (["x", "--kv-budget", "plenty"], "--kv-budget must be a size (2GB, 512MiB) or a share up to 100%"),
        (["x", "--max-context", "0"], "--max-context"),
    ],
)
def test_what_cannot_be_meant_is_told_before_anything_is_loaded(
    tmp_path: Path, arguments: list[str], told: str
) -> None:
    (tmp_path / "prompts").write_text('{"prompt": "x"}\n')
    done = tinyllm("generate", "-m", "nowhere", *(argument.format(tmp=tmp_path) for argument in arguments))
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
    assert told.format(tmp=tmp_path) in done.stderr.decode()


def test_limits_of_memory_reach_the_engine(llama: Path, tmp_path: Path) -> None:
    long = tinyllm("generate", DOCUMENT, "-m", llama, "--max-context", "300", "-n", "2")
    assert (long.returncode, long.stdout) == (1, b"") and b"can attend to 300" in long.stderr
    small = tinyllm("generate", "x", "-m", llama, "--kv-budget", "1kB", "-n", "2")
    assert (small.returncode, small.stdout) == (1, b"") and b"budget" in small.stderr
    enough = ("--kv-budget", "1MB", "--max-context", "300", "--no-wired-limit")
    assert report("x", "-m", llama, *enough)["token_ids"] == report("x", "-m", llama)["token_ids"]
    (tmp_path / "prompts").write_text('{"prompt": "x"}\n')
    many = ("generate", "--prompts", tmp_path / "prompts", "-m", llama, "-n", "2", "--max-context", "4000")
    eight = tinyllm(*many, "--batch", "8", "--kv-budget", "4MB")  # a token takes 256 bytes
    assert b"8 sequences of 4,000 tokens" in eight.stderr
    assert tinyllm(*many, "--batch", "2", "--kv-budget", "4MB").returncode == 0


@pytest.mark.real_model
def test_the_embedded_model_computes_a_text_once(real_model: Path, tmp_path: Path) -> None:
    text = "The lighthouse keeper wrote down every storm. " * 16
    first, second = ((f"{text} {ask}", "-m", real_model) for ask in ("Who wrote?", "What did he write down?"))
    made, cold = report(*first, "--prompt-cache", tmp_path / "x"), report(*second)
    warm = report(*second, "--prompt-cache", tmp_path / "x")
    assert warm["token_ids"] == cold["token_ids"]
    both = zip(made["prompt_token_ids"], cold["prompt_token_ids"], strict=False)
    common = next(i for i, (a, b) in enumerate(both) if a != b)
    assert common > 140
    assert [one["cached_tokens"] for one in (made, cold, warm)] == [0, 0, common]
