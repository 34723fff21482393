"""Draw configs of every family at random, and hold tinyllm to what transformers computes of them.

A config begins as a golden case's, and has several fields of the reference's own class changed: shapes, flags,
activations, rotary parameters, kinds of layers. tinyllm must give the same logits, however they are fed, or refuse
the config by name. Of what differs, changes are taken back for as long as it still does.

    python scripts/fuzz_families.py [FAMILY ...] [--draws N] [--seed N]

needs torch and transformers beside tinyllm; families are `model_type`s, by default all of them. Exits with 1 where
something differs.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tinyllm._mx import mx  # isort: skip  # before torch: the first to load a BLAS chooses it

import torch
from golden_case import Case
from golden_table import CASES
from make_golden import LEAST_GAP, Choices, class_defaults, logits_of, make_config, make_model, randomise

from tinyllm.engine.engine import Engine
from tinyllm.engine.request import Request
from tinyllm.errors import TinyllmError
from tinyllm.model.load import load_model
from tinyllm.model.transformer import ModelForCausalLM
from tinyllm.ops.features import FEATURES

LENGTH, LONGEST_CASE = 41, 64
TOLERANCE = 1e-4  # of the logits' standard deviation, as for the golden folders
TRIES = 30  # most draws make no model of the reference's

Draw = Callable[[Random, Mapping[str, Any]], Any]


def one_of(*values: Any) -> Draw:
    """Any of these."""
    return lambda random, config: random.choice(values)


def divisor(of: str) -> Draw:
    """Any number that divides another field's."""
    return lambda random, config: random.choice([n for n in range(1, config[of] + 1) if config[of] % n == 0])


def a_list(count: str, *values: Any) -> Draw:
    """Any list of these, one a layer."""
    return lambda random, config: [random.choice(values) for _ in range(config[count])]


def rotary(random: Random, config: Mapping[str, Any]) -> Any:
    """Any scheme, with or without what it may leave out."""
    kind = random.choice(["default", "linear", "llama3", "yarn", "dynamic", "default", "longrope", "proportional"])
    said: dict[str, Any] = {"rope_type": kind, "rope_theta": random.choice([50.0, 500.0, 1e4, 1e6])}
    if kind != "default":
        said["factor"] = random.choice([1.0, 1.5, 4.0, 32.0])
    if kind in ("llama3", "yarn", "longrope"):
        said["original_max_position_embeddings"] = random.choice([16, 24, 64])
    if kind == "llama3":
        said |= {"low_freq_factor": random.choice([1.0, 0.5]), "high_freq_factor": random.choice([4.0, 2.0])}
    if kind == "yarn":
        for name, values in {
            "beta_fast": [8.0, 3.0], "beta_slow": [0.5, 2.0], "mscale": [0.7, 1.0], "mscale_all_dim": [0.5, 1.0],
            "attention_factor": [1.2, 0.9], "truncate": [False, True],
        }.items():  # fmt: skip
            if random.random() < 0.3:
                said[name] = random.choice(values)
    if random.random() < 0.2:
        said["partial_rotary_factor"] = random.choice([0.25, 0.5, 0.75])
    if kind == "longrope":
        heads = config.get("num_attention_heads", 4)
        width = config.get("head_dim") or config.get("hidden_size", 32) // heads
        width = config.get("qk_rope_head_dim") or width
        pairs = int(width * said.get("partial_rotary_factor", 1.0)) // 2
        for name in ("short_factor", "long_factor"):
            said[name] = [round(random.uniform(1, 4), 2) for _ in range(pairs)]
        if random.random() < 0.5:
            del said["factor"]
    return said


