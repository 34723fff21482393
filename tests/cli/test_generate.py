"""`tinyllm generate` through a real process: stdout is the answer and nothing else, failures are one line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from process import tinyllm
from screen import Terminal
from terminal import tinyllm_on_a_terminal

from tinyllm.cli.prompt import read_prompt
from tinyllm.errors import UsageError
from tinyllm.kernels import has_compiler

ANSWER = " one two three"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_scripted_checkpoint(tmp_path_factory.mktemp("cli") / "scripted", ANSWER)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that never stops: its context is far longer than a test waits."""
    return tiny.write_scripted_checkpoint(
        tmp_path_factory.mktemp("cli") / "endless",
        ANSWER,
        end=None,
        config_overrides={"max_position_embeddings": 10**6},
    )


def test_stdout_is_exactly_the_answer(scripted: Path) -> None:
    done = tinyllm("generate", "count", "-m", scripted)
    assert (done.stdout, done.stderr, done.returncode) == (f"{ANSWER}\n".encode(), b"", 0)


def test_json_is_one_object_with_everything(scripted: Path) -> None:
    done = tinyllm("generate", "count", "-m", scripted, "--json", "-n", "2", "--seed", "7")
    report = json.loads(done.stdout)
    assert done.stdout.count(b"\n") == 1
    assert report["model"] == str(scripted)
    assert report["text"] == " one two"
    assert report["token_ids"] == tiny.token_ids(" one two")
    assert report["finish_reason"] == "length"
    assert report["prompt_tokens"] == len(report["prompt_token_ids"])
    assert report["completion_tokens"] == 2
    assert report["seed"] == 7
    assert (report["reasoning"], report["stop"], report["logprobs"]) == ("", None, None)
    assert report["sampling"]["temperature"] == 0
    assert set(report["timings"]) == {"load_s", "ttft_s", "prefill_tps", "decode_tps", "total_s"}
    assert set(report["memory"]) == {"peak_bytes", "kv_bytes", "kv_limit_bytes", "kv_token_bytes", "kv_bits"}
    assert report["memory"].pop("kv_bits") is None
    assert (report["context"], report["cached_tokens"]) == (tiny.config()["max_position_embeddings"], 0)
    assert all(value > 0 for value in (*report["timings"].values(), *report["memory"].values()))


def prompt_ids(*arguments: str | Path, stdin: str | None = None) -> list[int]:
    return json.loads(tinyllm("generate", *arguments, "--json", "-n", "0", stdin=stdin).stdout)["prompt_token_ids"]


def test_the_template_is_applied_unless_raw(scripted: Path) -> None:
    rendered = "<|im_start|>user\ncount<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_ids("count", "-m", scripted) == tiny.token_ids(rendered)
    assert prompt_ids("count", "-m", scripted, "-s", "be brief") == tiny.token_ids(
        "<|im_start|>system\nbe brief<|im_end|>\n" + rendered
    )
    assert prompt_ids("count", "-m", scripted, "--raw") == tiny.token_ids("count")


def test_a_piped_prompt_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/zero").open(encoding="utf-8") as endless:
        monkeypatch.setattr("sys.stdin", endless)
        with pytest.raises(UsageError, match="stdin: larger than 16 MB"):
            read_prompt("-")


@pytest.mark.parametrize("content", [b"\x89PNG\r\n", b"\xff\xfeh\0i\0", b"a\0b"])
def test_stdin_that_is_not_text_is_refused(scripted: Path, content: bytes) -> None:
    for prompt in (["-"], [], ["describe this"]):
        done = tinyllm("generate", *prompt, "-m", scripted, stdin=content)
        assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
        assert done.stderr.startswith(b"tinyllm: stdin: is not text")


@pytest.mark.parametrize("prompt", ["", " \t\n"])
def test_a_blank_prompt_is_refused_unless_raw(scripted: Path, prompt: str) -> None:
    done = tinyllm("generate", prompt, "-m", scripted)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"tinyllm: the prompt is blank (--raw continues even an empty one)\n"
    assert tinyllm("generate", prompt, "-m", scripted, "--raw").stdout.decode() == f"{ANSWER}\n"


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_long_prompt_shows_how_far_it_is_read(tmp_path: Path, flags: list[str]) -> None:
    model = tiny.write_scripted_checkpoint(
        tmp_path / "long", ANSWER, config_overrides={"max_position_embeddings": 20_000}
    )
    with Terminal("generate", "0123456789" * 1000, "-m", model, "--eager", *flags, rows=50) as terminal:
        terminal.wait_for_screen("reading the prompt")
        terminal.wait_for_screen(" of 10,")
        assert terminal.wait_to_end() == 0
        assert "reading the prompt" not in terminal.shown and ANSWER in terminal.shown


