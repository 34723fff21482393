"""`tinyllm list` through real processes: what is here, where it looks, plain when piped, readable on a terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny
from hub_server import Hub
from machine import Machine

LONG = "mlx-community/Some-Model-With-A-Long-Name-3.1-70B-Instruct-4bit"


@pytest.fixture(scope="module")
def furnished(hub: Hub, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A machine with a good model, a broken one, and one of a family that tinyllm lacks; nothing here changes it."""
    machine = Machine(tmp_path_factory.mktemp("furnished"), hub)
    for name in (LONG, "org/broken"):
        machine.hub.add(name, tiny_checkpoint)
        assert machine.run("pull", name).returncode == 0
    [weights] = machine.cache.glob("models--org--broken/snapshots/*/model.safetensors")
    weights.resolve().unlink()
    snapshot = machine.cache / "models--org--mamba" / "snapshots" / ("0" * 40)
    (machine.cache / "models--org--mamba" / "refs").mkdir(parents=True)
    (machine.cache / "models--org--mamba" / "refs" / "main").write_text("0" * 40)
    tiny.write_checkpoint(snapshot)
    tiny.write_json(snapshot / "config.json", {"model_type": "mamba"})
    machine.run("use", LONG)
    return machine


def test_a_list_is_plain_marked_and_broken_models_say_why(furnished: Machine) -> None:
    done = furnished.run("list")
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode()
    assert "\x1b" not in text and all(line == line.rstrip() for line in text.splitlines())
    assert re.search(rf"^\* +{LONG} +[\d.]+ kB +f32 +llama +yes$", text, re.MULTILINE)
    broken = "no: model.safetensors links to nothing: tinyllm pull org/broken"
    assert re.search(rf"^ +org/broken +[\d.]+ kB +- +- +{broken}$", text, re.MULTILINE)
    assert re.search(r"^ +org/mamba +[\d.]+ kB +- +- +no: config\.json: model_type 'mamba'", text, re.MULTILINE)
    assert re.search(r"^models folder: /", text, re.MULTILINE)
    assert text.endswith(f"hub cache:     {furnished.cache}\n")


def test_a_list_fits_a_terminal_of_80_columns(furnished: Machine) -> None:
    shown = furnished.show("list")
    assert "\x1b[" in shown
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    table = lines[: next(i for i, line in enumerate(lines) if line.startswith("models folder:"))]
    assert max(map(len, table)) <= 80
    joined = "".join("".join(line.split()) for line in table)
    assert "org/broken" in joined and "yes" in joined


def test_json_has_everything(furnished: Machine) -> None:
    done = furnished.run("list", "--json")
    report = json.loads(done.stdout)
    models = {model["name"]: model for model in report["models"]}
    good, broken = models[LONG], models["org/broken"]
    assert good["runs"] and good["in_use"] and good["problem"] is None
    assert (good["family"], good["quantization"]) == ("llama", "f32")
    assert Path(good["path"]).is_dir() and good["disk_bytes"] > good["memory_bytes"] > 0
    assert not broken["runs"] and not broken["in_use"] and broken["place"] == "hub cache"
    assert broken["problem"] == "model.safetensors links to nothing: tinyllm pull org/broken"
    assert [folder["title"] for folder in report["folders"]] == ["models folder", "hub cache"]


def test_an_empty_machine_still_names_every_folder_and_broken_settings_are_told(machine: Machine) -> None:
    done = machine.run("list")
    assert (done.returncode, done.stderr) == (0, b"")
    assert f"hub cache:     {machine.cache} (not there yet)\n" in done.stdout.decode()
    assert machine.run("use", "org/tiny").returncode == 0
    [settings] = machine.home.rglob("settings.json")
    settings.write_text("{")
    broken = machine.run("list")
    assert broken.returncode == 0 and broken.stdout == done.stdout.replace(b"*", b" ")
    assert f"tinyllm: {settings}: cannot be read" in broken.stderr.decode()
