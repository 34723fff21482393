"""`tinyllm generate --prompts`: every line has its answer or its error, once, however often the process is ended."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
import tiny
from process import tinyllm
from terminal import tinyllm_on_a_terminal

from tinyllm.cli.answers_file import AnswersFile
from tinyllm.cli.prompts_file import PromptsFile
from tinyllm.errors import UsageError

ANSWER = " one two three"
HALF_A_PAIR = "\ud800"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_scripted_checkpoint(tmp_path_factory.mktemp("many") / "scripted", ANSWER)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that never stops: a line without max_tokens is still being answered when the process is ended."""
    overrides = {"max_position_embeddings": 10**6}
    folder = tmp_path_factory.mktemp("many") / "endless"
    return tiny.write_scripted_checkpoint(folder, ANSWER, end=None, config_overrides=overrides)


def write_lines(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(path: Path) -> dict[Any, str]:
    return {record["id"]: record["text"] for record in read_lines(path)}


# ---------------------------------------------------------------- lines in, lines out


def test_each_line_has_its_answer_with_settings_of_its_own_or_of_the_command(scripted: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    prompts = write_lines(
        tmp_path / "in.jsonl",
        {"id": "a", "prompt": "x"},
        "",
        {"prompt": "x", "max_tokens": 1},
        {"id": 2.5, "messages": [{"role": "user", "content": "x"}], "stop": "o th"},
        {"id": HALF_A_PAIR, "prompt": "x", "logit_bias": {str(tiny.token_ids(ANSWER)[2]): 50}, "seed": None},
    )
    done = tinyllm("generate", "-m", scripted, "--prompts", prompts, "--output", out, "-n", "2", "--in-order")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    records = read_lines(out)
    prompt_tokens = len(tiny.token_ids("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"))
    assert records[0] == {
        "id": "a",
        "text": " one two",
        "finish_reason": "length",
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 2,
        "hash": records[0]["hash"],
    }
    assert texts(out) == {"a": " one two", 3: " one", 2.5: " one two", HALF_A_PAIR: " three three"}
    assert {record["prompt_tokens"] for record in records} == {prompt_tokens}


def test_reasoning_and_the_seed_of_what_was_drawn_are_told(tmp_path: Path) -> None:
    template = tiny.CHAT_TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
    folder = tiny.write_scripted_checkpoint(tmp_path, tiny.token_ids("a</think>b"), chat_template=template)
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "x", "temperature": 0.01, "seed": 5})
    [record] = [json.loads(tinyllm("generate", "-m", folder, "--prompts", prompts).stdout)]
    assert (record["reasoning"], record["text"], record["seed"]) == ("a", "b", 5)


def test_raw_and_the_system_message_apply_as_to_a_single_prompt(scripted: Path, tmp_path: Path) -> None:
    """A conversation that begins with a system message keeps its own."""
    user = {"role": "user", "content": "x"}
    own = [{"role": "system", "content": "of its own"}, user]
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "x"}, {"messages": [user]}, {"messages": own})

    def prompt_tokens(*arguments: str) -> list[int]:
        done = tinyllm("generate", "-m", scripted, "--prompts", prompts, "-n", "0", "--in-order", *arguments)
        return [json.loads(line)["prompt_tokens"] for line in done.stdout.splitlines()]

    rendered = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    plain, said, kept = (
        len(tiny.token_ids(system + rendered))
        for system in ("", "<|im_start|>system\nhi<|im_end|>\n", "<|im_start|>system\nof its own<|im_end|>\n")
    )
    assert prompt_tokens() == [plain, plain, kept]
    assert prompt_tokens("--system", "hi") == [said, said, kept]
    assert prompt_tokens("--raw") == [1, plain, kept]


def test_prompts_come_from_stdin_and_answers_go_to_stdout_as_they_are_in_json(tmp_path: Path) -> None:
    """Also where stdout has an encoding that lacks a character: JSON is UTF-8."""
    folder = tiny.write_scripted_checkpoint(tmp_path, "né")
    for output in ([], ["--output", "-"]):
        done = tinyllm(
            *("generate", "-m", folder, "--prompts", "-", *output),
            stdin='\ufeff{"prompt": "x"}',
            env={"PYTHONIOENCODING": "ascii"},
        )
        assert (done.returncode, done.stderr, done.stdout.count(b"\n")) == (0, b"", 1)
        assert '"id": 1, "text": "né"' in done.stdout.decode()


