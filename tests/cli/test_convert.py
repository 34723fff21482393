"""`tinyllm convert` through real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from gguf_files import convert_tiny
from machine import Machine
from process import tinyllm
from terminal import tinyllm_on_a_terminal

SMALL_MEMORY = """
import psutil

class Memory:
    total = available = 1000

psutil.virtual_memory = Memory
"""
SIZES = {"hidden_size": 128, "intermediate_size": 192, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("convert") / "llama"
    return tiny.write_checkpoint(folder, config_overrides=SIZES, dtype="BF16", chat_template=tiny.CHAT_TEMPLATE)


def run(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[bytes]:
    done = tinyllm("convert", *arguments)
    assert done.returncode == code, done.stderr
    return done


def quantization(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "config.json").read_text())["quantization"]
    return found


def test_a_model_is_packed_and_answers(source: Path, tmp_path: Path) -> None:
    done = run(source, tmp_path / "q4", "--quantize", "4")
    assert done.stdout.decode() == f"{tmp_path / 'q4'}\n"
    assert "bits a number, 15 matrices packed" in done.stderr.decode()
    assert quantization(tmp_path / "q4") == {"group_size": 64, "bits": 4, "mode": "affine"}
    assert tinyllm("generate", "-m", tmp_path / "q4", "-n", "3", "the one").returncode == 0


def test_what_stays_dense_is_said(source: Path, tmp_path: Path) -> None:
    done = run(source, tmp_path / "q", "--quantize", "8", "--group-size", "128")
    assert (
        "tinyllm: stays dense: model.layers.{0-1}.mlp.down_proj (groups of 128 do not divide its 192 columns)\n"
        in done.stderr.decode()
    )


def test_modes_and_recipes_are_written(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "1", "--mode", "mxfp4")
    assert quantization(tmp_path / "1") == {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    run(source, tmp_path / "2", "--recipe", "lm_head=8,layers.*.mlp.down=false,*=4")
    assert quantization(tmp_path / "2")["model.embed_tokens"] == {"group_size": 64, "bits": 8, "mode": "affine"}
    run(source, tmp_path / "3", "--recipe", "mixed", "--quantize", "3")
    found = quantization(tmp_path / "3")
    assert (found["bits"], found["model.layers.0.mlp.down_proj"]["bits"]) == (3, 4)
    assert found["model.layers.0.self_attn.v_proj"] == {"group_size": 64, "bits": 5, "mode": "affine"}


def test_packed_models_are_unpacked(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "q", "--quantize", "4")
    run(tmp_path / "q", tmp_path / "d", "--dequantize", "--dtype", "float32")
    values = json.loads((tmp_path / "d" / "config.json").read_text())
    assert not {"quantization", "quantization_config"} & values.keys()
    assert values["torch_dtype"] == "float32"


def test_what_was_packed_already_is_said(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "q8", "--quantize", "8")
    anew = run(tmp_path / "q8", tmp_path / "q4", "--quantize", "4").stderr.decode()
    assert "packed already: 15 are packed anew (they were 8 bits), which adds to what that lost\n" in anew
    kept = run(tmp_path / "q8", tmp_path / "copy").stderr.decode()
    assert "packed already: 15 stay as they are\n" in kept
    assert "packed already" not in run(source, tmp_path / "again", "--quantize", "8").stderr.decode()


def test_a_repository_is_converted_whatever_its_size(source: Path, machine: Machine) -> None:
    """Also one that the memory does not hold: what is made of it may fit."""
    machine.hub.add("org/tiny", source)
    small = machine.home / "small"
    small.mkdir()
    (small / "sitecustomize.py").write_text(SMALL_MEMORY)
    path = os.pathsep.join(filter(None, [str(small), os.environ.get("PYTHONPATH")]))
    assert machine.run("pull", "org/tiny", PYTHONPATH=path).returncode == 1
    done = machine.run("convert", "org/tiny", machine.home / "q4", "--quantize", "4", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == f"{machine.home / 'q4'}\n"
    assert quantization(machine.home / "q4")["bits"] == 4
    assert not any(path.is_symlink() for path in (machine.home / "q4").iterdir())
    again = machine.run_without_network("convert", "org/tiny", machine.home / "q8", "--quantize", "8", "--offline")
    assert again.returncode == 0, again.stderr


def test_a_gguf_file_of_a_repository_is_converted(machine: Machine, tmp_path: Path) -> None:
    scripted = tiny.write_scripted_checkpoint(tmp_path / "0", " one two", chat_template=tiny.CHAT_TEMPLATE)
    (folder := tmp_path / "repository").mkdir()
    for variant in ("F32", "Q8_0"):
        convert_tiny(scripted, folder / f"Tiny-{variant}.gguf")
    machine.hub.add("org/tiny-GGUF", folder)
    done = machine.run("convert", "org/tiny-GGUF:F32", machine.home / "tiny")
    assert (done.returncode, done.stdout) == (0, f"{machine.home / 'tiny'}\n".encode()), done.stderr
    assert machine.hub.fetched() == {"Tiny-F32.gguf"}
    answered = machine.run("generate", "count", "-m", machine.home / "tiny")
    assert answered.stdout == b" one two\n"


def test_a_disk_that_fills_up_is_told_and_nothing_stays(source: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk."""
    script = (
        "import resource, runpy, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "runpy.run_module('tinyllm', run_name='__main__')"
    )
    command = [sys.executable, "-c", script, "convert", str(source), str(tmp_path / "copy")]
    done = subprocess.run(command, capture_output=True, check=False)
    told = done.stderr.decode()
    assert done.returncode == 1 and told.count("\n") == 1
    assert "model.safetensors: " in told and "internal error" not in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--quantize", "7"], "--quantize: affine has 2, 3, 4, 5, 6, 8, and not 7"),
        (["--quantize", "4", "--group-size", "48"], "--group-size: affine has 32, 64, 128, and not 48"),
        (["--group-size", "32"], "--group-size needs --quantize, --mode or --recipe"),
        (["--mode", "q4_k"], "--mode must be one of affine, mxfp4, mxfp8, nvfp4, not 'q4_k'"),
        (["--dequantize", "--quantize", "4"], "--dequantize unpacks"),
        (["--recipe", "lm_heads=8"], "--recipe: no matrix of this model is called lm_heads"),
        (["--dtype", "int8"], "--dtype must be one of"),
    ],
)
def test_what_cannot_be_meant_is_one_line(arguments: list[str], told: str, source: Path, tmp_path: Path) -> None:
    stderr = run(source, tmp_path / "q", *arguments, code=2).stderr.decode()
    assert told in stderr and stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(source: Path, tmp_path: Path) -> None:
    assert "never overwritten" in run(source, tmp_path, code=2).stderr.decode()
    assert "there is no folder" in run(source, tmp_path / "a" / "b", code=2).stderr.decode()


