"""Write tests/golden/: tiny random checkpoints, each with the logits that transformers computes from it.

The suite needs only what this writes. To write it again, in an environment of its own:

    pip install torch==2.13.0 transformers==5.24.0 mlx-lm==0.32.2 'mlx[cpu]==0.32.4'
    python scripts/make_golden.py [NAME ...] [--real-model models/SmolLM2-135M-Instruct-from-Q4_1]

mlx-lm is for the quantised folders alone, whose layout is its own; their logits too are those of transformers, from
the dequantised weights. A folder holds

    config.json            as transformers 5 (or mlx-lm) writes it
    config.*.json          the same model as others write it; transformers reads each to the same logits (checked)
    model*.safetensors     every parameter random: norms of ones and biases of zeros would hide faults
    expected.safetensors   ids (n,), and the float32 logits (k, vocab) after the last k of them
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from golden_case import Case
from golden_table import CASES, QUANTIZED
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
EXPECTED, DEFAULTS, REAL_MODEL = "expected.safetensors", "reference_defaults.json", "real_model.json"

LEAST_GAP = 1e-4  # of scores, so that no rounding chooses another expert

# tinyllm has no default for shapes; nor for the end token, of which the class assumes one tokenizer's id.
SHAPES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
NEVER_ABSENT = SHAPES | {"eos_token_id"}

# ---------------------------------------------------------------- a random model


def make_config(case: Case) -> PreTrainedConfig:
    """Make the reference's own config object."""
    settings = {**case.base, **copy.deepcopy(dict(case.settings)), "pad_token_id": None}
    if case.family != "Mistral3":
        return getattr(transformers, class_names(case)[0])(**settings)
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return transformers.Mistral3Config(
        text_config={"model_type": "mistral", **settings},
        vision_config={"model_type": "pixtral", "patch_size": 2, "image_size": 4, **vision},
        tie_word_embeddings=settings.get("tie_word_embeddings", False),
    )


def class_names(case: Case) -> tuple[str, str]:
    """Return the names of the reference's classes, config and network."""
    if case.family == "Mistral3":
        return "Mistral3Config", "Mistral3ForConditionalGeneration"
    return case.classes or (f"{case.family}Config", f"{case.family}ForCausalLM")


def make_model(config: PreTrainedConfig, case: Case) -> PreTrainedModel:
    """Make the reference's network."""
    network = getattr(transformers, class_names(case)[1])
    return network._from_config(config, attn_implementation=case.attention, dtype=torch.float32).eval()


@torch.no_grad()
def randomise(model: PreTrainedModel, dtype: torch.dtype, random: Mapping[str, tuple[float, float]]) -> None:
    """Give every parameter values that matter: attention far from uniform, each branch as large as the residual."""
    stored = ("e_score_correction_bias", "layer_scalar")
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(stored)]
    for name, parameter in [*model.named_parameters(), *buffers]:
        noise = torch.randn(parameter.shape)
        own = next((values for pattern, values in random.items() if re.search(pattern, name)), None)
        if own is not None:
            value = own[0] + own[1] * noise
        elif "norm" in name or "ln_" in name or ".ln" in name:
            value = 0.3 * noise if name.endswith("bias") else 1.2 + 0.4 * noise
        elif name.endswith("bias"):
            value = 0.5 * noise
        elif re.search(r"embed|wte|wpe|word_embeddings", name):
            value = 0.7 * noise
        else:
            gain = 1.7 if re.search("q_proj|k_proj|qkv|query|c_attn", name) else 1.2
            value = noise * gain / math.sqrt(parameter.shape[-1])
        parameter.copy_(value.to(dtype))
    for name, buffer in model.named_buffers():
        for mean, deviation in (values for pattern, values in random.items() if re.search(pattern, name)):
            buffer.copy_((mean + deviation * torch.randn(buffer.shape)).to(dtype))


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: torch.Tensor, keep: int) -> torch.Tensor:
    """Return float32 logits (keep, vocab) after the last `keep` of `ids` (n,)."""
    if isinstance(model, transformers.Llama4ForConditionalGeneration):
        model = model.language_model  # the whole asks its output for what it has not (in 5.24), and fails
    return model(input_ids=ids[None], logits_to_keep=keep, use_cache=False).logits[0].contiguous()


