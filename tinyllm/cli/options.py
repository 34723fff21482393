"""Options that commands share, and how their values are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from tinyllm.errors import UsageError

DTYPES = ("float32", "float16", "bfloat16")
DEVICES = ("cpu", "gpu")

Model = Annotated[
    str | None,
    typer.Option(
        "-m",
        "--model",
        metavar="MODEL",
        help="A folder, a GGUF file, or OWNER/NAME on the hub (:Q4_K_M of GGUF files).",
    ),
]
System = Annotated[str | None, typer.Option("-s", "--system", metavar="TEXT", help="The system message.")]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "-n", "--max-tokens", metavar="N", min=0, help="Most tokens to generate; without it, to the answer's end."
    ),
]
ChatMaxTokens = Annotated[
    int | None,
    typer.Option(
        "-n", "--max-tokens", metavar="N", min=1, help="Most tokens of an answer; without it, to the answer's end."
    ),
]
_TEMPERATURE = ("--temperature", "--temp", "-t")
Temperature = Annotated[
    float | None,
    typer.Option(
        *_TEMPERATURE,
        metavar="T",
        help="0 takes the most probable token; higher is more random. Default: the model's own, else 0.",
    ),
]
ChatTemperature = Annotated[
    float | None,
    typer.Option(
        *_TEMPERATURE,
        metavar="T",
        help="0 takes the most probable token. Default: the model's own, else 0.7 with top-p 0.95.",
    ),
]
TopP = Annotated[
    float | None, typer.Option(metavar="P", help="Draw among the likeliest tokens that make up probability P.")
]
TopK = Annotated[int | None, typer.Option(metavar="K", help="Draw among the K likeliest tokens; 0: all.")]
MinP = Annotated[
    float | None, typer.Option(metavar="P", help="Draw among tokens at least P times as likely as the likeliest.")
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(metavar="R", help="Above 1, tokens already in the text become less likely.")
]
RepetitionWindow = Annotated[
    int | None, typer.Option(metavar="N", help="How many of the last tokens that looks at; 0: all.")
]
PresencePenalty = Annotated[
    float | None, typer.Option(metavar="X", help="Subtracted from the logits of tokens already in the answer.")
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(metavar="X", help="The same, times how often each occurs in the answer.")
]
LogitBias = Annotated[
    list[str] | None, typer.Option(metavar="ID=V", help="Add V to the logit of token ID; may be repeated.")
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Makes a random answer repeatable.")]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End the answer before TEXT; may be repeated.")]
Think = Annotated[
    bool | None, typer.Option("--think/--no-think", help="Ask the template for reasoning, or for none.")
]
TemplateArg = Annotated[
    list[str] | None,
    typer.Option(metavar="K=V", help="Set a variable of the chat template, V as JSON or text; may be repeated."),
]
Prompts = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Answer every line of FILE; - reads stdin."),
]
Output = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="With --prompts: write to FILE, and go on with one that is there."),
]
Batch = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, max=256, help="With --prompts: how many to answer at once. Default: 8."),
]
InOrder = Annotated[
    bool, typer.Option("--in-order", help="With --prompts: write in the order of the prompts, not as they finish.")
]
PromptCache = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Keep the computed prompt in FILE; one that is there saves computing it."),
]
KvBudget = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Most memory for the KV cache: 2GB, 512MiB, 40% of what is left."),
]
KvBits = Annotated[
    int | None,
    typer.Option(metavar="BITS", help="Pack the KV cache to 8 or 4 bits an element: less memory, less exact."),
]
MaxContext = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Most tokens of a prompt and its answer together: room is made for them."),
]
NoWiredLimit = Annotated[
    bool, typer.Option("--no-wired-limit", help="Do not have Metal keep the model's memory resident.")
]
Eager = Annotated[bool, typer.Option("--eager", help="Do not compile decode steps.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE",
        help="Compute in float32, float16 or bfloat16. Default: float32 on a CPU; on a GPU the model's own, with"
        " bfloat16 in place of float16.",
    ),
]
Device = Annotated[str | None, typer.Option(metavar="DEVICE", help="Compute on cpu or gpu.")]
Offline = Annotated[bool, typer.Option("--offline", help="Make no connection at all.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and when an answer ends: an option for each field, where a command is `grouped`."""

    max_tokens: MaxTokens = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    repetition_window: RepetitionWindow = None
    presence_penalty: PresencePenalty = None
    frequency_penalty: FrequencyPenalty = None
    logit_bias: LogitBias = None
    seed: Seed = None
    stop: Stop = None

    def settings(self) -> dict[str, Any]:
        """Return those that were given, as `LLM.generate` takes them.

        Raises UsageError, before a model is looked for, for a value that no model takes.
        """
        from tinyllm.engine.request import SamplingParams

        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given["logit_bias"] = read_logit_bias(self.logit_bias)
        if "" in (self.stop or ()):
            raise UsageError("--stop needs a text: a stop string must not be empty")
        given = {name: value for name, value in given.items() if value not in (None, [])}
        names = {field.name for field in fields(SamplingParams)}
        SamplingParams(**{name: value for name, value in given.items() if name in names})
        return given


