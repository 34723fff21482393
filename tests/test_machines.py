"""Every command answers in an installation without the development tools, with an empty home, on every x86-64 CPU.

CPUs that this machine does not have are emulated by qemu (Debian's qemu-user-static), which stops a program at the
first instruction that the chosen CPU lacks, as the CPU itself would.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
import tiny
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct-from-Q4_1"
EMULATOR = shutil.which("qemu-x86_64-static")
CPUS = {"this machine's": [], "AVX2": ["-cpu", "Haswell"], "no AVX": ["-cpu", "Nehalem"]}

RUN_ALL = """
import io, sys
from contextlib import redirect_stdout
from tinyllm import doctor
from tinyllm.cli.app import main

def run(*words):
    sys.argv, out = ["tinyllm", *words], io.StringIO()
    try:
        with redirect_stdout(out):
            main()
    except SystemExit as end:
        assert not end.code, (words, end.code, out.getvalue())
    return out.getvalue()

real, tiny, text, new, emulated = sys.argv[1:]
if real:
    answer = run("generate", "-m", real, "--max-tokens", "8", "What is the capital of France?")
    assert answer == "The capital of France is Paris.\\n", answer
assert run("generate", "-m", tiny, "--max-tokens", "4", "--seed", "1", "the one")
sys.stdin = io.TextIOWrapper(io.BytesIO(b"hello\\n"))
assert run("chat", "-m", tiny, "--max-tokens", "4")
assert "tg4" in run("bench", "-m", tiny, "-p", "8", "-n", "4", "-r", "1")
assert "llama" in run("inspect", tiny)
assert run("convert", tiny, new, "--quantize", "4", "--group-size", "32")
assert run("perplexity", new, text, "--context", "32")
if emulated:  # all of it would take minutes there
    doctor.LONG, doctor.GOLDEN = (), doctor.GOLDEN[:1]
assert run("doctor")
run("list")
print("every command answered")
"""


def needed(requirement: Requirement) -> dict[str, Distribution]:
    """Return the distributions that a requirement brings on this machine, by name."""
    found = distribution(requirement.name)
    brought = {requirement.name: found}
    for extra in ("", *requirement.extras):
        for inner in map(Requirement, found.requires or ()):
            if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                brought |= needed(inner)
    return brought


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages that holds links to what a user's installation has, and nothing else."""
    folder = tmp_path_factory.mktemp("packages")
    for name, found in needed(Requirement("tinyllm-mlx[cpu]")).items():
        for file in found.files or ():
            source, target = Path(str(found.locate_file(file))), folder / file
            if name != "tinyllm-mlx" and ".." not in file.parts and source.exists() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(source)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with nothing in it, which the CPUs share, as they may on a network's disk."""
    return tmp_path_factory.mktemp("home")


@pytest.mark.skipif(sys.platform != "linux", reason="qemu's user mode emulates Linux")
@pytest.mark.parametrize("cpu", CPUS)
def test_every_command_runs(cpu: str, packages: Path, home: Path, tmp_path: Path) -> None:
    emulated: list[str] = []
    if CPUS[cpu]:
        if EMULATOR is None or platform.machine() != "x86_64":
            pytest.skip("needs qemu-x86_64-static (Debian's qemu-user-static) on an x86-64 machine")
        emulated = [EMULATOR, *CPUS[cpu]]
    model = tiny.write_checkpoint(tmp_path / "tiny", chat_template=tiny.CHAT_TEMPLATE)
    text = tmp_path / "text.txt"
    text.write_text("the one two three " * 20, encoding="utf-8")
    ran = subprocess.run(
        [
            *emulated,
            sys.executable,
            "-S",
            "-c",
            RUN_ALL,
            str(MODEL) if MODEL.exists() else "",
            str(model),
            str(text),
            str(tmp_path / "new"),
            "emulated" if emulated else "",
        ],
        env={"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": f"{packages}{os.pathsep}{ROOT}"},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (ran.returncode, ran.stdout.splitlines()[-1:]) == (0, ["every command answered"]), ran.stdout + ran.stderr
