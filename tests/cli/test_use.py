"""`tinyllm use` through real processes: the choice lasts, and says where it comes from."""

from __future__ import annotations

import shutil
from pathlib import Path

import tiny
from machine import Machine


def test_a_choice_lasts_until_it_is_cleared(machine: Machine) -> None:
    assert machine.run("use").stdout == b"default (no other was chosen)\n"
    chosen = machine.run("use", "org/tiny")
    assert (chosen.returncode, chosen.stdout) == (0, b"org/tiny (tinyllm use)\n")
    assert b"org/tiny is not on this machine: its first use downloads it" in chosen.stderr
    assert machine.run("use").stdout == b"org/tiny (tinyllm use)\n"
    assert machine.run("use", "--clear").stdout == b"default (no other was chosen)\n"
    assert machine.run("use", "default").stdout == b"default (tinyllm use)\n"
    assert machine.hub.connections == 0


def test_a_folder_is_kept_by_its_whole_path_and_is_what_generate_loads(machine: Machine, tmp_path: Path) -> None:
    folder = tiny.write_scripted_checkpoint(tmp_path / "mine", " one two three")
    chosen = machine.run("use", folder)
    assert (chosen.stdout.decode(), chosen.stderr) == (f"{folder} (tinyllm use)\n", b"")
    assert machine.run("generate", "x").stdout == b" one two three\n"


def test_the_environment_goes_before_the_choice_and_is_named(machine: Machine) -> None:
    chosen = machine.run("use", "org/tiny", TINYLLM_MODEL="org/other")
    assert chosen.stdout == b"org/other ($TINYLLM_MODEL)\n"
    assert b"kept for later: $TINYLLM_MODEL is set" in chosen.stderr


def test_what_cannot_be_meant_is_refused_and_nothing_is_kept(machine: Machine) -> None:
    refused = machine.run("use", "./modl")
    assert (refused.returncode, refused.stdout) == (1, b"")
    assert b"tinyllm: ./modl: there is no such folder here, and it is not the name of a repository" in refused.stderr
    (machine.home / "empty").mkdir()
    assert b"empty: is a folder without a model: it has no config.json\n" in machine.run("use", "empty").stderr
    assert machine.run("use", "org/tiny", "--clear").returncode == 2
    assert machine.run("use").stdout == b"default (no other was chosen)\n"


def test_a_model_in_use_that_is_gone_says_who_chose_it(machine: Machine, tmp_path: Path) -> None:
    folder = tiny.write_scripted_checkpoint(tmp_path / "mine", "x")
    assert machine.run("use", folder).returncode == 0
    shutil.rmtree(folder)
    done = machine.run("generate", "x")
    assert done.returncode == 1
    assert done.stderr.decode().endswith("on this machine (the model is from tinyllm use)\n")


def test_a_misspelt_name_gets_the_nearest_of_this_machine(machine: Machine, tiny_checkpoint: Path) -> None:
    machine.hub.add("org/tiny", tiny_checkpoint)
    assert machine.run("pull", "org/tiny").returncode == 0
    assert machine.run("use", "tinny").stderr.decode().endswith("on this machine (did you mean org/tiny?)\n")
