"""AWQ's entry to the packed GEMM: an unpacked AWQ layer to the common layout, and its product."""

from __future__ import annotations

import torch

from qengine.kernels.w4a16 import W4A16Weight, w4a16_linear

__all__ = ["pack", "w4a16_linear"]


def pack(
    q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, group_size: int, device: torch.device | str
) -> W4A16Weight:
    """The packed weight of codes q uint8 [N, K], scales [N, G] and zeros [N, G]; AWQ's groups are always contiguous."""
    return W4A16Weight.pack(q, scales, zeros, None, bits, group_size, device)
