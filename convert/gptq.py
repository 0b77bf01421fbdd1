"""GPTQ (Frantar et al., arXiv 2210.17323): round column by column and let later columns make up for the error.

With H = mean x x^T and U the upper Cholesky factor of its inverse, rounding column j leaves the error
e = (w_j - q_j) / U[j, j], and every later column k moves by -e * U[j, k]. The updates run at once inside a block of
columns and in one matrix product for what lies behind it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from qengine.convert.grid import minmax_grid, search_grid, to_codes
from qengine.convert.rtn import assemble
from qengine.convert.scheme import Scheme
from qengine.errors import QEngineError
from qengine.quant.weights import QuantizedWeight

Order = Literal["plain", "grouped", "static", "act"]
BLOCK = 128
MAX_DAMP = 1.0


@dataclass(frozen=True)
class GPTQSettings:
    """How GPTQ goes through the columns.

    damp: share of the mean diagonal added to H's diagonal; multiplied by ten until the factorization succeeds.
    order: "plain" left to right; "grouped" groups by importance and columns by importance inside each, so the file
    keeps plain groups; "static" columns by importance with grids fixed beforehand, plain groups too; "act" columns by
    importance, groups formed in that order (needs g_idx in the file).
    search: choose each group's range by weighted squared error instead of its extremes.
    """

    damp: float = 0.01
    order: Order = "grouped"
    search: bool = True


class FactorizationError(QEngineError):
    """H cannot be factored even with heavy damping; the caller rounds to nearest instead and reports it."""


def inverse_factor(hessian: torch.Tensor, damp: float) -> tuple[torch.Tensor, float]:
    """(U, damp used): U upper triangular with U^T U = (H + damp * mean(diag H) * I)^-1. hessian [K, K], symmetric."""
    mean = hessian.diagonal().mean()
    identity = torch.eye(hessian.shape[0], dtype=hessian.dtype, device=hessian.device)
    while damp <= MAX_DAMP:
        damped = hessian + identity * (damp * mean)
        lower, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0:
            inverse = torch.cholesky_inverse(lower)
            upper, info = torch.linalg.cholesky_ex(inverse, upper=True)
            if int(info) == 0 and bool(torch.isfinite(upper).all()):
                return upper, damp
        damp *= 10
    raise FactorizationError(
        f"gptq: the second moment of the calibration inputs could not be factored with damping up to {MAX_DAMP}; "
        "use more calibration text (--samples) or --method awq"
    )


def column_order(importance: torch.Tensor, group: int, order: Order) -> torch.Tensor:
    """int64 [K]: the order in which columns are rounded. importance: diag H [K]; ties keep their order."""
    if order == "plain":
        return torch.arange(importance.numel(), device=importance.device)
    if order in ("act", "static"):
        return torch.argsort(importance, descending=True, stable=True)
    by_group = importance.reshape(-1, group)
    inside = torch.argsort(by_group, dim=1, descending=True, stable=True)
    groups = torch.argsort(by_group.amax(1), descending=True, stable=True)
    return (inside + torch.arange(by_group.shape[0], device=inside.device)[:, None] * group)[groups].reshape(-1)


def quantize_gptq(
    weight: torch.Tensor, second_moment: torch.Tensor, scheme: Scheme, settings: GPTQSettings
) -> QuantizedWeight:
    """Quantize `weight` [N, K] given H = mean x x^T [K, K], in the weight's dtype (float32 or float64).

    Rows do not depend on each other, so matrices with the same input may be stacked. Raises FactorizationError.
    """
    width = weight.shape[1]
    group = scheme.group(width)
    hessian = second_moment.to(weight.dtype).clone()
    weight = weight.clone()
    dead = hessian.diagonal() <= 0
    hessian.diagonal()[dead] = 1.0
    weight[:, dead] = 0.0  # never excited by the data: zero costs nothing and keeps its group's range small
    importance = hessian.diagonal().clone()
    perm = column_order(importance, group, settings.order)
    upper, _ = inverse_factor(hessian[perm][:, perm], settings.damp)

    positions = torch.arange(width, device=weight.device)
    group_of = positions // group if settings.order == "act" else perm // group
    fixed = _grids(weight.reshape(weight.shape[0], -1, group), scheme, importance.reshape(-1, group), settings)
    columns = _Columns(weight[:, perm].T.contiguous(), upper, group_of, importance[perm])
    if settings.order == "static":
        scales, zeros = fixed
    else:
        scales, zeros = torch.empty_like(fixed[0]), torch.empty_like(fixed[1])
    codes = _solve(columns, scales, zeros, scheme, settings, group)

    inverse = torch.argsort(perm)
    shuffled = settings.order == "act" and group < width
    g_idx = group_of[inverse].to(torch.int32) if shuffled else None
    return assemble(codes[inverse].T.contiguous(), scales, zeros, scheme, g_idx)


@dataclass
class _Columns:
    """Columns in rounding order: weight [K, N] (a row is a column of W), U [K, K], group and importance [K]."""

    weight: torch.Tensor
    upper: torch.Tensor
    group_of: torch.Tensor
    importance: torch.Tensor


def _grids(
    groups: torch.Tensor, scheme: Scheme, importance: torch.Tensor, settings: GPTQSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, zeros) [N, G] of groups [N, G, g]."""
    if settings.search:
        scales, zeros = search_grid(groups, scheme, importance)
    else:
        scales, zeros = minmax_grid(groups, scheme)
    return scales.squeeze(-1), zeros.squeeze(-1)


def _block_size(group: int) -> int:
    """Columns a block: never ends inside a group that starts in it, unless the group starts where a block does."""
    if group % BLOCK == 0:
        return BLOCK
    if group < BLOCK:
        return group * (BLOCK // group)
    return max(math.gcd(group, BLOCK), 32) if group % 32 == 0 else group


def _solve(
    columns: _Columns, scales: torch.Tensor, zeros: torch.Tensor, scheme: Scheme, settings: GPTQSettings, group: int
) -> torch.Tensor:
    """Codes [K, N] in rounding order; fills scales and zeros [N, G] at each group's start unless they are static."""
    weight, upper = columns.weight, columns.upper
    width = weight.shape[0]
    codes = torch.empty_like(weight)
    group_of = columns.group_of.tolist()
    block_size = _block_size(group)
    for start in range(0, width, block_size):
        end = min(start + block_size, width)
        block, local = weight[start:end], upper[start:end, start:end]
        errors = torch.empty_like(block)
        for j in range(end - start):
            at = start + j
            g = group_of[at]
            if settings.order != "static" and at % group == 0:
                members = weight[at : at + group].T.unsqueeze(1)
                s, z = _grids(members, scheme, columns.importance[at : at + group].unsqueeze(0), settings)
                scales[:, g], zeros[:, g] = s.squeeze(1), z.squeeze(1)
            s, z = scales[:, g], zeros[:, g]
            column = block[j]
            codes[at] = to_codes(column, s, z, scheme)
            torch.sub(column, (codes[at] - z) * s, out=errors[j])
            errors[j].div_(local[j, j])
            if j + 1 < end - start:
                block[j + 1 :].addr_(local[j, j + 1 :], errors[j], alpha=-1)
        if end < width:
            weight[end:].addmm_(upper[start:end, end:].T, errors, alpha=-1)
    return codes
