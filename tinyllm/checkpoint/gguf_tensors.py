"""The tensors of a GGUF file under canonical names, each matrix as MLX would pack it. No mlx.

Blocks that have one scale for 32 elements are MLX's affine groups (or its mxfp4) in another order, and stay what they
are, bit for bit. Those with a scale for 16 have no equal there: their elements become 8-bit ones, in groups of 32,
unless they are read as dense.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tinyllm.checkpoint.gguf_architectures import Architecture
from tinyllm.checkpoint.gguf_config import architecture_of, config_values
from tinyllm.checkpoint.gguf_header import GgufHeader, GgufTensor
from tinyllm.checkpoint.safetensors_header import BITS
from tinyllm.checkpoint.tensor_table import StoredTensor, TensorTable
from tinyllm.config.config import Config
from tinyllm.config.fused import (
    Piece,
    grouped_delta_gates,
    query_and_gate,
    stacked_delta,
    stacked_gate_up,
    stacked_qkv,
)
from tinyllm.config.layers import AttentionConfig, DeltaConfig, LayerConfig, MLPConfig
from tinyllm.config.quantization import QuantFormat, QuantizationConfig
from tinyllm.errors import CheckpointError, ConfigError, TensorMismatchError

__all__ = [
    "GROUP", "LAYER_NAMES", "WHOLE_NAMES", "GgufPart", "Order", "as_dense", "config_and_tensors", "packing_of",
]  # fmt: skip

GROUP = 32
_DENSE = ("F32", "F16", "BF16")
# How MLX packs the same, and the type of the scales that are no less exact than the block's; others are packed anew.
_EXACT = {
    **{
        name: (QuantFormat(bits, GROUP), "F16") for name, bits in (("Q4_0", 4), ("Q4_1", 4), ("Q5_0", 5), ("Q5_1", 5))
    },
    **{name: (QuantFormat(bits, GROUP), "F32") for name, bits in (("Q4_K", 4), ("Q5_K", 5))},
    "Q8_0": (QuantFormat(8, GROUP), "F16"),
    "MXFP4": (QuantFormat(4, GROUP, "mxfp4"), "U8"),
}
_REPACKED = (QuantFormat(8, GROUP), "F32")

WHOLE_NAMES = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "token_embd_norm": "model.embed_norm",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.embed_q",
    "attn_v_b": "self_attn.unembed_out",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "attn_gate": "linear_attn.z_proj",
    "ssm_ba": "linear_attn.ba_proj",
    "ssm_alpha": "linear_attn.a_proj",
    "ssm_beta": "linear_attn.b_proj",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
# What is no weight or bias of a module, whatever a file calls it.
_NUMBERS = {
    "attn_sinks": "self_attn.sinks",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
}
_PACKABLE = re.compile(
    r"^(model\.embed_tokens|lm_head)$|_proj$|_proj_with_mqa$|\.(embed_q|unembed_out)$|\.mlp\.(shared_expert_)?gate$"
)
_RECOMPUTED = re.compile(r"^(rope_(freqs|factors_long|factors_short)|blk\.\d+\.(attn_rot_embd|rope_freqs))\.weight$")
_LAYER = re.compile(r"^blk\.(\d{1,6})\.([\w.]+?)(?:\.(weight|bias))?$")
_WHOLE = re.compile(r"^(\w+)\.(weight|bias)$")


@dataclass(frozen=True)
class Order:
    """What puts rows, those from `start` on, or columns right.

    They are seen as (outer, first, second, ...), of which the two in the middle change places.
    """

    outer: int
    first: int
    second: int
    start: int = 0
    columns: bool = False


@dataclass(frozen=True)
class GgufPart:
    """A tensor of a file as it is read: `part` is its packed "weight", the "scales" or "biases", or "dense".

    `dtype` and `shape` are of what is read, `start` and `end` of the file's bytes, that hold `stored`, in an `order`
    of its own. `shift` is taken from each element; where it is a `decay`, the file has -exp of each.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    stored: GgufTensor
    part: str = "dense"
    order: Order | None = None
    shift: float = 0.0
    decay: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of what is read."""
        return math.prod(self.shape) * BITS[self.dtype] // 8


def packing_of(tensor: GgufTensor) -> tuple[QuantFormat, str] | None:
    """Return how MLX packs the elements of a type, and the type of its scales; None for one that is dense."""
    return None if tensor.type.name in _DENSE else _EXACT.get(tensor.type.name, _REPACKED)


def config_and_tensors(header: GgufHeader) -> tuple[Config, TensorTable]:
    """Return what config.json would say of a GGUF file's model, and its tensors.

    Raises UnsupportedModelError, ConfigError (or a class below it) and CheckpointError.
    """
    architecture = architecture_of(header)
    config = Config.from_dict(config_values(header), str(header.file))
    table, forms = _name_all(header, architecture, config)
    return replace(config, quantization=_quantization(forms)), table


def as_dense(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Have packed matrices of GGUF files read as dense ones, from the file's own blocks."""
    dense = dict(tensors)
    for name, tensor in tensors.items():
        [part, *_] = tensor.parts
        if isinstance(part, GgufPart) and part.part != "dense":
            del dense[name]
            if part.part == "weight":
                dense[name] = replace(tensor, parts=(_part(part, part.stored, "dense"),))
    return dense


