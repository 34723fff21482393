"""Write tests/checkpoint/modelopt/: tiny checkpoints that ModelOpt quantised, and the logits that they give.

ModelOpt writes the files and dequantises them; transformers computes the logits in float32 from these matrices. In an
environment of its own:

    pip install torch==2.13.0 transformers==5.24.0 nvidia-modelopt==0.47.0 requests datasets scipy
    python scripts/make_modelopt_golden.py
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "checkpoint" / "modelopt"
CASES = {"fp8": mtq.FP8_DEFAULT_CFG, "nvfp4": mtq.NVFP4_DEFAULT_CFG}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.3,
}
IDS = torch.tensor([[(7 * i * i + 3) % 96 for i in range(24)]])


def dequantised(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the float32 matrices that exported tensors stand for, as ModelOpt's own classes have them."""
    dense = {}
    for name, tensor in tensors.items():
        scale = tensors.get(f"{name}_scale")
        if name.endswith(("_scale", "_scale_2")):
            continue
        if tensor.dtype == torch.uint8:
            packed = NVFP4QTensor(torch.Size((tensor.shape[0], 2 * tensor.shape[1])), torch.float32, tensor)
            whole = tensors[f"{name}_scale_2"]
            dense[name] = packed.dequantize(torch.float32, scale=scale, double_scale=whole, block_sizes={-1: 16})
        else:
            dense[name] = tensor.float() if scale is None else tensor.float() * scale
    return dense


def main() -> None:
    """Write all folders anew."""
    for name, recipe in CASES.items():
        folder = FOLDER / name
        shutil.rmtree(folder, ignore_errors=True)
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**CONFIG)).to(torch.bfloat16).eval()
        with torch.no_grad():
            model = mtq.quantize(model, recipe, lambda quantised: quantised(IDS))
            export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=folder)
            reference = LlamaForCausalLM(LlamaConfig(**CONFIG)).float().eval()
            reference.load_state_dict(dequantised(load_file(folder / "model.safetensors")))
            logits = reference(IDS).logits[0].contiguous()
        save_file({"ids": IDS[0].int(), "logits": logits}, folder / "expected.safetensors")
        (folder / "generation_config.json").unlink()
        assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "modelopt"


if __name__ == "__main__":
    main()
