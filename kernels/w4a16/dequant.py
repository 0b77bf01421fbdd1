# mypy: disable-error-code="no-untyped-def"
"""Unpacking on the device: words to fp16 or bf16 rows, for products so large that cuBLAS pays for the extra pass."""

import triton
import triton.language as tl

from .tile import group_of, load_scales, load_words, weight_tile


@triton.jit
def dequantize_rows(
    w_ptr,
    sz_ptr,
    out_ptr,
    first16,
    rows,
    N,
    KB,
    so,
    multiplier,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
    ASM: tl.constexpr,
):
    """Write W[16 first16 + r, k] to out[r, k] for r < rows and every packed column k, in the packed order.

    out: [rows, at least KB * block] in fp16 or bf16, row stride so. (q - zero) * scale is rounded to fp16 once, in
    units of the multiplier (a power of two): for fp16 scales the result is what the checkpoint's library computes.
    """
    pb = tl.program_id(0)
    pn = tl.program_id(1)
    BLOCK: tl.constexpr = 512 // BITS
    HALF: tl.constexpr = BLOCK // 2
    n16 = tl.cdiv(N, 16)
    local = pn * (BN // 16) + tl.arange(0, BN // 16)
    rows16 = tl.minimum(first16 + local, n16 - 1)
    q = load_words(w_ptr, rows16, KB, pb)
    szs = n16 * 16
    a = load_scales(sz_ptr, group_of(pb, 0, BLOCK, GROUP), szs, rows16, BN)
    left, right = weight_tile(q, a, sz_ptr, pb, szs, rows16, BITS, GROUP, BN, True, ASM)
    on = pn * BN + tl.arange(0, BN)
    cols = pb * BLOCK + tl.arange(0, HALF)
    op = out_ptr + on.to(tl.int64)[:, None] * so + cols[None, :]
    keep = (on < rows)[:, None]
    kind = out_ptr.dtype.element_ty
    tl.store(op, (left.to(tl.float32) * multiplier).to(kind), mask=keep)
    tl.store(op + HALF, (right.to(tl.float32) * multiplier).to(kind), mask=keep)
