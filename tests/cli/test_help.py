"""The command line's outside: what --help says, and what it does not load."""

from __future__ import annotations

import subprocess
import sys

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
    done = tinyllm()
    assert b"generate" in done.stdout + done.stderr