class Choices(TorchDispatchMode):
    """The least gap between the last score that was chosen and the first that was not, in all that routers chose."""

    least = math.inf

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the scores of what chooses, and run it."""
        if function is torch.ops.aten.topk.default and args[1] < args[0].shape[-1]:
            best = function(args[0], args[1] + 1)[0]
            self.least = min(self.least, (best[..., -2] - best[..., -1]).nan_to_num(math.inf).min().item())
        return function(*args, **(kwargs or {}))


@contextmanager
def partial_rotation() -> Iterator[None]:
    """Let Llama rotate a part of each head, with the functions of Phi-3.

    transformers reads `partial_rotary_factor` for Llama, but its Llama network ignores the key, or breaks on it.
    Checkpoints with it exist, and mean what the same key means in Phi-3.
    """
    kept = modeling_llama.LlamaRotaryEmbedding, modeling_llama.apply_rotary_pos_emb
    modeling_llama.LlamaRotaryEmbedding = modeling_phi3.Phi3RotaryEmbedding
    modeling_llama.apply_rotary_pos_emb = modeling_phi3.apply_rotary_pos_emb
    try:
        yield
    finally:
        modeling_llama.LlamaRotaryEmbedding, modeling_llama.apply_rotary_pos_emb = kept


# ---------------------------------------------------------------- the same config, as others write it


def in_text_config(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Apply `change` to a copy of a config, to the nested one where there is one."""

    def changed(config: dict[str, Any]) -> dict[str, Any]:
        config = copy.deepcopy(config)
        change(config.get("text_config", config))
        return config

    return changed


def as_transformers_4(config: dict[str, Any], type_key: str = "rope_type") -> None:
    """rope_theta beside rope_scaling, torch_dtype, and no layer_types where Qwen's rule gives them."""
    parameters = config.pop("rope_parameters")
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in parameters:
            config[name] = parameters.pop(name)
    kind = parameters.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {type_key: kind, **parameters}
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    if "use_sliding_window" in config:
        if config.get("layer_types") != ["sliding_attention", "full_attention"] * 2:
            config.pop("layer_types", None)
        if not config["use_sliding_window"]:
            config["sliding_window"] = 8  # as Qwen 2.5 has it: a window that is switched off


def with_type(config: dict[str, Any]) -> None:
    """The key "type", which "rope_type" replaced (fault 09)."""
    as_transformers_4(config, "type")


def with_stale_theta(config: dict[str, Any]) -> None:
    """A rope_theta at the top that rope_parameters overrules (fault 10)."""
    config["rope_theta"] = 10000.0


def without_defaults(config: dict[str, Any]) -> None:
    """Only the shapes, and the keys that differ from the family's own defaults (fault 12)."""
    plain = AutoConfig.for_model(config["model_type"])
    kept = {plain.attribute_map.get(name, name) for name in NEVER_ABSENT}
    for name, default in class_defaults(type(plain)).items():
        if config.get(name, ...) == default and name not in kept:
            del config[name]
    if "rope_parameters" in config and config["rope_parameters"] == plain.rope_parameters:
        del config["rope_parameters"]


def with_nested_rope(config: dict[str, Any]) -> None:
    """rope_parameters by layer type, which these four networks of transformers do not read themselves (fault 10)."""
    kinds = dict.fromkeys(config.get("layer_types", ["full_attention"]))
    config["rope_parameters"] = {kind: dict(config["rope_parameters"]) for kind in kinds}


def with_nested_tie(config: dict[str, Any]) -> None:
    """Tied by the nested config alone (fault 02)."""
    del config["tie_word_embeddings"]


