# mypy: disable-error-code="no-untyped-def"
"""Tiles of y whose K was split: their parts, and the sum in a fixed order, so that equal inputs give equal bits."""

import triton
import triton.language as tl


@triton.jit
def store_tile(yp, acc, multiplier, bp, rows, keep, HAS_BIAS: tl.constexpr):
    """Write a tile of y [BN, BM], scaled and with its bias."""
    y = acc * multiplier
    if HAS_BIAS:
        y += tl.load(bp, mask=rows, other=0.0).to(tl.float32)[:, None]
    tl.store(yp, y.to(yp.dtype.element_ty), mask=keep)


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
    parts,
    lock,
    splits,
    ps,
    y_ptr,
    sy,
    multiplier,
    bp,
    on,
    pm,
    M,
    N,
    BM: tl.constexpr,
    BN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
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
        keep = (on < N)[:, None] & (om < M)[None, :]
        yp = y_ptr + om.to(tl.int64)[None, :] * sy + on[:, None]
        store_tile(yp, from_flat(total, EIGHTH, BN), multiplier, bp, on < N, keep, HAS_BIAS)
    # the last to leave clears the lock
    tl.debug_barrier()
    if tl.atomic_add(lock, 1, sem="acq_rel") == 2 * splits - 1:
        tl.store(lock, 0)