def _quantization(forms: Mapping[str, QuantFormat]) -> QuantizationConfig | None:
    if not forms:
        return None
    [(default, _)] = Counter(forms.values()).most_common(1)
    return QuantizationConfig(default, {module: form for module, form in forms.items() if form != default})


def _name_all(
    header: GgufHeader, architecture: Architecture, config: Config
) -> tuple[TensorTable, dict[str, QuantFormat]]:
    names = _names(header, architecture)
    tensors: dict[str, StoredTensor] = {}
    forms: dict[str, QuantFormat] = {}
    skipped = 0
    for stored in header.tensors.values():
        if _is_of_no_use(stored.name, header, config):
            skipped += 1
            continue
        module, leaf = _canonical(header, stored, names, config)
        if module.endswith("shared_expert_gate") and len(stored.shape) == 1:
            stored = replace(stored, shape=(1, *stored.shape))  # converters drop axes of one element
        whole = _info(header, stored, module, architecture, config)
        packing = packing_of(stored) if leaf == "weight" and _PACKABLE.search(module) else None
        for target, piece in _pieces(module, stored, header, config).items():
            parts = ["dense"] if packing is None else _parts(packing[0])
            for part in parts:
                last = leaf if part == "dense" else part
                name = f"{target}.{last}" if last else target
                if name in tensors:
                    raise CheckpointError(
                        f"{stored.file}: {name!r} is there twice, the second time as {stored.name!r}"
                    )
                axis = 1 if leaf == "bias" else 2
                tensors[name] = StoredTensor((_part(whole, stored, part),), piece=piece, axis=axis)
            if packing is not None:
                forms[target] = packing[0]
    return TensorTable(tensors, skipped, {}), forms


def _parts(form: QuantFormat) -> tuple[str, ...]:
    return ("weight", "scales", "biases") if form.mode == "affine" else ("weight", "scales")


def _is_of_no_use(name: str, header: GgufHeader, config: Config) -> bool:
    """Whether a tensor is computed, is there in two forms, or is of a layer that predicts further tokens."""
    if _RECOMPUTED.match(name):
        return True
    found = _LAYER.match(name)
    if found is None:
        return False
    if found[2] == "attn_kv_b":
        return f"blk.{found[1]}.attn_k_b.weight" in header.tensors
    further = header.metadata.get(f"{header.metadata['general.architecture']}.nextn_predict_layers", 0)
    return int(found[1]) in range(config.num_hidden_layers, config.num_hidden_layers + further)


def _names(header: GgufHeader, architecture: Architecture) -> dict[str, str]:
    """Return what tensors of a file are called in a Llama."""
    names = WHOLE_NAMES | LAYER_NAMES
    present = (
        f"blk.0.{name}.weight" in header.tensors or f"{name}.weight" in header.tensors for name in architecture.names
    )
    return {**names, **architecture.names} if all(present) else names


def _canonical(
    header: GgufHeader, stored: GgufTensor, names: Mapping[str, str], config: Config
) -> tuple[str, str | None]:
    """Return the module of a Llama, and "weight" or "bias", or None where the name is a whole one."""
    if found := _LAYER.match(stored.name):
        layer, name, leaf = f"model.layers.{int(found[1])}", found[2], found[3]
        if int(found[1]) < config.num_hidden_layers:
            if name in _NUMBERS:
                return f"{layer}.{_NUMBERS[name]}", None
            if name == "attn_qkv" and isinstance(config.layer_at(layer).attention, DeltaConfig):
                return f"{layer}.linear_attn.qkv_proj", leaf
            if name in names and leaf is not None:
                return f"{layer}.{names[name]}", leaf
    elif (found := _WHOLE.match(stored.name)) and found[1] in WHOLE_NAMES:
        return names[found[1]], found[2]
    raise TensorMismatchError(
        f"{stored.file}: the tensor {stored.name!r} is none that tinyllm knows in a file of this architecture"
    )


