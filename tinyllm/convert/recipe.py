"""Which matrix is packed in which form: recipes, as a person writes them. No mlx."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tinyllm.config.config import Config
from tinyllm.config.quantization import MODES, QuantFormat
from tinyllm.config.tensors import EMBEDDING, LM_HEAD, stored_shapes
from tinyllm.errors import UsageError

__all__ = ["MIXED", "Choice", "Recipe", "choose", "read_format", "read_recipe"]

MIXED = "mixed"
_FEWEST_ROWS = 8
_NEVER = re.compile(
    r"\.(?:mlp|moe)\.gate$|\.shared_expert_gate$|\.linear_attn\.in_proj_[ab]$|\.conv1d$|\.conv\.conv$|embed_positions$|norm$"
)
_NUMBER = re.compile(r"\.\d+\.")
_DENSE = ("false", "16")
_HEAD, _EMBEDDING = LM_HEAD.removesuffix(".weight"), EMBEDDING.removesuffix(".weight")

Rule = Callable[[str], "QuantFormat | None"]


@dataclass(frozen=True)
class Recipe:
    """Patterns over names of modules, each with a form (None: dense), the first that fits first; else `default`.

    A pattern (`lm_head`, `layers.*.mlp.down`) may leave out "model." at the beginning and "_proj" at the end, and
    `lm_head` is the embedding, too, where the two are one. With `mixed`, modules that no pattern fits are packed as
    `_mixed` says.
    """

    default: QuantFormat | None
    patterns: tuple[tuple[str, QuantFormat | None], ...] = ()
    mixed: bool = False


@dataclass(frozen=True)
class Choice:
    """The form of each module that has a matrix (None: dense), and why those are dense that nobody asked to be."""

    forms: Mapping[str, QuantFormat | None]
    dense: Mapping[str, str]


def read_format(bits: int | None, group_size: int | None, mode: str) -> QuantFormat:
    """Return the form that options name, MLX's defaults of a mode in place of what is None.

    Raises UsageError for one that MLX does not have.
    """
    if mode not in MODES:
        raise UsageError(f"--mode must be one of {', '.join(MODES)}, not {mode!r}")
    bits_known, groups_known = MODES[mode]
    form = QuantFormat(bits or bits_known[0], group_size or groups_known[0], mode)
    for name, value, known in (
        ("--quantize", form.bits, bits_known),
        ("--group-size", form.group_size, groups_known),
    ):
        if value not in known:
            numbers = ", ".join(map(str, sorted(known)))
            raise UsageError(f"{name}: {mode} has {numbers}, and not {value}")
    return form


def read_recipe(text: str, default: QuantFormat) -> Recipe:
    """Read `PATTERN=FORM,...`, a form being bits, the name of a mode, or false (or 16) for dense; or `mixed`.

    Bits are of `default`'s mode and group where that has as many, else affine. Raises UsageError for what is none of
    these. Modules that no pattern fits are packed as `default`.
    """
    patterns: list[tuple[str, QuantFormat | None]] = []
    mixed = False
    for part in filter(None, (part.strip() for part in text.split(","))):
        pattern, equals, value = (piece.strip() for piece in part.partition("="))
        if part == MIXED:
            mixed = True
        elif not pattern or not equals:
            raise UsageError(
                f"--recipe is {MIXED}, or has PATTERN=BITS (lm_head=8,layers.*.mlp.down=6,*=4), not {part!r}"
            )
        else:
            patterns.append((pattern, _read_form(value, default)))
    if not patterns and not mixed:
        raise UsageError("--recipe says nothing")
    return Recipe(default, tuple(patterns), mixed)


def choose(config: Config, recipe: Recipe, names: Container[str] = ()) -> Choice:
    """Decide for every matrix of a model, of which a checkpoint has these `names`.

    Raises UsageError for a pattern that fits none of them, or none that the ones before it leave.
    """
    rule = _mixed(config, recipe.default) if recipe.mixed else lambda module: recipe.default
    forms: dict[str, QuantFormat | None] = {}
    dense: dict[str, str] = {}
    unused, idle = ([pattern for pattern, _ in recipe.patterns] for _ in range(2))
    known: dict[str, None] = {}
    for name, shape in stored_shapes(config, names).items():
        module = name.removesuffix(".weight")
        if len(shape) < 2 or module == name:
            continue
        called = _names(module, config)
        known[_NUMBER.sub(".*.", min(called, key=len))] = None
        fitting = [(pattern, form) for pattern, form in recipe.patterns if _fits(pattern, called)]
        unused = [pattern for pattern in unused if pattern not in dict(fitting)]
        idle = [pattern for pattern in idle if not fitting or pattern != fitting[0][0]]
        form = fitting[0][1] if fitting else rule(module)
        reason = None if form is None else _why_dense(module, shape, form)
        if reason is not None:
            dense[module] = reason
        forms[module] = form if reason is None else None
    if unused:
        raise UsageError(
            f"--recipe: no matrix of this model is called {' or '.join(unused)}: it has {', '.join(known)}"
        )
    if idle:
        raise UsageError(
            f"--recipe: {' and '.join(idle)} changes nothing: the first pattern that fits counts, and others before"
            " fit all that it names"
        )
    return Choice(forms, dense)


def _mixed(config: Config, base: QuantFormat | None) -> Rule:
    """Spend a step more (4 bits: 5, 6: 8) where the loss is, and two on values.

    What is rounded matters by where it goes. A feed-forward network's down projection reads the products of two
    others, with a few great values among them, and writes to the residual stream, from where nothing takes it back.
    The head's errors are errors of logits. Values are summed by attention as they are, while errors of q and k only
    shift its weights; and with heads in groups they are few.

    On the embedded model at 4 bits, measured by KL divergence a bit, bits for values bought several times what bits
    for all matrices do, and those for down projections and the head more than those for any other; a second step
    there, or more for the first and last layers, bought less than a bit for all.
    """
    if base is None or base.mode != "affine":
        raise UsageError(f"--recipe {MIXED} chooses among bits, which only the mode affine has")
    steps = sorted(MODES["affine"][0])
    one, two = (
        QuantFormat(steps[min(steps.index(base.bits) + more, len(steps) - 1)], base.group_size) for more in (1, 2)
    )
    values = re.compile(r"\.layers\.\d+\..*(?:\.v_proj|\.kv_[ab]_proj\w*)$")
    head = _EMBEDDING if config.tie_word_embeddings else _HEAD

    def rule(module: str) -> QuantFormat:
        if values.search(module):
            return two
        return one if module == head or module.endswith(".down_proj") else base

    return rule


def _read_form(text: str, default: QuantFormat) -> QuantFormat | None:
    if text in _DENSE:
        return None
    if text in MODES:
        return read_format(None, None, text)
    affine_bits, affine_groups = MODES["affine"]
    if not text.isascii() or not text.isdigit() or int(text) not in affine_bits:
        numbers = ", ".join(map(str, sorted(affine_bits)))
        raise UsageError(f"--recipe: a form is bits ({numbers}), {', '.join(MODES)}, or false, not {text!r}")
    if int(text) in MODES[default.mode][0]:
        return QuantFormat(int(text), default.group_size, default.mode)
    return QuantFormat(int(text), affine_groups[0])


def _names(module: str, config: Config) -> frozenset[str]:
    """Return all that a pattern may call a module."""
    names = {module, _HEAD} if module == _EMBEDDING and config.tie_word_embeddings else {module}
    names |= {name.removeprefix("model.") for name in names}
    return frozenset(names | {name.removesuffix("_proj") for name in names})


def _fits(pattern: str, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _why_dense(module: str, shape: tuple[int, ...], form: QuantFormat) -> str | None:
    if _NEVER.search(module):
        return "it decides much and is small"
    if shape[-2] < _FEWEST_ROWS:
        return f"it has {shape[-2]} rows"
    if shape[-1] % form.group_size:
        return f"groups of {form.group_size} do not divide its {shape[-1]} columns"
    return None
