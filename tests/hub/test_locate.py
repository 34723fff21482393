"""Which folder a name means, where it is looked for, and what is said where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from huggingface_hub import constants

from tinyllm import hardware
from tinyllm.errors import HubError, MissingFileError, ModelNotFoundError, OfflineError
from tinyllm.hub import locate
from tinyllm.hub.embedded import SMOLLM2_135M
from tinyllm.hub.locate import EMBEDDED, find_model, model_name

pytestmark = pytest.mark.usefixtures("home")


def test_a_folder_is_found_by_its_path_and_by_its_name_in_the_models_folder(home: Path) -> None:
    tiny.write_checkpoint(home / "models" / "mine")
    assert find_model("models/mine") == find_model("./models/mine") == Path("models/mine")
    assert find_model("mine") == home / "models" / "mine"


def test_a_folder_here_goes_before_a_repository_of_the_name(home: Path) -> None:
    tiny.write_checkpoint(home / "org" / "tiny")
    assert find_model("org/tiny") == Path("org/tiny")


def test_a_folder_is_called_by_its_repository_or_by_its_own_name(home: Path) -> None:
    assert model_name(Path("hub/models--org--a--b/snapshots/0123")) == "org/a--b"
    assert model_name(Path("models--org--a/0123")) == "0123"
    assert model_name(Path()) == home.name


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("./modl", "./modl: there is no such folder here, and it is not the name of a repository"),
        ("modl", "modl: there is no such folder here, and it is not the name of a repository"),
        ("/a/b", "/a/b: there is no such folder here, and it is not the name of a repository"),
        ("a/b/c", "a/b/c: there is no such folder here, and it is not the name of a repository"),
        ("a/../b", "a/../b: there is no such folder here, and it is not the name of a repository"),
        ("a--b/c", "a--b/c: there is no such folder here, and it is not the name of a repository"),
        ("file", "file: is a file, not a folder with a model"),
    ],
)
def test_fault_45_a_name_that_means_nothing_says_both_readings(home: Path, name: str, told: str) -> None:
    (home / "file").touch()
    with pytest.raises(ModelNotFoundError) as failure:
        find_model(name)
    assert str(failure.value).startswith(told) and "\n" not in str(failure.value)


def test_fault_45_offline_says_that_it_did_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    told = r"^modl/x: there is no such folder here; .*not been downloaded, and {} forbids .* tinyllm pull modl/x$"
    with pytest.raises(OfflineError, match=told.format("--offline")):
        find_model("modl/x", offline=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OfflineError, match=told.format("HF_HUB_OFFLINE")):
        find_model("modl/x")


def test_a_model_that_somebody_else_chose_is_named_with_who_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYLLM_MODEL", "nowhere")
    with pytest.raises(ModelNotFoundError, match=r"^nowhere: .*\(the model is from \$TINYLLM_MODEL\)$"):
        find_model()


def test_fault_08_a_folder_with_a_link_to_nothing_is_named(home: Path) -> None:
    folder = tiny.write_checkpoint(home / "mine")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("gone")
    with pytest.raises(MissingFileError, match=r"mine: model.safetensors links to nothing; download again"):
        find_model("mine")


def test_a_folder_here_is_found_without_the_hub_library_and_without_mlx(tiny_checkpoint: Path) -> None:
    script = (
        "import sys; from tinyllm.hub.locate import find_model; find_model(sys.argv[1])\n"
        "print(sorted({'huggingface_hub', 'mlx', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tiny_checkpoint)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_embedded_model_when_it_is_not_fetched_says_how() -> None:
    with pytest.raises(ModelNotFoundError, match=r"not been fetched: run tinyllm pull default"):
        find_model()


def test_the_embedded_model_comes_with_a_line_about_a_better_one_unless_it_was_asked_for(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SMOLLM2_135M.folder == EMBEDDED
    (home / "models" / EMBEDDED).mkdir(parents=True)
    monkeypatch.setattr(hardware, "total_memory", lambda: 16 * 2**30)
    monkeypatch.setattr(hardware, "has_gpu_backend", lambda: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    lines: list[str] = []
    assert find_model(report=lines.append) == home / "models" / EMBEDDED
    assert lines == []  # nobody watches
    monkeypatch.setattr(locate.sys.stderr, "isatty", lambda: True, raising=False)
    for name in (None, "default", None):
        assert find_model(name, report=lines.append) == home / "models" / EMBEDDED
    [line] = lines
    assert "135M" in line and line.endswith("tinyllm pull --use mlx-community/Qwen3-8B-4bit")


def test_fault_45_both_readings_are_said_when_the_hub_cannot_be_reached(home: Path) -> None:
    with pytest.raises(HubError, match=r"modl/x: there is no such folder here, and the hub \(.*\) cannot be reached"):
        find_model("modl/x")


def test_a_folder_without_a_model_is_told_as_one(home: Path) -> None:
    (home / "docs").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"docs: is a folder without a model"):
        find_model("docs")


def test_a_misspelt_name_comes_with_the_nearest_of_this_machine(home: Path) -> None:
    (home / "models" / "Qwen3-4B-4bit").mkdir(parents=True)
    for name in ("qwen3", "Qwen3-4B-4bt"):
        with pytest.raises(ModelNotFoundError, match=r"did you mean Qwen3-4B-4bit\?"):
            find_model(name)
    with pytest.raises(ModelNotFoundError, match=r"on this machine$"):
        find_model("zzz")
    with pytest.raises(OfflineError, match=r"\(did you mean Qwen3-4B-4bit\?\)$"):
        find_model("Qwen/Qwen3-4B-4bt", offline=True)
    with pytest.raises(OfflineError, match=r"tinyllm pull meta/zzz$"):
        find_model("meta/zzz", offline=True)
