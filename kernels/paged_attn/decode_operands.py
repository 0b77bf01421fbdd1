# mypy: disable-error-code="no-untyped-def"
"""Operands of the decode kernel's two products, out of loaded words, and what comes between the products.

Words become operands of `mma` in the registers that they were loaded to, so nothing passes through shared memory.
Scores are [WARPS, H, 8, TOK]: a warp's own tokens, for H groups of 8 queries.
"""

import triton
import triton.language as tl

from qengine.kernels.w4a16.unpack import opaque

from .decode_kinds import BF16, FP8, INT4, INT8
from .decode_unpack import HIGH_NIBBLE, LOW_NIBBLE, byte_pairs, bytes4, halves, nibble_pairs, nibbles8

SCORE_UNIT = HIGH_NIBBLE
"""Scores of int4 keys are multiplied by this; `to_score` makes up for it."""


@triton.jit
def output_order(DP: tl.constexpr, VV: tl.constexpr, IV: tl.constexpr, KIND: tl.constexpr, D: tl.constexpr):
    """(element, whether it exists) of a head at each place of the second product's outer dimension, [DP]."""
    m = tl.arange(0, DP)
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
def value_unit(DP: tl.constexpr):
    """What a 1 in each row of the second product's sums of int4 codes stands for, float32 [DP]."""
    return tl.where(tl.arange(0, DP) < DP // 2, 1.0 / LOW_NIBBLE, 1.0 / HIGH_NIBBLE)


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
def _lanes_to_scores(x, NT: tl.constexpr, WARPS: tl.constexpr):
    # [NT * LANES, 2 tokens] -> [WARPS, 1, 8, 8 NT]: the lane that loaded a token's number is the lane of its scores
    x = tl.permute(tl.reshape(x, (NT, WARPS, 8, 4, 2)), (1, 2, 0, 3, 4))
    return tl.reshape(x, (WARPS, 1, 8, 8 * NT))


@triton.jit
def scale_and_offsets(x, NT: tl.constexpr, WARPS: tl.constexpr, KIND: tl.constexpr, OFFSETS: tl.constexpr):
    """(scale, first offset, last offset) float32 [WARPS, 1, 8, 8 NT] of what load_scales gave; offsets of int4 only."""
    x = x.to(tl.float32)
    if KIND == INT4 and OFFSETS == 2:
        even, odd = tl.split(tl.reshape(x, (NT * WARPS * 32, 2, 2, 2)))
        scale, last = tl.split(even)
        first, _ = tl.split(odd)
        last = _lanes_to_scores(last, NT, WARPS)
        return _lanes_to_scores(scale, NT, WARPS), _lanes_to_scores(first, NT, WARPS), last
    elif KIND == INT4:
        scale, offset = tl.split(tl.reshape(x, (NT * WARPS * 32, 2, 2)))
        offset = _lanes_to_scores(offset, NT, WARPS)
        return _lanes_to_scores(scale, NT, WARPS), offset, offset
    else:
        x = _lanes_to_scores(x, NT, WARPS)
        return x, x, x


@triton.jit
def _product(a, b, acc, ASM: tl.constexpr):
    # the interpreter has no bf16 products: its twin multiplies the same values in float32
    if ASM:
        return tl.dot(a, b, acc)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def query_sums(qa, qb, WARPS: tl.constexpr, H: tl.constexpr):
    """Sums of both halves of each query, [WARPS, H, 8, 1], in the units of `scores` of int4 keys."""
    a = tl.sum(qa.to(tl.float32), 2) * SCORE_UNIT
    if H == 1:
        a, b = tl.split(tl.permute(tl.reshape(a, (WARPS, 2, 8)), (0, 2, 1)))
    else:
        b = tl.sum(qb.to(tl.float32), 2) * SCORE_UNIT
    return tl.reshape(a, (WARPS, H, 8, 1)), tl.reshape(b, (WARPS, H, 8, 1))


@triton.jit
def scores(
    qa, qb, ka, kb, TOK: tl.constexpr, WARPS: tl.constexpr, H: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr
):
    """q . k [WARPS, H, 8, TOK] of the halves of query_operand and key_operands; of int4 codes times SCORE_UNIT.

    Where there are only 8 queries, the 16 rows of the operand (qa and qb alike) are their first and their second
    halves: of each product the rows that meet their own half count.
    """
    FIRST: tl.constexpr = HIGH_NIBBLE / LOW_NIBBLE if KIND == INT4 else 1.0
    zero = tl.zeros((WARPS, 16, TOK), tl.float32)
    if H == 1:
        first = tl.permute(tl.reshape(_product(qa, ka, zero, ASM), (WARPS, 2, 8, TOK)), (0, 2, 3, 1))
        second = tl.permute(tl.reshape(_product(qa, kb, zero, ASM), (WARPS, 2, 8, TOK)), (0, 2, 3, 1))
        s, _ = tl.split(first)
        _, t = tl.split(second)
        return tl.reshape(s * FIRST + t, (WARPS, 1, 8, TOK))
    else:
        return tl.reshape(_product(qb, kb, _product(qa, ka, zero, ASM) * FIRST, ASM), (WARPS, 2, 8, TOK))


@triton.jit
def hide(s, v_scale, v_offset, at, low, high, WARPS: tl.constexpr, TOK: tl.constexpr, KIND: tl.constexpr):
    """Scores of tokens outside low..high become -inf; the scales of their values, which may be anything, 0."""
    place = at + tl.expand_dims(tl.arange(0, WARPS) * TOK, 1) + tl.expand_dims(tl.arange(0, TOK), 0)
    place = tl.reshape(place, (WARPS, 1, 1, TOK))
    seen = (place <= high) & (place >= low)
    if KIND > BF16:
        v_scale = tl.where(seen, v_scale, 0.0)
    if KIND == INT4:
        v_offset = tl.where(seen, v_offset, 0.0)
    return tl.where(seen, s, float("-inf")), v_scale, v_offset


@triton.jit
def sum_in_lanes(p, NT: tl.constexpr, WARPS: tl.constexpr, H: tl.constexpr):
    """p [WARPS, H, 8, 8 NT] summed over the tokens that one lane holds: [WARPS, H, 8, 4]."""
    return tl.sum(tl.sum(tl.reshape(p, (WARPS, H, 8, NT, 4, 2)), 5), 3)


@triton.jit
def add_values(
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
    """acc [WARPS, DP, ROWS] + values . pv.

    Of int4 codes 7.5 times the sum of pv is taken off before it comes to acc: tensor cores cut sums off, and what they
    cut of sums that are not around 0 would add up over a long context. Units are those of the nibbles, see value_unit.
    """
    if KIND == INT4:
        ones = tl.full((WARPS, 16, TOK), 1.0, tl.float16)
        x = _product(ones, pv, tl.zeros((WARPS, 16, ROWS), tl.float32), ASM)
        x = tl.permute(tl.join(x * (-7.5 * LOW_NIBBLE), x * (-7.5 * HIGH_NIBBLE)), (0, 3, 1, 2))
        x = tl.broadcast_to(tl.expand_dims(x, 2), (WARPS, 2, DP // 32, 16, ROWS))
        return acc + _product(values, pv, tl.reshape(x, (WARPS, DP, ROWS)), ASM)
    else:
        return _product(values, pv, acc, ASM)
