"""GPTQ (Frantar et al., arXiv 2210.17323): round column by column and let later columns make up for the error.

With H = mean x x^T and U the upper Cholesky factor of its inverse, rounding column j leaves the error
e = (w_j - q_j) / U[j, j], and every later column k moves by -e * U[j, k]. The updates run at once inside a block of
columns and in one matrix product for what lies behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from qengine.convert.grid import minmax_grid, search_grid, split_groups, to_codes
from qengine.convert.phases import phase
from qengine.convert.rtn import assemble
from qengine.convert.scheme import Scheme
from qengine.errors import QEngineError
from qengine.quant.weights import QuantizedWeight

Order = Literal["plain", "grouped", "static", "act"]
BLOCK = 128
MAX_DAMP = 1.0
SEARCHED = 1 << 24
"""Weights whose grids are searched at once on a GPU: 64 MiB in float32, of which a step holds a few copies."""


@dataclass(frozen=True)
class GPTQSettings:
    """How GPTQ goes through the columns.

    damp: share of the mean diagonal added to H's diagonal; multiplied by ten until the factorization succeeds.
    distrust: share of each entry of H's diagonal added to it. The products between columns are those of one text: with
    more of it, later columns make up for less of what that text says and lose less on others.
    order: "plain" left to right; "grouped" groups by importance and columns by importance inside each, so the file
    keeps plain groups; "static" columns by importance with grids fixed beforehand, plain groups too; "act" columns by
    importance, groups formed in that order (needs g_idx in the file).
    search: choose each group's range by weighted squared error instead of its extremes.
    """

    damp: float = 0.01
    distrust: float = 0.3
    order: Order = "grouped"
    search: bool = True


class FactorizationError(QEngineError):
    """H cannot be factored even with heavy damping; the caller rounds to nearest instead and reports it."""


def inverse_factor(hessian: Callable[[], torch.Tensor], damp: float) -> tuple[torch.Tensor, float]:
    """(U, damp used): U upper triangular with U^T U = (H + damp * mean(diag H) * I)^-1.

    hessian: makes H [K, K], symmetric, for each try; it is changed. Of a wide layer every such matrix is half a
    gigabyte, so none is kept for a try that is hardly ever made.
    """
    while damp <= MAX_DAMP:
        damped = hessian()
        damped.diagonal().add_(damp * damped.diagonal().mean())
        lower, info = torch.linalg.cholesky_ex(damped)
        del damped
        if int(info) == 0:
            inverse = torch.cholesky_inverse(lower)
            del lower
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
    weight = weight.clone()
    importance = second_moment.diagonal().to(weight.dtype, copy=True)
    dead = importance <= 0
    importance[dead] = 1.0
    weight[:, dead] = 0.0  # never excited by the data: zero costs nothing and keeps its group's range small
    perm = column_order(importance, group, settings.order)

    def hessian() -> torch.Tensor:
        ordered = second_moment[perm]
        ordered = ordered[:, perm].to(importance.dtype)
        ordered.diagonal().copy_(importance[perm] * (1 + settings.distrust))
        return ordered

    with phase("gptq: factor"):
        upper, _ = inverse_factor(hessian, settings.damp)

    positions = torch.arange(width, device=weight.device)
    group_of = positions // group if settings.order == "act" else perm // group
    columns = _Columns(weight[:, perm], upper, group_of, importance[perm])
    scales = weight.new_empty(width // group, weight.shape[0])
    zeros = torch.empty_like(scales)
    if settings.order == "static":
        with phase("gptq: grids"):
            _static_grids(weight, scheme, importance, settings, scales, zeros)
    del weight
    solve = _solve_on_gpu if columns.weight.is_cuda and columns.weight.dtype == torch.float32 else _solve
    with phase("gptq: columns"):
        codes = solve(columns, scales, zeros, scheme, settings, group)

    inverse = torch.argsort(perm)
    shuffled = settings.order == "act" and group < width
    g_idx = group_of[inverse].to(torch.int32) if shuffled else None
    return assemble(codes[:, inverse], scales.T.contiguous(), zeros.T.contiguous(), scheme, g_idx)


@dataclass
class _Columns:
    """Columns in rounding order: weight [N, K], U [K, K], group and importance [K]."""

    weight: torch.Tensor
    upper: torch.Tensor
    group_of: torch.Tensor
    importance: torch.Tensor


def _grid(
    members: torch.Tensor, scheme: Scheme, importance: torch.Tensor, settings: GPTQSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, zeros) [N] of one group [N, g], or [N, G] of several [N, G, g]; importance [g] or [G, g]."""
    scales, zeros = search_grid(members, scheme, importance) if settings.search else minmax_grid(members, scheme)
    return scales.squeeze(-1), zeros.squeeze(-1)


