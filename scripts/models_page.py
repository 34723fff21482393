"""docs/MODELS.md: which models run, what each is made of, and how that is known."""

from __future__ import annotations

import json
import pkgutil
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from variants import VARIANTS, Variant

from tinyllm.anatomy.counts import experts_of, networks_of
from tinyllm.config import families
from tinyllm.config.config import Config
from tinyllm.config.families.table import FAMILIES
from tinyllm.config.families.wrappers import WRAPPERS
from tinyllm.config.layers import ACTIVATIONS, Alibi, AttentionConfig, LayerConfig, NormConfig, rope_of

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from native_models import MODELS  # noqa: E402

GOLDEN = TESTS / "golden"
MEASURED = GOLDEN / "measured.json"

_PLACES = {
    "pre": "before each branch",
    "post": "after each sum",
    "branch": "after each branch",
    "sandwich": "before and after each branch",
    "parallel": "before two parallel branches",
}

_INTRODUCTION = """# Models

This page is made by `scripts/docs` from the table of families, the checkpoints in `tests/golden/` and what
`scripts/measure_golden.py` has measured of them: change these, not the page.

A family is a `model_type` of config.json. For each there are small random checkpoints, made with transformers
{versions} and holding the logits that it computes. tinyllm is held to these within {tolerance:g} of their standard
deviation in float32, whatever the way: fused and in plain operations, in one pass, token by token and in chunks,
over dense buffers and over pages. The *difference* is the worst of all ways and of all checkpoints of a family, as
it was measured on a CPU. A checkpoint named after more than its family proves a variant: what config.json can ask
for beside the plain model. `tinyllm inspect MODEL` shows what any model is made of, and whether its files are what
they should be.
"""

_VARIANTS = """## Variants

What decoders differ in, value by value. Each is proven against transformers by the checkpoints that have it, two of
which are named, and by models of one's own ([NATIVE.md](NATIVE.md)), which `tests/model/test_native.py` holds to
formulas in plain numpy in every way to run them: dense and in pages, in one pass, token by token and in chunks, fused
and in plain operations, and in batches of unequal length. Of either kind, a test makes sure that the logits would be
far off if what is said were not done.

| axis | value | against transformers | against formulas |
| --- | --- | --- | --- |
"""

_NOTES = """## What is refused

All of it by name, in one line, before a weight is read:

- a `model_type` that is not above, a key of config.json that is not known, and a known one, in the column *refused*,
  at a value that would change the numbers in a way that is not computed here;
- activations other than {activations}, and Apertus's xielu;
- RoPE schemes other than default, linear, dynamic, llama3, yarn, longrope and proportional;
- a part of each head to rotate (`partial_rotary_factor`) in families in which transformers rotates all of it whatever
  the file says; in `llama` the part is rotated as in Phi-3;
- what GPTQ (3 bits, columns sorted by activation), AWQ (other than GEMM's layout) and compressed-tensors (sparse,
  nvfp4, several schemes, zero points beside `symmetric`) can do beyond the list below; weights that bitsandbytes,
  HQQ, Quanto, EETQ, AQLM and others have quantised; and checkpoints with pickled weights only;
- tensors that are missing, surplus or of another shape than config.json asks for.

## To know

- **dynamic NTK**: theta depends on the length of the one pass that a sequence is computed in, so that token by token
  and at once would give different numbers. Contexts end at `max_position_embeddings`, up to which it is plain RoPE.
- **longrope**: a sequence that grows past the original length is rotated otherwise from its beginning on. It is
  computed again there, as in transformers.
- Of multimodal models the text model is run; the tensors of other parts are left out, with a notice.
- Layers that predict further tokens, and a head beside tied embeddings, are not read.
- What MLX has quantised is read: 2 to 8 bits, mxfp4, mxfp8, nvfp4, layer by layer. `mlx-lm-*` are made by mlx-lm.
- What others have quantised is made into MLX's formats when it is read, without loss: GPTQ of 4 and 8 bits, AWQ,
  compressed-tensors of 4 and 8 bits (pack-quantized, int-quantized) and of mxfp4, and gpt-oss's own mxfp4. Those in
  fp8 (e4m3, with scales of blocks, rows or all) and ModelOpt's NVFP4 become bfloat16, or what is computed in.
  Activations are never quantised.
"""


@dataclass(frozen=True)
class Golden:
    """A checkpoint of known logits, and how far from them tinyllm is at worst; None where that is not measured."""

    name: str
    config: Config
    difference: float | None


def models_page(tolerance: float = 1e-4) -> str:
    """Return the page."""
    goldens = list(_goldens())
    by_family: dict[str, list[Golden]] = defaultdict(list)
    for golden in goldens:
        by_family[golden.config.model_type].append(golden)
    lines = [_INTRODUCTION.format(versions=" and ".join(_versions(goldens)), tolerance=tolerance)]
    for title, names in _groups():
        lines += [f"## {title}", "", "| family | difference | made of | refused |", "| --- | --- | --- | --- |"]
        lines += [_family_row(name, by_family[name]) for name in names]
        lines += ["", *(f"- {_proofs(name, by_family[name])}" for name in names if by_family[name]), ""]
    lines += ["## Multimodal models, of which the text model is run", ""]
    lines += [f"- {_wrapper_line(name, goldens)}" for name in sorted(WRAPPERS)]
    lines += ["", _VARIANTS.rstrip("\n"), *_variant_rows(goldens), ""]
    lines += [_NOTES.format(activations=", ".join(ACTIVATIONS))]
    return "\n".join(lines).rstrip("\n") + "\n"


