"""Round-to-nearest: every weight to the closest point of its group's grid. No data needed."""

from __future__ import annotations

import torch

from qengine.convert.grid import fake_quantize, minmax_grid, search_grid, split_groups, to_codes
from qengine.convert.scheme import Scheme
from qengine.quant.weights import QuantizedWeight, QuantSpec


def quantize_rtn(
    weight: torch.Tensor, scheme: Scheme, *, search: bool = False, importance: torch.Tensor | None = None
) -> QuantizedWeight:
    """Round `weight` [N, K] floating to the scheme's grid.

    search: choose each group's range by least squared error (weighted by `importance` [K]) instead of its extremes.
    """
    groups = split_groups(weight, scheme)
    if search:
        by_group = None if importance is None else importance.reshape(groups.shape[1:])
        scales, zeros = search_grid(groups, scheme, by_group)
    else:
        scales, zeros = minmax_grid(groups, scheme)
    codes = to_codes(groups, scales, zeros, scheme).reshape(weight.shape)
    return assemble(codes, scales.squeeze(-1), zeros.squeeze(-1), scheme)


def round_trip(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """`weight` [N, K] after rounding to its min/max grid, in its own dtype."""
    groups = split_groups(weight, scheme)
    scales, zeros = minmax_grid(groups, scheme)
    return fake_quantize(groups, scales, zeros, scheme).reshape(weight.shape)


def assemble(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    scheme: Scheme,
    g_idx: torch.Tensor | None = None,
) -> QuantizedWeight:
    """Codes [N, K], scales and zeros [N, G], all floating, as the form that every format's packer takes."""
    spec = QuantSpec(scheme.bits, scheme.group_size, scheme.sym, g_idx is not None, "none", "none")
    half = scales.to(torch.float16)
    return QuantizedWeight(codes.to(torch.uint8).contiguous(), half, zeros.to(torch.int16), spec, g_idx)