def test_a_source_that_is_not_there_is_told(tmp_path: Path) -> None:
    done = run(tmp_path / "nowhere", tmp_path / "q", "--quantize", "4", "--offline", code=1)
    assert b"there is no such folder" in done.stderr and done.stderr.count(b"\n") == 1


def test_a_terminal_sees_a_bar_that_goes(source: Path, tmp_path: Path) -> None:
    shown = tinyllm_on_a_terminal("convert", source, tmp_path / "q", "--quantize", "4")
    assert "matrices packed" in shown


# Says when the first tensor is written, and goes no further: it waits for a word that never comes.
STAYS_IN_THE_MIDDLE = """
import os, runpy
from tinyllm.convert.shards import ShardWriter

def write_and_wait(writer, name, data, write=ShardWriter.write):
    write(writer, name, data)
    os.write(1, b"written\\n")
    os.read(0, 1)

ShardWriter.write = write_and_wait
runpy.run_module("tinyllm", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_one_that_is_stopped_is_redone(kind: signal.Signals, source: Path, tmp_path: Path) -> None:
    """Ctrl-C leaves nothing; what a kill leaves is not the folder, and goes with the next one."""
    target, begun = tmp_path / "1", tmp_path / ".1.converting"
    command = [sys.executable, "-c", STAYS_IN_THE_MIDDLE, "convert", str(source), str(target), "--quantize", "4"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"written\n", process.stderr.read()
        assert (begun / "model.safetensors").exists()
        process.send_signal(kind)
        assert process.stderr.read() == b""
    assert process.returncode == (130 if kind == signal.SIGINT else -kind)
    assert not target.exists() and begun.exists() == (kind == signal.SIGKILL)
    run(source, target, "--quantize", "4")
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
