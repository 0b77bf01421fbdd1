# mypy: disable-error-code="no-untyped-def"
"""Partial results of the decode kernel: what the pieces of a head leave, and their sum."""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)
"""A maximum of scores before there are any."""


@triton.jit
def store_part(part_ptr, stat_ptr, slot, o, m, l, DP: tl.constexpr, ROWS: tl.constexpr):
    """Leave sums o [DP, ROWS], their maxima and totals [ROWS] in a slot."""
    n = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    tl.store(part_ptr + slot.to(tl.int64) * (DP * ROWS) + n[None, :] * DP + d[:, None], o)
    tl.store(stat_ptr + slot * (2 * ROWS) + n, m)
    tl.store(stat_ptr + slot * (2 * ROWS) + ROWS + n, l)


@triton.jit
def add_parts(part_ptr, stat_ptr, slot0, step, count, DP: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr):
    """The results of slots slot0, slot0 + step, ..., `count` of them, added in this order, FEW at a time.

    Returns (sums [DP, ROWS], their maximum, their total).
    """
    i = tl.arange(0, FEW)
    n = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    top = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    o = tl.zeros((ROWS, DP), tl.float32)
    for start in range(0, count, FEW):
        slot = slot0 + (start + i) * step
        there = (start + i < count)[:, None]
        pp = part_ptr + (slot.to(tl.int64) * (DP * ROWS))[:, None, None] + (n * DP)[None, :, None] + d[None, None, :]
        part = tl.load(pp, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        at = stat_ptr + slot[:, None] * (2 * ROWS) + n[None, :]
        m = tl.load(at, mask=there, other=LOWEST, cache_modifier=".cg")
        l = tl.load(at + ROWS, mask=there, other=0.0, cache_modifier=".cg")
        new = tl.maximum(top, tl.max(m, 0))
        fade = tl.exp2(top - new)
        top = new
        weight = tl.exp2(m - top[None, :])
        total = total * fade + tl.sum(l * weight, 0)
        o = o * fade[:, None] + tl.sum(part * tl.expand_dims(weight, 2), 0)
    return tl.trans(o), top, total
