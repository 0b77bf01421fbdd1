"""Runs in the peers' environment: loads a checkpoint with another library and writes what that library makes of it.

usage: python peer_load.py transformers|gptqmodel FOLDER OUT.safetensors TOKEN,TOKEN,...

OUT holds "logits" [T, V] float32 and, for every linear of the decoder layers, its weight [N, K] float32 under the
module's name: the rows that the module itself returns for an identity matrix, so exactly what it multiplies by.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file


def load_transformers(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16, device_map="cpu")


def load_gptqmodel(folder):
    from gptqmodel import BACKEND, GPTQModel

    method = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]["quant_method"]
    backend = {"awq": BACKEND.AWQ_TORCH, "gptq": BACKEND.GPTQ_TORCH}[method]  # dequantizes, so it is exact
    return GPTQModel.load(folder, device="cpu", backend=backend, dtype=torch.float16).model


@torch.no_grad()
def weights(model):
    found = {}
    for name, module in model.named_modules():
        if ".layers." not in name or not name.endswith("_proj"):
            continue
        width = getattr(module, "in_features", None)
        rows = module(torch.eye(width, dtype=torch.float16)).float()
        bias = getattr(module, "bias", None)
        if bias is not None:
            rows = rows - bias.float()
        found[name] = rows.T.contiguous()
    return found


@torch.no_grad()
def main():
    library, folder, out, tokens = sys.argv[1:]
    model = {"transformers": load_transformers, "gptqmodel": load_gptqmodel}[library](folder).eval()
    ids = torch.tensor([[int(token) for token in tokens.split(",")]])
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    kinds = sorted({type(m).__name__ for n, m in model.named_modules() if ".layers." in n and n.endswith("_proj")})
    print("modules:", ", ".join(kinds))
    save_file({"logits": logits.contiguous(), **weights(model)}, out)


main()
