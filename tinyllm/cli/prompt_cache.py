"""`--prompt-cache FILE`: a prompt that was computed once, for all that begin like it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tinyllm.cli import console
from tinyllm.errors import PrefixFileError, UsageError
from tinyllm.hub.sizes import disk_size

if TYPE_CHECKING:
    from tinyllm.cli.progress import Progress
    from tinyllm.llm import LLM, Answer, Chunk


class PromptCache:
    """A file that is read before anything is asked where it is there, and written with the first prompt where not.

    Raises UsageError for a file in a folder that does not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_there = path.exists()
        self._saved: tuple[int, ...] = ()
        if not path.parent.is_dir():
            raise UsageError(f"--prompt-cache: there is no folder {path.parent}")

    def load(self, llm: LLM, progress: Progress) -> None:
        """Let prompts find what is in the file, if it is there. Raises PrefixFileError, by name."""
        if self.is_there:
            progress.show(f"loading {self.path}")
            self._saved = llm.load_prefix(self.path)

    def chunks(self, llm: LLM, answer: Answer, progress: Progress) -> Iterator[Chunk]:
        """Yield the chunks of an answer; write the file, if it is not there, before the first one with a token.

        Raises PrefixFileError if the prompt has next to nothing in common with one that was loaded.
        """
        if self.is_there:
            self._check_shared(answer.prompt_token_ids, 0 if llm.plan is None else llm.plan.page_size)
        for chunk in answer:
            if chunk.token_ids and not self.is_there:
                progress.show(f"saving {self.path}")
                self._save(llm, answer)
                progress.clear()
                size = disk_size(self.path.stat().st_size)
                console.say(f"{self.path}: {len(answer.prompt_token_ids):,} tokens of the prompt saved, {size}")
            yield chunk

    def _save(self, llm: LLM, answer: Answer) -> None:
        with _undisturbed():
            llm.save_prefix(answer.prompt_token_ids, self.path)
        self.is_there = True

    def _check_shared(self, prompt: tuple[int, ...], page_size: int) -> None:
        """A template alone begins alike everywhere: with less than a page in common, another text was meant."""
        pairs = enumerate(zip(self._saved, prompt, strict=False))
        common = next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(self._saved), len(prompt)))
        if common < min(page_size, len(prompt)) and page_size < len(self._saved):
            raise PrefixFileError(
                f"{self.path}: made of another text: its {len(self._saved):,} tokens and the prompt's {len(prompt):,}"
                f" part at token {common + 1:,}: delete it to make a new one, or give another file"
            )


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold a Ctrl-C back until a file is written: it would end the process, and leave half of it behind."""
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        signal.raise_signal(signal.SIGINT)
