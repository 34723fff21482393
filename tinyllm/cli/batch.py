"""`tinyllm generate --prompts`: the prompts of a file, several at a time, into a file of answers."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tinyllm.checkpoint.digest import model_digest
from tinyllm.cli import console
from tinyllm.cli.answers_file import Answered, AnswersFile
from tinyllm.cli.asking import Asking
from tinyllm.cli.progress import Progress
from tinyllm.cli.prompts_file import Id, Line, PromptsFile
from tinyllm.errors import TinyllmError
from tinyllm.terminal.text import tell

if TYPE_CHECKING:
    from tinyllm.llm import LLM, Answer

Record = dict[str, Any]

AHEAD = 2  # requests at hand for each that the engine runs at once, so that it never waits for the next
HELD = 8  # where order is kept, so many times more lines may have begun: a long answer holds back those after it


@dataclass(frozen=True)
class Plan:
    """Which prompts, where their answers go, how many are computed at once, and in which order they are written.

    `running` are those arguments of `LLM` that may change an answer.
    """

    prompts: str
    output: str
    batch: int
    in_order: bool
    running: Mapping[str, Any]


def answer_file(
    plan: Plan,
    asking: Asking,
    find: Callable[[], Path],
    load: Callable[[Path, Progress], LLM],
    *,
    with_figures: bool,
    debug: bool,
) -> None:
    """Answer the lines of a file that have no answer yet, or an answer to another prompt, setting or model.

    `find` returns the model's folder and `load` loads it. A line that fails has an error in place of an answer, and
    does not keep the others from theirs. The file of answers is left alone until the model is loaded. Raises
    UsageError, before a model is looked for, for files that cannot be meant; and TinyllmError, at the end, if lines
    failed.
    """
    prompts, answers = PromptsFile(plan.prompts), AnswersFile(plan.output)
    folder = find()
    more = (model_digest(folder), asking.system, asking.template_args, asking.raw, plan.running)
    fingerprints = {line.id: line.fingerprint(asking.settings, *more) for line in prompts if line.id is not None}
    current = {
        (line_id, made_of) for line_id, made_of in answers.answered if _is_current(line_id, made_of, fingerprints)
    }
    answered = {line_id for line_id, _ in current}
    done = len(prompts.ids & answered)
    _tell_of_earlier(answers, current, answered & prompts.ids, prompts.count)
    if done == prompts.count:
        answers.keep(current)
        return
    with Progress() as progress:
        llm = load(folder, progress)
        if without_effect := asking.without_effect(llm):
            console.say(without_effect)
    answers.keep(current)
    watched = console.on_terminal() and not (plan.output == "-" and sys.stdout.isatty())
    tally = _Tally(total=prompts.count, answered=done)
    lines = (line for line in prompts if line.id not in answered)
    try:
        with tally.shown(on_terminal=watched):
            for record in _Run(llm, asking, plan, tally, debug).records(lines):
                tally.add_line(record)  # first: whoever reads a line may interrupt before anything comes after it
                made_of = fingerprints.get(record["id"])
                answers.write(record if made_of is None or "error" in record else {**record, "hash": made_of})
    except KeyboardInterrupt:
        further = "" if plan.output == "-" else f" in {answers.name}: the same command goes on from there"
        console.say(f"stopped: {tally.answered:,} of {tally.total:,} lines are answered{further}")
        raise
    except Exception:
        llm.close()  # or the threads that wait for answers would keep the process from its end
        raise
    if with_figures:
        tell(tally.figures())
    if tally.failed:
        raise TinyllmError(f"{tally.failed:,} of {tally.total:,} lines failed: {answers.name} says why")


def _is_current(line_id: Id, made_of: str | None, fingerprints: Mapping[Id, str]) -> bool:
    """Return False for an answer to something other than is asked now; without a hash, nobody knows."""
    return made_of is None or fingerprints.get(line_id, made_of) == made_of


def _tell_of_earlier(answers: AnswersFile, current: Set[Answered], kept: Set[Id], count: int) -> None:
    """Tell how many answers of an earlier run are kept, and how many are made again."""
    stale = {line_id for line_id, made_of in answers.answered if (line_id, made_of) not in current} - kept
    if stale:
        were = "1 answer was to another" if len(stale) == 1 else f"{len(stale):,} answers were to another"
        console.say(f"{answers.name}: {were} prompt, setting or model: asked again")
    unknown = sum(made_of is None and line_id in kept for line_id, made_of in current)
    if unknown:
        does = "1 answer does" if unknown == 1 else f"{unknown:,} answers do"
        console.say(f"{answers.name}: {does} not say what was asked: kept")
    if kept:
        console.say(f"{answers.name}: {len(kept):,} of {count:,} lines are answered there already")


class _Run:
    """Asks in the order of the lines, a bounded number ahead, and takes each answer in a thread of its own."""

    def __init__(self, llm: LLM, asking: Asking, plan: Plan, tally: _Tally, debug: bool) -> None:
        self._llm = llm
        self._asking = asking
        self._in_order = plan.in_order
        self._batch = plan.batch
        self._tally = tally
        self._debug = debug

    def records(self, lines: Iterable[Line]) -> Iterator[Record]:
        """Yield what to write for each line, as they finish or in their order."""
        threads = AHEAD * self._batch
        most = HELD * threads if self._in_order else threads
        pool = ThreadPoolExecutor(threads)
        running: list[Future[Record]] = []
        try:
            for line in lines:
                running.append(pool.submit(self._collect, line, self._ask(line)))
                if len(running) >= most:
                    yield from self._finished(running)
            while running:
                yield from self._finished(running)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _finished(self, running: list[Future[Record]]) -> list[Record]:
        """Wait for the first to finish (in order: for the first one), and take out those that have by then."""
        done, _ = wait(running[:1] if self._in_order else running, return_when=FIRST_COMPLETED)
        records = [future.result() for future in running if future in done]
        running[:] = [future for future in running if future not in done]
        return records

    def _ask(self, line: Line) -> Answer | Exception:
        try:
            return self._asking.ask(self._llm, line.content(), **line.settings())
        except Exception as error:  # of whatever kind: it is this line's alone
            return error

    def _collect(self, line: Line, answer: Answer | Exception) -> Record:
        try:
            if isinstance(answer, Exception):
                raise answer
            return {"id": line.id, **self._read(answer)}
        except Exception as error:
            if self._debug:
                tell("".join(traceback.format_exception(error)).rstrip())
            return {"id": line.id, "error": f"line {line.number}: {_explain(error)}"}

    def _read(self, answer: Answer) -> Record:
        """Wait for the end of an answer. Reasoning and a seed are told where there are any."""
        chunks = []
        for chunk in answer:
            self._tally.add_tokens(len(chunk.token_ids))
            chunks.append(chunk)
        reasoning = "".join(chunk.reasoning for chunk in chunks)
        statistics = chunks[-1].statistics
        assert statistics is not None
        return {
            "text": "".join(chunk.text for chunk in chunks),
            **({"reasoning": reasoning} if reasoning else {}),
            "finish_reason": chunks[-1].finish_reason,
            "prompt_tokens": statistics.prompt_tokens,
            "completion_tokens": statistics.completion_tokens,
            **({} if statistics.sampling.greedy else {"seed": statistics.sampling.seed}),
        }


def _explain(error: Exception) -> str:
    if isinstance(error, TinyllmError):
        return str(error)
    return f"internal error: {type(error).__name__}: {' '.join(str(error).split())}"


class _Tally:
    """Counts lines, and tokens as they come from every thread; `answered` lines may be so from an earlier run."""

    def __init__(self, *, total: int, answered: int) -> None:
        self.total = total
        self.answered = answered
        self.failed = 0
        self._before = answered
        self._prompt_tokens = self._tokens = 0
        self._started = perf_counter()
        self._lock = threading.Lock()
        self._show: Callable[..., object] = lambda **figures: None

    @contextmanager
    def shown(self, *, on_terminal: bool) -> Iterator[None]:
        """Show a bar on stderr meanwhile, where it is a terminal."""
        if not on_terminal:
            yield
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        from tinyllm.terminal.console import TerminalConsole

        rate, left = TextColumn("{task.fields[rate]:,.0f} tokens/s"), TextColumn("left")
        columns = ("answering", BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn(), left)
        period = 3600  # an answer may take minutes, and the time that is left is told from those of this period
        with Bar(
            *columns,
            console=TerminalConsole(stderr=True),
            transient=True,
            redirect_stdout=False,
            speed_estimate_period=period,
        ) as bar:
            task = bar.add_task("", total=self.total, completed=self.answered, rate=0.0)
            self._show = partial(bar.update, task)
            yield

    def add_tokens(self, count: int) -> None:
        """Count tokens of an answer that are there; from any thread."""
        with self._lock:
            self._tokens += count
        self._show(rate=self._rate)

    def add_line(self, record: Record) -> None:
        """Count a line that is written."""
        if "error" in record:
            self.failed += 1
        else:
            self.answered += 1
            self._prompt_tokens += record["prompt_tokens"]
        self._show(completed=self.answered + self.failed)

    def figures(self) -> str:
        """Say in one line what this run did."""
        failed = f", {self.failed:,} failed" if self.failed else ""
        return (
            f"{self.answered - self._before:,} lines answered{failed} · prompts {self._prompt_tokens:,} tokens"
            f" · answers {self._tokens:,} tokens in {self._elapsed_s:.1f} s, {self._rate:.1f} tokens/s"
        )

    @property
    def _elapsed_s(self) -> float:
        return perf_counter() - self._started

    @property
    def _rate(self) -> float:
        return self._tokens / self._elapsed_s
