"""`tinyllm bench`: real processes where what they print matters, and every refusal before a model is loaded."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import tiny
from process import tinyllm
from terminal import tinyllm_on_a_terminal
from typer.testing import CliRunner

from tinyllm import hardware
from tinyllm.bench.compare import RULE
from tinyllm.cli.app import app

SMALL = ("-p", "8", "-n", "4", "-r", "2")


def said(stderr: bytes) -> list[str]:
    """The lines of stderr, without what Matplotlib says, once on each machine, where that takes it some seconds."""
    return [line for line in stderr.decode().splitlines() if not line.startswith("Matplotlib is building")]


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ends every answer at once (fault 46)."""
    folder = tmp_path_factory.mktemp("bench") / "biased"
    return tiny.write_scripted_checkpoint(folder, [tiny.EOS], end=tiny.EOS, chat_template=None)


def test_fault_46_json_has_exactly_what_was_asked_for_and_compares_with_itself(biased: Path, tmp_path: Path) -> None:
    report, picture = tmp_path / "old.json", tmp_path / "picture.svg"
    asked = ("-m", biased, "-p", "0", "-n", "20", "-r", "2", "--delay", "0.01", "-o", "json")
    plot = ("--plot", picture) if importlib.util.find_spec("matplotlib") else ()
    done = tinyllm("bench", *asked, "--output", report, *plot)
    assert (done.returncode, done.stdout, said(done.stderr)) == (0, b"", [])
    assert picture.exists() == bool(plot)
    [result] = json.loads(report.read_text())["results"]
    assert [len(sample["gaps_s"]) for sample in result["samples"]] == [20, 20]
    assert (result["test"], result["model"]["name"], result["tps"]["n"]) == ("tg20", "biased", 2)

    again = tinyllm("bench", *asked, "--compare", report)
    assert (again.returncode, said(again.stderr)) == (0, [])
    [change] = json.loads(again.stdout)["changes"]
    assert change["old"] == result["tps"]["median"]


def test_slower_than_allowed_exits_with_3_after_the_whole_report(biased: Path, tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    done = tinyllm("bench", "-m", biased, *SMALL, "-o", "json", "--output", old)
    values = json.loads(old.read_text())
    for result in values["results"]:
        result["tps"] = {"n": 3, "median": 1e12, "mean": 1e12, "sd": 1.0, "min": 1e12, "max": 1e12}
    values["machine"]["chip"] = "another chip"
    old.write_text(json.dumps(values))
    done = tinyllm("bench", "-m", biased, *SMALL, "-o", "csv", "--compare", old, "--fail-slower", "10")
    assert done.returncode == 3
    assert done.stdout.count(b"\n") == 3  # the columns, and two tests
    told = said(done.stderr)
    assert told[0].startswith("tinyllm: --compare: chip was another chip, and is ")
    assert "| biased | fused    | paged | pp8  |" in "\n".join(told)
    assert RULE in told
    assert told[-1].startswith("tinyllm: slower by more than 10 %: biased pp8 (-100.0%), biased tg4")


def test_md_names_the_machine_and_each_kind_of_kernels(biased: Path, tmp_path: Path) -> None:
    command = ("bench", "-m", f"{biased},{biased}", *SMALL, "--pg", "8,3", "--features", "reference,fused")
    done = tinyllm(*command, "--output", tmp_path / "report.md")
    assert (done.returncode, said(done.stderr)) == (0, [])
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert text.startswith("- tinyllm 0.1.0, mlx ") and " cores, " in text and "memory is read at " in text
    rows = [line for line in text.splitlines() if line.startswith("| biased | ")]
    assert [row.split(" | ")[4:6] for row in rows] == [
        [kernels.ljust(9), test.ljust(7)] for test in ("pp8", "tg4", "pp8+tg3") for kernels in ("reference", "fused")
    ] * 2


def test_a_pipe_gets_tables_of_a_hundred_columns(biased: Path) -> None:
    done = tinyllm("bench", "-m", biased, *SMALL, "-b", "1,2,4", "-r", "1")
    rows = [line for line in done.stdout.decode().splitlines() if line.startswith("| ")]
    assert "| test | batch |" in rows[0] and max(map(len, rows)) <= 100


def test_a_terminal_shows_progress_and_a_chart(biased: Path) -> None:
    shown = tinyllm_on_a_terminal("bench", "-m", biased, *SMALL, "-r", "1", "-o", "jsonl")
    assert "loading" in shown and "0/4" in shown
    assert shown.index('"test": "tg4"') < shown.rindex("pp8")
    assert "tokens/s" in shown


def test_prompts_answers_and_both_have_bars_on_scales_of_their_own(biased: Path) -> None:
    one_of_each = ("-p", "8", "-n", "4", "--pg", "8,3", "-b", "1")
    shown = tinyllm_on_a_terminal("bench", "-m", biased, *one_of_each, "-r", "1", "-o", "jsonl")
    bars = [line for line in shown.splitlines() if line.rstrip().endswith("tokens/s") and "█" in line]
    assert [line.count("█") for line in bars] == [40, 40, 40]


def test_a_terminal_shows_tables_that_it_is_wide_enough_for(biased: Path, tmp_path: Path) -> None:
    shown = tinyllm_on_a_terminal("bench", "-m", biased, *SMALL)
    rows = [line for line in shown.replace("\r", "\n").splitlines() if line.startswith("| ")]
    assert "| test | batch |" in rows[0] and any(row.startswith("| peak memory") for row in rows)
    assert max(map(len, rows)) <= 80


def test_ops_are_counted_instead_of_timed(biased: Path, tmp_path: Path) -> None:
    done = tinyllm("bench", "-m", biased, "--ops", "--output", tmp_path / "ops.md")
    assert (done.returncode, done.stdout, said(done.stderr)) == (0, b"", [])
    assert "modelled" in (tmp_path / "ops.md").read_text()


def test_rows_run_at_once_on_either_cache_and_say_so(biased: Path) -> None:
    done = tinyllm(
        "bench", "-m", biased, *SMALL, "-b", "1,3", "--kv", "paged,dense", "--features", "eager", "-o", "jsonl"
    )
    assert (done.returncode, said(done.stderr)) == (0, [])
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(r["test"], r["workload"]["batch"], r["model"]["kv"]) for r in results] == [
        (test, batch, kv) for batch in (1, 3) for test in ("pp8", "tg4") for kv in ("paged", "dense")
    ]
    assert all(len(s["gaps_s"]) == 4 for r in results if r["test"] == "tg4" for s in r["samples"])


