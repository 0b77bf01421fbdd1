"""Reference of the packed GEMM in plain torch: what every kernel of this folder is held against.

y[m, n] = sum_k x[m, perm[k]] * (q[n, k] - zero[n, g(k)]) * scale[n, g(k)] + bias[n],    g(k) = k // group_size
"""

from __future__ import annotations

import torch

from qengine.kernels.fused.ref import act_and_mul

from .layout import W4A16Weight, unpack_scales, unpack_words


def dequantize_ref(weight: W4A16Weight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """W [N, K] in x's own column order, computed in float32 and rounded once to `dtype`."""
    q = unpack_words(weight.words, weight.bits).float()
    scales, zeros = unpack_scales(weight.scales_zeros, weight.multiplier)
    columns = q.shape[1]
    size = weight.group_size or columns
    group = (torch.arange(columns, device=q.device) // size).clamp_(max=scales.shape[1] - 1)
    values = (q - zeros[:, group]) * scales[:, group]
    if weight.perm is None:
        return values[: weight.n, : weight.k].to(dtype)
    plain = values.new_zeros(values.shape[0], weight.k + 1)
    plain[:, weight.perm.long()] = values
    return plain[: weight.n, : weight.k].to(dtype)


def linear_ref(x: torch.Tensor, weight: W4A16Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y [M, N] in x's dtype for x [M, K]: everything in float32, rounded once at the end."""
    y = x.float() @ dequantize_ref(weight).T
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def gated_ref(x: torch.Tensor, weight: W4A16Weight, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """act(gate) * up [M, N / 2] of linear_ref, whose columns are paired: see layout.paired_rows."""
    gate, up = linear_ref(x, weight, bias).view(x.shape[0], -1, 2, 8).unbind(2)
    return act_and_mul(gate.flatten(1), up.flatten(1), activation)
