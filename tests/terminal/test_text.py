"""What others wrote cannot command a terminal, and standard streams that are closed take nothing they should not."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text
from terminal import tinyllm_on_a_terminal

from tinyllm.terminal.console import TerminalConsole
from tinyllm.terminal.text import for_stream, visible

ATTACK = "a\x1b]0;title\x07b\x1b[2Jc\x9b31md\x7f\r\b"
SHOWN = "a␛]0;title␇b␛[2Jc\\x9b31md␡␍␈"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_are_shown_and_text_is_not_changed() -> None:
    assert visible(ATTACK) == SHOWN
    plain = "tabs\tand\nlines, ä 日本 👍 \u200d עברית"
    assert visible(plain) == plain
    assert visible("windows\r\nlines") == "windows\nlines"
    assert visible("\u202egpj.exe \ud83d") == "\\u202egpj.exe \ufffd"


def test_only_a_terminal_gets_another_text() -> None:
    assert for_stream(ATTACK, Terminal()) == SHOWN
    assert for_stream(ATTACK, io.StringIO()) == ATTACK


@pytest.mark.parametrize("form", [Text, Markdown, lambda text: f"[{text}]"], ids=["text", "markdown", "string"])
def test_no_escape_of_a_text_leaves_a_rich_console(form: object) -> None:
    out = Terminal()
    console = TerminalConsole(file=out, force_terminal=True, color_system=None, width=200, markup=False)
    console.print(form(ATTACK))  # type: ignore[operator]
    assert not set(out.getvalue()) & set("\x1b\x07\x9b\x7f\b")
    with Live(form(ATTACK), console=console, transient=True):  # type: ignore[operator]
        pass
    assert "\x1b]0;" not in out.getvalue() and "\x1b[2J" not in out.getvalue() and "\x9b" not in out.getvalue()


@pytest.fixture(scope="module")
def attacker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers with an escape sequence, in a folder that is named with one."""
    folder = tmp_path_factory.mktemp("models") / "evil\x1b]0;title\x07"
    return tiny.write_scripted_checkpoint(folder, "x\x1b]0;t\x07y")


@pytest.mark.parametrize("command", ["generate", "inspect", "error", "chat"])
def test_an_attack_is_shown_on_a_terminal(attacker: Path, command: str, tmp_path: Path) -> None:
    arguments = {
        "generate": ("generate", "-m", attacker, "go"),
        "inspect": ("inspect", attacker),
        "error": ("generate", "-m", f"{attacker}/nothing", "go"),
        "chat": ("chat", "-m", attacker, "--plain", "nothing\x1b]0;title\x07"),
    }[command]
    shown = tinyllm_on_a_terminal(*arguments, env={"XDG_DATA_HOME": str(tmp_path)})
    assert "␛]0;" in shown or "\\x1b]0;" in shown
    assert "\x1b]0;" not in shown and "\x07" not in shown


def test_piped_output_is_the_text_as_it_is(attacker: Path) -> None:
    done = run("generate", "-m", str(attacker), "go")
    assert done.stdout == "x\x1b]0;t\x07y\n"


def run(*arguments: str, redirect: str = "") -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'exec "$0" -m tinyllm "$@" {redirect}', sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=120)


def test_with_stderr_closed_messages_go_nowhere(attacker: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "go"}\n{"prompt": 5}\n')
    done = run("generate", "-m", str(attacker), "--prompts", str(prompts), "--output", str(out), redirect="2>&-")
    assert (done.returncode, done.stdout) == (1, "")
    assert len([json.loads(line) for line in out.read_text().splitlines()]) == 2
    assert run("generate", "-m", "nowhere", "go", redirect="2>&-").stdout == ""


def test_with_stdout_closed_there_is_one_line_about_it(attacker: Path) -> None:
    done = run("generate", "-m", str(attacker), "go", redirect=">&-")
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["tinyllm: stdout: Bad file descriptor"]


def test_with_stdin_closed_a_prompt_is_answered(attacker: Path) -> None:
    assert run("generate", "-m", str(attacker), "go", redirect="<&-").returncode == 0
    done = run("generate", "-m", str(attacker), redirect="<&-")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_an_output_that_links_to_itself_is_one_line(attacker: Path, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "in.jsonl").write_text('{"prompt": "go"}\n')
    done = run(
        "generate", "-m", str(attacker), "--prompts", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "a")
    )
    assert done.returncode in (1, 2)
    [line] = done.stderr.splitlines()
    assert "internal error" not in line


@pytest.mark.parametrize("name", ["bos_token", "eos_token"])
def test_half_a_surrogate_pair_as_a_special_token_is_one_line(tmp_path: Path, name: str) -> None:
    folder = tiny.write_scripted_checkpoint(tmp_path / "model", "yes")
    tiny.write_json(folder / "tokenizer_config.json", {name: "\ud83d"})
    done = run("generate", "-m", str(folder), "go")
    assert "internal error" not in done.stderr
    assert done.returncode == 0 or len(done.stderr.splitlines()) == 1
