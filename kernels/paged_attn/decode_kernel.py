# mypy: disable-error-code="no-untyped-def"
"""The decode kernel: one new token a sequence against its paged keys and values.

Work is cut into tiles of WARPS * TOK consecutive tokens of one sequence, KV head and group of query rows. All tiles of
a step, sequence by sequence and head by head, are dealt to the programs in equal runs, worked out on the device from
the lengths: whatever mixture of lengths a step has, every program gets the same number of tiles, give or take one.
A run that holds all tiles of a head writes its result; of a head that several runs share, each run leaves a partial
result, and the last to finish adds them in the order of the context. Equal inputs give equal bits.

Each warp of a program has its own TOK tokens of a tile, its own running maximum and its own sums, joined at the end of
a run, so that nothing in the loop waits for another warp. Loaded words become operands of `mma` in the registers that
they were loaded to: for the scores the keys are the right operand, whose lanes hold 4 x 16 bytes of a token; for the
output the values are the left operand (out^T = V^T P^T), whose lanes hold 8 x 16 bytes of a token; the scores of 8
tokens come out in the lanes where the second product takes their probabilities. The order in which a head's elements
pass through the first product, and leave the second, follows from that: `query_order` and `output_order` say it.
"""

import triton
import triton.language as tl

from qengine.kernels.w4a16.unpack import opaque

from .decode_kinds import BF16, FP8, FP16, INT4, INT8
from .decode_unpack import byte_pairs, bytes4, halves, hidden_zero, nibble_pairs, nibbles8

LOWEST = tl.constexpr(-1e30)


