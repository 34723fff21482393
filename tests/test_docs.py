"""What the documentation says, held against the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tinyllm.config.families.table import FAMILIES

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
CLI_PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


def test_pages_that_are_made_are_what_they_are_made_of() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "docs", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_are_there(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "cli.md"], ids=lambda page: page.name)
def test_commands_that_pages_show_have_the_options_that_they_are_given(page: Path) -> None:
    for line in re.findall(r"^.*\btinyllm [a-z]+ .*$", page.read_text(encoding="utf-8"), re.MULTILINE):
        command = re.search(r"\btinyllm ([a-z]+) ", line)
        if command is None or f"## `tinyllm {command[1]}`" not in CLI_PAGE:
            continue
        section = CLI_PAGE.split(f"## `tinyllm {command[1]}`")[1].split("\n## ")[0]
        for option in re.findall(r"(?<=\s)--?[a-z][a-z-]*", line.split(f"tinyllm {command[1]}")[1]):
            assert f"`{option}`" in section, f"{line.strip()}: {option}"


def test_the_files_of_the_map_exist() -> None:
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[a-z_]+/)?[a-z_]+\.py)`", page)) | set(re.findall(r"`([a-z]+/)`", page))
    package = ROOT / "tinyllm"
    absent = [name for name in named if not (package / name).exists() and not list(package.rglob(name.strip("/")))]
    assert not [name for name in absent if not (ROOT / name).exists()]


def test_what_contributing_shows_of_the_code_is_in_it() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    shown = [" ".join(block.split()) for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL)]
    files = [*(ROOT / "tinyllm" / "config" / "families").glob("*.py"), *(ROOT / "scripts").glob("golden_*.py")]
    code = [" ".join(file.read_text(encoding="utf-8").split()) for file in files]
    assert shown and all(any(block in text for text in code) for block in shown)


def test_every_golden_checkpoint_is_measured_and_agrees() -> None:
    golden = ROOT / "tests" / "golden"
    measured = json.loads((golden / "measured.json").read_text(encoding="utf-8"))
    folders = {file.parent.name for file in golden.glob("*/expected.safetensors")}
    assert measured.keys() == folders, "run scripts/measure_golden.py"
    assert max(measured.values()) <= 1e-4


def test_the_version_is_one() -> None:
    import tinyllm

    assert f'version = "{tinyllm.__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_readme_counts_what_there_is() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    measured = json.loads((ROOT / "tests" / "golden" / "measured.json").read_text(encoding="utf-8"))
    counts = re.search(r"(\d+) families, .*?(\d+) small checkpoints,.*?\(the worst: ([\d.e-]+)\)", text, re.DOTALL)
    assert counts is not None
    assert (int(counts[1]), int(counts[2])) == (len(FAMILIES), len(measured))
    assert float(counts[3]) == max(measured.values())
