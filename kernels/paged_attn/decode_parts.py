# mypy: disable-error-code="no-untyped-def"
"""Partial results of the decode kernel: what the pieces of a head leave, and their sum."""

import triton
import triton.language as tl

from .decode_operands import output_order

LOWEST = tl.constexpr(-1e30)
"""A maximum of scores before there are any."""
TEAM = tl.constexpr(16)
"""Pieces whose parts one program adds."""


@triton.jit
def worker_of(tile, size, more):
    """The program that has a tile, where the first `more` have size + 1 tiles and the others size."""
    large = more * (size + 1)
    return tl.where(tile < large, tile // (size + 1), more + (tile - large) // size)


@triton.jit
def slot_of(left, piece, programs):
    """Where piece `piece` of a head that begins in program `left` leaves its part.

    A program has at most one piece that continues a head, and at most one that begins a head and does not end it.
    """
    return tl.where(piece == 0, programs + left, left + piece)


@triton.jit
def store_part(part_ptr, stat_ptr, slot, o, m, l, DP: tl.constexpr, ROWS: tl.constexpr, LIVE: tl.constexpr):
    """Leave the first LIVE columns of sums o [DP, ROWS], their maxima and totals [ROWS] in a slot."""
    n = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    keep = n < LIVE
    pp = part_ptr + slot.to(tl.int64) * (DP * LIVE) + n[None, :] * DP + d[:, None]
    tl.store(pp, o, mask=tl.broadcast_to(keep[None, :], (DP, ROWS)))
    tl.store(stat_ptr + slot * (2 * LIVE) + n, m, mask=keep)
    tl.store(stat_ptr + slot * (2 * LIVE) + LIVE + n, l, mask=keep)


@triton.jit
def store_sum(part_ptr, stat_ptr, slot, o, m, l, DP: tl.constexpr, LIVE: tl.constexpr):
    """As store_part, for o [LIVE, DP]."""
    n = tl.arange(0, LIVE)
    d = tl.arange(0, DP)
    tl.store(part_ptr + slot.to(tl.int64) * (DP * LIVE) + n[:, None] * DP + d[None, :], o)
    tl.store(stat_ptr + slot * (2 * LIVE) + n, m)
    tl.store(stat_ptr + slot * (2 * LIVE) + LIVE + n, l)


@triton.jit
def add_parts(
    part_ptr, stat_ptr, left, piece, step, count, programs, DP: tl.constexpr, LIVE: tl.constexpr, FEW: tl.constexpr
):
    """Parts of the pieces piece, piece + step, ..., `count` of them, added in this order, FEW at a time.

    Returns (sums [LIVE, DP], their maximum, their total).
    """
    i = tl.arange(0, FEW)
    n = tl.arange(0, LIVE)
    d = tl.arange(0, DP)
    top = tl.full((LIVE,), LOWEST, tl.float32)
    total = tl.zeros((LIVE,), tl.float32)
    o = tl.zeros((LIVE, DP), tl.float32)
    for start in range(0, count, FEW):
        slot = slot_of(left, piece + (start + i) * step, programs)
        there = (start + i < count)[:, None]
        pp = part_ptr + (slot.to(tl.int64) * (DP * LIVE))[:, None, None] + (n * DP)[None, :, None] + d[None, None, :]
        part = tl.load(pp, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        at = stat_ptr + slot[:, None] * (2 * LIVE) + n[None, :]
        m = tl.load(at, mask=there, other=LOWEST, cache_modifier=".cg")
        l = tl.load(at + LIVE, mask=there, other=0.0, cache_modifier=".cg")
        new = tl.maximum(top, tl.max(m, 0))
        fade = tl.exp2(top - new)
        top = new
        weight = tl.exp2(m - top[None, :])
        total = total * fade + tl.sum(l * weight, 0)
        o = o * fade[:, None] + tl.sum(part * tl.expand_dims(weight, 2), 0)
    return o, top, total


@triton.jit
def hand_over(
    part_ptr,
    stat_ptr,
    lock_ptr,
    out_ptr,
    live_rows,
    left,
    piece,
    pieces,
    o,
    m,
    l,
    D: tl.constexpr,
    DP: tl.constexpr,
    VV: tl.constexpr,
    IV: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    LIVE: tl.constexpr,
    FEW: tl.constexpr,
):
    """Leave a piece's sums o [DP, ROWS], maxima and totals [ROWS]; who comes last writes the head's result.

    Piece `piece` of `pieces`, the first of which is program `left`'s. The last of up to TEAM neighbours adds their
    parts, and the last to have done so adds these sums. out: the head's first row, of live_rows rows.
    """
    programs = tl.num_programs(0)
    n = tl.arange(0, LIVE)
    d, real = output_order(DP, VV, IV, KIND, D)
    out = out_ptr + n[:, None] * D + d[None, :]
    keep = real[None, :] & (n < live_rows)[:, None]
    store_part(part_ptr, stat_ptr, slot_of(left, piece, programs), o, m, l, DP, ROWS, LIVE)
    team = piece // TEAM * TEAM
    members = tl.minimum(pieces - team, TEAM)
    lock = lock_ptr + slot_of(left, team, programs)
    tl.debug_barrier()
    if tl.atomic_add(lock, 1, sem="acq_rel") == members - 1:
        sums, top, total = add_parts(part_ptr, stat_ptr, left, team, 1, members, programs, DP, LIVE, FEW)
        tl.store(lock, 0)
        if pieces <= TEAM:
            tl.store(out, (sums / total[:, None]).to(out_ptr.dtype.element_ty), mask=keep)
        else:
            tl.debug_barrier()
            store_sum(part_ptr, stat_ptr, slot_of(left, team, programs), sums, top, total, DP, LIVE)
            teams = (pieces + TEAM - 1) // TEAM
            tl.debug_barrier()
            # the lock of the second piece, which leads no team
            if tl.atomic_add(lock_ptr + left + 1, 1, sem="acq_rel") == teams - 1:
                sums, top, total = add_parts(part_ptr, stat_ptr, left, 0, TEAM, teams, programs, DP, LIVE, FEW)
                tl.store(out, (sums / total[:, None]).to(out_ptr.dtype.element_ty), mask=keep)
                tl.store(lock_ptr + left + 1, 0)
