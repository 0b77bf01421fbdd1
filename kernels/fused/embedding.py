# mypy: disable-error-code="no-untyped-def"
"""Token embeddings: rows of a table that lies on the device or in pinned host memory, converted and scaled.

A pinned host table is read in place over PCIe, the rows of the step and no others: 7 KiB a token of a 7B model, where
the table itself would take 1 GiB of the card.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .card import dependent_launch, launch_options


@triton.jit
def embedding_kernel(
    ids_ptr,
    table_ptr,
    out_ptr,
    vocabulary,
    H,
    blocks,
    table_stride,
    out_stride,
    scale,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK columns of one token's row: round(round(table[id]) * scale), zeros where the id is not in the table."""
    place = tl.program_id(0)
    token = (place // blocks).to(tl.int64)
    columns = place % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = columns < H
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(ids_ptr + token).to(tl.int64)
    known = (row >= 0) & (row < vocabulary)
    row = tl.where(known, row, 0)
    x = tl.load(table_ptr + row * table_stride + columns, columns < tl.where(known, H, 0), other=0.0)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    # through float32, which holds every value of the narrow types: a float16 is not a bfloat16
    y = x.to(tl.float32).to(DTYPE)
    if SCALED:
        y = (y.to(tl.float32) * scale).to(DTYPE)
    tl.store(out_ptr + token * out_stride + columns, y, mask)


def launch_for(size: int) -> tuple[int, int]:
    """(BLOCK, warps) for rows of `size` values."""
    return min(4096, triton.next_power_of_2(size)), 4


def run_embedding(
    ids: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    launch: tuple[int, int] | None = None,
    pdl: bool | None = None,
) -> None:
    """Launch embedding_kernel: ids int64 or int32 [T], out [T, H] on a CUDA device; table [V, H] there or pinned.

    launch: (BLOCK, warps), or the usual one.
    """
    count, (vocabulary, size) = ids.shape[0], table.shape
    if count == 0 or size == 0:
        return
    block, warps = launch or launch_for(size)
    blocks = triton.cdiv(size, block)
    pdl = dependent_launch(ids.device) if pdl is None else pdl
    embedding_kernel[(count * blocks,)](
        ids,
        table,
        out,
        vocabulary,
        size,
        blocks,
        table.stride(0),
        out.stride(0),
        scale,
        BLOCK=block,
        SCALED=scale != 1.0,
        PDL=pdl,
        num_warps=warps,
        num_stages=1,
        enable_fp_fusion=False,
        **launch_options(pdl),
    )