def _info(
    header: GgufHeader, stored: GgufTensor, module: str, architecture: Architecture, config: Config
) -> GgufPart:
    # The norm within linear attention has nothing added, in no family.
    shifted = module.endswith("norm") and not module.endswith("linear_attn.norm") and stored.name.endswith("weight")
    return GgufPart(
        stored.name,
        stored.file,
        stored.type.name if stored.type.name in _DENSE else "F32",
        stored.shape,
        stored.start,
        stored.end,
        stored,
        order=_order(header, stored, module, architecture, config),
        shift=architecture.norm_shift if shifted else 0.0,
        decay=module.endswith(".A_log"),
    )


def _order(
    header: GgufHeader, stored: GgufTensor, module: str, architecture: Architecture, config: Config
) -> Order | None:
    """Return the order that rows or columns are in, where it is not that of config.json's families."""
    order: Order | None = None
    leaf = module.rpartition(".")[2]
    if architecture.paired and leaf in ("q_proj", "k_proj", "qkv_proj"):
        shape = config.layer_at(module).attention
        assert isinstance(shape, AttentionConfig)
        heads = shape.num_heads if leaf == "q_proj" else shape.num_kv_heads
        rows = stored.shape[0] if stored.shape else 0
        order = Order(heads, rows // (2 * heads), 2)
        if leaf == "qkv_proj":
            raise TensorMismatchError(f"{stored.file}: {stored.name!r} holds q and k as they turn, which is not read")
    elif architecture.tiled and ".linear_attn." in module and leaf != "norm":
        order = _untiled(config.layer_at(module), leaf)
    if order is None:
        return None
    along = stored.shape[-1] if order.columns else (stored.shape or (0,))[0] - order.start
    units = order.outer * max(order.first, 1) * order.second
    packed = GROUP if order.columns and packing_of(stored) is not None else 1
    if along <= 0 or along % (units * packed):
        raise TensorMismatchError(
            f"{stored.file}: {stored.name!r} is {list(stored.shape)}, which {units} equal parts do not divide"
        )
    return order


def _untiled(layer: LayerConfig, leaf: str) -> Order | None:
    """Return the order of value heads: the first of each key head, then the second of each."""
    shape = layer.attention
    if not isinstance(shape, DeltaConfig):
        return None  # a tensor that there is no use for, as will be said
    keys = shape.num_key_heads
    start = 2 * keys * shape.key_dim if leaf in ("qkv_proj", "conv1d") else 0
    return Order(1, shape.num_value_heads // keys, keys, start, columns=leaf == "out_proj")


def _pieces(module: str, stored: GgufTensor, header: GgufHeader, config: Config) -> dict[str, Piece | None]:
    """Return the modules that a tensor holds: q, k and v one below the other, gate and up, or one."""
    parent, _, leaf = module.rpartition(".")
    fused = {
        "self_attn.qkv_proj": stacked_qkv,
        "linear_attn.qkv_proj": stacked_delta,
        "linear_attn.ba_proj": grouped_delta_gates,
        "experts.gate_up_proj": stacked_gate_up,
    }.get(".".join(module.split(".")[-2:]))
    if leaf == "q_proj":
        attention = config.layer_at(module).attention
        fused = query_and_gate if isinstance(attention, AttentionConfig) and attention.gate else None
    elif leaf == "up_proj" and ".experts" not in module and _is_gated(config.layer_at(module)):
        beside = stored.name.replace("ffn_up", "ffn_gate")
        fused = None if beside in header.tensors else stacked_gate_up
    if fused is None:
        return {module: None}
    pieces = fused(config.layer_at(module), module)
    [whole] = {piece.whole for piece in pieces.values()}
    rows = stored.shape[-1 if stored.name.endswith("bias") else -2 :][:1]
    if rows != (whole,):
        raise ConfigError(f"{stored.name!r} is {list(stored.shape)}, and {whole} was to be rows of it")
    return {f"{parent}.{name}": piece for name, piece in pieces.items()}


def _is_gated(layer: LayerConfig) -> bool:
    return isinstance(layer.feed_forward, MLPConfig) and layer.feed_forward.gated


def _part(info: GgufPart, stored: GgufTensor, part: str) -> GgufPart:
    """Return a part of a tensor, in the type and shape that it is read with."""
    *rows, columns = stored.shape
    packing = packing_of(stored)
    if part == "dense" or packing is None:
        dtype = stored.type.name if packing is None else "F32"
        return replace(info, dtype=dtype, shape=stored.shape, part="dense", name=stored.name)
    form, scales = packing
    name = f"{stored.name}:{part}"
    if part == "weight":
        return replace(info, dtype="U32", shape=(*rows, columns * form.bits // 32), part=part, name=name)
    return replace(info, dtype=scales, shape=(*rows, columns // GROUP), part=part, name=name)