def refusal(*arguments: str | Path) -> tuple[int, str]:
    """The code and the line of a command that must fail in this process, without loading anything."""
    done = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    assert done.stdout == "" and done.stderr.count("\n") == 1 and done.stderr.startswith("tinyllm: ")
    return done.exit_code, done.stderr


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: object, **options: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("tinyllm.bench.subject.load_engine", load)


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["-p", "x"], 2, "-p must be counts"),
        (["-n", "8-1"], 2, "-n: the range"),
        (["-d", "1-8*1"], 2, "-d: the range"),
        (["--pg", "8"], 2, "--pg must be two counts"),
        (["-p", "0", "-n", "0"], 2, "nothing to measure"),
        (["-b", "0"], 2, "-b must be 1 or more"),
        (["-b", "2", "-d", "256", "--pg", "8,8"], 2, "--pg cannot be timed behind a depth in a batch (-d 256 -b 2)"),
        (["--kv", "page"], 2, "--kv: there is paged, dense, and no 'page'"),
        (["--kv", "dense", "--features", "scattered"], 2, "--kv dense: the cache of scattered is paged"),
        (["--features", "fused,fast"], 2, "eager, dense, reference, scattered, and no 'fast'"),
        (["--ops", "--features", "scattered"], 2, "--ops counts a step whose pages lie side by side"),
        (["-o", "xml"], 2, "-o: there is md, csv, json, jsonl, and no 'xml'"),
        (["--output", "{tmp}/no/such.md"], 2, "cannot be written"),
        (["--output", "{tmp}"], 2, "cannot be written"),
        (["--plot", "{tmp}/a.pdf"], 2, "--plot draws .png or .svg"),
        (["--ops", "-o", "json"], 2, "--ops counts"),
        (["--fail-slower", "5"], 2, "--fail-slower needs --compare"),
        (["--compare", "{tmp}/none.json"], 1, "No such file"),
        (["--compare", "{tmp}/config.json"], 2, "is not a report"),
        (["-p", "9999"], 1, "the context of biased has 256"),
        (["-m", "nowhere"], 1, "nowhere: there is no such folder"),
    ],
)
@pytest.mark.usefixtures("nothing_loads")
def test_what_cannot_be_measured_is_one_line(
    biased: Path, tmp_path: Path, arguments: list[str], code: int, told: str
) -> None:
    (tmp_path / "config.json").write_bytes((biased / "config.json").read_bytes())
    given = [argument.format(tmp=tmp_path) for argument in arguments]
    exit_code, line = refusal("-m", biased, "-p", "8", "-n", "4", *given)
    assert exit_code == code
    assert told in line


@pytest.mark.usefixtures("nothing_loads")
def test_more_than_the_memory_is_refused(biased: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "available_memory", lambda: 1000)
    assert "and 0.0 MiB are free" in refusal("-m", biased, *SMALL)[1]


@pytest.mark.usefixtures("nothing_loads")
def test_a_report_without_these_tests_is_refused_before_they_are_run(biased: Path, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text('{"machine": {}, "results": []}')
    code, line = refusal("-m", biased, *SMALL, "--compare", tmp_path / "old.json")
    assert code == 2 and "has none of these tests" in line


@pytest.mark.usefixtures("nothing_loads")
def test_a_picture_without_matplotlib_is_refused(
    biased: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinyllm.cli.bench.find_spec", lambda name: None)
    code, line = refusal("-m", biased, *SMALL, "--plot", tmp_path / "a.png")
    assert code == 2 and line.endswith("pip install matplotlib\n")


def test_a_full_disk_under_the_report_is_one_line_that_names_the_file(biased: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full on this system")
    done = tinyllm("bench", "-m", biased, *SMALL, "--output", "/dev/full")
    assert (done.returncode, said(done.stderr)) == (1, ["tinyllm: /dev/full: No space left on device"])
