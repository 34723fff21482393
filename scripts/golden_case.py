"""What a golden checkpoint is made of. See make_golden.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# rms_norm_eps is so large that leaving it out shows.
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 0.2,
}
LONG = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
# Past 4,096 positions, where float32 holds the angle of a fast pair to 1e-4 only: hence the slow pairs.
PAST_WINDOW = {**LONG, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e9}}
WIDE_HEADS = {"head_dim": 16}
QWEN_WINDOW = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 10, "max_window_layers": 2}

LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 2000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
RAMP = {"beta_fast": 4.0, "beta_slow": 0.7}


Dialect = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class Case:
    """One folder. `settings` go to the family's config class, over those of `base`; `keep` logits are recorded.

    The classes of transformers are `family` + Config and ForCausalLM where `classes` does not name others. `random`
    has, by regular expressions over parameter names, mean and standard deviation of those that are not to be drawn as
    most are; `mean` of norms is 1.2, or where 1 is added to weights 0.2. `dialects` change a config as written into
    the same model's as others write it, `sparse` adds one without what equals the class's defaults. `seed` is changed
    where routers tie. `attention` names the implementation, of which some families have a faulty "eager".
    """

    name: str
    family: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    length: int = 64
    keep: int | None = None
    dtype: str = "bfloat16"
    shard_size: str = "1GB"
    base: Mapping[str, Any] = field(default_factory=lambda: SMALL)
    classes: tuple[str, str] | None = None
    random: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    dialects: Mapping[str, Dialect] = field(default_factory=dict)
    v4: bool = True
    seed: int = 0
    sparse: bool = False
    attention: str = "eager"


def rope(parameters: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Settings of a case that differs from SMALL in its rotary parameters."""
    return {"rope_parameters": {**parameters, **more}, **WIDE_HEADS}
