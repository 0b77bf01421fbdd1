# mypy: disable-error-code="no-untyped-def"
"""Loads of the decode kernel: which words of queries, keys, values and scales each lane of a warp gets.

A row of a loaded tensor is a lane: rows run over lanes first, then over what a lane loads one after the other. Words
of a row lie one after the other in memory, 16 bytes where the cache's rows are aligned so.
"""

import triton
import triton.language as tl

from .decode_kinds import BF16, INT4


@triton.jit
def unit_starts(at, low, high, UNIT: tl.constexpr, NU: tl.constexpr, WARPS: tl.constexpr):
    """First tokens [NU, WARPS * 32] of each warp's NU units of UNIT tokens, in a tile that starts at token `at`.

    In place of a unit without a token in low..high stands one that has some: nothing is read of other blocks.
    """
    start = at + (tl.arange(0, WARPS * 32) // 32 * (NU * UNIT))[None, :] + (tl.arange(0, NU) * UNIT)[:, None]
    return tl.minimum(tl.maximum(start, low), high) & -UNIT


@triton.jit
def load_blocks(table, starts, SHIFT: tl.constexpr):
    """Block ids of units, of the shape of `starts`."""
    # a column, so that every Triton gives neighbouring lanes neighbouring rows
    at = tl.reshape(starts >> SHIFT, (starts.shape[0] * starts.shape[1], 1))
    return tl.reshape(tl.load(table + at), starts.shape)


@triton.jit
def load_words(
    ptr,
    base,
    row,
    part,
    FROM: tl.constexpr,
    PARTS: tl.constexpr,
    X: tl.constexpr,
    VEC: tl.constexpr,
    N8: tl.constexpr,
    WW: tl.constexpr,
    WP: tl.constexpr,
):
    """Words [NU * N8 * X * LANES, VEC] of one token of every 8 of a unit, VEC words of each of X chunks a lane.

    base int64 [NU, LANES]: words before the unit. row [LANES], or [NU, N8, LANES] for every 8 tokens: the lane's token
    of the 8, or of the unit. part [LANES] of PARTS: which words of a chunk are the lane's. FROM: the first chunk's.
    """
    NU: tl.constexpr = base.shape[0]
    LANES: tl.constexpr = base.shape[1]
    chunk = (tl.arange(0, X) + FROM) * (PARTS * VEC)
    if len(row.shape) == 1:
        at = tl.reshape(base + (row * WW + part * VEC)[None, :], (NU, 1, 1, LANES))
        at = at + tl.reshape(tl.arange(0, N8) * (8 * WW), (1, N8, 1, 1))
    else:
        at = tl.reshape(base + (part * VEC)[None, :], (NU, 1, 1, LANES))
        at = at + tl.expand_dims(row * WW, 2)
    at = at + tl.reshape(chunk, (1, 1, X, 1))
    # Triton 3.6 does not look through a reshape for what it knows of alignment
    at = tl.multiple_of(tl.reshape(at, (NU * N8 * X * LANES,)), VEC)
    word = tl.arange(0, VEC)
    if WW == WP:
        return tl.load(ptr + (at[:, None] + word[None, :]))
    else:
        keep = tl.reshape(chunk[:, None] + (part * VEC)[None, :] < WW, (1, 1, X, LANES))
        keep = tl.reshape(tl.broadcast_to(keep, (NU, N8, X, LANES)), (NU * N8 * X * LANES,))
        keep = tl.broadcast_to(keep[:, None], (NU * N8 * X * LANES, VEC))
        return tl.load(ptr + (at[:, None] + word[None, :]), mask=keep, other=0)


@triton.jit
def _within(row, starts, low, high, N8: tl.constexpr):
    # token `row` [LANES] of every 8 of a unit, as its place in the unit, kept within low..high: [NU, N8, LANES]
    UNIT: tl.constexpr = N8 * 8
    place = tl.expand_dims(row, 0) + tl.expand_dims(tl.arange(0, N8) * 8, 1)
    most = tl.expand_dims(tl.minimum(high - starts, UNIT - 1), 1)
    least = tl.expand_dims(tl.maximum(low - starts, 0), 1)
    return tl.minimum(tl.maximum(tl.expand_dims(place, 0), least), most)


@triton.jit
def load_scales(ptr, base, pair, N8: tl.constexpr, EACH: tl.constexpr):
    """float16 scales of the two neighbouring tokens whose scores a lane holds, [rows, 2 EACH]: EACH numbers a token.

    base int64 [NU, LANES]: float16 numbers before the unit. pair [LANES]: first of the lane's two tokens of every 8.
    rows: NU * N8 * LANES.
    """
    NU: tl.constexpr = base.shape[0]
    LANES: tl.constexpr = base.shape[1]
    at = tl.reshape(base + (pair * EACH)[None, :], (NU, 1, LANES)) + tl.reshape(tl.arange(0, N8) * 8 * EACH, (1, N8, 1))
    at = tl.multiple_of(tl.reshape(at, (NU * N8 * LANES,)), 2 * EACH)
    return tl.load(ptr + (at[:, None] + tl.arange(0, 2 * EACH)[None, :]))


@triton.jit
def load_keys(
    kp,
    ksp,
    bw,
    starts,
    lane,
    IH: tl.constexpr,
    VK: tl.constexpr,
    N8: tl.constexpr,
    BS: tl.constexpr,
    WW: tl.constexpr,
    WP: tl.constexpr,
    KIND: tl.constexpr,
    EACH: tl.constexpr,
):
    """A tile's key words, of the first and the last half of each token, and scales (what is not there: words again).

    bw int64 [NU, LANES]: words before the block of each unit that begins at token `starts`. EACH: scales a token.
    """
    place = starts & (BS - 1)
    u = load_words(kp, bw + place * WW, lane // 4, lane % 4, 0, 4, IH, VK, N8, WW, WP)
    v = u
    if KIND != INT4:
        v = load_words(kp, bw + place * WW, lane // 4, lane % 4, IH, 4, IH, VK, N8, WW, WP)
    if KIND > BF16:
        return u, v, load_scales(ksp, bw * 2 + place * EACH, lane % 4 * 2, N8, EACH)
    else:
        return u, v, u


@triton.jit
def load_values(
    vp,
    vsp,
    bw,
    starts,
    low,
    high,
    lane,
    IV: tl.constexpr,
    VV: tl.constexpr,
    N8: tl.constexpr,
    BS: tl.constexpr,
    WW: tl.constexpr,
    WP: tl.constexpr,
    KIND: tl.constexpr,
):
    """A tile's value words, of even and of odd tokens, and scales (what is not there: words again)."""
    place = starts & (BS - 1)
    even = lane % 4 * 2
    if KIND > BF16:
        # whatever codes lie beyond a sequence are finite
        EACH: tl.constexpr = 2 if KIND == INT4 else 1
        u = load_words(vp, bw + place * WW, even, lane // 4, 0, 8, IV, VV, N8, WW, WP)
        v = load_words(vp, bw + place * WW, even + 1, lane // 4, 0, 8, IV, VV, N8, WW, WP)
        return u, v, load_scales(vsp, bw * 2 + place * EACH, even, N8, EACH)
    else:
        one = _within(even, starts, low, high, N8)
        two = _within(even + 1, starts, low, high, N8)
        u = load_words(vp, bw + place * WW, one, lane // 4, 0, 8, IV, VV, N8, WW, WP)
        return u, load_words(vp, bw + place * WW, two, lane // 4, 0, 8, IV, VV, N8, WW, WP), u


@triton.jit
def _query_words(
    qp,
    real_rows,
    lane,
    HALF: tl.constexpr,
    SHIFT: tl.constexpr,
    VEC: tl.constexpr,
    RUN: tl.constexpr,
    X: tl.constexpr,
    H: tl.constexpr,
    KIND: tl.constexpr,
    D: tl.constexpr,
):
    # words [2 * X * LANES, VEC] of 16 rows of queries, from word SHIFT of each lane's RUN words of X chunks
    LANES: tl.constexpr = lane.shape[0]
    BETWEEN: tl.constexpr = D // 4 if KIND == INT4 else X * 4 * RUN
    WORDS: tl.constexpr = D // 4 if KIND == INT4 else D // 2
    two = tl.arange(0, 2)[:, None]
    run = tl.arange(0, X)[:, None] * (4 * RUN) + (lane % 4 * RUN)[None, :]
    if H == 1:
        row = two * 0 + (lane // 4)[None, :]
        half = two
    else:
        row = two * 8 + (lane // 4)[None, :]
        half = two * 0 + HALF
    at = row * (D // 2) + half * BETWEEN
    at = tl.expand_dims(at, 1) + tl.expand_dims(run + SHIFT, 0)
    if KIND == INT4:
        keep = tl.expand_dims(row < real_rows, 1) & tl.expand_dims(run < WORDS, 0)
    else:
        keep = tl.expand_dims(row < real_rows, 1) & (tl.expand_dims(run, 0) + tl.expand_dims(half * BETWEEN, 1) < WORDS)
    at = tl.multiple_of(tl.reshape(at, (2 * X * LANES,)), VEC)
    keep = tl.broadcast_to(tl.reshape(keep, (2 * X * LANES,))[:, None], (2 * X * LANES, VEC))
    return tl.load(qp + (at[:, None] + tl.arange(0, VEC)[None, :]), mask=keep, other=0)


@triton.jit
def load_query(
    qp,
    real_rows,
    lane,
    HALF: tl.constexpr,
    I: tl.constexpr,
    VK: tl.constexpr,
    H: tl.constexpr,
    KIND: tl.constexpr,
    D: tl.constexpr,
):
    """Words of queries as query_operand takes them: the first and the last of each lane's run of words of a chunk.

    H == 2: half HALF of the elements of 16 queries. H == 1: both halves of 8 queries. qp: words of the first query;
    real_rows: how many there are.
    """
    RUN: tl.constexpr = VK if KIND <= BF16 else 2 * VK
    VEC: tl.constexpr = min(RUN, 4)
    X: tl.constexpr = I if KIND == INT4 else I // 2
    u = _query_words(qp, real_rows, lane, HALF, 0, VEC, RUN, X, H, KIND, D)
    if RUN > VEC:
        return u, _query_words(qp, real_rows, lane, HALF, VEC, VEC, RUN, X, H, KIND, D)
    else:
        return u, u
