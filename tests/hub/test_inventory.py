"""What is on this machine: every model is listed, and a broken one with its reason."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import tiny
from gguf_files import convert_golden, split_gguf

from tinyllm.hub import inventory
from tinyllm.hub.inventory import Entry


def listed() -> dict[str, Entry]:
    return {entry.name: entry for entry in inventory.inventory()}


def test_what_is_on_this_machine_is_listed_with_what_it_is_or_why_it_does_not_run(home: Path) -> None:
    models = home / "models"
    good = tiny.write_checkpoint(models / "good", dtype="BF16")
    tiny.write_json(tiny.write_checkpoint(models / "foreign") / "config.json", {"model_type": "mamba"})
    (tiny.write_checkpoint(models / "no-tokenizer") / "tokenizer.json").unlink()
    (tiny.write_checkpoint(models / "torn") / "model.safetensors").write_bytes(b"torn")
    (models / "empty").mkdir()
    (models / ".hidden").mkdir()
    (models / "README.md").touch()
    entries = listed()
    assert set(entries) == {"good", "foreign", "no-tokenizer", "torn", "empty"}
    assert entries["good"].summary is not None and entries["good"].problem is None
    assert (entries["good"].summary.family, entries["good"].summary.quantization) == ("llama", "bf16")
    assert entries["good"].disk_bytes == sum(path.stat().st_size for path in good.iterdir())
    problems = {name: entry.problem for name, entry in entries.items() if entry.summary is None}
    assert problems["foreign"].startswith("config.json: model_type 'mamba'")
    assert problems["no-tokenizer"].startswith("it has no tokenizer.json")
    assert problems["torn"].startswith("model.safetensors: its header")
    assert problems["empty"] == "config.json: there is no such file"


def test_a_model_in_several_gguf_files_is_one_of_the_list(home: Path) -> None:
    (models := home / "models").mkdir(exist_ok=True)
    parts = split_gguf(convert_golden("llama", models / "model.gguf"), 10)
    [(name, entry)] = listed().items()
    assert name == parts[0].name and entry.summary is not None
    assert entry.disk_bytes == sum(part.stat().st_size for part in parts)
    parts[0].unlink()
    [(name, entry)] = listed().items()
    assert name == parts[1].name and entry.summary is None
    assert entry.problem == f"{parts[0].name}, one of the 3 parts of the model, is not beside it: download it"


def cached(home: Path, name: str, revision: str = "main") -> Path:
    """Write a checkpoint as the hub's cache has it, and return the snapshot's folder."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    source = tiny.write_checkpoint(home / "source")
    snapshot = repository / "snapshots" / ("0" * 40)
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    for path in source.iterdir():
        path.rename(repository / "blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    (repository / "refs" / revision).write_text("0" * 40)
    return snapshot


def test_fault_08_a_cache_is_listed_with_what_is_not_whole_in_it(home: Path) -> None:
    cached(home, "org/good")
    cached(home, "org/tagged", "v1")
    dangling = cached(home, "org/dangling")
    (dangling / "model.safetensors").resolve().unlink()
    begun = home / "hub" / "models--org--begun" / "blobs"
    begun.mkdir(parents=True)
    (begun / "abc.incomplete").write_bytes(b"x" * 1000)
    (home / "hub" / "datasets--org--data" / "snapshots").mkdir(parents=True)
    entries = listed()
    assert set(entries) == {"org/good", "org/tagged@v1", "org/dangling", "org/begun"}
    assert entries["org/good"].summary is not None and entries["org/tagged@v1"].summary is not None
    assert entries["org/dangling"].problem == "model.safetensors links to nothing: tinyllm pull org/dangling"
    assert entries["org/begun"].problem == "the download did not end: tinyllm pull org/begun"
    assert entries["org/begun"].disk_bytes == 1000


def test_no_folder_at_all_is_an_empty_list_of_two_places(home: Path) -> None:
    assert inventory.inventory() == []
    assert [place.folder for place in inventory.places()] == [home / "models", home / "hub"]


def test_a_conversion_that_runs_is_told_from_one_that_was_killed(home: Path) -> None:
    folder = home / "models" / ".new.converting"
    folder.mkdir(parents=True)
    assert "did not end" in (listed()[".new.converting"].problem or "")
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert listed()[".new.converting"].problem == "a conversion is writing it"
    os.close(handle)