def test_a_piped_prompt_is_read_and_follows_one_that_is_given(scripted: Path) -> None:
    raw = ("-m", scripted, "--raw")
    assert prompt_ids(*raw, stdin="piped\n") == tiny.token_ids("piped")
    assert prompt_ids("-", *raw, stdin="piped\n") == tiny.token_ids("piped")
    assert prompt_ids("first", *raw, stdin="piped\n") == tiny.token_ids("first\n\npiped")
    assert prompt_ids("first", *raw) == tiny.token_ids("first")


def test_a_random_answer_repeats_with_its_seed(tiny_checkpoint: Path) -> None:
    def ask(seed: int) -> bytes:
        return tinyllm(
            "generate", "x", "-m", tiny_checkpoint, "-n", "12", "--temperature", "2", "--seed", str(seed)
        ).stdout

    assert ask(0) == ask(0) != ask(1)


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["-m", "nowhere"], 1, "nowhere: there is no such folder"),
        (["-m", "{scripted}/config.json"], 1, "not a folder"),
        (["-m", "{scripted}", "--dtype", "int3"], 2, "dtype must be one of"),
        (["-m", "{scripted}", "--device", "tpu"], 2, "device must be one of"),
        (["-m", "{scripted}", "--device", "gpu"], 1, "MLX has no GPU"),
        (["-m", "{scripted}", "--raw", "-s", "x"], 2, "--raw"),
    ],
)
def test_a_failure_is_one_line_and_its_code(scripted: Path, arguments: list[str], code: int, told: str) -> None:
    if "gpu" in arguments and sys.platform == "darwin":
        pytest.skip("a Mac has a GPU")
    done = tinyllm("generate", "x", *(argument.format(scripted=scripted) for argument in arguments))
    assert done.returncode == code
    assert done.stdout == b""
    assert done.stderr.startswith(b"tinyllm: ") and done.stderr.count(b"\n") == 1
    assert told in done.stderr.decode()


def test_fault_12_a_missing_key_is_one_line_with_key_and_path(tmp_path: Path) -> None:
    folder = tiny.write_scripted_checkpoint(tmp_path, ANSWER)
    values = json.loads((folder / "config.json").read_text())
    del values["intermediate_size"]
    tiny.write_json(folder / "config.json", values)
    done = tinyllm("generate", "x", "-m", folder)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode().count("\n") == 1
    assert f"{folder}/config.json" in done.stderr.decode() and "intermediate_size" in done.stderr.decode()


def test_debug_shows_the_traceback_before_the_line() -> None:
    done = tinyllm("generate", "x", "-m", "nowhere", "--debug")
    lines = done.stderr.decode().splitlines()
    assert lines[0].startswith("Traceback") and lines[-1].startswith("tinyllm: ")
    assert done.returncode == 1


@pytest.mark.parametrize(
    "arguments", [["--temperature", "-1"], ["--seed", "-1"], ["-n", "-3"], ["--nonsense"], ["y"], []]
)
def test_usage_errors_exit_with_2(scripted: Path, arguments: list[str]) -> None:
    prompt = ["x"] if arguments else []
    done = tinyllm("generate", *prompt, "-m", scripted, *arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"tinyllm: ") and done.stderr.count(b"\n") == 1


def start(folder: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tinyllm", "generate", "x", "-m", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(5) == b" one "  # it streams: the answer has no end
    return process


def test_fault_43_ctrl_c_ends_with_130_and_no_traceback(endless: Path) -> None:
    process = start(endless)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, b"")


def test_a_closed_pipe_ends_quietly(endless: Path) -> None:
    process = start(endless)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) in (0, 1)


def test_ctrl_c_with_json_prints_what_there_is_and_ends_with_130(endless: Path, tmp_path: Path) -> None:
    """Nothing is printed before, but with a prompt to save a line on stderr comes before the first token."""
    command = [sys.executable, "-m", "tinyllm", "generate", "x", "-m", str(endless), "--json", "--stats"]
    process = subprocess.Popen(
        [*command, "--prompt-cache", str(tmp_path / "saved")],
        bufsize=0,  # what follows the line is left for what reads the rest
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    assert b"tokens of the prompt saved" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, b"")
    assert json.loads(stdout)["finish_reason"] == "cancelled"


def test_fault_44_characters_that_stdout_cannot_hold_are_substituted(tmp_path: Path) -> None:
    folder = tiny.write_scripted_checkpoint(tmp_path, "né")
    done = tinyllm("generate", "x", "-m", folder, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout, done.stderr) == (0, b"n?\n", b"")