def test_lines_that_fail_say_why_and_the_others_are_answered(tmp_path: Path) -> None:
    template = "{% if messages[0]['role'] == 'x' %}{{ raise_exception('Role not supported') }}{% endif %}"
    folder = tiny.write_scripted_checkpoint(tmp_path / "m", ANSWER, chat_template=template + tiny.CHAT_TEMPLATE)
    prompts = write_lines(
        tmp_path / "in.jsonl",
        {"id": "good", "prompt": "x"},
        "{",
        {"id": "long", "prompt": "x" * 300},
        {"id": "typo", "prompt": "x", "top_kk": 3},
        {"id": "range", "prompt": "x", "temperature": -1},
        {"id": "role", "messages": [{"role": "x", "content": "x"}]},
        {"id": "blank", "prompt": " "},
        {"id": "last", "prompt": "x"},
    )
    out = tmp_path / "out.jsonl"
    done = tinyllm("generate", "-m", folder, "--prompts", prompts, "--output", out, "--in-order")
    told = f"tinyllm: 6 of 8 lines failed: {out} says why\n"
    assert (done.returncode, done.stdout, done.stderr.decode()) == (1, b"", told)
    good, broken, long, typo, out_of_range, role, blank, last = read_lines(out)
    assert blank["error"].startswith("line 7: the prompt is blank")
    assert (good["text"], last["text"]) == (ANSWER, ANSWER)
    assert broken == {"id": None, "error": broken["error"]} and broken["error"].startswith("line 2: is not JSON: ")
    assert long["id"] == "long" and "can attend to 256" in long["error"]
    assert "'top_kk'" in typo["error"] and "temperature must be" in out_of_range["error"]
    assert role["error"].startswith("line 6: ") and "Role not supported" in role["error"]
    assert not [record for record in read_lines(out) if "\n" in record.get("error", "")]


def test_debug_shows_the_traceback_of_a_line_that_failed(scripted: Path, tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "x", "top_p": 3})
    done = tinyllm("generate", "-m", scripted, "--prompts", prompts, "--debug")
    assert done.returncode == 1
    assert done.stderr.startswith(b"Traceback") and b"UsageError: top_p must be" in done.stderr


# ---------------------------------------------------------------- what a line may say


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[1]", "is not a JSON object"),
        ("nonsense", "is not JSON"),
        ('{"prompt": NaN}', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"id": true, "prompt": "x"}', "id must be"),
        ('{"id": [1], "prompt": "x"}', "id must be"),
        ('{"id": 1e999, "prompt": "x"}', "id must be"),
        ('{"id": 1}', "either a prompt or messages"),
        ('{"prompt": "x", "messages": [{}]}', "either a prompt or messages"),
        ('{"prompt": 3}', "prompt must be"),
        ('{"messages": []}', "messages must be"),
        ('{"messages": ["x"]}', "messages must be"),
        ('{"messages": {"role": "user"}}', "messages must be"),
        ('{"prompt": "x", "stop": [1]}', "stop must be"),
        ('{"prompt": "x", "stop": 1}', "stop must be"),
        ('{"prompt": "x", "logit_bias": {"x": 1}}', "logit_bias must be"),
        ('{"prompt": "x", "logit_bias": [1]}', "logit_bias must be"),
        ('{"prompt": "x", "logprobs": 1}', "'logprobs'"),
    ],
)
def test_a_line_of_another_form_is_told_by_what_is_wrong(tmp_path: Path, line: str, told: str) -> None:
    [read] = PromptsFile(str(write_lines(tmp_path / "in.jsonl", line)))
    with pytest.raises(UsageError, match=told):
        (read.content(), read.settings())


def test_a_line_that_is_not_utf_8_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "\xff"}\n{"prompt": "x"}')
    broken, good = PromptsFile(str(tmp_path / "in.jsonl"))
    assert (broken.id, good.id, good.content()) == (None, 2, "x")
    assert broken.problem is not None and "is not JSON" in broken.problem


@pytest.mark.parametrize("name", ["/dev/zero", "-"])
def test_a_line_has_an_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/zero").open(encoding="utf-8") as endless:
        monkeypatch.setattr("sys.stdin", endless)
        with pytest.raises(UsageError, match=r"(/dev/zero|stdin): line 1: larger than 16 MB"):
            PromptsFile(name)


def test_what_comes_through_a_pipe_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b'{"prompt": "x"}\n' * 10
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(lines)))
    monkeypatch.setattr("tinyllm.cli.prompts_file._MOST_PIPED", len(lines))
    assert PromptsFile("-").count == 10
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(lines + b"{}")))
    with pytest.raises(UsageError, match=r"stdin: more than .* write them to a file"):
        PromptsFile("-")