@dataclass(frozen=True)
class ChatSampling(Sampling):
    """As in a chat, which is livelier where the model's makers say nothing."""

    max_tokens: ChatMaxTokens = None
    temperature: ChatTemperature = None


@dataclass(frozen=True)
class Running:
    """How a model is run: an option for each field, where a command is `grouped`."""

    kv_budget: KvBudget = None
    kv_bits: KvBits = None
    max_context: MaxContext = None
    no_wired_limit: NoWiredLimit = False
    eager: Eager = False
    dtype: Dtype = None
    device: Device = None

    def arguments(self, *, batch: int) -> dict[str, Any]:
        """Return them as `LLM` takes them. Raises UsageError for a value that no model takes."""
        for name, value, known in (("dtype", self.dtype, DTYPES), ("device", self.device, DEVICES)):
            if value is not None and value not in known:
                raise UsageError(f"--{name} must be one of {', '.join(known)}, not {value!r}")
        check_kv_bits(self.kv_bits)
        return {
            "kv_budget": read_kv_budget(self.kv_budget),
            "kv_bits": self.kv_bits,
            "max_context": self.max_context,
            "wired": not self.no_wired_limit,
            "compiled": not self.eager,
            "dtype": self.dtype,
            "device": self.device,
            "batch": batch,
        }


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, in the place of each parameter that is a dataclass, an option for each of its fields.

    All parameters are taken by name.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    shown: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        if parameter.name not in groups:
            shown.append(parameter.replace(annotation=hints[parameter.name]))
            continue
        group = groups[parameter.name]
        of_group = get_type_hints(group, include_extras=True)
        for field in fields(group):
            of_field = of_group[field.name]
            shown.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=of_field))

    @wraps(command)
    def called(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    called.__signature__ = signature(command).replace(parameters=shown)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return called


def check_kv_bits(bits: int | None) -> None:
    """Raise UsageError for bits that no KV cache is packed to."""
    from tinyllm.config.quantization import CACHE_BITS

    if bits is not None and bits not in CACHE_BITS:
        raise UsageError(f"--kv-bits must be {' or '.join(map(str, CACHE_BITS))}, not {bits}")


def read_kv_budget(text: str | None) -> int | Fraction | None:
    """Read a size in bytes, or a share. Raises UsageError for what is neither."""
    from tinyllm.engine.plan_text import read_size

    return None if text is None else read_size("--kv-budget", text)


def read_logit_bias(pairs: list[str] | None) -> dict[int, float] | None:
    """Read ID=V pairs. Raises UsageError for one that is none."""
    biases: dict[int, float] = {}
    for pair in pairs or []:
        token_id, _, value = pair.partition("=")
        try:
            biases[int(token_id)] = float(value)
        except ValueError:
            raise UsageError(f"--logit-bias must be a token id, =, and a number, not {pair!r}") from None
    return biases or None


def read_template_args(pairs: list[str] | None, think: bool | None) -> dict[str, Any]:
    """Read K=V pairs, V as JSON or else as text; `think` sets what templates call it. Raises UsageError."""
    from tinyllm.text.chat_template import THINKING

    values: dict[str, Any] = {} if think is None else dict.fromkeys(THINKING, think)
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise UsageError(f"--template-arg must be a name, =, and a value, not {pair!r}")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values