def _static_grids(
    weight: torch.Tensor,
    scheme: Scheme,
    importance: torch.Tensor,
    settings: GPTQSettings,
    scales: torch.Tensor,
    zeros: torch.Tensor,
) -> None:
    """Fill scales and zeros [G, N] from weight [N, K], columns in the file's order: several groups at a time on a GPU,
    where each step of the search is a launch, and one on a CPU, whose cache holds no more."""
    groups = split_groups(weight, scheme)
    rows, count, size = groups.shape
    at_once = max(1, SEARCHED // (rows * size)) if weight.is_cuda else 1
    by_group = importance.reshape(count, size)
    for start in range(0, count, at_once):
        part = slice(start, start + at_once)
        found = _grid(groups[:, part], scheme, by_group[part], settings)
        scales[part], zeros[part] = (values.T for values in found)


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
    """Codes [N, K] in rounding order; fills scales and zeros [G, N] at each group's start unless they are static.

    Here a row is a column of W, so that each step works on memory that lies together.
    """
    weight, upper = columns.weight.T.contiguous(), columns.upper
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
                part = slice(at, at + group)
                scales[g], zeros[g] = _grid(weight[part].T, scheme, columns.importance[part], settings)
            s, z = scales[g], zeros[g]
            column = block[j]
            codes[at] = to_codes(column, s, z, scheme)
            torch.sub(column, (codes[at] - z) * s, out=errors[j])
            errors[j].div_(local[j, j])
            if j + 1 < end - start:
                block[j + 1 :].addr_(local[j, j + 1 :], errors[j], alpha=-1)
        if end < width:
            weight[end:].addmm_(upper[start:end, end:].T, errors, alpha=-1)
    return codes.T.contiguous()


def _solve_on_gpu(
    columns: _Columns, scales: torch.Tensor, zeros: torch.Tensor, scheme: Scheme, settings: GPTQSettings, group: int
) -> torch.Tensor:
    """As `_solve`, with a kernel that goes through the columns of a block in one launch."""
    from qengine.convert.gptq_kernel import solve_block

    weight, upper = columns.weight.contiguous(), columns.upper.contiguous()
    width = weight.shape[1]
    codes = torch.empty_like(weight, dtype=torch.uint8)
    group_of = columns.group_of.to(torch.int32)
    starts = columns.group_of[::group].tolist()
    # a group's grid comes from its updated weights, so a block ends where a group does
    block_size = BLOCK if settings.order == "static" or group % BLOCK == 0 else min(group, BLOCK)
    at = 0
    while at < width:
        if settings.order != "static" and at % group == 0:
            g, part = starts[at // group], slice(at, at + group)
            scales[g], zeros[g] = _grid(weight[:, part], scheme, columns.importance[part], settings)
        until = width if settings.order == "static" else (at // group + 1) * group
        end = min(at + block_size, until)
        errors = solve_block(weight, upper, scales, zeros, group_of, codes, (at, end), scheme.max_code)
        if end < width:
            weight[:, end:].addmm_(errors, upper[at:end, end:], alpha=-1)
        at = end
    return codes
