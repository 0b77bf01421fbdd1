"""GPTQ's entry to the packed GEMM: an unpacked GPTQ layer to the common layout, and its product."""

from __future__ import annotations

import torch

from qengine.kernels.w4a16 import W4A16Weight, w4a16_linear

__all__ = ["pack", "w4a16_linear"]


def pack(
    q: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    g_idx: torch.Tensor | None,
    bits: int,
    group_size: int,
    device: torch.device | str,
) -> W4A16Weight:
    """The packed weight of codes q uint8 [N, K], scales [N, G], zeros [N, G] and the group of each column.

    With act-order (g_idx not in order) columns are sorted by group once, here; products gather x in their loads.
    """
    return W4A16Weight.pack(q, scales, zeros, g_idx, bits, group_size, device)
