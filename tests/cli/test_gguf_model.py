"""GGUF files through real processes: generate, inspect, bench, pull and use; and what is refused, in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
from gguf_files import convert_tiny, split_gguf
from machine import Machine
from process import tinyllm
from typer.testing import CliRunner

from tinyllm.checkpoint import gguf_parts
from tinyllm.checkpoint.gguf_header import GgufHeader, read_gguf_header
from tinyllm.cli.app import app

ANSWER = " one two three"
REPO = "org/tiny-GGUF"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    scripted = tiny.write_scripted_checkpoint(folder / "scripted", ANSWER, chat_template=tiny.CHAT_TEMPLATE)
    return convert_tiny(scripted, folder / "Tiny-1M-F32.gguf")


def test_a_file_answers(file: Path) -> None:
    done = tinyllm("generate", "count", "-m", file)
    assert (done.stdout, done.stderr, done.returncode) == (f"{ANSWER}\n".encode(), b"", 0)


def test_a_file_is_inspected(file: Path) -> None:
    done = tinyllm("inspect", file, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["model"] == "Tiny-1M-F32.gguf"


def test_a_file_is_measured(file: Path) -> None:
    done = tinyllm("bench", "-m", file, "-p", "8", "-n", "4", "-r", "1", "--no-warmup", "-o", "json")
    assert done.returncode == 0, done.stderr
    assert b"Tiny-1M-F32.gguf" in done.stdout


def test_a_file_is_compared_with_itself(file: Path) -> None:
    done = tinyllm("perplexity", file, "--limit", "20", "--against", file, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["against"]["divergence"]["greatest"] == 0


@pytest.mark.parametrize(
    ("arguments", "times"),
    [
        (["generate", "count", "-m", "{file}"], 1),
        (["perplexity", "{file}", "--limit", "20"], 1),
        (["perplexity", "{file}", "--limit", "20", "--against", "{file}"], 2),
        (["bench", "-m", "{file}", "-p", "8", "-n", "0", "-r", "1", "--features", "eager,scattered"], 1),
        (["inspect", "{file}"], 1),
        (["convert", "{file}", "{target}"], 1),
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, list) else None,
)
def test_the_header_of_each_model_is_read_once(
    arguments: list[str], times: int, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def counted(path: Path) -> GgufHeader:
        read.append(path)
        return read_gguf_header(path)

    monkeypatch.setattr(gguf_parts, "read_gguf_header", counted)
    given = [argument.format(file=file, target=tmp_path / "folder") for argument in arguments]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.stderr
    assert read == [file] * times


def test_what_is_no_such_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (broken := tmp_path / "broken.gguf").write_bytes(b"GGUF\3\0\0\0" + bytes(range(200)))
    for arguments in (["generate", "x", "-m", broken], ["inspect", broken]):
        done = tinyllm(*arguments)
        assert (done.returncode, done.stdout) == (1, b"")
        assert done.stderr.decode().startswith(f"tinyllm: {broken}: ")
        assert done.stderr.count(b"\n") == 1


def test_one_file_of_a_repository_is_pulled_by_its_quantisation(machine: Machine, file: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("Tiny-1M-F32.gguf", "Tiny-1M-Q4_K_M.gguf", "Tiny-1M-Q4_K_S.gguf", "mmproj-Q4_K_M.gguf"):
        (source / name).write_bytes(file.read_bytes())
    machine.hub.add(REPO, source)
    done = machine.run("generate", "x", "-m", f"{REPO}:q4_k_m")
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n".encode()), done.stderr
    snapshot = next((machine.cache / "models--org--tiny-GGUF" / "snapshots").iterdir())
    assert [path.name for path in snapshot.iterdir()] == ["Tiny-1M-Q4_K_M.gguf"]
    again = machine.run_without_network("generate", "x", "-m", f"{REPO}:Q4_K_M")
    assert (again.returncode, again.stdout, again.stderr) == (0, f"{ANSWER}\n".encode(), b"")
    listed = machine.run("list", "--json")
    cached = [entry for entry in json.loads(listed.stdout)["models"] if entry["place"] == "hub cache"]
    assert [(entry["name"], entry["runs"]) for entry in cached] == [(f"{REPO}:Q4_K_M", True)]
    looked_at = machine.run("inspect", f"{REPO}:F32", "--json")
    assert json.loads(looked_at.stdout)["model"] == f"{REPO}:F32"
    used = machine.run("use", f"{REPO}:Q4_K_M")
    assert used.returncode == 0, used.stderr


def test_a_model_in_several_files_is_pulled_listed_and_inspected_as_one(
    machine: Machine, file: Path, tmp_path: Path
) -> None:
    (source := tmp_path / "source").mkdir()
    (source / "Tiny-1M-Q8_0.gguf").write_bytes(file.read_bytes())
    (source / "Tiny-1M-F32.gguf").write_bytes(file.read_bytes())
    parts = split_gguf(source / "Tiny-1M-F32.gguf", 8)
    size = sum(part.stat().st_size for part in parts)
    machine.hub.add(REPO, source)
    looked_at = json.loads(machine.run("inspect", f"{REPO}:F32", "--json").stdout)
    assert (looked_at["model"], looked_at["weights"]["files"]) == (f"{REPO}:F32", len(parts))
    done = machine.run("generate", "x", "-m", f"{REPO}:F32")
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n".encode()), done.stderr
    snapshot = next((machine.cache / "models--org--tiny-GGUF" / "snapshots").iterdir())
    assert sorted(path.name for path in snapshot.iterdir()) == [part.name for part in parts]
    [entry] = [e for e in json.loads(machine.run("list", "--json").stdout)["models"] if e["place"] == "hub cache"]
    assert (entry["name"], entry["runs"], entry["disk_bytes"]) == (f"{REPO}:F32", True, size)
    (snapshot / parts[1].name).unlink()
    offline = machine.run("generate", "x", "-m", f"{REPO}:F32", "--offline")
    assert offline.returncode == 1 and f"not whole (F32 is in {len(parts)} files, without {parts[1].name})" in (
        offline.stderr.decode()
    )
    again = machine.run("generate", "x", "-m", f"{REPO}:F32")
    assert (again.returncode, again.stdout) == (0, f"{ANSWER}\n".encode()), again.stderr
    alone = machine.run("generate", "x", "-m", snapshot / parts[1].name)
    assert alone.stdout == done.stdout, alone.stderr
    chosen = machine.run("use", snapshot / parts[-1].name)
    assert chosen.returncode == 0, chosen.stderr
    used = machine.run("generate", "x", "--offline")
    assert used.stdout == done.stdout, used.stderr


def test_what_a_repository_has_not_is_named(machine: Machine, file: Path, tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    for name in ("Tiny-Q8_0.gguf", "Tiny-Q2_K-00001-of-00003.gguf", "Tiny-Q2_K-00003-of-00003.gguf"):
        (source / name).write_bytes(file.read_bytes())
    machine.hub.add(REPO, source)
    for variant, told in (("Q5_K", "there are"), ("Q2_K", "in 3 files, without Tiny-Q2_K-00002-of-00003.gguf")):
        done = machine.run("pull", f"{REPO}:{variant}")
        assert done.returncode == 1
        assert done.stderr.startswith(b"tinyllm: org/tiny-GGUF: ") and done.stderr.count(b"\n") == 1
        assert told in done.stderr.decode()
    plain = machine.run("pull", REPO)
    assert plain.returncode == 1 and b"add :Q2_K" in plain.stderr
