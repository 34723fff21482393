"""Standard streams that are closed or full, and text that must not command a terminal, in every command."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from screen import Terminal

from tinyllm.cli import console
from tinyllm.terminal.text import visible

ANSWER = "yes"
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that always says ANSWER."""
    return tiny.write_scripted_checkpoint(tmp_path_factory.mktemp("models") / "model", ANSWER)


def run(home: Path, *arguments: str | Path, redirect: str = "", stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'exec "$0" -m tinyllm "$@" {redirect}', sys.executable, *map(str, arguments)]
    places = {"XDG_DATA_HOME": str(home / "data"), "XDG_CONFIG_HOME": str(home / "config"), "HOME": str(home)}
    env = {**os.environ, **places, "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=120, env=env)


@pytest.mark.parametrize(
    "command",
    [["--version"], ["--help"], ["list"], ["inspect"], ["generate", "go", "-m"], ["chat", "-m"]],
    ids=" ".join,
)
def test_with_stdout_closed_every_command_ends_in_one_line(model: Path, tmp_path: Path, command: list[str]) -> None:
    takes_model = command[0] in ("inspect", "generate", "chat")
    done = run(tmp_path, *command, *([model] if takes_model else []), redirect=">&-", stdin="go\n")
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("tinyllm: ") and "internal error" not in line


def test_a_warning_that_nobody_can_read_stops_no_chat(model: Path, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")  # no folder: a warning
    done = run(tmp_path, "chat", "-m", model, redirect="2>/dev/full", stdin="go\ngo\n")
    assert done.stdout == f"{ANSWER}\n{ANSWER}\n"
    assert done.returncode == 0


def test_a_full_disk_stops_no_chat_on_a_terminal(model: Path, tmp_path: Path) -> None:
    """A limit of 0 on the size of files: neither the conversation nor the history of lines can be written."""
    chat = [sys.executable, "-m", "tinyllm", "chat", "--eager", "-m", str(model)]
    program = ["bash", "-c", 'ulimit -f 0; exec "$@"', "bash", *chat]
    env = {"XDG_DATA_HOME": str(tmp_path), "HOME": str(tmp_path), "OPENBLAS_NUM_THREADS": "1"}
    with Terminal(program=program, columns=200, env=env) as terminal:
        for times in (1, 2):
            terminal.wait_for_prompt()
            terminal.enter("hello")
            terminal.wait_for(f"\n{ANSWER}\n", times=times)
        terminal.wait_for_prompt()
        assert terminal.shown.count("not written") == 1
        assert "exception" not in terminal.shown


def test_an_error_that_nobody_can_read_has_its_exit_code(tmp_path: Path) -> None:
    assert run(tmp_path, "generate", "--nonsense", redirect="2>/dev/full").returncode == 2
    assert run(tmp_path, "generate", "-m", "nowhere", "go", redirect="2>/dev/full").returncode == 1


def test_a_killed_chat_is_resumed_with_a_template_that_wants_turns(tmp_path: Path) -> None:
    model = tiny.write_scripted_checkpoint(tmp_path / "strict", ANSWER, chat_template=ALTERNATING)
    assert run(tmp_path, "chat", "-m", model, stdin="first\n").stdout == f"{ANSWER}\n"
    [file] = (tmp_path / "data" / "tinyllm" / "chats").glob("*.jsonl")
    file.write_bytes(file.read_bytes()[:-5])  # in the middle of the answer
    done = run(tmp_path, "chat", "--resume", stdin="second\n")
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n")
    assert "tinyllm: " not in done.stderr and "/retry has it answered" in done.stderr
    said = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["content"] for line in said if "role" in line] == ["first", "second", ANSWER]


def test_overrides_and_halves_of_pairs_are_shown() -> None:
    assert visible("a\u202etxt.exe\u202d") == "a\\u202etxt.exe\\u202d"
    assert visible("\udc9b31m \ud83d") == "\ufffd31m \ufffd"
    shown = "\u2067עברית\u2069 \u200f 👨\u200d👩 é"
    assert visible(shown) == shown  # what ordinary text has


class _TerminalStream(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_traceback_commands_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("\x1b]0;title\x07")

    shown = _TerminalStream()
    monkeypatch.setattr(sys, "stderr", shown)
    assert console.run(fail, debug=True) == 1
    assert "Traceback" in shown.getvalue() and "␛]0;title␇" in shown.getvalue()
    assert not set(shown.getvalue()) & set("\x1b\x07")