# ---------------------------------------------------------------- refused before anything is loaded


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["x", "--prompts", "{prompts}"], "PROMPT is for a single prompt"),
        (["--prompts", "{prompts}", "--json"], "--json is for a single prompt"),
        (["--prompts", "{prompts}", "--json", "--logprobs", "1"], "--json is for a single prompt"),
        (["--prompts", "{prompts}", "--logprobs", "1"], "--logprobs is for a single prompt"),
        (["x", "--output", "out.jsonl"], "--output is for the answers to --prompts"),
        (["x", "--batch", "2"], "--batch is for the answers to --prompts"),
        (["x", "--in-order"], "--in-order is for the answers to --prompts"),
        (["--prompts", "{prompts}", "--batch", "0"], "--batch"),
        (["--prompts", "{prompts}", "--top-p", "2"], "top_p must be"),
        (["--prompts", "{empty}"], "there is no prompt in it"),
        (["--prompts", "{twice}"], "lines 1 and 3 have the same id, 3"),
        (["--prompts", "{prompts}", "--output", "{prompts}"], "line 1 is no answer"),
    ],
)
def test_what_cannot_be_meant_is_one_line_before_a_model_is_looked_for(
    tmp_path: Path, arguments: list[str], told: str
) -> None:
    files = {
        "prompts": write_lines(tmp_path / "in.jsonl", {"id": 1, "prompt": "x"}),
        "empty": write_lines(tmp_path / "empty.jsonl", "", " "),
        "twice": write_lines(tmp_path / "twice.jsonl", {"id": 3, "prompt": "x"}, "{", {"prompt": "y"}),
    }
    done = tinyllm("generate", "-m", "nowhere", *(argument.format(**files) for argument in arguments))
    assert (done.returncode, done.stdout) == (2, b"")
    assert told in done.stderr.decode() and done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("arguments", [("--prompts", "none.jsonl"), ("--prompts", "-", "--output", "none/out.jsonl")])
def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = tinyllm("generate", "-m", "nowhere", *arguments, stdin='{"prompt": "x"}', cwd=tmp_path)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert b"none" in done.stderr and b"No such file" in done.stderr


@pytest.mark.parametrize(
    "content",
    [
        "notes\n",
        "notes",
        '{"id": 1, "prompt": "x"}\n',
        '{"id": 1, "text": "a"}\n\n',
        '{"id": 1, "text": "a"}\n[]\n',
        '{"id": null, "text": "a"}\n',
        '{"id": [1], "text": "a"}\n',
        '{"text": "a"}\n',
        '{"id": 1, "text": "a", "error": "b"}\n',
    ],
)
def test_a_file_of_another_form_is_refused_and_left_as_it_is(tmp_path: Path, content: str) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(content)
    with pytest.raises(UsageError, match="is no answer"):
        AnswersFile(str(out))
    assert out.read_text() == content
    assert list(tmp_path.iterdir()) == [out]


# ---------------------------------------------------------------- going on


@pytest.mark.parametrize("torn", ["", "{", '{"id"', '{"id": ', '{"id": "c", "text": "half a'])
def test_answers_stay_while_errors_and_a_torn_line_are_taken_out(tmp_path: Path, torn: str) -> None:
    kept = '{"id": "a", "text": "one"}\n', '{"id": 1, "text": "é"}\n'
    errors = '{"id": "b", "error": "no"}\n', '{"id": null, "error": "no"}\n'
    real, out = tmp_path / "real.jsonl", tmp_path / "out.jsonl"
    real.write_text(kept[0] + errors[0] + kept[1] + errors[1] + torn)
    real.chmod(0o640)
    out.symlink_to(real)
    answers = AnswersFile(str(out))
    assert answers.answered == [("a", None), (1, None)]
    assert real.read_text().endswith(torn)  # nothing is taken out yet
    answers.keep(answers.answered)
    answers.write({"id": "b", "text": "ü"})
    assert real.read_text() == "".join([*kept, '{"id": "b", "text": "ü"}\n'])
    assert out.is_symlink() and real.stat().st_mode & 0o777 == 0o640
    assert {path.name for path in tmp_path.iterdir()} == {"real.jsonl", "out.jsonl"}


def test_a_file_that_another_process_writes_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    for content in ("", '{"id": 1, "error": "no"}\n'):  # the second is replaced by one without the error
        out.write_text(content)
        first = AnswersFile(str(out))
        with pytest.raises(UsageError, match="another process"):
            AnswersFile(str(out))
        del first