ACTIVATIONS = one_of(
    *["silu", "gelu", "gelu_new", "relu", "relu2", "swish", "gelu_fast", "gelu_pytorch_tanh"] * 7,
    "silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python", "relu", "relu2",
    "quick_gelu", "gelu_10", "mish", "tanh", "sigmoid", "relu6", "leaky_relu", "laplace", "linear", "gelu_accurate",
)  # fmt: skip
LAYERS = one_of(1, 2, 3, 5, 6)
HIDDEN, HEADS = one_of(24, 32, 48, 36), one_of(1, 2, 3, 4, 6, 8)
WINDOW = one_of(1, 2, 3, 7, 13, 16, 17, 40, 41, 64, None)
SCALE = one_of(0.3, 0.8, 1.7, -0.5, 2)
FIELDS: Mapping[str, Draw] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), HIDDEN),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), divisor("num_attention_heads")),
    "num_kv_heads": divisor("num_attention_heads"),
    "head_dim": one_of(6, 8, 10, 16, 24, None),
    "global_head_dim": one_of(8, 16, 20),
    "vocab_size": one_of(96, 61, 130),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), one_of(20, 33, 48, 64)),
    "intermediate_size_mlp": one_of(20, 33),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), one_of(32, 48, 64, 128, 4096)),
    **dict.fromkeys(("hidden_act", "activation_function", "activation", "hidden_activation"), ACTIVATIONS),
    **dict.fromkeys(("sliding_window", "window_size"), WINDOW),
    "attention_chunk_size": one_of(1, 3, 8, 12, 40, 41, 50),
    "rope_parameters": rotary,
    "layer_types": a_list("num_hidden_layers", "full_attention", "sliding_attention"),
    "no_rope_layers": a_list("num_hidden_layers", 0, 1),
    "mlp_layer_types": a_list("num_hidden_layers", "dense", "sparse"),
    "mlp_only_layers": one_of([0], [1], [0, 2], []),
    "moe_layers": one_of([0], [1], [0, 2]),
    "decoder_sparse_step": one_of(1, 2, 3),
    "interleave_moe_layer_step": one_of(1, 2, 3),
    "no_rope_layer_interval": one_of(1, 2, 3, 4),
    "first_k_dense_replace": one_of(0, 1, 2, 9),
    "num_dense_layers": one_of(0, 1, 9),
    "max_window_layers": one_of(0, 1, 2, 9),
    "moe_layer_start_index": one_of(0, 1, 2),
    "moe_layer_end_index": one_of(-1, 1, 2),
    "moe_layer_interval": one_of(1, 2),
    "sliding_window_pattern": one_of(1, 2, 3, 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), one_of(2, 4, 5, 8)),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), one_of(1, 2, 3)),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts"), one_of(0, 1, 2, 3, None)),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), one_of(8, 12, 20)),
    "shared_intermediate_size": one_of(0, 8, 20),
    "n_group": one_of(1, 2, 4),
    "topk_group": one_of(1, 2),
    "topk_method": one_of("greedy", "group_limited_greedy"),
    "q_lora_rank": one_of(None, 8, 20),
    "kv_lora_rank": one_of(8, 12),
    "qk_nope_head_dim": one_of(4, 8, 12),
    "qk_rope_head_dim": one_of(2, 4, 8),
    "v_head_dim": one_of(4, 10, 12),
    "rotary_dim": one_of(2, 4, 8),
    "linear_conv_kernel_dim": one_of(2, 3, 4),
    "conv_L_cache": one_of(2, 3, 5),
    "linear_num_key_heads": one_of(1, 2),
    "linear_num_value_heads": one_of(2, 4, 6),
    "linear_key_head_dim": one_of(6, 8),
    "linear_value_head_dim": one_of(6, 10),
    "num_ln_in_parallel_attn": one_of(None, 1, 2),
    "num_kv_shared_layers": one_of(0, 1, 2),
    "hidden_size_per_layer_input": one_of(0, 6, 8),
    "word_embed_proj_dim": one_of(16, 32, 40),
    "clip_qkv": one_of(None, 0.5, 1.0),
    "attn_config": one_of({}, {"clip_qkv": 0.7}, {"softmax_scale": 0.3, "alibi": True}),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), one_of(None, 0.8, 3.0, 30)),
    "query_pre_attn_scalar": one_of(4, 10, 37),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), one_of(1e-5, 0.3, 1)),
    **dict.fromkeys(("norm_eps", "norm_epsilon"), one_of(1e-5, 0.3, 1)),
    "floor_scale": one_of(4, 8, 100),
    "swiglu_limit": one_of(0.7, 2.0, 7),
    "swiglu_alpha": one_of(1.0, 1.702),
    "dim_model_base": one_of(8, 20),
    "expansion_ratio": one_of(2, 4),
    "norm_type": one_of("layernorm", "low_precision_layernorm", "rmsnorm"),
    "block_multiple_of": one_of(8, 16),
    "original_max_position_embeddings": one_of(16, 32, 64),
    "layer_rope_theta": a_list("num_hidden_layers", 0, 100.0, 5000.0),
    "full_attn_idxs": one_of([0], [1], [0, 1]),
    "vocab_size_per_layer_input": one_of(96, 130),
}  # fmt: skip
# What depends on others comes after them.
LATER = ("rope_parameters", "layer_types", "no_rope_layers", "mlp_layer_types", "layer_rope_theta", "full_attn_idxs")
LATER += ("num_key_value_heads", "num_kv_heads")
# Without effect on the numbers, or not to be drawn.
LEFT = frozenset("initializer_range init_std pretraining_tp router_aux_loss_coef embedding_initializer_range".split())