def dialects(case: Case, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return file name -> the config as it would stand there, for all that apply."""
    changes = dict(case.dialects)
    parameters = config.get("text_config", config).get("rope_parameters")
    if case.v4 and parameters is not None and "rope_type" in parameters:
        changes["v4"] = as_transformers_4
        if parameters["rope_type"] != "default":
            changes["v4-type"] = with_type
    if case.name in ("llama-long", "qwen3-layer-types"):
        changes |= {"stale-theta": with_stale_theta, "nested": with_nested_rope}
    if case.sparse or case.name.endswith(("defaults", "default")):
        changes["sparse"] = without_defaults
    written = {f"config.{name}.json": in_text_config(change)(config) for name, change in changes.items()}
    if case.name == "mistral3-tied":
        nested_tie = copy.deepcopy(config)
        with_nested_tie(nested_tie)
        written["config.nested-tie.json"] = nested_tie
    return written


# ---------------------------------------------------------------- folders


def write_case(case: Case) -> None:
    """Write one folder, and check that the reference reads every dialect in it alike."""
    with partial_rotation() if "partial" in case.name else nullcontext():
        dtype = getattr(torch, case.dtype)
        torch.manual_seed(zlib.crc32(case.name.encode()) + case.seed)
        config = make_config(case)
        model = make_model(config, case)
        randomise(model, dtype, case.random)
        ids = torch.randint(config.get_text_config().vocab_size, (case.length,))
        with Choices() as choices:
            expected = logits_of(model, ids, case.keep or case.length)
        if choices.least < LEAST_GAP:
            raise SystemExit(f"{case.name}: a router chose by {choices.least:.1e}; give the case another seed")

        folder = fresh_folder(case.name)
        model.to(dtype).save_pretrained(folder, max_shard_size=case.shard_size)
        (folder / "generation_config.json").unlink(missing_ok=True)
        save_file({"ids": ids.to(torch.int32), "logits": expected}, folder / EXPECTED)

        written = json.loads((folder / "config.json").read_text())
        for name, values in dialects(case, written).items():
            write_json(folder / name, values)
            if "nested" not in name:
                again = make_model(type(config).from_json_file(folder / name), case)
                again.load_state_dict(model.state_dict())
                assert torch.equal(logits_of(again.float(), ids, case.keep or case.length), expected), name
    report(folder, expected)


def fresh_folder(name: str) -> Path:
    """Make tests/golden/NAME, empty."""
    folder = GOLDEN / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def write_json(path: Path, values: Any) -> None:
    """Write as the committed files are: indented, with a newline at the end."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def report(folder: Path, logits: torch.Tensor) -> None:
    """Say what was written."""
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder.name:32} {size / 1000:6.1f} KB   logits' standard deviation {logits.std().item():.2f}")


# ---------------------------------------------------------------- quantised by mlx-lm


def mixed_bits(path: str, module: object) -> bool | dict[str, Any]:
    """What mlx-lm asks for each layer: 6 bits, 8 bits, none, or (True) the checkpoint's own format."""
    if path.endswith("layers.0.self_attn.v_proj"):
        return {"group_size": 32, "bits": 6, "mode": "affine"}
    if path.endswith("layers.1.mlp.down_proj"):
        return {"group_size": 64, "bits": 8, "mode": "affine"}
    return not path.endswith("layers.1.self_attn.o_proj")


