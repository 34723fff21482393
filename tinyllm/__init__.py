"""tinyllm runs open-weight language models on Apple's MLX.

    from tinyllm import LLM

    with LLM("models/SmolLM2-135M-Instruct-from-Q4_1") as llm:
        for chunk in llm.chat([{"role": "user", "content": "What is the capital of France?"}]):
            print(chunk.text, end="", flush=True)

Names are imported when they are first used: importing tinyllm itself loads neither MLX nor a model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyllm.answer import Answer as Answer
    from tinyllm.answer import Chunk as Chunk
    from tinyllm.answer import Statistics as Statistics
    from tinyllm.checkpoint.weights import WeightStore as WeightStore
    from tinyllm.config.config import Config as Config
    from tinyllm.engine.request import SamplingParams as SamplingParams
    from tinyllm.errors import TinyllmError as TinyllmError
    from tinyllm.kv.full import TinyKvFullCache as TinyKvFullCache
    from tinyllm.kv.paged import TinyKvPagedCache as TinyKvPagedCache
    from tinyllm.kv.paged import TinyKvPagedPool as TinyKvPagedPool
    from tinyllm.llm import LLM as LLM
    from tinyllm.model.attention import Attention as Attention
    from tinyllm.model.block import TransformerBlock as TransformerBlock
    from tinyllm.model.linear import Embedding as Embedding
    from tinyllm.model.linear import linear as linear
    from tinyllm.model.load import load_model as load_model
    from tinyllm.model.mlp import MLP as MLP
    from tinyllm.model.moe import Moe as Moe
    from tinyllm.model.norm import RMSNorm as RMSNorm
    from tinyllm.model.transformer import ModelForCausalLM as ModelForCausalLM
    from tinyllm.ops.features import ModelFeatures as ModelFeatures

__version__ = "0.1.0"

_HOMES = {
    "LLM": "tinyllm.llm",
    "Answer": "tinyllm.answer",
    "Chunk": "tinyllm.answer",
    "SamplingParams": "tinyllm.engine.request",
    "Statistics": "tinyllm.answer",
    "TinyllmError": "tinyllm.errors",
    "Config": "tinyllm.config.config",
    "WeightStore": "tinyllm.checkpoint.weights",
    "ModelFeatures": "tinyllm.ops.features",
    "RMSNorm": "tinyllm.model.norm",
    "Embedding": "tinyllm.model.linear",
    "linear": "tinyllm.model.linear",
    "Attention": "tinyllm.model.attention",
    "MLP": "tinyllm.model.mlp",
    "Moe": "tinyllm.model.moe",
    "TransformerBlock": "tinyllm.model.block",
    "ModelForCausalLM": "tinyllm.model.transformer",
    "load_model": "tinyllm.model.load",
    "TinyKvFullCache": "tinyllm.kv.full",
    "TinyKvPagedCache": "tinyllm.kv.paged",
    "TinyKvPagedPool": "tinyllm.kv.paged",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tinyllm' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