@dataclass(frozen=True)
class Finding:
    """What became of a draw: "same", "refused", "differs", "fails" or "invalid", and more about it."""

    kind: str
    what: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether tinyllm is to blame."""
        return self.kind in ("differs", "fails")


def text_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the text model's settings, which a multimodal model has nested."""
    inner: dict[str, Any] = settings.get("text_config", settings)
    return inner


def family_of(case: Case) -> str:
    """Return the `model_type` of a case's text model."""
    name: str = make_config(case).get_text_config().model_type
    return name


def draw_changes(case: Case, random: Random) -> dict[str, Any]:
    """Draw new values for some fields of a case's config class."""
    config = make_config(case).get_text_config()
    config.allow_global_per_layer_attribute_access = True  # of Gemma 4
    said = text_of({**case.base, **case.settings})
    fields = class_defaults(type(config)) | {"tie_word_embeddings": False, "rope_parameters": None}
    fields |= {name: None for name in ("head_dim", "layer_types") if getattr(config, name, None)}
    now = {**{name: getattr(config, name, None) for name in fields}, **said}
    names = [name for name in fields if name not in LEFT and not name.endswith(("_id", "dropout", "_pdrop"))]
    changes: dict[str, Any] = {}
    for name in sorted(names, key=lambda name: (name in LATER, random.random())):
        if random.random() > 0.3:
            continue
        if name in FIELDS:
            changes[name] = FIELDS[name](random, {**now, **changes})
        elif isinstance(fields[name], bool):
            changes[name] = not now[name]
        elif isinstance(fields[name], float) or "multiplier" in name:
            changes[name] = SCALE(random, now)
    kinds = said.get("layer_types")
    layers = next(
        (changes[name] for name in ("num_hidden_layers", "num_layers") if name in changes), len(kinds or ())
    )
    if kinds and ("layer_types" in changes or layers != len(kinds)):
        changes["layer_types"] = [random.choice(kinds) for _ in range(layers)]
    return changes


def changed(case: Case, changes: Mapping[str, Any], seed: int) -> Case:
    """Return the case with some settings changed."""
    settings = copy.deepcopy(dict(case.settings))
    text_of(settings).update(changes)
    faulty = case.family == "Falcon" and settings.get("alibi")  # eager attention adds ALiBi twice there
    return replace(case, settings=settings, seed=seed, attention="sdpa" if faulty else case.attention)


