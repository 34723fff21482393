"""`tinyllm generate`: one prompt, one answer."""

from __future__ import annotations

import json
import os
import stat
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinyllm.cli import console
from tinyllm.errors import UsageError

if TYPE_CHECKING:
    from tinyllm.llm import LLM, Answer


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", help="What to say; - reads it from stdin. Text piped in is added after a blank line."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("-m", "--model", metavar="FOLDER", help="Folder of a model. Without it, the embedded one."),
    ] = None,
    system: Annotated[str | None, typer.Option("-s", "--system", metavar="TEXT", help="The system message.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "-n", "--max-tokens", metavar="N", min=0, help="Most tokens to generate. Without it, to the answer's end."
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(metavar="T", min=0.0, help="0 takes the likeliest token; higher is more random.")
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=2**32 - 1, help="Makes a random answer repeatable.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when the answer is done.")] = False,
    dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Compute in float32, float16 or bfloat16.")
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="DEVICE", help="Compute on cpu or gpu.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")] = False,
) -> None:
    """Answer one prompt, streaming the text to stdout."""

    def command() -> None:
        text = read_prompt(prompt)
        from tinyllm.checkpoint.locate import find_model
        from tinyllm.llm import LLM

        with LLM(find_model(model), dtype=dtype, device=device) as llm:
            answer = _ask(llm, text, system, raw, max_tokens=max_tokens, temperature=temperature, seed=seed)
            if as_json:
                _print_json(llm, answer)
            else:
                _print_text(answer)

    raise typer.Exit(console.run(command, debug=debug))


def read_prompt(argument: str | None) -> str:
    """Return the prompt from the argument and from what is piped or redirected into stdin, if anything is.

    A stdin that is neither pipe nor file is left alone unless the argument is "-": a service's would never end.
    """
    piped = _read_stdin() if argument == "-" or _is_redirected() else None
    if argument in (None, "-"):
        if piped is None:
            raise UsageError("there is no prompt: give one as an argument, or pipe one in")
        return piped
    return argument if not piped else f"{argument}\n\n{piped}"


def _is_redirected() -> bool:
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or no real file
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _read_stdin() -> str:
    return sys.stdin.buffer.read().decode("utf-8", errors="replace").removesuffix("\n")


def _ask(llm: LLM, text: str, system: str | None, raw: bool, **settings: Any) -> Answer:
    if raw and system is not None:
        raise UsageError("--raw continues the prompt as it is, so that there is no place for a --system message")
    if raw or llm.tokenizer.chat_template is None:
        return llm.generate(text, **settings)
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return llm.chat(messages, **settings)


def _print_text(answer: Answer) -> None:
    """Stream the text, and end the line: on a terminal the prompt comes next, and a file ends with a newline."""
    for chunk in answer:
        console.write(chunk.text)
    console.write("\n")


def _print_json(llm: LLM, answer: Answer) -> None:
    chunks = list(answer)
    statistics = chunks[-1].statistics
    assert statistics is not None
    figures = asdict(statistics)
    report = {
        "model": str(llm.path),
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": [token_id for chunk in chunks for token_id in chunk.token_ids],
        "prompt_token_ids": list(answer.prompt_token_ids),
        "finish_reason": chunks[-1].finish_reason,
        **{name: figures[name] for name in ("prompt_tokens", "completion_tokens", "seed")},
        "timings": {name: figures[name] for name in ("load_s", "ttft_s", "prefill_tps", "decode_tps", "total_s")},
        "memory": {name: figures[name] for name in ("peak_bytes", "kv_bytes")},
    }
    console.write(json.dumps(report, ensure_ascii=False) + "\n")
