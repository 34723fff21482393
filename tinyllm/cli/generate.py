"""`tinyllm generate`: one prompt and its answer, or a file of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinyllm.chat.figures import figures
from tinyllm.chat.interrupt import cancelling
from tinyllm.cli import console, options
from tinyllm.cli.asking import Asking, check_not_blank
from tinyllm.cli.prompt import read_prompt
from tinyllm.cli.prompt_cache import PromptCache
from tinyllm.errors import UsageError
from tinyllm.terminal.text import tell

if TYPE_CHECKING:
    from tinyllm.cli.progress import Progress
    from tinyllm.llm import LLM, Answer, Chunk

DEFAULT_BATCH = 8
_CHANGES_ANSWERS = ("dtype", "device", "kv_bits", "max_context")  # of the arguments of LLM
_MEMORY = ("peak_bytes", "kv_bytes", "kv_limit_bytes", "kv_token_bytes", "kv_bits")


@options.grouped
def generate(
    *,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="What to say; - reads stdin. Text that is piped in follows it."),
    ] = None,
    model: options.Model = None,
    system: options.System = None,
    sampling: options.Sampling,
    think: options.Think = None,
    template_arg: options.TemplateArg = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is: no template, and control tokens count.")
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, max=100, help="With --json: log-probabilities, and the N likeliest tokens'."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when the answer is done.")] = False,
    stats: Annotated[
        bool | None, typer.Option("--stats/--no-stats", help="Show figures on stderr; on a terminal they are shown.")
    ] = None,
    prompts: options.Prompts = None,
    output: options.Output = None,
    batch: options.Batch = None,
    in_order: options.InOrder = False,
    prompt_cache: options.PromptCache = None,
    running: options.Running,
    offline: options.Offline = False,
    debug: options.Debug = False,
) -> None:
    """Answer a prompt, or all prompts of a file, several at once.

    The answer is written to stdout as it comes, and everything else to stderr.

    A line of --prompts is {"prompt": TEXT} or {"messages": [{"role": ROLE, "content": TEXT}, ...]}, with an "id"
    (else it is the line's number) and settings of its own: max_tokens, stop, seed, temperature, top_p and so on.

    A line of --output is {"id", "text", "finish_reason", "prompt_tokens", "completion_tokens"}, with "reasoning"
    if there is some, "seed" if tokens were sampled, and "hash" of what was asked; or {"id", "error"}. The same
    command, run again, answers what has no answer there yet, and what was asked otherwise.
    """

    def command() -> None:
        settings = sampling.settings()
        if logprobs is not None:
            settings["logprobs"] = logprobs
        of_one = {"PROMPT": prompt is not None, "--json": as_json, "--logprobs": logprobs is not None}
        of_many = {"--output": output is not None, "--batch": batch is not None, "--in-order": in_order}
        _check_together(prompts, of_one, of_many)
        if logprobs is not None and not as_json:
            raise UsageError("--logprobs needs --json, which shows them")
        template_args = options.read_template_args(template_arg, think)
        if raw and (system is not None or template_args):
            raise UsageError(
                "--raw continues the prompt as it is: there is no template for --system, --think or such"
            )
        asking = Asking(settings, system, template_args, raw)
        cache = None if prompt_cache is None else PromptCache(prompt_cache)
        _check_cache(cache, of_many=prompts is not None, max_tokens=sampling.max_tokens)
        at_once = 1 if prompts is None else batch or DEFAULT_BATCH
        loading = partial(load, cache, model, offline, running.arguments(batch=at_once))
        with_figures = console.on_terminal() if stats is None else stats
        if prompts is None:
            text = read_prompt(prompt)
            check_not_blank(text, raw=raw)
            _answer(text, asking, loading, cache, as_json=as_json, with_figures=with_figures)
        else:
            from tinyllm.cli.batch import Plan, answer_file
            from tinyllm.hub.locate import find_model

            arguments = running.arguments(batch=at_once)
            of_answers = {name: arguments[name] for name in _CHANGES_ANSWERS}
            plan = Plan(prompts, "-" if output is None else output, at_once, in_order, of_answers)
            finding = partial(find_model, model, offline=offline, report=console.say)
            loading_it = partial(load_folder, cache, arguments)
            answer_file(plan, asking, finding, loading_it, with_figures=with_figures, debug=debug)

    raise typer.Exit(console.run(command, debug=debug))


def _check_together(prompts: str | None, of_one: Mapping[str, bool], of_many: Mapping[str, bool]) -> None:
    """Raise UsageError for an option that was given for one prompt where there are many, or the other way round."""
    given = [name for name, is_given in (of_many if prompts is None else of_one).items() if is_given]
    if given and prompts is None:
        raise UsageError(f"{given[0]} is for the answers to --prompts FILE, and there is none")
    if given:
        raise UsageError(f"{given[0]} is for a single prompt, and --prompts gives a file of them")


def _check_cache(cache: PromptCache | None, *, of_many: bool, max_tokens: int | None) -> None:
    """Raise UsageError where the file of --prompt-cache could not be made."""
    if cache is None or cache.is_there:
        return
    if of_many:
        raise UsageError(f"--prompt-cache {cache.path}: make it with a single prompt before")
    if max_tokens == 0:
        raise UsageError("--prompt-cache needs --max-tokens 1 or more: without an answer the prompt is not computed")


def load(
    cache: PromptCache | None, model: str | None, offline: bool, settings: Mapping[str, Any], progress: Progress
) -> LLM:
    """Find the model that a person means and load it, with `settings` of `LLM` and a saved prompt; show progress."""
    from tinyllm.hub.locate import find_model

    return load_folder(cache, settings, find_model(model, offline=offline, report=console.say), progress)


def load_folder(cache: PromptCache | None, settings: Mapping[str, Any], folder: Path, progress: Progress) -> LLM:
    """Load the model in a folder, as `load` does."""
    from tinyllm.hub.locate import model_name

    progress.show(f"loading {model_name(folder)}")
    from tinyllm.llm import LLM

    llm = LLM(folder, **settings)
    if cache is not None:
        cache.load(llm, progress)
    return llm


def _answer(
    text: str,
    asking: Asking,
    loading: Callable[[Progress], LLM],
    cache: PromptCache | None,
    *,
    as_json: bool,
    with_figures: bool,
) -> None:
    from tinyllm.cli.progress import Progress

    with Progress() as progress:
        llm = loading(progress)
        if without_effect := asking.without_effect(llm):
            console.say(without_effect)
        answer = asking.ask(llm, text)
        chunks = iter(answer) if cache is None else cache.chunks(llm, answer, progress)
        if not as_json:
            _print_text(answer, chunks, progress, with_figures=with_figures)
            return
        report, interrupted = _report(llm, answer, chunks, progress)
        progress.clear()
        console.write(json.dumps(report, ensure_ascii=False) + "\n")
        if interrupted:
            raise KeyboardInterrupt


def _print_text(answer: Answer, chunks: Iterator[Chunk], progress: Progress, *, with_figures: bool) -> None:
    """Stream the answer to stdout, and end its last line; reasoning is shown beside it on a terminal only."""
    prompt_tokens, last, thinking = len(answer.prompt_token_ids), "", False
    progress.prefill(0, prompt_tokens)
    for chunk in chunks:
        if chunk.prefilled < prompt_tokens:
            progress.prefill(chunk.prefilled, prompt_tokens)
        if chunk.reasoning:
            progress.aside(chunk.reasoning)
            thinking = True
        if chunk.text:
            if thinking:
                progress.aside("\n\n")
            progress.clear()
            thinking = False
            console.write(chunk.text)
            last = chunk.text
        if chunk.statistics is not None:
            progress.clear()
            if not last.endswith("\n"):
                console.write("\n")
            if with_figures:
                tell("\n".join(figures(chunk.statistics, console.columns())))


def _report(llm: LLM, answer: Answer, chunks_of: Iterator[Chunk], progress: Progress) -> tuple[dict[str, Any], bool]:
    """Return what --json prints, and whether Ctrl-C ended the answer early: what there is of it is printed too."""
    chunks: list[Chunk] = []
    prompt_tokens = len(answer.prompt_token_ids)
    progress.prefill(0, prompt_tokens)
    with cancelling(answer) as interrupted:
        for chunk in chunks_of:
            if chunk.prefilled < prompt_tokens:
                progress.prefill(chunk.prefilled, prompt_tokens)
            elif not chunks or chunks[-1].prefilled < prompt_tokens:
                progress.show("answering")
            chunks.append(chunk)
    statistics = chunks[-1].statistics
    assert statistics is not None
    measured = asdict(statistics)
    sampling = measured["sampling"]
    report = {
        "model": str(llm.path),
        "text": "".join(chunk.text for chunk in chunks),
        "reasoning": "".join(chunk.reasoning for chunk in chunks),
        "token_ids": [token_id for chunk in chunks for token_id in chunk.token_ids],
        "prompt_token_ids": list(answer.prompt_token_ids),
        "finish_reason": chunks[-1].finish_reason,
        "stop": chunks[-1].stop,
        "prompt_tokens": statistics.prompt_tokens,
        "cached_tokens": statistics.cached_tokens,
        "completion_tokens": statistics.completion_tokens,
        "seed": sampling.pop("seed"),
        "sampling": sampling,
        "logprobs": [asdict(logprobs) for chunk in chunks for logprobs in chunk.logprobs] or None,
        "timings": {name: measured[name] for name in ("load_s", "ttft_s", "prefill_tps", "decode_tps", "total_s")},
        "memory": {name: measured[name] for name in _MEMORY},
        "context": statistics.context,
    }
    return report, bool(interrupted)
