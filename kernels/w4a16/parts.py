# mypy: disable-error-code="no-untyped-def"
"""Tiles of y whose K was split: their parts, and the sum in a fixed order, so that equal inputs give equal bits."""

import triton
import triton.language as tl

from qengine.kernels.fused.activation import activate_quickly


@triton.jit
def store_tile(
    y_ptr, sy, acc, multiplier, bias_ptr, pn, om, M, N, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, LIB: tl.constexpr
):  # fmt: skip
    """Write the sums [BN, columns] of tile pn, scaled and with their bias, to the rows om [columns] of y.

    ACT, LIB: see w4a16_gemm; a row and its partner, 8 further, are registers of one lane.
    """
    BN: tl.constexpr = acc.shape[0]
    COLUMNS: tl.constexpr = acc.shape[1]
    on = pn * BN + tl.arange(0, BN)
    y = acc * multiplier
    if HAS_BIAS:
        y += tl.load(bias_ptr + on, mask=on < N, other=0.0).to(tl.float32)[:, None]
    y = y.to(y_ptr.dtype.element_ty)
    if ACT != "":
        gate, up = tl.split(tl.permute(tl.reshape(y, (BN // 16, 2, 8, COLUMNS)), (0, 2, 3, 1)))
        z = activate_quickly(gate.to(tl.float32), y.dtype, ACT, LIB).to(tl.float32) * up.to(tl.float32)
        y = tl.reshape(z.to(y.dtype), (BN // 2, COLUMNS))
        on = pn * (BN // 2) + tl.arange(0, BN // 2)
        N = N // 2
    tl.store(y_ptr + om.to(tl.int64)[None, :] * sy + on[:, None], y, mask=(on < N)[:, None] & (om < M)[None, :])


@triton.jit
def to_flat(acc, BM: tl.constexpr, BN: tl.constexpr):
    """Sums [BN, BM] as [BN * BM] in the order in which the tensor cores leave them in registers.

    Rows (n, h, g) and columns (j, t, e) become (j, n, g, t, h, e): storing them needs no exchange between lanes.
    """
    parts = tl.reshape(acc, (BN // 16, 2, 8, BM // 8, 4, 2))
    return tl.reshape(tl.permute(parts, (3, 0, 2, 4, 1, 5)), (BN * BM,))


@triton.jit
def from_flat(flat, BM: tl.constexpr, BN: tl.constexpr):
    """The inverse of to_flat."""
    parts = tl.reshape(flat, (BM // 8, BN // 16, 8, 4, 2, 2))
    return tl.reshape(tl.permute(parts, (1, 4, 2, 0, 3, 5)), (BN, BM))


@triton.jit
def _part(pp, i, splits, BM: tl.constexpr, BN: tl.constexpr):
    # the sums of part i, 0 past the last
    there = tl.zeros((BN * BM,), tl.int32) + i < splits
    return tl.load(pp + i * (BN * BM), mask=there, other=0.0, cache_modifier=".cg")


@triton.jit
def sum_parts(parts, splits, BM: tl.constexpr, BN: tl.constexpr):
    """A tile [BN, BM] from its parts (pointers [BN * BM] to the first, the others follow), added in the order of K."""
    total = tl.zeros((BN * BM,), tl.float32)
    if BM <= 32:
        # small parts: the time is that of a load's way to L2 and back, so four go at once
        for i in range(0, splits, 4):
            p0 = _part(parts, i, splits, BM, BN)
            p1 = _part(parts, i + 1, splits, BM, BN)
            p2 = _part(parts, i + 2, splits, BM, BN)
            p3 = _part(parts, i + 3, splits, BM, BN)
            total = (((total + p0) + p1) + p2) + p3
    else:
        for i in range(splits):
            total += tl.load(parts + i * (BN * BM), cache_modifier=".cg")
    return from_flat(total, BM, BN)


@triton.jit
def share_sums(
    parts, lock, splits, ps, y_ptr, sy, multiplier, bias_ptr, pn, pm, M, N, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, LIB: tl.constexpr,
):  # fmt: skip
    """Add up a tile's parts, each of its programs an eighth of the columns, or several; write y; clear the lock.

    Called by all `splits` programs of the tile, once each has stored its part and counted itself in the lock. They wait
    for each other, which cannot last: programs start in the order of their numbers, so of one kernel at most
    splits - 1 wait for a program that has not started, far fewer than a card runs at once.
    (Triton's interpreter runs programs one after the other and would wait for ever.)
    """
    while tl.atomic_add(lock, 0, sem="acq_rel") < splits:
        pass
    EIGHTH: tl.constexpr = BM // 8
    within = tl.arange(0, BN * EIGHTH)
    for eighth in range(ps, 8, splits):
        at = parts + eighth * (BN * EIGHTH) + within
        total = tl.load(at, cache_modifier=".cg")
        for i in range(1, splits):
            total += tl.load(at + i * (BN * BM), cache_modifier=".cg")
        om = pm * BM + eighth * EIGHTH + tl.arange(0, EIGHTH)
        total = from_flat(total, EIGHTH, BN)
        store_tile(y_ptr, sy, total, multiplier, bias_ptr, pn, om, M, N, HAS_BIAS, ACT, LIB)
    # the last to leave clears the lock
    tl.debug_barrier()
    if tl.atomic_add(lock, 1, sem="acq_rel") == 2 * splits - 1:
        tl.store(lock, 0)