def write_quantized(case: Case) -> None:
    """Write a folder as mlx-lm converts it, and the logits of transformers from its dequantised weights."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm import utils as mlx_lm

    dtype = getattr(torch, case.dtype)
    torch.manual_seed(zlib.crc32(case.name.encode()) + case.seed)
    model = make_model(make_config(case), case)
    randomise(model, dtype, case.random)
    ids = torch.randint(model.config.get_text_config().vocab_size, (case.length,))
    source = fresh_folder(f".{case.name}")
    model.to(dtype).save_pretrained(source)

    packed, config = mlx_lm.load_model(source)
    kwargs = {"mode": "mxfp4"} if case.family == "Mistral3" else {"group_size": 32, "bits": 4}
    packed, config = mlx_lm.quantize_model(
        packed,
        config,
        kwargs.pop("group_size", None),
        kwargs.pop("bits", None),
        quant_predicate=None if case.name == "mlx-lm-4bit" else mixed_bits,
        **kwargs,
    )
    folder = fresh_folder(case.name)
    mlx_lm.save_model(folder, packed)
    mlx_lm.save_config(config, folder / "config.json")
    shutil.rmtree(source)

    packed.set_dtype(mx.float32)
    dense = {name: to_torch(value) for name, value in tree_flatten(mlx_lm.dequantize_model(packed).parameters())}
    renamed = {name.replace("language_model.model.", "model.language_model."): value for name, value in dense.items()}
    model = make_model(make_config(case), case)  # anew: casting rounded the frequencies of the other
    missing, surplus = model.load_state_dict(
        {name.replace("language_model.lm_head", "lm_head"): value for name, value in renamed.items()}, strict=False
    )
    assert not surplus and all("vision" in name or "projector" in name or "lm_head" in name for name in missing)
    expected = logits_of(model, ids, case.length)
    save_file({"ids": ids.to(torch.int32), "logits": expected}, folder / EXPECTED)
    report(folder, expected)


def to_torch(array: Any) -> torch.Tensor:
    """Copy an array of MLX, in float32."""
    import mlx.core as mx
    import numpy as np

    return torch.from_numpy(np.array(array.astype(mx.float32)))


# ---------------------------------------------------------------- records


def class_defaults(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """What an absent key means to the reference: the defaults of the config class, before any is derived."""
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return {
        field.name: field.default
        for field in dataclasses.fields(config_class)
        if field.name not in inherited and field.default is not dataclasses.MISSING
    }


def write_defaults() -> None:
    """Record the defaults of each text model's config class, and the base of its rotary embedding."""
    record = {}
    for name in dict.fromkeys(class_names(case)[0] for case in CASES):
        config_class = getattr(transformers, name)
        config_class = config_class.sub_configs.get("text_config", config_class)
        if not issubclass(config_class, PreTrainedConfig):
            continue  # a wrapper of any text model
        theta = getattr(config_class, "default_theta", None)
        theta = theta["global"] if isinstance(theta, dict) else theta  # Gemma 3 has another for windowed layers
        record[config_class.model_type] = class_defaults(config_class) | {"rope_theta": theta}
    write_json(GOLDEN / DEFAULTS, record)


PROMPTS = (
    ("chat", "What is the capital of France? Answer in one word."),
    ("chat", "What is 2 + 2? Answer with the number only."),
    ("chat", "Which planet is the largest in the solar system?"),
    ("chat", "Name three colours."),
    ("raw", "The capital of Italy is"),
    ("raw", "Once upon a time, there was a"),
    ("raw", "The first five prime numbers are"),
    ("raw", "Die Hauptstadt von Deutschland ist"),
)
LEAST_MARGIN, MOST_TOKENS = 0.01, 10


def write_real_model(path: Path) -> None:
    """Record greedy answers in float32, with the least margin between the two best logits of any step.

    A prompt with a smaller margin than LEAST_MARGIN proves nothing, and is dropped.
    """
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    answers = []
    for kind, text in PROMPTS:
        prompt = text
        if kind == "chat":
            messages = [{"role": "user", "content": text}]
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
        ids, margin = greedy(model, prompt_ids, model.config.eos_token_id)
        print(f"{margin:8.3f}  {text!r} -> {tokenizer.decode(ids)!r}")
        if margin >= LEAST_MARGIN:
            answers.append({"kind": kind, "text": text, "prompt_ids": prompt_ids, "ids": ids, "margin": margin})
    write_json(GOLDEN / REAL_MODEL, {"folder": path.name, "answers": answers})


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt_ids: Sequence[int], eos: int) -> tuple[list[int], float]:
    """Return at most MOST_TOKENS ids (`eos` included), and the least margin; each step runs the whole sequence."""
    ids: list[int] = []
    margin = math.inf
    while len(ids) < MOST_TOKENS and eos not in ids:
        logits = model(torch.tensor([[*prompt_ids, *ids]]), use_cache=False).logits[0, -1]
        best = logits.topk(2)
        margin = min(margin, (best.values[0] - best.values[1]).item())
        ids.append(int(best.indices[0]))
    return ids, round(margin, 4)


def main() -> None:
    """Write the folders that are named, or all of them, and the record of defaults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="folders to write; all of them if none is named")
    parser.add_argument("--real-model", type=Path, metavar="PATH", help="record greedy answers of this model instead")
    arguments = parser.parse_args()
    if arguments.real_model:
        write_real_model(arguments.real_model.resolve())
        return
    for case in CASES:
        if not arguments.names or case.name in arguments.names:
            write_case(case)
    for case in QUANTIZED:
        if not arguments.names or case.name in arguments.names:
            write_quantized(case)
    write_defaults()


if __name__ == "__main__":
    main()
