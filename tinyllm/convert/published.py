"""What a GGUF file's model is in a folder: tensors under Hugging Face's names, and the files beside them. No mlx."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tinyllm.checkpoint.gguf_config import config_values, special_ids
from tinyllm.checkpoint.gguf_header import GgufHeader
from tinyllm.checkpoint.gguf_tokenizer import read_tokenizer
from tinyllm.config.config import Config
from tinyllm.config.layers import AttentionConfig
from tinyllm.errors import TinyllmError

__all__ = ["in_older_words", "published_config", "write_beside", "write_json"]


_CLASSES: Mapping[str, str] = {
    "falcon": "FalconForCausalLM", "gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM", "gpt2": "GPT2LMHeadModel", "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM", "olmoe": "OlmoeForCausalLM", "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM", "stablelm": "StableLmForCausalLM", "starcoder2": "Starcoder2ForCausalLM",
}  # fmt: skip
_GPT2 = {
    "hidden_size": ("n_embd",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "max_position_embeddings": ("n_positions",),
}
# What published files call values, where not all programs know another name of them.
_NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gpt2": {**_GPT2, **dict.fromkeys(("max_position_embeddings", "n_positions"), ("n_positions", "n_ctx"))},
    "gpt_bigcode": _GPT2,
    "gpt_neox": {"rope_theta": ("rotary_emb_base",), "partial_rotary_factor": ("rotary_pct",)},
    "qwen3_moe": {"num_local_experts": ("num_experts",)},
}
# What they say, and no GGUF file does.
_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_SAID: Mapping[str, Mapping[str, Any]] = {
    "nemotron": {"hidden_act": "relu2"},
    "qwen3_moe": _SPARSE,
    "qwen3_next": _SPARSE,
}
_ALL_LAYERS, _LOCAL = "full_attention", "sliding_attention"


def published_config(header: GgufHeader) -> dict[str, Any]:
    """Return the config.json of a GGUF file's model, in the words of those that are published."""
    values = config_values(header)
    model_type = values["model_type"]
    if model_type in _CLASSES:
        values["architectures"] = [_CLASSES[model_type]]
    _say_partial_rotation(values)
    # A config class may have a token for padding that is beyond this vocabulary.
    return in_older_words({"pad_token_id": None, **values, **_SAID.get(model_type, {})})


def _say_partial_rotation(values: Mapping[str, Any]) -> None:
    """Say how much of a head is rotated also where a family's default is meant: mlx-lm's may be another one."""
    attention, rope = Config.from_dict(values).layers[0].attention, values.get("rope_parameters")
    if isinstance(attention, AttentionConfig) and attention.rope is not None and isinstance(rope, dict):
        share = attention.rope.dims / attention.head_dim
        if "rope_theta" in rope and share != 1:
            rope.setdefault("partial_rotary_factor", share)


def in_older_words(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json in the words of transformers 4, which version 5 and mlx-lm know as well.

    Rotation is said at the top level. What would not mean the same stays as it is.
    """
    for said in (*_said_apart(values), values):
        with suppress(TinyllmError):
            renamed = _renamed(said)
            if Config.from_dict(renamed) == Config.from_dict(values):
                return renamed
    return dict(values)


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    names = _NAMES.get(str(values.get("model_type")), {})
    return {other: value for name, value in values.items() for other in names.get(name, (name,))}


def _said_apart(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Give ways to say it, of which one may mean the same."""
    inner = values.get("text_config")
    if isinstance(inner, dict):
        yield from ({**values, "text_config": said} for said in _said_apart(inner))
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict):
        return
    local = rope.get(_LOCAL)
    rope = rope.get(_ALL_LAYERS, rope)
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return
    apart = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    scaling = {name: value for name, value in rope.items() if name not in apart}
    others = {name: value for name, value in values.items() if name != "rope_parameters"}
    others |= {**apart, "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling}
    yield others
    if isinstance(local, dict) and "rope_theta" in local:
        yield {**others, "rope_local_base_freq": local["rope_theta"]}


def write_beside(header: GgufHeader, folder: Path, context: int) -> None:
    """Write a GGUF file's tokenizer, its chat templates and the tokens that end an answer into `folder`.

    Raises TokenizerError for a tokenizer that is unknown or damaged.
    """
    tokenizer = read_tokenizer(header)
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str(), encoding="utf-8")
    said: dict[str, Any] = {
        # Others are rebuilt by transformers from what their class says, in place of what tokenizer.json does.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        **tokenizer.named,
    }
    if tokenizer.templates.keys() == {"default"}:
        said["chat_template"] = tokenizer.templates["default"]
    elif tokenizer.templates:
        said["chat_template"] = [{"name": name, "template": text} for name, text in tokenizer.templates.items()]
    write_json(folder / "tokenizer_config.json", said)
    write_json(folder / "generation_config.json", special_ids(header.metadata))


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON object, indented."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
