"""Round-to-nearest 8-bit weights, for layers that a checkpoint keeps dense."""

from __future__ import annotations

import torch

from qengine.quant import QuantizedWeight, QuantSpec

GROUP_SIZE = 128
CHUNK_ROWS = 8192
"""Rows quantized at once, so that the float32 copy stays small beside the weight."""


def quantize_int8(weight: torch.Tensor, bias: torch.Tensor | None = None) -> QuantizedWeight:
    """The weight [N, K], any floating dtype, in symmetric 8 bits: q = round(w / s) + 128, s = max|w| / 127 a group.

    Groups of 128 columns, the last may be shorter; scales are float32.
    """
    n, k = weight.shape
    groups = -(-k // GROUP_SIZE)
    q = torch.empty(n, k, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, groups, dtype=torch.float32, device=weight.device)
    for start in range(0, n, CHUNK_ROWS):
        rows = torch.nn.functional.pad(weight[start : start + CHUNK_ROWS].float(), (0, groups * GROUP_SIZE - k))
        rows = rows.view(-1, groups, GROUP_SIZE)
        scale = (rows.abs().amax(-1) / 127).clamp_min(2.0**-100)
        codes = (rows / scale[..., None]).round().clamp(-127, 127) + 128
        q[start : start + CHUNK_ROWS] = codes.to(torch.uint8).view(-1, groups * GROUP_SIZE)[:, :k]
        scales[start : start + CHUNK_ROWS] = scale
    zeros = torch.full((n, groups), 128, dtype=torch.int16, device=weight.device)
    spec = QuantSpec(8, GROUP_SIZE, True, False, "qengine", "rtn")
    return QuantizedWeight(q, scales, zeros, spec, None, bias)