@triton.jit
def output_order(zero, DP: tl.constexpr, VV: tl.constexpr, IV: tl.constexpr, KIND: tl.constexpr, D: tl.constexpr):
    """(element, whether it exists) of a head at each place of the second product's outer dimension, [DP]."""
    m = tl.arange(0, DP) + zero
    g = m % 8
    rest = m // 8
    if KIND <= BF16:
        at = ((rest // (2 * VV) * 8 + g) * VV + rest // 2 % VV) * 2 + rest % 2
        return at, at < D
    else:
        at = ((rest // (4 * VV) % IV * 8 + g) * VV + rest // 4 % VV) * 4 + rest % 4
        if KIND == INT4:
            return at + rest // (4 * VV * IV) * (D // 2), at < D // 2
        else:
            return at, at < D


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
def _operand(x, ASM: tl.constexpr):
    # Triton 3.6 chooses an operand's layout by looking for joins behind it, and would choose another than x has
    if ASM:
        return opaque(x)
    else:
        return x


@triton.jit
def key_operands(
    u,
    v,
    NT: tl.constexpr,
    I: tl.constexpr,
    VK: tl.constexpr,
    WARPS: tl.constexpr,
    DP: tl.constexpr,
    KIND: tl.constexpr,
    ASM: tl.constexpr,
):
    """Words of a token's first and second half -> both halves of K^T, [WARPS, DP / 2, 8 NT], elements in `query_order`.

    int4 has both halves in u.
    """
    if KIND == INT4:
        a, b, c, d, e, f, g, h = nibbles8(u, KIND, ASM)
        x = _key_bytes(tl.join(tl.join(a, b), tl.join(c, d)), NT, I, VK, WARPS, DP)
        y = _key_bytes(tl.join(tl.join(e, f), tl.join(g, h)), NT, I, VK, WARPS, DP)
    elif KIND == INT8 or KIND == FP8:  # noqa: SIM109
        a, b, c, d = bytes4(u, KIND, ASM)
        x = _key_bytes(tl.join(tl.join(a, b), tl.join(c, d)), NT, I // 2, VK, WARPS, DP)
        a, b, c, d = bytes4(v, KIND, ASM)
        y = _key_bytes(tl.join(tl.join(a, b), tl.join(c, d)), NT, I // 2, VK, WARPS, DP)
    else:
        a, b = halves(u, KIND == BF16, ASM)
        x = _key_halves(tl.join(a, b), NT, I // 2, VK, WARPS, DP)
        a, b = halves(v, KIND == BF16, ASM)
        y = _key_halves(tl.join(a, b), NT, I // 2, VK, WARPS, DP)
    return _operand(x, ASM), _operand(y, ASM)


@triton.jit
def _key_bytes(x, NT: tl.constexpr, I: tl.constexpr, VK: tl.constexpr, WARPS: tl.constexpr, DP: tl.constexpr):
    x = tl.permute(tl.reshape(x, (NT, I, WARPS, 8, 4, VK, 2, 2)), (2, 1, 5, 7, 4, 6, 0, 3))
    return tl.reshape(x, (WARPS, DP // 2, 8 * NT))


@triton.jit
def _key_halves(x, NT: tl.constexpr, I: tl.constexpr, VK: tl.constexpr, WARPS: tl.constexpr, DP: tl.constexpr):
    x = tl.permute(tl.reshape(x, (NT, I, WARPS, 8, 4, VK // 2, 2, 2)), (2, 1, 5, 6, 4, 7, 0, 3))
    return tl.reshape(x, (WARPS, DP // 2, 8 * NT))


@triton.jit
def value_operand(
    u,
    v,
    NT: tl.constexpr,
    IV: tl.constexpr,
    VV: tl.constexpr,
    WARPS: tl.constexpr,
    DP: tl.constexpr,
    KIND: tl.constexpr,
    ASM: tl.constexpr,
):
    """Words of even and of odd tokens -> V^T [WARPS, DP, 8 NT], elements in `output_order`."""
    if KIND == INT4:
        a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = nibble_pairs(u, v, KIND, ASM)
        low = tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h)))
        high = tl.join(tl.join(tl.join(i, j), tl.join(k, l)), tl.join(tl.join(m, n), tl.join(o, p)))
        x = tl.reshape(tl.join(low, high), (NT // 2, 2, IV, WARPS, 8, 4, VV, 2, 2, 2, 2))
        x = tl.permute(x, (3, 10, 2, 6, 9, 8, 4, 0, 1, 5, 7))
    elif KIND == INT8 or KIND == FP8:  # noqa: SIM109
        a, b, c, d, e, f, g, h = byte_pairs(u, v, KIND, ASM)
        x = tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h)))
        x = tl.reshape(x, (NT // 2, 2, IV, WARPS, 8, 4, VV, 2, 2, 2))
        x = tl.permute(x, (3, 2, 6, 9, 8, 4, 0, 1, 5, 7))
    else:
        a, b = halves(u, KIND == BF16, ASM)
        c, d = halves(v, KIND == BF16, ASM)
        x = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (NT // 2, 2, IV, WARPS, 8, 4, VV, 2, 2))
        x = tl.permute(x, (3, 2, 6, 8, 4, 0, 1, 5, 7))
    return _operand(tl.reshape(x, (WARPS, DP, 8 * NT)), ASM)


@triton.jit
def _lanes_to_scores(x, NT: tl.constexpr, WARPS: tl.constexpr):
    # [NT * LANES, 2 tokens] -> [WARPS, 1, 8, 8 NT]: the lane that loaded a token's number is the lane of its scores
    x = tl.permute(tl.reshape(x, (NT, WARPS, 8, 4, 2)), (1, 2, 0, 3, 4))
    return tl.reshape(x, (WARPS, 1, 8, 8 * NT))


@triton.jit
def load_scales(ptr, base, pair, N8: tl.constexpr, KIND: tl.constexpr):
    """float16 scales of the two neighbouring tokens whose scores a lane holds, [rows, 2]; int4 with offsets: [rows, 4].

    base int64 [NU, LANES]: float16 numbers before the unit. pair [LANES]: first of the lane's two tokens of every 8.
    rows: NU * N8 * LANES.
    """
    NU: tl.constexpr = base.shape[0]
    LANES: tl.constexpr = base.shape[1]
    EACH: tl.constexpr = 2 if KIND == INT4 else 1
    at = tl.reshape(base + (pair * EACH)[None, :], (NU, 1, LANES)) + tl.reshape(tl.arange(0, N8) * 8 * EACH, (1, N8, 1))
    at = tl.multiple_of(tl.reshape(at, (NU * N8 * LANES,)), 2 * EACH)
    return tl.load(ptr + (at[:, None] + tl.arange(0, 2 * EACH)[None, :]))


@triton.jit
def scale_and_offset(x, NT: tl.constexpr, WARPS: tl.constexpr, KIND: tl.constexpr):
    """(scale, offset) float32 [WARPS, 1, 8, 8 NT] of what load_scales gave; the offset only of int4."""
    x = x.to(tl.float32)
    if KIND == INT4:
        scale, offset = tl.split(tl.reshape(x, (NT * WARPS * 32, 2, 2)))
        return _lanes_to_scores(scale, NT, WARPS), _lanes_to_scores(offset, NT, WARPS)
    else:
        x = _lanes_to_scores(x, NT, WARPS)
        return x, x


@triton.jit
def _product(a, b, acc, ASM: tl.constexpr):
    # the interpreter has no bf16 products: its twin multiplies the same values in float32
    if ASM:
        return tl.dot(a, b, acc)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def _add_values(
    acc,
    values,
    pv,
    WARPS: tl.constexpr,
    TOK: tl.constexpr,
    DP: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    ASM: tl.constexpr,
):
    # acc + values . pv, for int4 less 71.5 times the sum of pv (its codes count from 64) before it comes to acc: tensor
    # cores cut sums off, and what they cut of such large ones would add up over a long context
    if KIND == INT4:
        ones = tl.full((WARPS, 16, TOK), 1.0, tl.float16)
        x = _product(ones, pv, tl.zeros((WARPS, 16, ROWS), tl.float32), ASM) * -71.5
        x = tl.broadcast_to(tl.expand_dims(x, 1), (WARPS, DP // 16, 16, ROWS))
        return acc + _product(values, pv, tl.reshape(x, (WARPS, DP, ROWS)), ASM)
    else:
        return _product(values, pv, acc, ASM)


@triton.jit
def _scores(qa, qb, ka, kb, TOK: tl.constexpr, WARPS: tl.constexpr, H: tl.constexpr, ASM: tl.constexpr):
    # q . k [WARPS, H, 8, TOK]. Where there are only 8 queries, the 16 rows of the operand (qa and qb alike) are the
    # queries' first halves and their second halves
    zero = tl.zeros((WARPS, 16, TOK), tl.float32)
    if H == 1:
        first = tl.permute(tl.reshape(_product(qa, ka, zero, ASM), (WARPS, 2, 8, TOK)), (0, 2, 3, 1))
        second = tl.permute(tl.reshape(_product(qa, kb, zero, ASM), (WARPS, 2, 8, TOK)), (0, 2, 3, 1))
        s, _ = tl.split(first)
        _, t = tl.split(second)
        return tl.reshape(s + t, (WARPS, 1, 8, TOK))
    else:
        return tl.reshape(_product(qb, kb, _product(qa, ka, zero, ASM), ASM), (WARPS, 2, 8, TOK))


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


@triton.jit
def query_operand(
    first,
    last,
    I: tl.constexpr,
    VK: tl.constexpr,
    WARPS: tl.constexpr,
    DP: tl.constexpr,
    KIND: tl.constexpr,
    QBF: tl.constexpr,
    ASM: tl.constexpr,
):
    """Queries as the first product's left operand, [WARPS, 16, DP / 2], elements in the order of `key_operands`."""
    RUN: tl.constexpr = VK if KIND <= BF16 else 2 * VK
    VEC: tl.constexpr = min(RUN, 4)
    B: tl.constexpr = RUN // VEC
    X: tl.constexpr = I if KIND == INT4 else I // 2
    u, v = halves(first, QBF, ASM)
    x = tl.join(u, v)
    if B == 2:
        u, v = halves(last, QBF, ASM)
        x = tl.join(x, tl.join(u, v))
    x = tl.reshape(x, (2, X, WARPS, 8, 4, VEC // 2, 2, 2, B))
    if KIND == INT4:
        x = tl.permute(x, (2, 0, 3, 1, 8, 5, 7, 4, 6))
    else:
        x = tl.permute(x, (2, 0, 3, 1, 8, 5, 6, 4, 7))
    x = tl.reshape(x, (WARPS, 16, DP // 2))
    if KIND == BF16:
        return _operand(x.to(tl.bfloat16), ASM)
    else:
        return _operand(x.to(tl.float16), ASM)


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
):
    """A tile's key words, of the first and the last half of each token, and scales (what is not there: words again).

    bw int64 [NU, LANES]: words before the block of each unit that begins at token `starts`.
    """
    place = starts & (BS - 1)
    u = load_words(kp, bw + place * WW, lane // 4, lane % 4, 0, 4, IH, VK, N8, WW, WP)
    v = u
    if KIND != INT4:
        v = load_words(kp, bw + place * WW, lane // 4, lane % 4, IH, 4, IH, VK, N8, WW, WP)
    if KIND > BF16:
        EACH: tl.constexpr = 2 if KIND == INT4 else 1
        return u, v, load_scales(ksp, bw * 2 + place * EACH, lane % 4 * 2, N8, KIND)
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
        return u, v, load_scales(vsp, bw * 2 + place * EACH, even, N8, KIND)
    else:
        one = _within(even, starts, low, high, N8)
        two = _within(even + 1, starts, low, high, N8)
        u = load_words(vp, bw + place * WW, one, lane // 4, 0, 8, IV, VV, N8, WW, WP)
        return u, load_words(vp, bw + place * WW, two, lane // 4, 0, 8, IV, VV, N8, WW, WP), u


@triton.jit
def _over_register_tokens(p, NT: tl.constexpr, WARPS: tl.constexpr, H: tl.constexpr):
    # [WARPS, H, 8, 8 NT] summed over the tokens that one lane holds: [WARPS, H, 8, 4]
    return tl.sum(tl.sum(tl.reshape(p, (WARPS, H, 8, NT, 4, 2)), 5), 3)


@triton.jit
def _run_of(tile, many, size):
    # the run that a tile is in: the first `many` runs have size + 1 tiles, the others `size`
    split = many * (size + 1)
    if tile < split:
        run = tile // (size + 1)
    else:
        run = many + (tile - split) // size
    return run


@triton.jit(do_not_specialize=["rows", "window", "stride16", "sq16", "st", "min_tiles"])
def paged_decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    ks_ptr,
    vs_ptr,
    table_ptr,
    len_ptr,
    out_ptr,
    part_ptr,
    stat_ptr,
    lock_ptr,
    to_score,
    cap,
    rows,
    window,
    sq16,
    so,
    st,
    stride16,
    min_tiles,
    KIND: tl.constexpr,
    QBF: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BS: tl.constexpr,
    SHIFT: tl.constexpr,
    GROUP: tl.constexpr,
    HKV: tl.constexpr,
    H: tl.constexpr,
    VK: tl.constexpr,
    VV: tl.constexpr,
    WARPS: tl.constexpr,
    TOK: tl.constexpr,
    TILE_SHIFT: tl.constexpr,
    SB: tl.constexpr,
    FETCH: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    ASM: tl.constexpr,
):
    """out[s, h] = softmax(scale q . K) V over the cached tokens of sequence s, for `rows` sequences.

    q, out [rows, HKV * GROUP, D] in fp16 or, with QBF, bf16; q as int32 words, 16 * sq16 bytes from row to row, out
    with row stride so. k_ptr, v_ptr: a layer's cache as int32 words,
    [NB, HKV, BS, words], 16 * stride16 bytes from block to block; ks_ptr, vs_ptr: its scales, float16, as many bytes
    from block to block (unused by FP16 and BF16). table int32 [rows, st], lens int32 [rows].

    part: float32, stat: float32 and lock: int32, see decode.py's workspace; locks are 0 before and after.
    to_score: factor that turns q . k into the exponent of 2, and with HAS_CAP into that of tanh's, whose multiple `cap`
    is then the exponent of 2. window: tokens a query sees, with HAS_WINDOW. A program takes at least min_tiles tiles,
    so short steps use fewer programs than there are.

    H: groups of 8 query rows that a program serves together (1 or 2). D padded to a power of two is DP. VK, VV: words
    of a token that a lane loads at once. SB: a power of two, at least `rows`. FETCH: values
    are loaded after the scores are computed (0), with the keys (1), or so, and keys a tile ahead (2).
    """
    NT: tl.constexpr = TOK // 8
    ROWS: tl.constexpr = 8 * H
    GROUPS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    HR: tl.constexpr = HKV * GROUPS
    LANES: tl.constexpr = WARPS * 32
    EPW: tl.constexpr = 2 if KIND <= BF16 else (8 if KIND == INT4 else 4)
    WW: tl.constexpr = D // EPW
    WP: tl.constexpr = DP // EPW
    I: tl.constexpr = WP // (4 * VK)
    IH: tl.constexpr = I if KIND == INT4 else I // 2
    IV: tl.constexpr = WP // (8 * VV)
    UNIT: tl.constexpr = BS if BS < TOK else TOK
    NU: tl.constexpr = TOK // UNIT
    SCALED: tl.constexpr = KIND > BF16
    # fp16 probabilities are held times 2^LIFT, so that small ones keep their bits; less room where scales come on top
    LIFT: tl.constexpr = 0.0 if KIND == BF16 else (12.0 if KIND == FP16 else 6.0)
    N8: tl.constexpr = UNIT // 8
    SCALE_HEAD: tl.constexpr = 2 * BS if KIND == INT4 else BS

    # parts loaded at once where they are added, 64 registers' worth
    FEW: tl.constexpr = max(1, 64 * LANES // (ROWS * DP))

    pid = tl.program_id(0)
    idx = tl.arange(0, SB)
    lens = tl.maximum(tl.load(len_ptr + idx, mask=idx < rows, other=0), 0)
    tiles = (lens + ((1 << TILE_SHIFT) - 1)) >> TILE_SHIFT
    if HAS_WINDOW:
        tiles -= tl.maximum(lens - window, 0) >> TILE_SHIFT
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0) * HR
    runs = tl.maximum(tl.minimum(tl.num_programs(0), tl.cdiv(total, min_tiles)), 1)
    size = total // runs
    many = total - size * runs
    pos = pid * size + tl.minimum(pid, many)
    stop = pos + size
    if pid < many:
        stop += 1
    if pid >= runs:
        stop = pos
    seq = tl.sum((ends * HR <= pos).to(tl.int32), 0)
    base = tl.sum(tl.where(idx < seq, tiles, 0), 0) * HR

    lane = tl.arange(0, LANES) % 32
    # scores and their maximum are held in units of which this many are a power of 2
    unit = 1.0 if HAS_CAP else to_score
    stride = stride16.to(tl.int64) * 4
    while pos < stop:
        length = tl.load(len_ptr + seq)
        first = 0
        if HAS_WINDOW:
            first = tl.maximum(length - window, 0)
        skipped = first >> TILE_SHIFT
        count = tl.maximum((length + ((1 << TILE_SHIFT) - 1)) >> TILE_SHIFT, 0) - skipped
        count = tl.maximum(count, 0)
        if pos >= base + count * HR:
            base += count * HR
            seq += 1
        else:
            head = (pos - base) // count
            begin = pos - base - head * count
            end = tl.minimum(count, begin + stop - pos)
            hk = head // GROUPS
            row0 = head % GROUPS * ROWS
            # the last token of this run; what is fetched for the next tile stays below it too
            high = tl.minimum(length, (skipped + end) << TILE_SHIFT) - 1
            table = table_ptr + seq.to(tl.int64) * st
            kp = k_ptr + hk * (BS * WW)
            vp = v_ptr + hk * (BS * WW)
            ksp = ks_ptr + hk * SCALE_HEAD
            vsp = vs_ptr + hk * SCALE_HEAD

            at = (skipped + begin) << TILE_SHIFT
            starts = unit_starts(at, first, high, UNIT, NU, WARPS)
            blocks = load_blocks(table, starts, SHIFT)
            starts1 = unit_starts(at + WARPS * TOK, first, high, UNIT, NU, WARPS)
            blocks1 = load_blocks(table, starts1, SHIFT)
            qp = q_ptr + seq * (sq16.to(tl.int64) * 4) + (hk * GROUP + row0) * (D // 2)
            qw0, qw1 = load_query(qp, GROUP - row0, lane, 0, I, VK, H, KIND, D)
            if H == 2:
                qw2, qw3 = load_query(qp, GROUP - row0, lane, 1, I, VK, H, KIND, D)
            bw = blocks.to(tl.int64) * stride
            if FETCH >= 2:
                kw0, kw1, ksw = load_keys(kp, ksp, bw, starts, lane, IH, VK, N8, BS, WW, WP, KIND)
            if FETCH == 3:
                vw0, vw1, vsw = load_values(vp, vsp, bw, starts, first, high, lane, IV, VV, N8, BS, WW, WP, KIND)
            qa = query_operand(qw0, qw1, I, VK, WARPS, DP, KIND, QBF, ASM)
            qb = qa
            if H == 2:
                qb = query_operand(qw2, qw3, I, VK, WARPS, DP, KIND, QBF, ASM)
            if KIND == INT4:
                q_sum = tl.reshape(tl.sum(qa.to(tl.float32), 2), (WARPS, 2, 8))
                if H == 1:
                    q_sum = tl.sum(q_sum, 1)
                else:
                    q_sum += tl.reshape(tl.sum(qb.to(tl.float32), 2), (WARPS, 2, 8))
                q_sum = tl.reshape(q_sum, (WARPS, H, 8, 1))

            m = tl.full((WARPS, H, 8), LOWEST, tl.float32)
            l = tl.zeros((WARPS, H, 8, 4), tl.float32)
            shift = tl.zeros((WARPS, H, 8, 4), tl.float32)
            acc = tl.zeros((WARPS, DP, ROWS), tl.float32)
            for _ in range(begin, end):
                bw1 = blocks1.to(tl.int64) * stride
                if FETCH < 2:
                    kw0, kw1, ksw = load_keys(kp, ksp, bw, starts, lane, IH, VK, N8, BS, WW, WP, KIND)
                if FETCH == 1 or FETCH == 2:
                    vw0, vw1, vsw = load_values(vp, vsp, bw, starts, first, high, lane, IV, VV, N8, BS, WW, WP, KIND)
                if FETCH == 3:
                    kn0, kn1, ksn = load_keys(kp, ksp, bw1, starts1, lane, IH, VK, N8, BS, WW, WP, KIND)
                    vn0, vn1, vsn = load_values(vp, vsp, bw1, starts1, first, high, lane, IV, VV, N8, BS, WW, WP, KIND)
                k0, k1 = key_operands(kw0, kw1, NT, I, VK, WARPS, DP, KIND, ASM)
                s = _scores(qa, qb, k0, k1, TOK, WARPS, H, ASM)
                if FETCH == 0:
                    vw0, vw1, vsw = load_values(vp, vsp, bw, starts, first, high, lane, IV, VV, N8, BS, WW, WP, KIND)
                if SCALED:
                    k_scale, k_offset = scale_and_offset(ksw, NT, WARPS, KIND)
                    if KIND == INT4:
                        s = s * k_scale + q_sum * (k_offset - 64.0 * k_scale)
                    else:
                        s = s * k_scale
                if FETCH == 2:
                    kw0, kw1, ksw = load_keys(kp, ksp, bw1, starts1, lane, IH, VK, N8, BS, WW, WP, KIND)
                starts = starts1
                bw = bw1
                starts1 = unit_starts(at + 2 * WARPS * TOK, first, high, UNIT, NU, WARPS)
                blocks1 = load_blocks(table, starts1, SHIFT)

                if HAS_CAP:
                    s = cap - (2.0 * cap) / (1.0 + tl.exp2(s * to_score))
                place = at + tl.expand_dims(tl.arange(0, WARPS) * TOK, 1) + tl.expand_dims(tl.arange(0, TOK), 0)
                place = tl.reshape(place, (WARPS, 1, 1, TOK))
                seen = (place <= high) & (place >= first)
                s = tl.where(seen, s, float("-inf"))
                top = tl.maximum(m, tl.max(s, 3))
                fade = tl.exp2((m - top) * unit)
                m = top
                p = tl.exp2(s * unit - tl.expand_dims(top * unit - LIFT, 3))
                l = l * tl.expand_dims(fade, 3) + _over_register_tokens(p, NT, WARPS, H)
                if SCALED:
                    v_scale, v_offset = scale_and_offset(vsw, NT, WARPS, KIND)
                    v_scale = tl.where(seen, v_scale, 0.0)
                    if KIND == INT4:
                        # x = (q - 7.5) scale + (offset + 7.5 scale), of which this is the second part
                        lost = p * (tl.where(seen, v_offset, 0.0) + 7.5 * v_scale)
                        shift = shift * tl.expand_dims(fade, 3) + _over_register_tokens(lost, NT, WARPS, H)
                    p = p * v_scale
                pv = p.to(tl.bfloat16 if KIND == BF16 else tl.float16)
                pv = tl.reshape(tl.permute(pv, (0, 3, 1, 2)), (WARPS, TOK, ROWS))
                values = value_operand(vw0, vw1, NT, IV, VV, WARPS, DP, KIND, ASM)
                acc = acc * tl.reshape(fade, (WARPS, 1, ROWS))
                acc = _add_values(acc, values, pv, WARPS, TOK, DP, ROWS, KIND, ASM)
                if FETCH == 3:
                    kw0, kw1, ksw = kn0, kn1, ksn
                    vw0, vw1, vsw = vn0, vn1, vsn
                at += WARPS * TOK

            # the warps' results become the run's: weights of each warp, then sums over warps
            m_all = tl.max(m, 0)
            weight = tl.exp2((m - m_all[None, :, :]) * unit)
            l_all = tl.reshape(tl.sum(tl.sum(l, 3) * weight, 0), (ROWS,))
            o = tl.sum(acc * tl.reshape(weight, (WARPS, 1, ROWS)), 0)
            if KIND == INT4:
                o += tl.reshape(tl.sum(tl.sum(shift, 3) * weight, 0), (1, ROWS))
            if KIND == FP8:
                o *= 256.0
            zero = hidden_zero(ASM)
            dm, dm_real = output_order(zero, DP, VV, IV, KIND, D)
            n = tl.arange(0, ROWS) + zero
            d = tl.arange(0, DP) + zero
            op = out_ptr + seq.to(tl.int64) * so + (hk * GROUP + row0 + n[None, :]) * D + dm[:, None]
            real = dm_real[:, None] & (row0 + n < GROUP)[None, :]
            if end - begin == count:
                tl.store(op, (o / l_all[None, :]).to(out_ptr.dtype.element_ty), mask=real)
            else:
                slot = 2 * pid
                if begin == 0:
                    slot += 1
                tl.store(part_ptr + slot.to(tl.int64) * (DP * ROWS) + n[None, :] * DP + d[:, None], o)
                tl.store(stat_ptr + slot * (2 * ROWS) + n, tl.reshape(m_all * unit, (ROWS,)))
                tl.store(stat_ptr + slot * (2 * ROWS) + ROWS + n, l_all)
                run0 = _run_of(base + head * count, many, size)
                pieces = _run_of(base + head * count + count - 1, many, size) - run0 + 1
                lock = lock_ptr + seq * HR + head
                tl.debug_barrier()
                done = tl.atomic_add(lock, 1, sem="acq_rel")
                if done == pieces - 1:
                    _join_parts(op, part_ptr, stat_ptr, run0, pieces, real, DP, ROWS, FEW)
                    tl.store(lock, 0)
            pos += end - begin

    # padding rows of a captured step: zeros
    for row in range(pid, rows, tl.num_programs(0)):
        if tl.load(len_ptr + row) <= 0:
            for c in range(0, HKV * GROUP * D, 1024):
                x = c + tl.arange(0, 1024)
                nothing = tl.zeros((1024,), out_ptr.dtype.element_ty)
                tl.store(out_ptr + row * so.to(tl.int64) + x, nothing, mask=x < HKV * GROUP * D)


@triton.jit
def _join_parts(op, part_ptr, stat_ptr, run0, pieces, real, DP: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr):
    # a head's partial results, added in the order of the context
    i = tl.arange(0, FEW)
    n = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    top = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    o = tl.zeros((ROWS, DP), tl.float32)
    for start in range(0, pieces, FEW):
        slot = 2 * (run0 + start + i) + (start + i == 0).to(tl.int32)
        there = (start + i < pieces)[:, None]
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
    tl.store(op, tl.trans(o / total[:, None]).to(op.dtype.element_ty), mask=real)