def test_fault_44_redirected_output_has_no_escape_codes_though_stderr_is_a_terminal(
    scripted: Path, tmp_path: Path
) -> None:
    with (tmp_path / "answer").open("wb") as file:
        shown = tinyllm_on_a_terminal("generate", "x", "-m", scripted, stdout=file.fileno())
    assert (tmp_path / "answer").read_bytes() == f"{ANSWER}\n".encode()
    assert "loading scripted" in shown
    assert "answer 4 tokens" in shown and "sampling: greedy" in shown


def test_json_reaches_a_redirected_stdout_though_stderr_is_a_terminal(scripted: Path, tmp_path: Path) -> None:
    with (tmp_path / "answer").open("wb") as file:
        shown = tinyllm_on_a_terminal("generate", "x", "-m", scripted, "--json", stdout=file.fileno())
    assert json.loads((tmp_path / "answer").read_bytes())["text"] == ANSWER
    assert "loading scripted" in shown and "finish_reason" not in shown


def test_json_on_a_terminal_is_one_whole_line(scripted: Path) -> None:
    shown = tinyllm_on_a_terminal("generate", "x", "-m", scripted, "--json")
    assert json.loads(shown[shown.index("{") : shown.rindex("}") + 1])["text"] == ANSWER


def test_a_terminal_shows_progress_the_answer_and_figures(scripted: Path) -> None:
    shown = tinyllm_on_a_terminal("generate", "x", "-m", scripted)
    assert shown.index("loading scripted") < shown.index(ANSWER) < shown.index("tokens/s")
    assert all(len(line) <= 80 for line in shown[shown.index("prompt ") :].splitlines())
    assert "tokens/s" not in tinyllm_on_a_terminal("generate", "x", "-m", scripted, "--no-stats")


def test_statistics_go_to_stderr_when_asked_for(scripted: Path) -> None:
    done = tinyllm("generate", "x", "-m", scripted, "--stats", "--temperature", "0.5", "--top-k", "1", "--seed", "3")
    assert done.stdout == f"{ANSWER}\n".encode()
    assert b"\x1b" not in done.stderr
    assert b"sampling: greedy" in done.stderr
    warm = tinyllm("generate", "x", "-m", scripted, "--stats", "-n", "1", "--temperature", "0.5", "--seed", "3")
    assert b"sampling: temperature 0.5, seed 3" in warm.stderr
    cold = tinyllm("generate", "x", "-m", scripted, "--stats", "-n", "1", "--top-p", "0.5")
    assert b"sampling: greedy (at temperature 0, without effect: top_p 0.5)\n" in cold.stderr


def test_fault_25_reasoning_is_not_in_stdout_but_in_json_and_on_a_terminal(tmp_path: Path) -> None:
    template = tiny.CHAT_TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
    folder = tiny.write_scripted_checkpoint(tmp_path, tiny.token_ids("a</think>b"), chat_template=template)
    assert tinyllm("generate", "x", "-m", folder).stdout == b"b\n"
    report = json.loads(tinyllm("generate", "x", "-m", folder, "--json").stdout)
    assert (report["reasoning"], report["text"]) == ("a", "b")
    assert "\x1b[2ma\x1b[0m" in tinyllm_on_a_terminal("generate", "x", "-m", folder)


def test_stop_and_bias_and_logprobs_do_what_their_help_says(scripted: Path) -> None:
    one, two, three = tiny.token_ids(ANSWER)
    report = json.loads(
        tinyllm("generate", "x", "-m", scripted, "--json", "--stop", "zz", "--stop", "o th", "--logprobs", "1").stdout
    )
    assert (report["text"], report["stop"], report["finish_reason"]) == (" one tw", "o th", "stop")
    assert [entry["top"][0][0] for entry in report["logprobs"]] == report["token_ids"] == [one, two, three]
    biased = tinyllm(
        "generate", "x", "-m", scripted, "--logit-bias", f"{one}=-99", "--logit-bias", f"{three}=50", "-n", "1"
    )
    assert biased.stdout == b" three\n"


def test_think_and_template_arguments_reach_the_template(tmp_path: Path) -> None:
    template = "{{ enable_thinking is defined and enable_thinking }}{{ k }}{{ messages[0]['content'] }}"
    folder = tiny.write_scripted_checkpoint(tmp_path, ANSWER, chat_template=template)
    asked = ("-m", folder, "--template-arg", 'k={"a": 1}')
    assert prompt_ids("x", *asked) == tiny.token_ids("False{'a': 1}x")
    assert prompt_ids("x", *asked, "--think") == tiny.token_ids("True{'a': 1}x")
    assert prompt_ids("x", "-m", folder, "--no-think", "--template-arg", "k=é") == tiny.token_ids("Falseéx")