def test_the_same_command_again_retries_errors_and_loads_nothing_when_all_is_answered(
    scripted: Path, tmp_path: Path
) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    scripted = shutil.copytree(scripted, tmp_path / "model")
    write_lines(prompts, {"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x", "max_tokens": "two"})
    many = ("--prompts", prompts, "--output", out)
    assert tinyllm("generate", "-m", scripted, *many).returncode == 1
    write_lines(prompts, {"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x", "max_tokens": 2})
    again = tinyllm("generate", "-m", scripted, *many, "--stats")
    assert (again.returncode, texts(out)) == (0, {"a": ANSWER, "b": " one two"})
    said, figures = again.stderr.decode().splitlines()
    assert said == f"tinyllm: {out}: 1 of 2 lines are answered there already"
    assert figures.startswith("1 lines answered · prompts ") and "answers 2 tokens in" in figures
    idle = tinyllm("generate", "-m", scripted, *many, "--kv-budget", "1B")  # which no model could be loaded with
    assert (idle.returncode, idle.stdout) == (0, b"")
    assert idle.stderr.decode() == f"tinyllm: {out}: 2 of 2 lines are answered there already\n"


def test_answers_to_other_prompts_settings_or_models_are_made_again(scripted: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    other = shutil.copytree(scripted, tmp_path / "other")
    write_lines(prompts, {"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y", "max_tokens": 1})
    many = ("--prompts", prompts, "--output", out)

    def again(model: Path, *options: str) -> str:
        done = tinyllm("generate", "-m", model, *many, *options)
        assert done.returncode == 0
        assert sorted(texts(out)) == ["a", "b"]
        return done.stderr.decode()

    assert again(scripted) == ""
    assert "2 of 2 lines are answered" in again(scripted)
    assert "1 answer was to another prompt, setting or model: asked again" in again(scripted, "-n", "2")
    assert texts(out) == {"a": " one two", "b": " one"}
    write_lines(prompts, {"id": "a", "prompt": "x"}, {"id": "b", "prompt": "z", "max_tokens": 1})
    assert "1 answer was to another" in again(scripted, "-n", "2")
    config = other / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rope_theta": 20000.0}))
    assert "2 answers were to another" in again(other, "-n", "2")
    assert "2 answers were to another" in again(other, "-n", "2", "--dtype", "bfloat16")
    write_lines(out, *[{key: value for key, value in record.items() if key != "hash"} for record in read_lines(out)])
    said = again(other, "-n", "3")  # an older tinyllm's
    assert "2 answers do not say what was asked: kept" in said and "2 of 2 lines are answered" in said


def test_a_model_is_known_by_its_files_and_not_by_its_name(scripted: Path, tmp_path: Path) -> None:
    prompts, out = write_lines(tmp_path / "in.jsonl", {"id": "a", "prompt": "x"}), tmp_path / "out.jsonl"
    model = shutil.copytree(scripted, tmp_path / "model")
    many = ("--prompts", prompts, "--output", out)
    assert tinyllm("generate", "-m", model, *many).returncode == 0
    renamed = model.rename(tmp_path / "renamed")
    again = tinyllm("generate", "-m", renamed, *many)
    assert again.stderr.decode() == f"tinyllm: {out}: 1 of 1 lines are answered there already\n"
    tokenizer = renamed / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    assert b"1 answer was to another prompt" in tinyllm("generate", "-m", renamed, *many).stderr


@pytest.mark.parametrize("options", [("-m", "nowhere"), ("--kv-budget", "1B"), ("--max-context", "999999999")])
def test_answers_are_kept_until_there_is_a_model_to_make_others(
    scripted: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    prompts, out = write_lines(tmp_path / "in.jsonl", {"id": "a", "prompt": "x"}), tmp_path / "out.jsonl"
    many = ("-m", scripted, "--prompts", prompts, "--output", out)
    assert tinyllm("generate", *many).returncode == 0
    before = out.read_bytes()
    assert tinyllm("generate", *many, "-n", "2", *options).returncode != 0
    assert out.read_bytes() == before


def test_an_id_may_be_any_number(scripted: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(prompts, {"id": 10**400, "prompt": "x"}, {"id": "b", "prompt": "x"})
    assert tinyllm("generate", "-m", scripted, "--prompts", prompts, "--output", out).returncode == 0
    assert texts(out) == {10**400: ANSWER, "b": ANSWER}


def start(*arguments: str | Path, **streams: Any) -> subprocess.Popen[bytes]:
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.Popen([sys.executable, "-m", "tinyllm", "generate", *map(str, arguments)], **streams)


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.02)
            pytest.fail(f"it ended: {process.communicate()}")


@pytest.mark.parametrize("order", [[], ["--in-order"]])
def test_a_killed_process_loses_nothing_that_is_finished_and_the_next_goes_on(
    endless: Path, tmp_path: Path, order: list[str]
) -> None:
    out = tmp_path / "out.jsonl"
    short = [{"id": f"short {i}", "prompt": "x", "max_tokens": i} for i in range(1, 4)]
    prompts = write_lines(tmp_path / "in.jsonl", *short, {"id": "last", "prompt": "x"})
    command = ("-m", endless, "--prompts", prompts, "--output", out, "--batch", "2", *order)
    process = start(*command)
    wait_for_lines(out, 3, process)
    process.kill()
    process.communicate(timeout=60)
    with out.open("a") as file:
        file.write('{"id": "last", "te')  # what a kill in the middle of a write would have left
    before = out.read_text().splitlines()[:3]
    done = tinyllm("generate", *command, "-n", "2")
    assert done.returncode == 0
    assert b"3 of 4 lines are answered there already" in done.stderr
    assert out.read_text().splitlines()[:3] == before
    assert texts(out) == {"short 1": " one", "short 2": " one two", "short 3": ANSWER, "last": " one two"}


def test_ctrl_c_ends_with_130_and_says_how_to_go_on(endless: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "x", "max_tokens": 1}, {"prompt": "x"})
    process = start("-m", endless, "--prompts", prompts, "--output", out)
    wait_for_lines(out, 1, process)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, b"")
    told = f"tinyllm: stopped: 1 of 2 lines are answered in {out}: the same command goes on from there\n"
    assert stderr.decode() == told
    assert texts(out) == {1: " one"}


