"""Small models of model_type "tinyllm": what no published checkpoint has, and what many have, put together."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs" / "NATIVE.md"
LAYER_NORM = {"kind": "layer", "eps": 0.1, "bias": True}
RMS = {"eps": 0.1}
ROPE = {"dims": 8, "theta": 500.0}
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
MLP = {"intermediate_size": 24, "activation": "silu"}


def model(*layers: dict[str, Any], **whole: Any) -> dict[str, Any]:
    return {
        "model_type": "tinyllm",
        "vocab_size": 48,
        "hidden_size": 20,
        "max_position_embeddings": 64,
        "final_norm": RMS,
        **whole,
        "layers": list(layers),
    }


def layer(attention: dict[str, Any], feed_forward: dict[str, Any] = MLP, **more: Any) -> dict[str, Any]:
    return {"attention": attention, "feed_forward": feed_forward, "norm": RMS, **more}


PLAIN = {"intermediate_size": 24, "gated": False, "bias": True}
DELTA = {"kind": "delta", "num_key_heads": 2, "num_value_heads": 2, "key_dim": 5, "value_dim": 6, "kernel": 4}
DELTA |= {"norm": RMS}
CONVOLUTION = {"kind": "conv", "width": 12, "kernel": 3, "biased": True}
LATENT = {"kind": "latent", "num_heads": 3, "latent_rank": 9, "plain_dim": 6, "value_dim": 5, "norm": RMS}
LATENT |= {"rope": {"dims": 4, "theta": 500.0}}
ORIGINAL = {"original_max_position_embeddings": 16}
LLAMA3 = {"kind": "llama3", "factor": 3.0, "low_freq_factor": 0.2, "high_freq_factor": 1.5, **ORIGINAL}
LONGROPE = {"kind": "longrope", "short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.5, 2.0, 3.0, 4.0], **ORIGINAL}
LONGROPE |= {"attention_factor": 1.2}
SHARING = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope": ROPE, "qk_norm": {"norm": RMS, "over": "heads"}}
CHOSEN = {"num_experts": 5, "top_k": 2, "bias": True, "scoring": "chosen", "jitter": 0.2, "epsilon": 0.2}
RESCALED = {"num_experts": 5, "top_k": 2, "renormalise": True, "expert_scale": True}
DUAL = {"kind": "dual", "dense": MLP, "experts": {"router": RESCALED, "expert": MLP}}
ROUTER = {"num_experts": 6, "top_k": 2, "groups": 3, "top_groups": 2}
MODELS = {
    "DeepNorm with Sandwich": model(
        layer(
            {**HEADS, "bias": {"kind": "sandwich", "dims": 12}, "qkv_bias": True, "output_bias": True},
            {"intermediate_size": 24, "activation": "gelu", "gated": False, "bias": True},
            norm=LAYER_NORM,
            placement="post",
            residual_scale=1.7,
            repeat=2,
        ),
        final_norm=None,
        learned_positions=66,
        position_offset=2,
    ),
    "strided sparse attention and squared ReLU": model(
        layer(
            {**HEADS, "rope": ROPE, "reach": {"kind": "strided", "local": 5, "stride": 7}},
            {"intermediate_size": 24, "activation": "relu2", "gated": False},
            repeat=2,
        ),
    ),
    "strided, as far as a page and further": model(
        layer({**HEADS, "rope": ROPE, "reach": {"kind": "strided", "local": 1, "stride": 19}}),
        layer({**HEADS, "rope": ROPE, "reach": {"kind": "strided", "local": 18, "stride": 4}}),
    ),
    "ReGLU, weightless norms, learned positions": model(
        layer(HEADS, {"intermediate_size": 24, "activation": "relu"}, norm={"eps": 0.1, "weight": False}, repeat=2),
        learned_positions=64,
        final_norm={"kind": "layer", "eps": 0.1, "weight": False},
        tie_word_embeddings=True,
        head_bias=True,
    ),
    "GeGLU and ALiBi, norms of branches": model(
        layer(
            {**HEADS, "bias": {"kind": "alibi", "most": 6.0, "factor": 0.7}, "scale": 0.5},
            {"intermediate_size": 24, "activation": "gelu_tanh"},
            placement="branch",
        ),
        layer({**HEADS, "bias": {"kind": "alibi"}, "reach": {"kind": "window", "size": 9}}, placement="branch"),
        embed_norm=LAYER_NORM,
    ),
    "chunks and windows in turn, four norms a layer": model(
        layer(
            {**HEADS, "rope": ROPE, "reach": {"kind": "chunk", "size": 11}, "softcap": 2.0},
            norm={"eps": 0.1, "offset": 1.0},
            placement="sandwich",
        ),
        layer(
            {
                **HEADS,
                "rope": {"dims": 4, "theta": 300.0, "interleaved": True},
                "reach": {"kind": "window", "size": 6},
                "qk_norm": {"norm": {"eps": 0.05}, "over": "whole"},
            },
            placement="sandwich",
        ),
        embedding_scale=1.5,
        logit_scale=0.8,
        logit_softcap=3.0,
    ),
    "parallel branches, sinks, gates": model(
        layer(
            {
                **HEADS,
                "rope": {**ROPE, "scaling": {"kind": "linear", "factor": 3.0}},
                "sinks": True,
                "clip": 1.5,
                "qk_norm": {"norm": {"eps": 0.05}, "over": "heads", "after_rope": True},
            },
            placement="parallel",
            shared_norm=True,
        ),
        layer(
            {**HEADS, "gate": True, "query_scaling": {"beta": 0.3, "every": 8, "shift": 1}},
            {**MLP, "limit": 1.2},
            placement="parallel",
        ),
        embedding_width=12,
    ),
    "experts in groups beside latent attention": model(
        layer(
            {
                "kind": "latent",
                "num_heads": 3,
                "query_rank": 10,
                "latent_rank": 9,
                "plain_dim": 6,
                "value_dim": 5,
                "rope": {"dims": 4, "theta": 500.0, "interleaved": True},
                "norm": RMS,
                "reach": {"kind": "window", "size": 15},
            },
            {
                "kind": "experts",
                "router": {
                    **ROUTER,
                    "scoring": "sigmoid",
                    "group_score": "two best",
                    "selection_bias": True,
                    "renormalise": True,
                    "scale": 1.7,
                },
                "expert": MLP,
                "shared": {**MLP, "intermediate_size": 16},
                "shared_gate": True,
            },
            branch_scale=0.6,
        ),
        layer(
            {
                "kind": "latent",
                "num_heads": 2,
                "latent_rank": 9,
                "plain_dim": 6,
                "value_dim": 7,
                "rope": {"dims": 4, "theta": 500.0},
                "norm": RMS,
            },
            {
                "kind": "experts",
                "router": {**ROUTER, "bias": True, "top_groups": 1},
                "expert": {**MLP, "bias": True},
                "shared": MLP,
            },
        ),
    ),
    "a rule, a convolution and attention in turn": model(
        layer({**DELTA, "num_value_heads": 4}, {"intermediate_size": 24, "activation": "relu2"}),
        layer(CONVOLUTION, {"intermediate_size": 24, "activation": "xielu", "gated": False}),
        layer({**HEADS, "rope": ROPE, "reach": {"kind": "window", "size": 9}}, {**PLAIN, "activation": "relu"}),
        layer(
            {**CONVOLUTION, "width": 20, "biased": False},
            {"kind": "experts", "router": {**ROUTER, "top_groups": 1}, "expert": MLP},
        ),
        final_norm={"eps": 1.0},
    ),
    "layers with a state alone": model(
        layer({**DELTA, "activation": "gelu", "norm": LAYER_NORM}, norm=LAYER_NORM, placement="post"),
        layer({**CONVOLUTION, "kernel": 2}, {**PLAIN, "activation": "silu"}, placement="branch"),
        layer(DELTA, placement="parallel"),
    ),
    "RoPE stretched in three ways": model(
        layer({**HEADS, "rope": {**ROPE, "scaling": LLAMA3}}),
        layer({**HEADS, "rope": {**ROPE, "scaling": {"kind": "yarn", "factor": 4.0, **ORIGINAL}}}),
        layer({**HEADS, "rope": {**ROPE, "scaling": {"kind": "proportional", "pairs": 3, "factor": 2.0}}}),
    ),
    "LongRoPE beyond its original length": model(
        layer({**HEADS, "rope": {**ROPE, "scaling": LONGROPE}}),
        layer({**LATENT, "rope": {"dims": 8, "theta": 300.0, "scaling": LONGROPE}}),
    ),
    "keys shared between layers, inputs of each layer": model(
        layer({**SHARING, "reach": {"kind": "window", "size": 7}}, DUAL, placement="sandwich", scalar=True),
        layer({**SHARING, "value_norm": RMS, "clip": 1.1}, placement="sandwich", branch_scale=0.7, scalar=True),
        layer(
            {**SHARING, "num_heads": 2, "source": 0, "reach": {"kind": "window", "size": 7}, "gate": True},
            placement="sandwich",
            repeat=2,
        ),
        layer({**SHARING, "source": 1, "rope": {**ROPE, "theta": 90.0}}, DUAL, placement="sandwich"),
        layer_inputs={"vocab_size": 50, "width": 6, "activation": "gelu_tanh"},
        tie_word_embeddings=True,
    ),
    "one key head, norms and values of its own": model(
        layer(
            {
                **HEADS,
                "num_kv_heads": 1,
                "values_are_keys": True,
                "value_norm": {"eps": 0.1, "weight": False},
                "qk_norm": {"norm": LAYER_NORM},
                "rope": ROPE,
            },
            norm={"kind": "layer", "eps": 0.1},
        ),
        layer(
            {**HEADS, "values_are_keys": True, "gate": True, "bias": {"kind": "alibi", "most": 3.0, "rounded": True}},
            norm={"kind": "layer", "eps": 0.1},
        ),
    ),
    "routers": model(
        layer(
            {**HEADS, "rope": ROPE},
            {"kind": "experts", "router": CHOSEN, "expert": {**MLP, "bias": True, "limit": 1.1}},
        ),
        layer(HEADS, {"kind": "experts", "router": {**CHOSEN, "scoring": "mixed"}, "expert": MLP}),
        layer(
            {**HEADS, "rope": ROPE},
            {
                "kind": "experts",
                "router": {**CHOSEN, "scoring": "sigmoid", "top_k": 1, "scales_input": True, "expert_scale": True},
                "expert": {**PLAIN, "activation": "relu2"},
                "shared": MLP,
            },
        ),
        layer(
            {**HEADS, "rope": ROPE, "query_scaling": {"beta": 0.2, "every": 6}},
            {
                "kind": "experts",
                "router": {**CHOSEN, "scoring": "sigmoid", "renormalise": True},
                "expert": {**PLAIN, "activation": "gelu_tanh"},
            },
        ),
    ),
    "latents in chunks and strides": model(
        layer({**LATENT, "reach": {"kind": "chunk", "size": 13}, "qkv_bias": True, "output_bias": True}),
        layer(
            {
                **LATENT,
                "query_rank": 8,
                "reach": {"kind": "strided", "local": 3, "stride": 5},
                "query_scaling": {"beta": 0.3, "every": 8},
                "scale": 0.4,
            },
            branch_scale=1.3,
        ),
    ),
}
EXAMPLE = re.findall(r"```json\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)[0]
MODELS["the example of the page"] = json.loads(EXAMPLE)
