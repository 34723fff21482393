"""A decoder in plain numpy, float64, a position at a time: formulas of the papers, written for the tests alone.

It takes the object that docs/NATIVE.md describes and the tensors by their canonical names; nothing of tinyllm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Spec = Mapping[str, Any]
Seen = list[tuple[np.ndarray, np.ndarray] | None]  # keys and values of each layer so far that has its own


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
    inputs = layer_inputs(x, spec, tensors, ids, layers)
    seen: Seen = []
    for i, layer in enumerate(layers):
        x = block(x, layer, tensors, f"model.layers.{i}", seen)
        if inputs is not None:
            gate = activation(
                spec["layer_inputs"]["activation"], project(x, tensors, f"model.layers.{i}.per_layer_input_gate")
            )
            own = project(gate * inputs[:, i], tensors, f"model.layers.{i}.per_layer_projection")
            x = x + norm(own, layer["norm"], tensors, f"model.layers.{i}.post_per_layer_input_norm")
        if layer.get("scalar"):
            x = x * tensors[f"model.layers.{i}.layer_scalar"]
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


def layer_inputs(
    x: np.ndarray, spec: Spec, tensors: Mapping[str, np.ndarray], ids: list[int], layers: list[Spec]
) -> np.ndarray | None:
    """What each layer gets of each token (n, layers, width), as Gemma 3n has it: half of x, half of a table."""
    shape = spec.get("layer_inputs")
    if not shape:
        return None
    form = (len(ids), len(layers), shape["width"])
    of_x = project(x, tensors, "model.per_layer_model_projection") / math.sqrt(x.shape[1])
    of_x = norm(of_x.reshape(form), layers[0]["norm"], tensors, "model.per_layer_projection_norm")
    of_table = tensors["model.embed_tokens_per_layer.weight"][ids].reshape(form) * math.sqrt(shape["width"])
    return (of_x + of_table) / math.sqrt(2)


def block(x: np.ndarray, layer: Spec, tensors: Mapping[str, np.ndarray], at: str, seen: Seen) -> np.ndarray:
    """One layer, its norms where `placement` has them; what others may see of it is added to `seen`."""

    def attend(y: np.ndarray) -> np.ndarray:
        mixer = {"latent": latent_attention, "delta": gated_delta, "conv": short_convolution}
        shape = layer["attention"]
        if shape.get("kind", "heads") == "heads":
            return attention(y, shape, tensors, f"{at}.self_attn", seen)
        seen.append(None)
        return mixer[shape["kind"]](y, shape, tensors, at)

    def normal(name: str, y: np.ndarray) -> np.ndarray:
        return norm(y, layer["norm"], tensors, f"{at}.{name}")

    def feed(y: np.ndarray) -> np.ndarray:
        shape = layer["feed_forward"]
        if shape.get("kind") == "experts":
            return experts(y, shape, tensors, f"{at}.mlp")
        if shape.get("kind") == "dual":
            dense = network(normal("pre_feedforward_layernorm", y), shape["dense"], tensors, f"{at}.mlp")
            routed = normal("router_norm", y) / math.sqrt(y.shape[1])
            mixed = experts(normal("pre_feedforward_layernorm_2", y), shape["experts"], tensors, f"{at}.moe", routed)
            return normal("post_feedforward_layernorm_1", dense) + normal("post_feedforward_layernorm_2", mixed)
        return network(y, shape, tensors, f"{at}.mlp")

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
        x = x + branch * normal("post_attention_layernorm", attend(normal("input_layernorm", x)))
        within = layer["feed_forward"].get("kind") == "dual"
        y = x if within else normal("pre_feedforward_layernorm", x)
        return x + branch * normal("post_feedforward_layernorm", feed(y))
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


def attention(x: np.ndarray, shape: Spec, tensors: Mapping[str, np.ndarray], at: str, seen: Seen) -> np.ndarray:
    """Attend head by head, query by query, over the keys that the query sees."""
    n, heads, width = len(x), shape["num_heads"], shape["head_dim"]
    kv_heads = shape.get("num_kv_heads", heads)
    said, limit = shape.get("qk_norm"), shape.get("clip") or math.inf

    def projected(part: str) -> np.ndarray:
        return project(x, tensors, f"{at}.{part}_proj").reshape(n, -1, width)

    def normed(part: np.ndarray, name: str) -> np.ndarray:
        if said.get("over", "head") == "whole":
            return norm(part.reshape(n, -1), said["norm"], tensors, f"{at}.{name}").reshape(part.shape)
        return norm(part, said["norm"], tensors, f"{at}.{name}")

    def placed(part: np.ndarray, name: str) -> np.ndarray:
        if said and not said.get("after_rope"):
            part = normed(part, name)
        part = np.clip(part, -limit, limit)
        if shape.get("rope"):
            part = rotated(part, shape["rope"])
        return normed(part, name) if said and said.get("after_rope") else part

    q = placed(projected("q"), "q_norm")
    if shape.get("source") is not None:
        k, v = seen[shape["source"]] or ()
        seen.append(None)
    else:
        k = projected("k")
        v = np.clip(k if shape.get("values_are_keys") else projected("v"), -limit, limit)
        if shape.get("value_norm"):
            v = norm(v, shape["value_norm"], tensors, f"{at}.v_norm")
        k = placed(k, "k_norm")
        seen.append((k, v))
    q = tuned(q, shape.get("query_scaling"))
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


def tuned(q: np.ndarray, tuning: Spec | None) -> np.ndarray:
    """Llama 4's temperature of queries (n, heads, width), which grows with the position."""
    if not tuning:
        return q
    steps = [(p + tuning.get("shift", 0)) // tuning["every"] for p in range(len(q))]
    return q * np.array([1 + tuning["beta"] * math.log1p(step) for step in steps])[:, None, None]


def latent_attention(x: np.ndarray, shape: Spec, tensors: Mapping[str, np.ndarray], at: str) -> np.ndarray:
    """2405.04434, as written there: keys and values of all heads are made of the latents."""
    at = f"{at}.self_attn"
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
    q = tuned(q, shape.get("query_scaling"))
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


def gated_delta(x: np.ndarray, shape: Spec, tensors: Mapping[str, np.ndarray], at: str) -> np.ndarray:
    """2412.06464: a matrix for each value head that decays, and is corrected towards the value of each key."""
    at = f"{at}.linear_attn"
    n, key_heads, heads, values = len(x), shape["num_key_heads"], shape["num_value_heads"], shape["value_dim"]
    qkv = np.concatenate([project(x, tensors, f"{at}.{part}_proj") for part in "qkv"], axis=1)
    qkv = activation(shape.get("activation", "silu"), convolved(qkv, tensors[f"{at}.conv1d.weight"]))
    keys = key_heads * shape["key_dim"]
    q, k, v = (
        part.reshape(n, -1, width)
        for part, width in zip(
            np.split(qkv, [keys, 2 * keys], axis=1), (shape["key_dim"], shape["key_dim"], values), strict=True
        )
    )
    q, k = (part / np.sqrt((part * part).sum(axis=-1, keepdims=True) + 1e-6) for part in (q, k))
    soft = np.log1p(np.exp(project(x, tensors, f"{at}.a_proj") + tensors[f"{at}.dt_bias"]))
    decay = np.exp(-np.exp(tensors[f"{at}.A_log"]) * soft)
    rate = 1 / (1 + np.exp(-project(x, tensors, f"{at}.b_proj")))
    out = np.zeros((n, heads, values))
    for head in range(heads):
        matrix, shared = np.zeros((shape["key_dim"], values)), head // (heads // key_heads)
        for i in range(n):
            matrix = matrix * decay[i, head]
            wrong = v[i, head] - k[i, shared] @ matrix
            matrix = matrix + np.outer(k[i, shared], rate[i, head] * wrong)
            out[i, head] = q[i, shared] @ matrix / math.sqrt(shape["key_dim"])
    out = norm(out, shape["norm"], tensors, f"{at}.norm").reshape(n, -1)
    return project(out * activation("silu", project(x, tensors, f"{at}.z_proj")), tensors, f"{at}.out_proj")


def short_convolution(x: np.ndarray, shape: Spec, tensors: Mapping[str, np.ndarray], at: str) -> np.ndarray:
    """LFM2's: gated before and after."""
    before, after, inner = np.split(project(x, tensors, f"{at}.conv.in_proj"), 3, axis=1)
    y = convolved(before * inner, tensors[f"{at}.conv.conv.weight"])
    if shape.get("biased"):
        y = y + tensors[f"{at}.conv.conv.bias"]
    return project(after * y, tensors, f"{at}.conv.out_proj")


def convolved(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Each channel of x (n, channels) by itself, with kernel (channels, k), whose last column is for the present."""
    last = kernel.shape[1] - 1
    return np.array(
        [sum(x[i - back] * kernel[:, last - back] for back in range(min(i, last) + 1)) for i in range(len(x))]
    )


def distance_bias(bias: Spec | None, head: int, heads: int, i: int, j: int) -> float:
    """ALiBi (2108.12409), for a power of two of heads, or Sandwich (2212.10356)."""
    if not bias:
        return 0.0
    if bias["kind"] == "alibi":
        slope = 2 ** (-bias.get("most", 8.0) * (head + 1) / heads)
        if bias.get("rounded"):  # of the same sum for all keys of a query, the key's part
            return bfloat16(bfloat16(slope) * bfloat16(j)) * bias.get("factor", 1.0)
        return -slope * (i - j) * bias.get("factor", 1.0)
    dims = bias["dims"]
    angles = 10000.0 ** (-2 * np.arange(dims // 2) / dims)
    here, there = (np.concatenate([np.sin(p * angles), np.cos(p * angles)]) for p in (i, j))
    return float(here @ there) * heads / (8 * (head + 1))


def bfloat16(value: float) -> float:
    """Round to eight significant bits, to the even one of two that are as near."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 256), exponent - 8)


def wavelengths(rope: Spec, length: int) -> tuple[np.ndarray, float]:
    """How many positions a radian of each pair is, and what multiplies the rotated part."""
    dims, scaling = rope["dims"], rope.get("scaling") or {"kind": "none"}
    plain = rope["theta"] ** (2 * np.arange(dims // 2) / dims)
    stretched, original = plain * scaling.get("factor", 1.0), scaling.get("original_max_position_embeddings", 0)
    turns = original / (2 * math.pi * plain)  # within the original length
    match scaling["kind"]:
        case "linear":
            return stretched, 1.0
        case "llama3":  # Llama 3.1's code: frequencies between low and high turns are blended
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            kept = np.clip((turns - low) / (high - low), 0, 1)
            return 1 / (kept / plain + (1 - kept) / stretched), 1.0
        case "yarn":  # 2309.00071 with the ramp of its code, over whole pairs
            fast, slow = (
                dims * math.log(original / (2 * math.pi * scaling.get(name, usual))) / (2 * math.log(rope["theta"]))
                for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0))
            )
            first, last = max(math.floor(fast), 0), min(math.ceil(slow), dims - 1)
            ramp = np.clip((np.arange(dims // 2) - first) / (last - first), 0, 1)
            return 1 / (ramp / stretched + (1 - ramp) / plain), 0.1 * math.log(scaling["factor"]) + 1
        case "longrope":
            factors = scaling["long_factor" if length > original else "short_factor"]
            return plain * np.array(factors), scaling["attention_factor"]
        case "proportional":
            return np.where(np.arange(dims // 2) < scaling["pairs"], stretched, np.inf), 1.0
    return plain, 1.0


def rotated(x: np.ndarray, rope: Spec) -> np.ndarray:
    """2104.09864: x (n, heads, width), the pairs of its first `dims` elements as complex numbers."""
    dims = rope["dims"]
    turned, rest = x[..., :dims], x[..., dims:]
    real, imaginary = (
        (turned[..., 0::2], turned[..., 1::2])
        if rope.get("interleaved")
        else (turned[..., : dims // 2], turned[..., dims // 2 :])
    )
    by_pair, factor = wavelengths(rope, len(x))
    angles = np.arange(len(x))[:, None] / by_pair
    pairs = (real + 1j * imaginary) * factor * np.exp(1j * angles)[:, None]
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
    if shape["activation"] == "xielu":
        return project(xielu(y, tensors, f"{at}.act_fn"), tensors, f"{at}.down_proj")
    if shape.get("limit"):
        gate = np.minimum(project(x, tensors, f"{at}.gate_proj"), shape["limit"])
        y = (np.clip(y, -shape["limit"], shape["limit"]) + 1) * gate / (1 + np.exp(-1.702 * gate))
    elif shape.get("gated", True):
        y = y * activation(shape["activation"], project(x, tensors, f"{at}.gate_proj"))
    else:
        y = activation(shape["activation"], y)
    return project(y, tensors, f"{at}.down_proj")


def xielu(x: np.ndarray, tensors: Mapping[str, np.ndarray], at: str) -> np.ndarray:
    """2411.13010, with parameters that are stored as the inverse of softplus."""
    beta, eps = tensors[f"{at}.beta"], tensors[f"{at}.eps"]
    above = np.log1p(np.exp(tensors[f"{at}.alpha_p"]))
    below = beta + np.log1p(np.exp(tensors[f"{at}.alpha_n"]))
    return np.where(x > 0, above * x * x + beta * x, below * (np.expm1(np.minimum(x, eps)) - x) + beta * x)


def mixed(raw: np.ndarray, router: Spec) -> dict[int, float]:
    """2409.12136: one expert after the other, each weighed among those near it that are left."""
    weights: dict[int, float] = {}
    for _ in range(router["top_k"]):
        best = max((e for e in range(len(raw)) if e not in weights), key=lambda e: raw[e])
        near = [
            math.exp(raw[e] - raw[best])
            for e in range(len(raw))
            if e not in weights
            and (raw[best] - raw[e]) / max(abs(raw[e]), raw[best]) <= 2 * router.get("jitter", 0.0)
        ]
        weights[best] = 1 / sum(near)
    return weights


def weighed(raw: np.ndarray, router: Spec, bias: np.ndarray) -> dict[int, float]:
    """The experts that a token goes to, of all or of the best groups, and their weights."""
    count, groups, scoring = router["num_experts"], router.get("groups", 1), router.get("scoring", "softmax")
    if scoring == "mixed":
        return mixed(raw, router)
    scores = {"sigmoid": 1 / (1 + np.exp(-raw)), "softmax": np.exp(raw) / np.exp(raw).sum(), "chosen": raw}[scoring]
    preferred = scores + bias
    best = 2 if router.get("group_score") == "two best" else 1
    by_group = [sorted(group)[-best:] for group in preferred.reshape(groups, -1)]
    allowed = np.argsort([sum(group) for group in by_group])[-router.get("top_groups", 1) :]
    candidates = [e for e in range(count) if e // (count // groups) in allowed]
    chosen = sorted(candidates, key=lambda e: preferred[e])[-router["top_k"] :]
    weights = {e: math.exp(scores[e]) if scoring == "chosen" else scores[e] for e in chosen}
    total = sum(weights.values()) + (0.0 if scoring == "chosen" else router.get("epsilon", 0.0))
    divided = scoring == "chosen" or router.get("renormalise")
    return {e: weight / total if divided else weight for e, weight in weights.items()}


def experts(
    x: np.ndarray, shape: Spec, tensors: Mapping[str, np.ndarray], at: str, routed: np.ndarray | None = None
) -> np.ndarray:
    """Token by token, expert by expert; the router reads `routed`, where that is not x."""
    router = shape["router"]
    count = router["num_experts"]
    bias = tensors.get(f"{at}.gate.e_score_correction_bias", np.zeros(count))
    scales = tensors.get(f"{at}.gate.per_expert_scale", np.ones(count))
    out = np.zeros_like(x)
    for token, row in enumerate(x):
        raw = project((x if routed is None else routed)[token], tensors, f"{at}.gate")
        for e, weight in weighed(raw, router, bias).items():
            weight = weight * router.get("scale", 1.0) * scales[e]
            own = {
                name.replace(f"{at}.experts.", "own."): value[e]
                for name, value in tensors.items()
                if name.startswith(f"{at}.experts.")
            }
            if router.get("scales_input"):
                out[token] += network(row * weight, shape["expert"], own, "own")
            else:
                out[token] += weight * network(row, shape["expert"], own, "own")
        if shape.get("shared"):
            y = network(row, shape["shared"], tensors, f"{at}.shared_expert")
            if shape.get("shared_gate"):
                y = y / (1 + np.exp(-project(row, tensors, f"{at}.shared_expert_gate")))
            out[token] += y
    return out
