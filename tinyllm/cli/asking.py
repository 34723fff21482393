"""How a prompt is put to a model, for one prompt or for many: what a command's flags say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinyllm.errors import UsageError

if TYPE_CHECKING:
    from tinyllm.llm import LLM, Answer


def check_not_blank(prompt: str, *, raw: bool) -> None:
    """Raise UsageError for a prompt that asks nothing; a `raw` one may be empty, and starts from nothing."""
    if not raw and not prompt.strip():
        raise UsageError("the prompt is blank (--raw continues even an empty one)")


@dataclass(frozen=True)
class Asking:
    """`settings` are those of `LLM.generate`; `raw` continues a prompt as it is, with no template around it."""

    settings: Mapping[str, Any]
    system: str | None
    template_args: Mapping[str, Any]
    raw: bool

    def without_effect(self, llm: LLM) -> str | None:
        """Say so where the model's template looks at nothing of what it is told. Raises ChatTemplateError."""
        template = llm.tokenizer.chat_template
        if not self.template_args or template is None or template.reads(*self.template_args):
            return None
        names = " or ".join(self.template_args)
        return f"the model's template does not know {names}: --think and --template-arg have no effect"

    def ask(self, llm: LLM, content: str | Sequence[Mapping[str, Any]], **own: Any) -> Answer:
        """Submit a prompt, or the messages of a conversation; settings of its `own` go before the flags'.

        The system message begins a conversation that has none. Raises TinyllmError, by name, for what the model or
        its template does not take.
        """
        settings = {**self.settings, **own}
        if isinstance(content, str):
            check_not_blank(content, raw=self.raw)
            if self.raw or llm.tokenizer.chat_template is None:
                return llm.generate(content, parse_special=self.raw, **settings)
            content = [{"role": "user", "content": content}]
        if self.system is not None and content[0].get("role") != "system":
            content = [{"role": "system", "content": self.system}, *content]
        return llm.chat(content, template_args=self.template_args, **settings)
