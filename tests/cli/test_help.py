"""The command line's outside: what --help says, and what it does not load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from process import tinyllm

import tinyllm as package


def test_help_loads_neither_mlx_nor_a_tokenizer() -> None:
    script = (
        "import sys; sys.argv = ['tinyllm', 'generate', '--help']; from tinyllm.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: print(sorted({name.split('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    heavy = {"mlx", "numpy", "tokenizers", "jinja2", "huggingface_hub", "safetensors", "gguf"}
    assert "--temperature" in done.stdout
    assert not heavy & set(eval(done.stderr))


def test_version_is_the_package_s() -> None:
    done = tinyllm("--version")
    assert (done.stdout.decode(), done.returncode) == (f"tinyllm {package.__version__}\n", 0)


def test_without_a_command_the_help_is_shown() -> None:
    done = tinyllm(env={"COLUMNS": "80"})
    assert (b"generate" in done.stdout, done.stderr, done.returncode) == (True, b"", 2)
    assert b"..." not in done.stdout.split(b"Commands:")[1]  # nothing is cut off


def test_help_on_a_full_disk_is_one_line() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full on this system")
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-m", "tinyllm", "--help"], stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, b"tinyllm: No space left on device\n")


def test_a_command_that_does_not_exist_is_one_line() -> None:
    done = tinyllm("genrate")
    assert (done.stdout, done.returncode, done.stderr.count(b"\n")) == (b"", 2, 1)
    assert done.stderr.startswith(b"tinyllm: No such command 'genrate'")
    assert done.stderr.endswith(b"tinyllm --help says what there is)\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "-n", "-1", "x"),
        ("generate", "--seed", "-1", "x"),
        ("generate", "--max-context", "0", "x"),
        ("generate", "--kv-budget", "-1GB", "x"),
        ("generate", "--top-k", "-5", "x"),
        ("generate", "--logprobs", "-1", "--json", "x"),
        ("generate", "--prompts", "f", "--batch", "0"),
        ("chat", "-n", "0"),
        ("bench", "-r", "0"),
        ("bench", "-p", "-8"),
        ("bench", "--delay", "-1"),
        ("bench", "--delay", "nan"),
        ("bench", "--delay", "1e300"),
        ("bench", "--compare", "f", "--fail-slower", "nan"),
        ("bench", "--compare", "f", "--fail-slower", "inf"),
        ("perplexity", "m", "--context", "0"),
        ("perplexity", "m", "--stride", "-1"),
    ],
    ids=lambda arguments: " ".join(arguments[:3]),
)
def test_numbers_that_make_no_sense_are_one_line(arguments: tuple[str, ...]) -> None:
    done = tinyllm(*arguments)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, b"", 1), done.stderr


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("--sys", "--system"),
        ("--max-token", "--max-tokens"),
        ("--maxtokens", "--max-tokens"),
        ("--temprature", "--temperature"),
        ("--tmp", "--temp"),
        ("--topp", "--top-p"),
        ("--no-stat", "--no-stats"),
        ("--model-name", "--model"),
        ("--num-predict", None),
        ("--verbose", None),
    ],
)
def test_an_option_that_does_not_exist_gets_the_nearest_if_one_is_near(written: str, meant: str | None) -> None:
    done = tinyllm("generate", written, "1", "x")
    hint = f" (did you mean {meant}?)" if meant else ""
    told, _, command = done.stderr.decode().rpartition(" (")
    assert told == f"tinyllm: No such option: {written}{hint}"
    assert command.endswith("tinyllm generate --help says what there is)\n")
    assert done.returncode == 2
