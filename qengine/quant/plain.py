"""Weights as they are: linear layers that no quantization touched, norms, embeddings."""

from __future__ import annotations

import torch

from qengine.checkpoint import TensorInfo, TensorStore
from qengine.errors import CheckpointError, UnsupportedError
from qengine.quant.reader import short
from qengine.quant.weights import PlainWeight

PLAIN_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_plain(name: str, info: TensorInfo) -> None:
    """UnsupportedError unless tensor `name` is of a floating dtype that can be computed with."""
    if info.dtype not in PLAIN_DTYPES:
        raise UnsupportedError(
            f"{name}: is stored as {short(info.dtype)} and no known quantization format explains it; "
            "use the original float16, bfloat16 or float32 model, or an AWQ, GPTQ or compressed-tensors INT4 one"
        )


def load_plain(tensors: TensorStore, name: str) -> PlainWeight:
    """Module `name` from `name.weight` [N, K] and, if there, `name.bias` [N]."""
    weight = tensors[f"{name}.weight"]
    check_plain(f"{name}.weight", weight)
    if len(weight.shape) != 2:
        raise CheckpointError(f"{name}: weight has shape {list(weight.shape)}, expected [out_features, in_features]")
    bias = tensors.get(f"{name}.bias")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise CheckpointError(f"{name}: bias has shape {list(bias.shape)}, expected {[weight.shape[0]]}")
    return PlainWeight(tensors.load(f"{name}.weight"), None if bias is None else tensors.load(f"{name}.bias"))