def test_what_a_template_does_not_look_at_is_told(tmp_path: Path, scripted: Path) -> None:
    knows = tiny.write_scripted_checkpoint(
        tmp_path, ANSWER, chat_template="{{ thinking is defined }}" + tiny.CHAT_TEMPLATE
    )
    assert tinyllm("generate", "x", "-m", knows, "--think", "--template-arg", "k=1").stderr == b""
    done = tinyllm("generate", "x", "-m", scripted, "--no-think")
    assert (done.stdout, done.stderr.count(b"\n")) == (f"{ANSWER}\n".encode(), 1)
    assert b"does not know enable_thinking or thinking" in done.stderr


def test_fault_22_a_template_that_rejects_the_system_role_says_so_in_its_own_words(tmp_path: Path) -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    folder = tiny.write_scripted_checkpoint(tmp_path, ANSWER, chat_template=template + tiny.CHAT_TEMPLATE)
    assert tinyllm("generate", "x", "-m", folder).stdout == f"{ANSWER}\n".encode()
    done = tinyllm("generate", "x", "-m", folder, "-s", "be brief")
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (1, b"", 1)
    assert b"System role not supported" in done.stderr


def test_fault_43_no_prompt_and_no_stdin_is_a_usage_error_and_never_waits(scripted: Path) -> None:
    done = tinyllm("generate", "-m", scripted)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_an_empty_stdin_alone_is_no_prompt(scripted: Path, arguments: list[str]) -> None:
    done = tinyllm("generate", *arguments, "-m", scripted, stdin="")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"tinyllm: there is no prompt: nothing came from stdin\n"
    assert tinyllm("generate", "x", "-m", scripted, stdin="").stdout == f"{ANSWER}\n".encode()


@pytest.mark.parametrize("arguments", [["--dtype", "int3"], ["--device", "tpu"], ["--stop", ""], ["--top-p", "2"]])
def test_values_are_checked_before_a_model_is_looked_for(arguments: list[str]) -> None:
    assert tinyllm("generate", "x", "-m", "nowhere", *arguments).returncode == 2


def test_dtypes_and_devices_are_those_of_the_library() -> None:
    from tinyllm import llm
    from tinyllm.cli import options

    assert tuple(llm.DTYPES) == options.DTYPES
    assert tuple(llm.DEVICES) == options.DEVICES


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--top-p", "1.5"], "top_p"),
        (["--top-k", "-1"], "top_k"),
        (["--min-p", "nan"], "min_p"),
        (["--temperature", "-1"], "temperature"),
        (["--repetition-penalty", "0"], "repetition_penalty"),
        (["--repetition-window", "-1"], "repetition_window"),
        (["--presence-penalty", "inf"], "presence_penalty"),
        (["--frequency-penalty", "1000"], "frequency_penalty"),
        (["--seed", "4294967296"], "seed"),
        (["--logit-bias", "x=1"], "--logit-bias"),
        (["--logit-bias", "7"], "--logit-bias"),
        (["--template-arg", "x"], "--template-arg"),
        (["--stop", ""], "stop string"),
        (["--logprobs", "1"], "--logprobs"),
        (["--raw", "--think"], "--raw"),
    ],
)
def test_every_value_is_checked_and_told_in_one_line(scripted: Path, arguments: list[str], named: str) -> None:
    done = tinyllm("generate", "x", "-m", scripted, *arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert named in done.stderr.decode() and done.stderr.count(b"\n") == 1


def test_a_full_disk_under_stdout_is_one_line(scripted: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full on this system")
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tinyllm", "generate", "x", "-m", str(scripted)],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
        )
    assert done.returncode == 1
    assert done.stderr == b"tinyllm: stdout: No space left on device\n"


def test_eager_steps_give_the_same_answer(scripted: Path) -> None:
    done = tinyllm("generate", "count", "-m", scripted, "--eager")
    assert (done.returncode, done.stdout) == (0, tinyllm("generate", "count", "-m", scripted).stdout)


@pytest.mark.skipif(not has_compiler() or sys.platform != "linux", reason="kernels are compiled on a Linux CPU")
def test_the_first_run_on_a_machine_says_what_it_waits_for(tiny_checkpoint: Path, tmp_path: Path) -> None:
    command = ("generate", "-m", tiny_checkpoint, "-n", "2", "x")
    shown = [tinyllm_on_a_terminal(*command, env={"XDG_CACHE_HOME": str(tmp_path)}) for _ in range(2)]
    assert ["compiling kernels, once per machine" in text for text in shown] == [True, False]


def test_temperature_has_a_short_name(tiny_checkpoint: Path) -> None:
    for option in ("--temperature", "--temp", "-t"):
        done = tinyllm("generate", "-m", tiny_checkpoint, "-n", "1", option, "0.5", "--seed", "1", "--json", "x")
        assert json.loads(done.stdout)["sampling"]["temperature"] == 0.5