def test_ctrl_c_without_a_file_has_given_what_was_finished(endless: Path, tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "x", "max_tokens": 1}, {"prompt": "x"})
    process = start("-m", endless, "--prompts", prompts)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["text"] == " one"
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, b"")
    assert stderr == b"tinyllm: stopped: 1 of 2 lines are answered\n"


def test_a_full_disk_is_one_line_and_waits_for_no_answer(endless: Path, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full on this system")
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "x", "max_tokens": 1}, {"prompt": "x"})
    done = tinyllm("generate", "-m", endless, "--prompts", prompts, "--output", "/dev/full")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"tinyllm: /dev/full: No space left on device\n"


def test_a_closed_pipe_ends_quietly_and_waits_for_no_answer(endless: Path, tmp_path: Path) -> None:
    """The first answer has an id that no pipe holds: whoever closes it has not let the whole line through."""
    prompts = write_lines(tmp_path / "in.jsonl", {"id": "x" * 2**21, "prompt": "x", "max_tokens": 1}, {"prompt": "x"})
    process = start("-m", endless, "--prompts", prompts)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(9) == b'{"id": "x'
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 1


def test_what_is_drawn_depends_on_the_seed_alone(tiny_checkpoint: Path, tmp_path: Path) -> None:
    lines = [{"id": i, "prompt": "abc"[: i + 1], "seed": 9 if i == 2 else None} for i in range(3)]
    hot = ("-m", tiny_checkpoint, "-n", "6", "--temperature", "1.5", "--seed", "4")

    def run(name: str, *arguments: str, count: int = 3) -> dict[Any, str]:
        prompts = write_lines(tmp_path / f"{name}.in", *lines[:count])
        done = tinyllm("generate", *hot, "--prompts", prompts, "--output", tmp_path / name, *arguments)
        assert done.returncode == 0
        return texts(tmp_path / name)

    whole = run("whole")
    assert [record["seed"] for record in sorted(read_lines(tmp_path / "whole"), key=lambda each: each["id"])] == [
        4,
        4,
        9,
    ]
    run("parts", "--batch", "1", count=1)
    assert run("parts", "--batch", "3") == whole


# ---------------------------------------------------------------- what a person sees


def test_a_terminal_shows_a_bar_and_figures(scripted: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    prompts = write_lines(tmp_path / "in.jsonl", *({"prompt": "x"} for _ in range(3)))
    shown = tinyllm_on_a_terminal("generate", "-m", scripted, "--prompts", prompts, "--output", out)
    assert "loading scripted" in shown and "answering" in shown and "/3" in shown and "left" in shown
    assert shown.rstrip().splitlines()[-1].endswith("tokens/s")
    assert "3 lines answered · prompts " in shown and "answers 12 tokens in " in shown
    assert len(read_lines(out)) == 3


def test_answers_that_the_terminal_shows_are_not_mixed_with_a_bar(scripted: Path, tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", *({"prompt": "x"} for _ in range(3)))
    shown = tinyllm_on_a_terminal("generate", "-m", scripted, "--prompts", prompts, "--no-stats", "--in-order")
    assert "answering" not in shown
    assert [json.loads(line)["id"] for line in shown[shown.index("{") :].splitlines()] == [1, 2, 3]