def write_reference(case: Case, folder: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """Write a checkpoint; return ids (n,) and logits (n, vocab), or None where these would prove nothing."""
    torch.manual_seed(case.seed)
    config = make_config(case)
    model = make_model(config, case)
    randomise(model, torch.float32, case.random)
    ids = torch.randint(config.get_text_config().vocab_size, (LENGTH,))
    with Choices() as choices:
        logits = logits_of(model, ids, LENGTH)
    if choices.least < LEAST_GAP or not torch.isfinite(logits).all() or logits.std() < 1e-6:
        return None
    model.save_pretrained(folder)
    return ids.numpy(), logits.numpy()


def run(model: ModelForCausalLM, ids: np.ndarray, pieces: list[int], page: int | None) -> np.ndarray:
    """Feed ids (n,) in pieces, through dense buffers or pages: logits (n, vocab)."""
    caches = model.create_kv_cache() if page is None else model.create_kv_cache("paged", page)
    logits, start = [], 0
    for size in pieces:
        logits.append(np.array(model(mx.array(ids[None, start : start + size]), start, caches, length=len(ids))[0]))
        start += size
    return np.concatenate(logits)


def differences(folder: Path, ids: np.ndarray, wanted: np.ndarray, random: Random) -> dict[str, float]:
    """Return how far tinyllm is from `wanted` (n, vocab) in each way to run it, in its standard deviations."""
    n, vocab = wanted.shape
    pieces: list[int] = []
    while sum(pieces) < n:
        pieces.append(min(random.choice([1, 2, 5, 9, 16]), n - sum(pieces)))
    page = random.choice([4, 8, 16])
    off = {}
    for name, features in FEATURES.items():
        model = load_model(folder, features, dtype=mx.float32)
        for how, sizes in {"at once": [n], "one by one": [1] * n, "in pieces": pieces}.items():
            for kind in (None, page):
                off[f"{name}, {how}, pages of {kind}"] = np.abs(run(model, ids, sizes, kind) - wanted).max()
    model = load_model(folder, dtype=mx.float32)
    if n <= model.config.max_position_embeddings and model.config.rope_boundary is None:
        lengths = (n - 8, 5, n // 2, 1)  # in a batch; log-probabilities are logits, but for a constant
        engine = Engine(
            model, page_size=page, compiled=random.random() < 0.1, prefill_chunk=random.choice([3, 7, 64])
        )
        asked = [Request(tuple(map(int, ids[:length])), 1, logprobs=min(20, vocab)) for length in lengths]
        for length, [output, *_] in zip(lengths, engine.run(asked), strict=True):
            top = output.logprobs.top if output.logprobs is not None else ()
            gaps = [value - wanted[length - 1, i] for i, value in top]
            off[f"batch, {length} tokens"] = (max(gaps) - min(gaps)) / 2
    return {how: float(most / wanted.std()) for how, most in off.items()}


def attempt(case: Case, changes: Mapping[str, Any], seed: int) -> Finding:
    """Compare one model, of another seed where routers tie."""
    for trial in range(8):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            try:
                found = write_reference(changed(case, changes, seed + trial), folder)
            except Exception as error:
                return Finding("invalid", f"{type(error).__name__}: {error}")
            if found is None:
                continue
            try:
                off = differences(folder, *found, Random(seed))
            except TinyllmError as error:
                return Finding("refused", str(error).replace(name, ""))
            except Exception as error:
                return Finding("fails", f"{type(error).__name__}: {error}")
            over = [f"{how}: {value:.1e}" for how, value in off.items() if not value <= TOLERANCE]
            return Finding("differs", "; ".join(over)) if over else Finding("same")
    return Finding("invalid", "routers tie, or the logits are not finite")


def shrink(case: Case, changes: dict[str, Any], seed: int) -> dict[str, Any]:
    """Take changes back, one at a time, as long as there is a fault."""
    for name in list(changes):
        fewer = {key: value for key, value in changes.items() if key != name}
        if attempt(case, fewer, seed).is_fault:
            changes = fewer
    return changes


def main() -> int:
    """Draw, compare and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="all of them if none is named")
    parser.add_argument("--draws", type=int, default=10, help="models of each family")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    by_family: dict[str, list[Case]] = {}
    for case in CASES:
        if case.length <= LONGEST_CASE:
            by_family.setdefault(family_of(case), []).append(case)
    faults = 0
    for family in arguments.families or by_family:
        tally: Counter[str] = Counter()
        for n in range(arguments.draws):
            seed = arguments.seed * 1000 + n
            random = Random(f"{family} {seed}")
            for _ in range(TRIES):
                case = random.choice(by_family[family])
                changes = draw_changes(case, random)
                found = attempt(case, changes, seed)
                if found.kind != "invalid":
                    break
            tally[found.kind] += 1
            if found.kind == "refused":
                print(f"    {family}: refused: {found.what}")
            if found.is_fault:
                faults += 1
                fewest = shrink(case, changes, seed)
                print(f"    {family}: {case.name} with {fewest} {found.kind}: {attempt(case, fewest, seed).what}")
        print(f"{family:20} {dict(tally)}", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
