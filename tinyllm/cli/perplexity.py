"""`tinyllm perplexity`: how well a model predicts a text, and how near it is to another one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinyllm.cli import console, options
from tinyllm.errors import UsageError

if TYPE_CHECKING:
    from tinyllm.perplexity.statistics import Comparison, Estimate

_CONTEXT = 512


def perplexity(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or a repository of the hub.")],
    text: Annotated[
        Path | None, typer.Argument(metavar="TEXT", help="A text file; without it, chapters of a novel of 1890.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Tokens of a window. Default: 512, or as the model has.")
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Tokens from one window to the next. Default: the context."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="TOKENS", min=2, help="Read only the first so many tokens of the text.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="OTHER", help="Compare with this model: the one that MODEL was made of.")
    ] = None,
    dtype: options.Dtype = None,
    kv_bits: options.KvBits = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    offline: options.Offline = False,
    debug: options.Debug = False,
) -> None:
    """Measure how well a model predicts a text.

    Perplexity is exp of the mean of -log p(token): lower is better. A window is read as a sequence of its own, and
    each of its tokens once. A token is scored in the first window that holds it and one before it. With --against,
    also how far the next-token distributions are apart. --kv-bits packs the KV cache of MODEL and not that of OTHER:
    --against MODEL itself says what that costs.
    """

    def command() -> None:
        if dtype is not None and dtype not in options.DTYPES:
            raise UsageError(f"--dtype must be one of {', '.join(options.DTYPES)}, not {dtype!r}")
        options.check_kv_bits(kv_bits)

        from tinyllm._mx import mx
        from tinyllm.checkpoint.contents import read_contents
        from tinyllm.cli.progress import Progress
        from tinyllm.hub.locate import find_model, model_name
        from tinyllm.perplexity import score, statistics
        from tinyllm.perplexity.text import DEFAULT_TEXT, common_tokens
        from tinyllm.perplexity.windows import windows
        from tinyllm.text.given import read_text

        path = DEFAULT_TEXT if text is None else text
        content = read_text(path)
        names = [model] if against is None else [model, against]
        folders = [find_model(name, offline=offline, report=console.say) for name in names]
        models = [read_contents(folder) for folder in folders]
        longest = min(opened.config.max_position_embeddings for opened in models)
        size = context or min(_CONTEXT, longest)
        ids = common_tokens(content, models, limit)
        read = windows(len(ids), size, stride or size)
        total = sum(window.scored for window in read)
        compute = None if dtype is None else getattr(mx, dtype)
        with Progress() as progress:

            def show(done: int) -> None:
                progress.show(f"{done:,} of {total:,} tokens")

            if against is None:
                compared = None
                losses = score.score(models[0], ids, read, dtype=compute, kv_bits=kv_bits, progress=show)
            else:
                pair = score.score_against(
                    models[0], models[1], ids, read, dtype=compute, kv_bits=kv_bits, progress=show
                )
                losses = pair.losses
                compared = statistics.compare(losses, pair.other_losses, pair.divergences, pair.agreeing)
        result = _Result(
            model=model_name(folders[0]),
            text=path.name,
            tokens=len(ids),
            scored=total,
            windows=len(read),
            context=size,
            stride=stride or size,
            kv_bits=kv_bits,
            perplexity=statistics.perplexity(losses),
            loss=statistics.mean(losses),
            other=None if against is None else model_name(folders[1]),
            against=compared,
        )
        if as_json:
            console.write(json.dumps(result.as_json(), ensure_ascii=False) + "\n")
        else:
            console.write("".join(f"{line}\n" for line in result.lines()))

    raise typer.Exit(console.run(command, debug=debug))


@dataclass(frozen=True)
class _Result:
    """What was measured of how much; `loss` is the mean of -log p, in nats."""

    model: str
    text: str
    tokens: int
    scored: int
    windows: int
    context: int
    stride: int
    kv_bits: int | None
    perplexity: Estimate
    loss: Estimate
    other: str | None
    against: Comparison | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> Iterator[str]:
        counts = f"{self.scored:,} of {self.tokens:,} tokens, by windows of {self.context:,}"
        packed = "" if self.kv_bits is None else f", KV cache packed to {self.kv_bits} bits"
        yield f"{self.model} on {self.text}: {counts}{packed}"
        yield f"{'perplexity:':<17}{_plain(self.perplexity, 3)}"
        if self.against is None:
            return
        found = self.against
        yield f"{'of the other:':<17}{_plain(found.perplexity, 3)} ({self.other})"
        yield f"{'difference:':<17}{_plain(found.difference, 3, sign='+')}"
        apart = found.divergence
        yield (
            f"{'KL divergence:':<17}{_plain(apart.mean, 5)}; 99 % of tokens below {apart.percentile_99:.5f},"
            f" at most {apart.greatest:.5f}"
        )
        yield f"{'same best token:':<17}{_plain(found.agreement, 2, scale=100)} %"


def _plain(estimate: Estimate, digits: int, *, sign: str = "", scale: float = 1) -> str:
    value = f"{scale * estimate.value:{sign}.{digits}f}"
    return value if estimate.error is None else f"{value} ± {scale * estimate.error:.{digits}f}"
