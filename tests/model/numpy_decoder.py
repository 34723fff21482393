"""A decoder in plain numpy, float64, a position at a time: formulas of the papers, written for the tests alone.

It takes the object that docs/NATIVE.md describes and the tensors by their canonical names; nothing of tinyllm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Spec = Mapping[str, Any]


def logits_of(spec: Spec, tensors: Mapping[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """Return logits (n, vocab) after each of `ids`."""
    tensors = {name: value.astype(np.float64) for name, value in tensors.items()}
    x = tensors["model.embed_tokens.weight"][ids] * spec.get("embedding_scale", 1.0)
    if spec.get("embedding_width"):
        x = x @ tensors["model.project_in.weight"].T
    if spec.get("embed_norm"):
        x = norm(x, spec["embed_norm"], tensors, "model.embed_norm")
    if spec.get("learned_positions"):
        first = spec.get("position_offset", 0)
        x = x + tensors["model.embed_positions.weight"][first : first + len(ids)]
    layers = [layer for layer in spec["layers"] for _ in range(layer.get("repeat", 1))]
    for i, layer in enumerate(layers):
        x = block(x, layer, tensors, f"model.layers.{i}")
    if spec["final_norm"]:
        x = norm(x, spec["final_norm"], tensors, "model.norm")
    if spec.get("embedding_width"):
        x = x @ tensors["model.project_out.weight"].T
    head = "model.embed_tokens" if spec.get("tie_word_embeddings") else "lm_head"
    logits = x @ tensors[f"{head}.weight"].T
    if spec.get("head_bias"):
        logits = logits + tensors["lm_head.bias"]
    logits = logits * spec.get("logit_scale", 1.0)
    cap = spec.get("logit_softcap")
    return np.tanh(logits / cap) * cap if cap else logits


def block(x: np.ndarray, layer: Spec, tensors: Mapping[str, np.ndarray], at: str) -> np.ndarray:
    """One layer, its norms where `placement` has them."""

    def attend(y: np.ndarray) -> np.ndarray:
        return attention(y, layer["attention"], tensors, f"{at}.self_attn", layer["norm"])

    def feed(y: np.ndarray) -> np.ndarray:
        shape = layer["feed_forward"]
        if shape.get("kind") == "experts":
            return experts(y, shape, tensors, f"{at}.mlp")
        return network(y, shape, tensors, f"{at}.mlp")

    def normal(name: str, y: np.ndarray) -> np.ndarray:
        return norm(y, layer["norm"], tensors, f"{at}.{name}")

    branch, residual = layer.get("branch_scale", 1.0), layer.get("residual_scale", 1.0)
    placement = layer.get("placement", "pre")
    if placement == "pre":
        x = x + branch * attend(normal("input_layernorm", x))
        return x + branch * feed(normal("post_attention_layernorm", x))
    if placement == "post":  # 2203.00555: LN(alpha x + f(x))
        x = normal("input_layernorm", residual * x + attend(x))
        return normal("post_attention_layernorm", residual * x + feed(x))
    if placement == "branch":
        x = x + normal("post_attention_layernorm", attend(x))
        return x + normal("post_feedforward_layernorm", feed(x))
    if placement == "sandwich":
        x = x + normal("post_attention_layernorm", attend(normal("input_layernorm", x)))
        return x + normal("post_feedforward_layernorm", feed(normal("pre_feedforward_layernorm", x)))
    assert placement == "parallel"
    first = normal("input_layernorm", x)
    second = first if layer.get("shared_norm") else normal("post_attention_layernorm", x)
    return x + attend(first) + feed(second)


def norm(x: np.ndarray, shape: Spec, tensors: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """RMSNorm (1910.07467) or LayerNorm (1607.06450) over the last axis."""
    if shape.get("kind", "rms") == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + shape["eps"])
    if shape.get("weight", True):
        x = x * (tensors[f"{name}.weight"] + shape.get("offset", 0.0))
    return x + tensors[f"{name}.bias"] if shape.get("bias") else x


def project(x: np.ndarray, tensors: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """X times the matrix of a module, plus its bias where it has one."""
    y = x @ tensors[f"{name}.weight"].T
    return y + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else y


# ---------------------------------------------------------------- attention


def attention(x: np.ndarray, shape: Spec, tensors: Mapping[str, np.ndarray], at: str, normal: Spec) -> np.ndarray:
    """Attend head by head, query by query, over the keys that the query sees."""
    if shape.get("kind") == "latent":
        return latent_attention(x, shape, tensors, at)
    n, heads, width = len(x), shape["num_heads"], shape["head_dim"]
    kv_heads = shape.get("num_kv_heads", heads)
    q, k, v = (project(x, tensors, f"{at}.{part}_proj").reshape(n, -1, width) for part in "qkv")
    if shape.get("clip"):
        q, k, v = (np.clip(part, -shape["clip"], shape["clip"]) for part in (q, k, v))
    said = shape.get("qk_norm")

    def normed(part: np.ndarray, name: str) -> np.ndarray:
        if said.get("over", "head") == "whole":
            return norm(part.reshape(n, -1), said["norm"], tensors, f"{at}.{name}").reshape(part.shape)
        return norm(part, said["norm"], tensors, f"{at}.{name}")

    if said and not said.get("after_rope"):
        q, k = normed(q, "q_norm"), normed(k, "k_norm")
    if shape.get("rope"):
        q, k = rotated(q, shape["rope"]), rotated(k, shape["rope"])
    if said and said.get("after_rope"):
        q, k = normed(q, "q_norm"), normed(k, "k_norm")
    tuning = shape.get("query_scaling")
    if tuning:
        steps = [(p + tuning.get("shift", 0)) // tuning["every"] for p in range(n)]
        q = q * np.array([1 + tuning["beta"] * math.log1p(step) for step in steps])[:, None, None]
    out = np.zeros((n, heads, width))
    for head in range(heads):
        for i in range(n):
            keys = [j for j in range(i + 1) if sees(shape.get("reach"), i, j)]
            shared = head // (heads // kv_heads)
            scores = np.array([q[i, head] @ k[j, shared] for j in keys]) * shape.get("scale", width**-0.5)
            if shape.get("softcap"):
                scores = shape["softcap"] * np.tanh(scores / shape["softcap"])
            scores = scores + [distance_bias(shape.get("bias"), head, heads, i, j) for j in keys]
            sink = [tensors[f"{at}.sinks"][head]] if shape.get("sinks") else []
            weights = np.exp(np.array([*scores, *sink]))
            weights /= weights.sum()
            out[i, head] = sum(weights[place] * v[j, shared] for place, j in enumerate(keys))
    out = out.reshape(n, -1)
    if shape.get("gate"):
        out = out / (1 + np.exp(-project(x, tensors, f"{at}.g_proj")))
    return project(out, tensors, f"{at}.o_proj")


def latent_attention(x: np.ndarray, shape: Spec, tensors: Mapping[str, np.ndarray], at: str) -> np.ndarray:
    """2405.04434, as written there: keys and values of all heads are made of the latents."""
    n, heads, plain, turned = len(x), shape["num_heads"], shape["plain_dim"], shape["rope"]["dims"]
    if shape.get("query_rank"):
        q = norm(project(x, tensors, f"{at}.q_a_proj"), shape["norm"], tensors, f"{at}.q_a_layernorm")
        q = project(q, tensors, f"{at}.q_b_proj")
    else:
        q = project(x, tensors, f"{at}.q_proj")
    q = q.reshape(n, heads, plain + turned)
    both = project(x, tensors, f"{at}.kv_a_proj_with_mqa")
    latent = norm(both[:, : shape["latent_rank"]], shape["norm"], tensors, f"{at}.kv_a_layernorm")
    key = rotated(both[:, None, shape["latent_rank"] :], shape["rope"])
    made = project(latent, tensors, f"{at}.kv_b_proj").reshape(n, heads, -1)
    k = np.concatenate([made[..., :plain], np.repeat(key, heads, axis=1)], axis=-1)
    q = np.concatenate([q[..., :plain], rotated(q[..., plain:], shape["rope"])], axis=-1)
    out = np.zeros((n, heads, shape["value_dim"]))
    for head in range(heads):
        for i in range(n):
            keys = [j for j in range(i + 1) if sees(shape.get("reach"), i, j)]
            scores = np.array([q[i, head] @ k[j, head] for j in keys])
            weights = np.exp(scores * shape.get("scale", (plain + turned) ** -0.5))
            weights /= weights.sum()
            out[i, head] = sum(w * made[j, head, plain:] for w, j in zip(weights, keys, strict=True))
    return project(out.reshape(n, -1), tensors, f"{at}.o_proj")


def sees(reach: Spec | None, i: int, j: int) -> bool:
    """Whether query i sees key j <= i."""
    if not reach:
        return True
    if reach["kind"] == "window":
        return i - j < reach["size"]
    if reach["kind"] == "chunk":
        return i // reach["size"] == j // reach["size"]
    return i - j < reach["local"] or (i - j) % reach["stride"] == 0  # 1904.10509, strided


def distance_bias(bias: Spec | None, head: int, heads: int, i: int, j: int) -> float:
    """ALiBi (2108.12409), for a power of two of heads, or Sandwich (2212.10356)."""
    if not bias:
        return 0.0
    if bias["kind"] == "alibi":
        slope = 2 ** (-bias.get("most", 8.0) * (head + 1) / heads)
        return -slope * (i - j) * bias.get("factor", 1.0)
    dims = bias["dims"]
    angles = 10000.0 ** (-2 * np.arange(dims // 2) / dims)
    here, there = (np.concatenate([np.sin(p * angles), np.cos(p * angles)]) for p in (i, j))
    return float(here @ there) * heads / (8 * (head + 1))


def rotated(x: np.ndarray, rope: Spec) -> np.ndarray:
    """2104.09864: x (n, heads, width), the pairs of its first `dims` elements as complex numbers."""
    dims = rope["dims"]
    turned, rest = x[..., :dims], x[..., dims:]
    real, imaginary = (
        (turned[..., 0::2], turned[..., 1::2])
        if rope.get("interleaved")
        else (turned[..., : dims // 2], turned[..., dims // 2 :])
    )
    positions = np.arange(len(x)) / (rope["scaling"]["factor"] if rope.get("scaling") else 1.0)
    angles = positions[:, None] * rope["theta"] ** (-2 * np.arange(dims // 2) / dims)
    pairs = (real + 1j * imaginary) * np.exp(1j * angles)[:, None]
    made = np.empty_like(turned)
    if rope.get("interleaved"):
        made[..., 0::2], made[..., 1::2] = pairs.real, pairs.imag
    else:
        made[..., : dims // 2], made[..., dims // 2 :] = pairs.real, pairs.imag
    return np.concatenate([made, rest], axis=-1)


# ---------------------------------------------------------------- feed-forward


def activation(name: str, x: np.ndarray) -> np.ndarray:
    """The functions of 2002.05202 and 2109.08668."""
    if name == "relu":
        return np.where(x > 0, x, 0)
    if name == "relu2":
        return np.where(x > 0, x * x, 0)
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu":
        return x * np.vectorize(lambda value: 0.5 * math.erfc(-value / math.sqrt(2)))(x)
    assert name == "gelu_tanh"
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def network(x: np.ndarray, shape: Spec, tensors: Mapping[str, np.ndarray], at: str) -> np.ndarray:
    """Gated or plain."""
    y = project(x, tensors, f"{at}.up_proj")
    if shape.get("limit"):
        gate = np.minimum(project(x, tensors, f"{at}.gate_proj"), shape["limit"])
        y = (np.clip(y, -shape["limit"], shape["limit"]) + 1) * gate / (1 + np.exp(-1.702 * gate))
    elif shape.get("gated", True):
        y = y * activation(shape["activation"], project(x, tensors, f"{at}.gate_proj"))
    else:
        y = activation(shape["activation"], y)
    return project(y, tensors, f"{at}.down_proj")


def experts(x: np.ndarray, shape: Spec, tensors: Mapping[str, np.ndarray], at: str) -> np.ndarray:
    """Token by token, expert by expert; of all experts or of the best groups."""
    router = shape["router"]
    count, groups = router["num_experts"], router.get("groups", 1)
    out = np.zeros_like(x)
    for token, row in enumerate(x):
        raw = project(row, tensors, f"{at}.gate")
        scores = 1 / (1 + np.exp(-raw)) if router.get("scoring") == "sigmoid" else np.exp(raw) / np.exp(raw).sum()
        preferred = scores + tensors.get(f"{at}.gate.e_score_correction_bias", np.zeros(count))
        best = 2 if router.get("group_score") == "two best" else 1
        by_group = [sorted(group)[-best:] for group in preferred.reshape(groups, -1)]
        allowed = np.argsort([sum(group) for group in by_group])[-router.get("top_groups", 1) :]
        candidates = [e for e in range(count) if e // (count // groups) in allowed]
        chosen = sorted(candidates, key=lambda e: preferred[e])[-router["top_k"] :]
        total = sum(scores[e] for e in chosen) if router.get("renormalise") else 1.0
        for e in chosen:
            own = {
                name.replace(f"{at}.experts.", "own."): value[e]
                for name, value in tensors.items()
                if name.startswith(f"{at}.experts.")
            }
            y = network(row, shape["expert"], own, "own")
            out[token] += scores[e] / total * router.get("scale", 1.0) * y
        if shape.get("shared"):
            y = network(row, shape["shared"], tensors, f"{at}.shared_expert")
            if shape.get("shared_gate"):
                y = y / (1 + np.exp(-project(row, tensors, f"{at}.shared_expert_gate")))
            out[token] += y
    return out
