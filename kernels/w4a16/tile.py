# mypy: disable-error-code="no-untyped-def"
"""Weights of one block as the tensor cores take them, from packed words. See layout.py for the order of the words.

They are the left operand (y^T = W x^T): on every card a thread's 16-byte loads are the registers that `mma` (or
Hopper's wgmma) takes them from, so they never pass through shared memory, and a batch of eight wastes nothing.
"""

import triton
import triton.language as tl

from .unpack import codes4, codes8, high_zero_pair, scale_float, scale_pair, weights4, weights8, zero_pair


@triton.jit
def _spread(u, v, BN: tl.constexpr, ONE: tl.constexpr):
    # [BN/16, 32, 2], a value a lane and half -> [BN/16, 128, 2]: u for the lane's first two words, v for the other two
    # (u for all four if ONE)
    if ONE:
        w = tl.broadcast_to(tl.expand_dims(u, 2), (BN // 16, 32, 4, 2))
    else:
        pair = tl.expand_dims(tl.permute(tl.join(u, v), (0, 1, 3, 2)), 3)
        w = tl.broadcast_to(pair, (BN // 16, 32, 2, 2, 2))
    return tl.reshape(w, (BN // 16, 128, 2))


@triton.jit
def _rows(lo, hi, BN: tl.constexpr):
    # words (n, g, t, i, h) and their halves e -> [BN, 32]: rows (n, h, g), columns (i, t, e)
    w = tl.reshape(tl.join(lo, hi), (BN // 16, 8, 4, 4, 2, 2))
    return tl.reshape(tl.permute(w, (0, 4, 1, 3, 2, 5)), (BN, 32))


@triton.jit
def side_by_side(a, b, BN: tl.constexpr, P: tl.constexpr):
    """Two [BN, P] tiles as one of [BN, 2 P]."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (BN, 2 * P))


@triton.jit
def scale_tile(sz, BN: tl.constexpr, BM: tl.constexpr):
    """Scale words [BN/16 n, 32 (g, t), 2 h] -> float32 [BN, BM]: the lane with a scale is the lane with its sums."""
    s = tl.reshape(scale_float(sz), (BN // 16, 8, 4, 2))
    s = tl.reshape(tl.permute(s, (0, 3, 1, 2)), (BN, 1, 4, 1))
    return tl.reshape(tl.broadcast_to(s, (BN, BM // 8, 4, 2)), (BN, BM))


@triton.jit
def load_words(w_ptr, rows16, KB, kb):
    """The words of block kb, [BN/16, 128, 2 halves]: each lane gets 16 bytes of either half.

    Two loads of two dimensions, not one of three: how Triton lays out equal dimensions differs between versions.
    """
    wp = w_ptr + (rows16 * KB + kb)[:, None] * 256 + tl.arange(0, 128)[None, :]
    return tl.join(tl.load(wp), tl.load(wp + 128))


@triton.jit
def load_scales(sz_ptr, group, szs, rows16, BN: tl.constexpr):
    """A group's scale words, [BN/16, 32 lanes, 2 halves]: each lane gets those of its own rows."""
    lane = tl.arange(0, 64)
    at = (rows16 * 16)[:, None] + (lane // 8 * 2 + lane % 2)[None, :]
    return tl.reshape(tl.load(sz_ptr + group * szs + at), (BN // 16, 32, 2))


@triton.jit
def group_of(kb, COLUMN: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """The group that a column of block kb is in."""
    if GROUP == 0:
        return kb * 0
    elif GROUP >= BLOCK:
        return kb // (GROUP // BLOCK)
    else:
        return kb * (BLOCK // GROUP) + COLUMN // GROUP


@triton.jit
def _plane(a, sz_ptr, kb, szs, rows16, J: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr):
    # the scale words of plane J: for its first 16 columns and for its last; `a` are those of the block's first column
    if GROUP == 0 or GROUP >= BLOCK or 32 * J + 16 < GROUP:
        return a, a
    else:
        u = load_scales(sz_ptr, group_of(kb, 32 * J, BLOCK, GROUP), szs, rows16, BN)
        if GROUP == 16:
            return u, load_scales(sz_ptr, group_of(kb, 32 * J + 16, BLOCK, GROUP), szs, rows16, BN)
        else:
            return u, u


@triton.jit
def _tile4(
    q,
    a,
    sz_ptr,
    kb,
    szs,
    rows16,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
    SCALED: tl.constexpr,
    ASM: tl.constexpr,
):
    # words of block kb -> its weights, two fp16 [BN, 64], times their scales or only less their zeros
    ONE: tl.constexpr = GROUP != 16
    a0, b0 = _plane(a, sz_ptr, kb, szs, rows16, 0, 128, GROUP, BN)
    a1, b1 = _plane(a, sz_ptr, kb, szs, rows16, 1, 128, GROUP, BN)
    a2, b2 = _plane(a, sz_ptr, kb, szs, rows16, 2, 128, GROUP, BN)
    a3, b3 = _plane(a, sz_ptr, kb, szs, rows16, 3, 128, GROUP, BN)
    z0 = _spread(zero_pair(a0, ASM), zero_pair(b0, ASM), BN, ONE)
    z1 = _spread(high_zero_pair(zero_pair(a1, ASM), ASM), high_zero_pair(zero_pair(b1, ASM), ASM), BN, ONE)
    z2 = _spread(zero_pair(a2, ASM), zero_pair(b2, ASM), BN, ONE)
    z3 = _spread(high_zero_pair(zero_pair(a3, ASM), ASM), high_zero_pair(zero_pair(b3, ASM), ASM), BN, ONE)
    if SCALED:
        s0 = _spread(scale_pair(a0, ASM), scale_pair(b0, ASM), BN, ONE)
        s1 = _spread(scale_pair(a1, ASM), scale_pair(b1, ASM), BN, ONE)
        s2 = _spread(scale_pair(a2, ASM), scale_pair(b2, ASM), BN, ONE)
        s3 = _spread(scale_pair(a3, ASM), scale_pair(b3, ASM), BN, ONE)
        l0, l1, l2, l3, h0, h1, h2, h3 = weights4(q, z0, z1, z2, z3, s0, s1, s2, s3, ASM)
    else:
        l0, l1, l2, l3, h0, h1, h2, h3 = codes4(q, z0, z1, z2, z3, ASM)
    low = side_by_side(_rows(l0, h0, BN), _rows(l1, h1, BN), BN, 32)
    return low, side_by_side(_rows(l2, h2, BN), _rows(l3, h3, BN), BN, 32)


@triton.jit
def _tile8(
    q,
    a,
    sz_ptr,
    kb,
    szs,
    rows16,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
    SCALED: tl.constexpr,
    ASM: tl.constexpr,
):
    # as _tile4, for 8 bits: two fp16 [BN, 32]
    ONE: tl.constexpr = GROUP != 16
    a0, b0 = _plane(a, sz_ptr, kb, szs, rows16, 0, 64, GROUP, BN)
    a1, b1 = _plane(a, sz_ptr, kb, szs, rows16, 1, 64, GROUP, BN)
    z0 = _spread(zero_pair(a0, ASM), zero_pair(b0, ASM), BN, ONE)
    z1 = _spread(zero_pair(a1, ASM), zero_pair(b1, ASM), BN, ONE)
    if SCALED:
        s0 = _spread(scale_pair(a0, ASM), scale_pair(b0, ASM), BN, ONE)
        s1 = _spread(scale_pair(a1, ASM), scale_pair(b1, ASM), BN, ONE)
        l0, l1, h0, h1 = weights8(q, z0, z1, s0, s1, ASM)
    else:
        l0, l1, h0, h1 = codes8(q, z0, z1, ASM)
    return _rows(l0, h0, BN), _rows(l1, h1, BN)


@triton.jit
def weight_tile(
    q,
    a,
    sz_ptr,
    kb,
    szs,
    rows16,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
    SCALED: tl.constexpr,
    ASM: tl.constexpr,
):
    """The weights of block kb, from its words q [BN/16, 128, 2]: fp16 [BN, BLOCK/2], the left and the right half.

    a [BN/16, 32, 2]: scale words of the block's first group. With SCALED the weights are q - zero times the scale (in
    units of the multiplier), rounded once; without, q - zero, exact.
    """
    if BITS == 4:
        return _tile4(q, a, sz_ptr, kb, szs, rows16, GROUP, BN, SCALED, ASM)
    else:
        return _tile8(q, a, sz_ptr, kb, szs, rows16, GROUP, BN, SCALED, ASM)


@triton.jit
def scaled_block(
    w_ptr, sz_ptr, rows16, KB, kb, szs, BITS: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, ASM: tl.constexpr
):
    """The weights of block kb times their scales, fp16 [BN, BLOCK], in units of the multiplier."""
    BLOCK: tl.constexpr = 512 // BITS
    q = load_words(w_ptr, rows16, KB, kb)
    a = load_scales(sz_ptr, group_of(kb, 0, BLOCK, GROUP), szs, rows16, BN)
    left, right = weight_tile(q, a, sz_ptr, kb, szs, rows16, BITS, GROUP, BN, True, ASM)
    return side_by_side(left, right, BN, BLOCK // 2)
