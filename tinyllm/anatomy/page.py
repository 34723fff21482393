"""What is known of a model as plain text of 80 columns. No mlx."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from textwrap import wrap
from typing import TYPE_CHECKING

from tinyllm.anatomy.counts import (
    block_kinds,
    block_parameters,
    experts_of,
    feed_forward_width,
    model_parameters,
    ungrouped_elements,
)
from tinyllm.anatomy.diagram import draw, rope_words
from tinyllm.anatomy.facts import ITEMSIZES, block_tensors, cached_bytes, packed_token_bytes, tensor_facts
from tinyllm.anatomy.subject import Format, Subject
from tinyllm.checkpoint.folded import folded, ranges
from tinyllm.config.config import Config
from tinyllm.config.generation import GenerationConfig
from tinyllm.config.layers import AttentionConfig, rope_of
from tinyllm.hub.sizes import disk_size, memory_size
from tinyllm.kv.kinds import layer_kinds

if TYPE_CHECKING:
    from tinyllm.engine.plan import MemoryPlan

__all__ = ["block_page", "page", "plan_page", "shapes_page"]

_LIMITS = ("max_new_tokens", "max_length", "min_new_tokens", "min_length")
_WIDTH, _LABEL, _SHOWN = 80, 14, 6
_ASCII = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def page(subject: Subject, context: int | None = None) -> Iterator[str]:
    """Yield the lines on a whole model: figures, a diagram of each kind of block, what is wrong with its files."""
    config = subject.config
    for label, text in _rows(subject, context or config.max_position_embeddings):
        yield from _row(label, text)
    for kind in block_kinds(config):
        counted = block_parameters(config, kind.layer)
        active = "" if counted.active == counted.total else f", {counted.active:,} active"
        numbers = f"layer {ranges(kind.numbers)}" if len(kind.numbers) == 1 else f"layers {ranges(kind.numbers)}"
        yield ""
        yield from wrap(f"{numbers}: {counted.total:,} parameters each{active}", _WIDTH)
        yield from draw(config, kind.layer)
    yield from _problems(subject.problems)


def block_page(subject: Subject, number: int) -> Iterator[str]:
    """Yield the lines on one block: the diagram, and its tensors as the config has them beside those of the files."""
    mine, theirs = block_tensors(subject, number)
    layer = subject.config.layers[number]
    rows = [["tensor", "config.json", "files"]]
    for name in [*mine, *(name for name in theirs or {} if name not in mine)]:
        pair = [mine.get(name), None if theirs is None else theirs.get(name)]
        rows.append([name, *("-" if shape is None else str(list(shape)) for shape in pair)])
    ours, refs = (sum(map(math.prod, shapes.values())) for shapes in (mine, theirs or {}))
    rows.append(["parameters", f"{ours:,}", "-" if theirs is None else f"{refs:,}"])
    yield f"{subject.name}, layer {number} of {subject.config.num_hidden_layers}"
    yield from ("", *draw(subject.config, layer), "")
    for row in rows:
        differs = theirs is not None and row[1] != row[2] and row is not rows[0]
        cells = [cell.ljust(max(len(other[i]) for other in rows)) for i, cell in enumerate(row)]
        yield f"{'!' if differs else ' '} {'  '.join(cells)}".rstrip()
    prefix = f"model.layers.{number}."
    here = {
        kind: {name: text for name, text in names.items() if name.startswith(prefix)}
        for kind, names in subject.problems.items()
    }
    yield from _problems({kind: names for kind, names in here.items() if names})


def shapes_page(subject: Subject) -> Iterator[str]:
    """Yield a line for each tensor, those that differ in their layer alone as one; ! marks what is wrong."""
    lines: dict[str, list[str]] = {}
    for row in tensor_facts(subject):
        expected, found = row["expected"], row["found"]
        if found is None:
            text = str(expected) if subject.table is None else f"missing, expected {expected}"
        else:
            wanted = "" if expected in (None, found) else f", expected {expected}"
            text = f"{found} {row['format']}{wanted}" + (", surplus" if expected is None else "")
        lines.setdefault(f"{'!' if row['problem'] else ' '}{text}", []).append(row["name"])
    rows = [(text[0], name, text[1:]) for text, names in lines.items() for name in folded(names)]
    for mark, name, text in sorted(rows, key=lambda row: row[1]):
        line = f"{mark} {name}  {text}"
        yield from [line] if len(line) <= _WIDTH else (f"{mark} {name}", f"      {text}")


def plan_page(plan: MemoryPlan, machine_bytes: int) -> Iterator[str]:
    """Yield the lines on what a model takes on a machine of so many bytes."""
    from tinyllm.engine.plan_text import table

    lent = f"of which Metal lends {memory_size(plan.available_bytes)} at least"
    yield f"on a Mac with {memory_size(machine_bytes)}, {lent}:"
    rows = table(plan)
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    for what, size, remark in rows:
        yield f"  {what:<{widths[0]}}  {size:>{widths[1]}}  {remark}"


# ---------------------------------------------------------------- figures


def _rows(subject: Subject, context: int) -> Iterator[tuple[str, str]]:
    config = subject.config
    counted = model_parameters(config)
    within = "" if config.wrapper is None else f", the text model of {config.wrapper.model_type}"
    yield subject.name, f"{config.model_type}{within}"
    active = "" if counted.active == counted.total else f"; {_count(counted.active)} active for a token"
    yield "parameters", f"{_count(counted.total)} ({counted.total:,}){active}"
    kinds = block_kinds(config)
    alike = "alike" if len(kinds) == 1 else f"of {len(kinds)} kinds"
    layers = f"{config.num_hidden_layers} layers {alike}" if config.num_hidden_layers > 1 else "1 layer"
    head = "also the head" if config.tie_word_embeddings else "beside a head"
    yield "shape", f"{layers}, hidden size {config.hidden_size:,}, {config.vocab_size:,} embeddings ({head})"
    for text in dict.fromkeys(_feed_forward(config)):
        yield "feed-forward", text
    positions = [*dict.fromkeys(_positions(config)), f"up to {config.max_position_embeddings:,}"]
    yield "positions", "; ".join(positions)
    yield from _cache_rows(config, context)
    yield "sampling", _sampling(subject.generation)
    ends = [f"{token} ({', '.join(sources)})" for token, sources in subject.stop_tokens.items()]
    yield "stop tokens", "; ".join(ends) or "none"
    yield "weights", _weights(subject)
    for form in subject.formats[1:]:
        yield "", f"{form.name}: {_members(form)} ({form.bits_per_weight:.3g} bits)"
    if subject.table is not None and subject.comparison is not None:
        if subject.comparison.ignored:
            yield "", f"of no use: {', '.join(folded(subject.comparison.ignored)[:_SHOWN])}"
        if subject.table.skipped:
            yield "", f"{subject.table.skipped:,} more tensors of other parts"
        wrong = sum(map(len, subject.problems.values()))
        differ = f"{wrong:,} {'differs' if wrong == 1 else 'differ'} from config.json, see below"
        yield "check", differ if wrong else "every tensor as config.json asks"


def _sampling(generation: GenerationConfig) -> str:
    """Say how tokens are chosen unless options say otherwise, and who says so."""
    stated = [f"{name} {value:g}" for name, value in generation.sampling.items() if name != "logit_bias"]
    if bias := generation.sampling.get("logit_bias"):
        stated.append(f"{len(bias):,} tokens with a bias")
    stated += [f"{name} {value:,}" for name in _LIMITS if (value := getattr(generation, name))]
    if begin := generation.begin_suppress_tokens:
        stated.append(f"{len(begin):,} tokens never first")
    return f"{', '.join(stated)} ({generation.source})" if stated else "greedy (the files state nothing)"


def _feed_forward(config: Config) -> Iterator[str]:
    for kind in block_kinds(config):
        mixture = experts_of(kind.layer.feed_forward)
        width = feed_forward_width(kind.layer)
        ratio = f"{round(width / config.hidden_size, 2)} times the hidden size"
        if mixture is None:
            yield f"{width:,} wide, {ratio}"
        else:
            experts = f"{mixture.router.top_k} of {mixture.router.num_experts} experts"
            yield f"{experts}, each {mixture.expert.intermediate_size:,} wide; for a token {width:,}, {ratio}"


def _positions(config: Config) -> Iterator[str]:
    for kind in block_kinds(config):
        mixer = kind.layer.attention
        rope = rope_of(mixer)
        if rope is not None:
            yield rope_words(rope, mixer.head_dim if isinstance(mixer, AttentionConfig) else rope.dims)
        elif isinstance(mixer, AttentionConfig) and mixer.bias is not None:
            yield type(mixer.bias).__name__
        elif isinstance(mixer, AttentionConfig) and config.learned_positions is None:
            yield "none in some layers"
    if config.learned_positions is not None:
        yield f"a table of {config.learned_positions:,}"


def _cache_rows(config: Config, context: int) -> Iterator[tuple[str, str]]:
    kinds = layer_kinds(config)[0]
    half, single = (sum(kind.token_bytes(size) for kind in kinds) for size in (2, 4))
    whole = 2 * ungrouped_elements(config)
    yield "KV cache", f"{half:,} bytes a token in half precision, {single:,} in float32"
    packed = packed_token_bytes(config, ITEMSIZES["bfloat16"])
    if packed:
        sizes = ", ".join(f"{nbytes:,} with --kv-bits {bits}" for bits, nbytes in packed.items())
        yield "", f"packed, {sizes}"
    mixers = [layer.attention for layer in config.layers]
    groups = {m.num_heads // m.num_kv_heads for m in mixers if isinstance(m, AttentionConfig)}
    if 0 < half < whole:
        sizes = " or ".join(map(str, sorted(groups)))
        shared = f"groups of {sizes} heads share keys; if none did" if groups else "if each head kept its own"
        yield "", f"{shared}, {whole:,}: {whole / half:.1f} times as much"
    for kind in kinds if len(kinds) > 1 else ():
        seen = "everything before" if kind.reach is None else kind.reach.describe()
        who = "1 layer sees" if kind.layers == 1 else f"{kind.layers} layers see"
        each = kind.token_bytes(ITEMSIZES["bfloat16"])
        yield "", f"{who} {seen}: {each:,} bytes a token" if each else f"{kind.layers} keep a state in place of keys"
    total = sum(cached_bytes(kind, context, ITEMSIZES["bfloat16"]) for kind in kinds)
    size = memory_size(total) if total >= 2**20 else f"{total:,} bytes"
    yield "", f"{size} for {context:,} tokens"


def _weights(subject: Subject) -> str:
    formats = subject.formats
    nbytes, count = sum(form.nbytes for form in formats), sum(form.parameters for form in formats)
    name = _ASCII.get(formats[0].name, formats[0].name)
    stored = f"{disk_size(nbytes)}, {name}, {8 * nbytes / max(1, count):.3g} bits a weight"
    if subject.table is None:
        return f"{stored}, as config.json says: no safetensors beside it"
    plural = "file" if subject.files == 1 else "files"
    return f"{stored}; {subject.filed:,} tensors in {subject.files:,} {plural}"


def _members(form: Format) -> str:
    names = folded(form.matrices) or ["norms and biases"]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(name.removesuffix(".weight") for name in names[:_SHOWN]) + more


def _problems(problems: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for kind, names in problems.items():
        yield ""
        yield f"{kind}: {len(names):,}"
        yield from (f"! {line}" for line in folded(names.values()))


def _row(label: str, text: str) -> list[str]:
    if len(label) >= _LABEL:
        return [f"{label}: {text}"]
    return wrap(
        text, _WIDTH, initial_indent=label.ljust(_LABEL), subsequent_indent=" " * _LABEL, break_on_hyphens=False
    )


def _count(parameters: int) -> str:
    """Write 596,049,920 as 596M, and 30,532,122,624 as 30.5B."""
    size, units = float(parameters), ["", "k", "M", "B", "T"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g}{units[0]}"