def _goldens() -> Iterator[Golden]:
    measured: Mapping[str, float] = json.loads(MEASURED.read_text(encoding="utf-8"))
    for file in sorted(GOLDEN.glob("*/expected.safetensors")):
        name = file.parent.name
        yield Golden(name, Config.from_json_file(file.parent), measured.get(name))


def _versions(goldens: Sequence[Golden]) -> list[str]:
    """Return the versions of transformers that wrote the checkpoints."""
    configs = (json.loads((GOLDEN / golden.name / "config.json").read_text(encoding="utf-8")) for golden in goldens)
    return sorted({config["transformers_version"] for config in configs if "transformers_version" in config})


def _groups() -> Iterator[tuple[str, list[str]]]:
    """Yield the modules of the table, by what they say of themselves, and their families."""
    left = dict.fromkeys(FAMILIES)
    for module in pkgutil.iter_modules(families.__path__):
        found = import_module(f"{families.__name__}.{module.name}")
        names = sorted(row.model_type for row in vars(found).get("ROWS", ()) if row.model_type in left)
        if names:
            yield (found.__doc__ or "").split(". No mlx")[0].splitlines()[0], names
        for name in names:
            del left[name]
    if left:
        yield "Others", sorted(left)


def _variant_rows(goldens: Sequence[Golden]) -> Iterator[str]:
    natives = {name: Config.from_dict(spec) for name, spec in MODELS.items()}
    for variant in VARIANTS:
        proofs = [golden.name for golden in goldens if variant.shown(golden.config)]
        more = f" and {len(proofs) - 2} more" if len(proofs) > 2 else ""
        named = ", ".join(f"`{proof}`" for proof in proofs[:2])
        formulas = _formulas(variant, natives)
        yield f"| {variant.axis} | {variant.value} | {named}{more} | {formulas} |"


def _formulas(variant: Variant, natives: Mapping[str, Config]) -> str:
    """Return the names of native models that have a variant, the first two."""
    found = [name for name, config in natives.items() if variant.shown(config)]
    return "; ".join(found[:2]) + (f"; {len(found) - 2} more" if len(found) > 2 else "")


def _family_row(name: str, goldens: Sequence[Golden]) -> str:
    worst = [golden.difference for golden in goldens if golden.difference is not None]
    traits = dict.fromkeys(trait for golden in goldens for trait in _traits(golden.config))
    refused = ", ".join(f"`{key}`" for key in sorted(FAMILIES[name].refused)) or "-"
    difference = f"{max(worst):.1e}" if worst else "-"
    return f"| `{name}` | {difference} | {'; '.join(traits) or '-'} | {refused} |"


def _proofs(name: str, goldens: Sequence[Golden]) -> str:
    return f"`{name}` is proven by {', '.join(f'`{golden.name}`' for golden in goldens)}"


def _wrapper_line(name: str, goldens: Sequence[Golden]) -> str:
    proofs = [golden.name for golden in goldens if golden.config.wrapper and golden.config.wrapper.model_type == name]
    proven = f", proven by {', '.join(f'`{proof}`' for proof in proofs)}" if proofs else ""
    return f"`{name}`{proven}"


def _traits(config: Config) -> Iterator[str]:
    """Yield what a model's layers are made of, in a few words each."""
    for layer in dict.fromkeys(config.layers):
        yield f"{_norm_name(layer.norm)} {_PLACES[layer.placement]}"
        yield from _attention_traits(layer, learned=config.learned_positions is not None)
        mixture = experts_of(layer.feed_forward)
        if mixture is not None:
            yield "experts" if mixture.shared is None else "experts and a shared one"
        for network, _ in networks_of(layer.feed_forward):
            yield f"{'gated ' if network.gated else ''}{network.activation}"
    if config.learned_positions is not None:
        yield "learned positions"
    if config.embedding_scale != 1:
        yield "scaled embeddings"
    if config.logit_softcap is not None or config.logit_scale != 1:
        yield "scaled or capped logits"


def _attention_traits(layer: LayerConfig, *, learned: bool) -> Iterator[str]:
    mixer, rope = layer.attention, rope_of(layer.attention)
    if not isinstance(mixer, AttentionConfig):
        yield {"LatentAttention": "latent attention", "Delta": "delta rule", "Conv": "short convolution"}.get(
            name := type(mixer).__name__.removesuffix("Config"), name
        )
    if rope is not None:
        scaling = "" if rope.scaling is None else f" {type(rope.scaling).__name__.removesuffix('Scaling').lower()}"
        yield f"{'interleaved ' if rope.interleaved else ''}RoPE{scaling}"
    if not isinstance(mixer, AttentionConfig):
        return
    if rope is None and mixer.bias is None and not learned:
        yield "layers without RoPE"
    if mixer.bias is not None:
        yield "ALiBi" if isinstance(mixer.bias, Alibi) else type(mixer.bias).__name__
    if mixer.reach is not None:
        yield type(mixer.reach).__name__.lower()
    if mixer.qk_norm is not None:
        yield f"q/k norm over the {mixer.qk_norm.over}"
    for trait, there in {
        "biases": mixer.qkv_bias or mixer.output_bias,
        "capped scores": mixer.softcap is not None,
        "sinks": mixer.sinks,
        "clipped q, k, v": mixer.clip is not None,
        "gated attention": mixer.gate,
        "scaled queries": mixer.query_scaling is not None,
    }.items():
        if there:
            yield trait


def _norm_name(norm: NormConfig) -> str:
    return "RMSNorm" if norm.kind == "rms" else "LayerNorm"
