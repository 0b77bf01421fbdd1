# mypy: disable-error-code="no-untyped-def"
"""The inner loop of GPTQ on a GPU: one block of columns, all of its steps in one launch.

A program owns some rows, keeps their columns of the block in registers, and goes through the columns in order: round
one, divide its error by the diagonal, and take the error times U's row from the columns behind. What lies behind the
block is left to a matrix product with the errors that come out. `gptq._solve` is the same in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 16
# Adding and subtracting 1.5 * 2**23 rounds a float32 below 2**22 to a whole number, ties to even, as torch.round does.
_ROUND = tl.constexpr(12582912.0)


@triton.jit
def _solve_kernel(
    weight, upper, scales, zeros, group_of, codes, errors,
    rows_total, width, start, columns, top,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = rows < rows_total
    mask = inside[:, None] & (cols < columns)[None, :]
    tile = tl.load(weight + rows[:, None] * width + start + cols[None, :], mask=mask, other=0.0)
    code_tile = tl.zeros((ROWS, BLOCK), tl.float32)
    error_tile = tl.zeros((ROWS, BLOCK), tl.float32)
    for j in range(columns):
        pick = (cols == j)[None, :]
        column = tl.sum(tl.where(pick, tile, 0.0), axis=1)
        group = tl.load(group_of + start + j)
        scale = tl.load(scales + group * rows_total + rows, mask=inside, other=1.0)
        zero = tl.load(zeros + group * rows_total + rows, mask=inside, other=0.0)
        step = tl.minimum(tl.maximum(tl.div_rn(column, scale), -1024.0), 1024.0)
        code = tl.minimum(tl.maximum((step + _ROUND) - _ROUND + zero, 0.0), top)
        line = upper + (start + j).to(tl.int64) * width + start
        error = tl.div_rn(column - (code - zero) * scale, tl.load(line + j))
        behind = tl.load(line + cols, mask=(cols > j) & (cols < columns), other=0.0)
        tile -= error[:, None] * behind[None, :]
        code_tile = tl.where(pick, code[:, None], code_tile)
        error_tile = tl.where(pick, error[:, None], error_tile)
    tl.store(codes + rows[:, None] * width + start + cols[None, :], code_tile.to(tl.uint8), mask=mask)
    tl.store(errors + rows[:, None] * columns + cols[None, :], error_tile, mask=mask)


def solve_block(
    weight: torch.Tensor,
    upper: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    group_of: torch.Tensor,
    codes: torch.Tensor,
    span: tuple[int, int],
    top: int,
) -> torch.Tensor:
    """Round columns span = (start, end) of weight float32 [N, K]; writes `codes` uint8 [N, K] there.

    upper: float32 [K, K], the factor of the inverse. scales, zeros: float32 [G, N]. group_of: int32 [K]. All
    contiguous, on one device. Returns the errors, float32 [N, end - start]; `weight` is left as it was.
    """
    rows, width = weight.shape
    start, columns = span[0], span[1] - span[0]
    errors = torch.empty(rows, columns, dtype=torch.float32, device=weight.device)
    _solve_kernel[(triton.cdiv(rows, ROWS),)](
        weight, upper, scales, zeros, group_of, codes, errors,
        rows, width, start, columns, float(top),
        BLOCK=max(triton.next_power_of_2(columns), 16), ROWS=ROWS,
    )  # fmt: skip
    return errors
