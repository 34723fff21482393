"""The tensors of a GGUF file under canonical names, each matrix as MLX would pack it. No mlx.

Blocks that have one scale for 32 elements are MLX's affine groups in another order, and stay what they are, bit for
bit. Those with a scale for 16 have no equal there: their elements become 8-bit ones, in groups of 32, unless they are
read as dense.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tinyllm.checkpoint.gguf_config import Architecture, architecture_of, config_values
from tinyllm.checkpoint.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from tinyllm.checkpoint.safetensors_header import BITS, TensorInfo
from tinyllm.checkpoint.tensor_table import StoredTensor, TensorTable
from tinyllm.config.config import Config
from tinyllm.config.fused import Piece, stacked_gate_up, stacked_qkv
from tinyllm.config.quantization import QuantFormat, QuantizationConfig
from tinyllm.errors import CheckpointError, ConfigError, TensorMismatchError

__all__ = ["GROUP", "LAYER_NAMES", "WHOLE_NAMES", "GgufPart", "as_dense", "packing_of", "read_gguf"]

GROUP = 32
_DENSE = ("F32", "F16", "BF16")
# Bits, and the type of the scales that are no less exact than the block's; the others are packed anew.
_EXACT = {
    "Q4_0": (4, "F16"), "Q4_1": (4, "F16"), "Q5_0": (5, "F16"), "Q5_1": (5, "F16"), "Q8_0": (8, "F16"),
    "Q4_K": (4, "F32"), "Q5_K": (5, "F32"),
}  # fmt: skip
_REPACKED = (8, "F32")

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
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_PACKABLE = re.compile(r"^(model\.embed_tokens|lm_head)$|_proj$|\.mlp\.gate$")
_RECOMPUTED = re.compile(r"^(rope_(freqs|factors_long|factors_short)|blk\.\d+\.attn_rot_embd)\.weight$")
_LAYER = re.compile(r"^blk\.(\d{1,6})\.(\w+)\.(weight|bias)$")
_WHOLE = re.compile(r"^(\w+)\.(weight|bias)$")


@dataclass(frozen=True)
class GgufPart(TensorInfo):
    """A tensor of a file as it is read: `part` is its packed "weight", the "scales" or "biases", or "dense".

    `dtype` and `shape` are of what is read, `start` and `end` of the file's bytes, that hold `stored`. `pair_heads`
    is how many heads the rows are of, where these are rotated as neighbours; `shift` is taken from each element.
    """

    stored: GgufTensor
    part: str = "dense"
    pair_heads: int | None = None
    shift: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of what is read."""
        return math.prod(self.shape) * BITS[self.dtype] // 8


def packing_of(tensor: GgufTensor) -> tuple[int, str] | None:
    """Return the bits an element that a type has in MLX, and the type of its scales; None for one that is dense."""
    return None if tensor.type.name in _DENSE else _EXACT.get(tensor.type.name, _REPACKED)


def read_gguf(path: Path) -> tuple[Config, TensorTable]:
    """Read the header of a GGUF file: what config.json would say, and the tensors.

    Raises CorruptFileError, UnsupportedQuantizationError, ConfigError (or a class below it) and CheckpointError.
    """
    header = read_gguf_header(path)
    architecture = architecture_of(header)
    config = Config.from_dict(config_values(header), str(path))
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
    tensors: dict[str, StoredTensor] = {}
    forms: dict[str, QuantFormat] = {}
    skipped = 0
    for stored in header.tensors.values():
        if _RECOMPUTED.match(stored.name):
            skipped += 1
            continue
        module, leaf = _canonical(header, stored, architecture, config)
        whole = _info(header, stored, module, architecture, config)
        packing = packing_of(stored) if leaf == "weight" and _PACKABLE.search(module) else None
        for target, piece in _pieces(module, stored, config).items():
            parts = ["dense"] if packing is None else ["weight", "scales", "biases"]
            for part in parts:
                name = f"{target}.{leaf if part == 'dense' else part}"
                if name in tensors:
                    raise CheckpointError(
                        f"{header.file}: {name!r} is there twice, the second time as {stored.name!r}"
                    )
                axis = 1 if leaf == "bias" else 2
                tensors[name] = StoredTensor((_part(whole, stored, part),), piece=piece, axis=axis)
            if packing is not None:
                forms[target] = QuantFormat(packing[0], GROUP)
    return TensorTable(tensors, skipped, {}), forms


def _canonical(header: GgufHeader, stored: GgufTensor, architecture: Architecture, config: Config) -> tuple[str, str]:
    """Return the module of a Llama, and "weight" or "bias"."""
    if found := _LAYER.match(stored.name):
        names = LAYER_NAMES
        if all(f"blk.0.{name}.weight" in header.tensors for name in architecture.names):
            names = {**names, **architecture.names}
        if found[2] in names and int(found[1]) < config.num_hidden_layers:
            return f"model.layers.{int(found[1])}.{names[found[2]]}", found[3]
    elif (found := _WHOLE.match(stored.name)) and found[1] in WHOLE_NAMES:
        return WHOLE_NAMES[found[1]], found[2]
    raise TensorMismatchError(
        f"{header.file}: the tensor {stored.name!r} is none that tinyllm knows in a file of this architecture"
    )


def _info(
    header: GgufHeader, stored: GgufTensor, module: str, architecture: Architecture, config: Config
) -> GgufPart:
    paired = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    leaf = module.rpartition(".")[2]
    heads = paired.get(leaf) if architecture.paired else None
    if heads is not None and (not stored.shape or stored.shape[0] % (2 * heads)):
        raise TensorMismatchError(
            f"{header.file}: {stored.name!r} is {list(stored.shape)}, which pairs of rows of {heads} heads"
            " do not divide"
        )
    shift = architecture.norm_shift if leaf.endswith("norm") and stored.name.endswith("weight") else 0.0
    dtype = stored.type.name if stored.type.name in _DENSE else "F32"
    return GgufPart(
        stored.name, header.file, dtype, stored.shape, stored.start, stored.end, stored, "dense", heads, shift
    )


def _pieces(module: str, stored: GgufTensor, config: Config) -> dict[str, Piece | None]:
    """Return the modules that a tensor holds: q, k and v one below the other, gate and up, or one."""
    parent, _, leaf = module.rpartition(".")
    if leaf == "qkv_proj":
        pieces = stacked_qkv(config.layer_at(module), module)
    elif leaf == "up_proj" and config.model_type == "phi3":
        pieces = stacked_gate_up(config.layer_at(module), module)
    else:
        return {module: None}
    [whole] = {piece.whole for piece in pieces.values()}
    if stored.shape[:1] != (whole,):
        raise ConfigError(f"{stored.name!r} is {list(stored.shape)}, and {whole} was to be rows of it")
    return {f"{parent}.{name}": piece for name, piece in pieces.items()}


def _part(info: GgufPart, stored: GgufTensor, part: str) -> GgufPart:
    """Return a part of a tensor, in the type and shape that it is read with."""
    *rows, columns = stored.shape
    packing = packing_of(stored)
    if part == "dense" or packing is None:
        dtype = stored.type.name if packing is None else "F32"
        return replace(info, dtype=dtype, shape=stored.shape, part="dense", name=stored.name)
    bits, scales = packing
    name = f"{stored.name}:{part}"
    if part == "weight":
        return replace(info, dtype="U32", shape=(*rows, columns * bits // 32), part=part, name=name)
    return replace(info, dtype=scales, shape=(*rows, columns // GROUP), part=part, name=name)
