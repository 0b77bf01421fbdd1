# mypy: disable-error-code="no-untyped-def"
"""The GEMM kernel: y = x @ W^T with W packed as layout.py says. See that file for the order of the words.

The weights are the left operand (y^T = W x^T): on every card a thread's 16-byte loads are the registers that `mma`
(or Hopper's wgmma) takes them from, so they never pass through shared memory, and a batch of eight wastes nothing.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .unpack import (
    codes4,
    codes8,
    drain,
    high_zero_pair,
    opaque,
    prefetch_lines,
    scale_float,
    scale_pair,
    weights4,
    weights8,
    zero_pair,
)


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
def _scale_tile(sz, BN: tl.constexpr, BM: tl.constexpr):
    # [BN/16 n, 32 (g, t), 2 h] -> [BN, BM]: the lane that holds a scale is the lane that holds the sums
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
def _load_x(x_ptr, perm_ptr, at, xrow, K, HAS_PERM: tl.constexpr, EVEN_K: tl.constexpr):
    # x at the packed columns `at`, transposed: [columns, BM]; columns past K count as 0
    if HAS_PERM:
        at = tl.load(perm_ptr + at)
    if EVEN_K:
        return tl.load(x_ptr + xrow[None, :] + at[:, None])
    else:
        return tl.load(x_ptr + xrow[None, :] + at[:, None], mask=(at < K)[:, None], other=0.0)


@triton.jit
def _product(w, x, acc, ASM: tl.constexpr):
    # the interpreter has no bf16 products: its twin multiplies the same values in float32
    if ASM:
        return tl.dot(opaque(w.to(x.dtype)), x, acc)
    else:
        return tl.dot(w.to(x.dtype).to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def _store(yp, acc, multiplier, bp, rows, keep, HAS_BIAS: tl.constexpr):
    y = acc * multiplier
    if HAS_BIAS:
        y += tl.load(bp, mask=rows, other=0.0).to(tl.float32)[:, None]
    tl.store(yp, y.to(yp.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["M", "N8", "K", "KB", "splits", "whole"])
def w4a16_gemm(
    x_ptr,
    x_desc,
    w_ptr,
    sz_ptr,
    perm_ptr,
    bias_ptr,
    y_ptr,
    part_ptr,
    lock_ptr,
    M,
    N8,
    K,
    KB,
    sx,
    sy,
    splits,
    whole,
    multiplier,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,
    PREFETCH: tl.constexpr,
    SCALED: tl.constexpr,
    HALVES: tl.constexpr,
    HAS_PERM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
    TMA: tl.constexpr,
    WGMMA: tl.constexpr,
    ASM: tl.constexpr,
):
    """One program computes a BM x BN tile of y, or one of `splits` parts of its K.

    x [M, K] (row stride sx) and y [M, N = 8 N8] (row stride sy) in fp16 or bf16, words int32 [N16, KB, 256],
    scales_zeros int32 [G, N16, 8, 2], perm int32 or unused, bias [N] or unused.

    Programs 0 to whole - 1 compute a tile each, those after them a part of a tile each; without SPLIT every program
    computes a tile. part: float32, splits * BM * BN elements for each tile in parts, and lock: int32, as many elements
    as such tiles, 0 before and after; both unused without SPLIT. The last program of a tile to finish adds the parts in
    the order of K, so equal inputs give equal bits.

    PREFETCH: blocks (0 to 2) whose words are loaded to registers ahead of their products, for cards without
    asynchronous copies and for the smallest batches.
    SCALED multiplies the weights by their scales instead of each group's sums; groups under a block need it.
    HALVES makes two chained products of a block's two halves, which puts all warps of `mma` along N: no weight is then
    converted twice.
    PDL: 0, or launched with programmatic dependent launch (compute capability 9.0): the next kernel may start when all
    programs have (1) started or (2) done their products. The weights, which no kernel writes, are fetched while the
    kernel before still runs; all that depends on it comes after the wait.
    TMA: x comes through its tensor descriptor x_desc, with blocks of [BM, BLOCK], or of half the columns with HALVES
    (compute capability 9.0, no perm). WGMMA: compiled for compute capability 9.0.
    """
    tile = tl.program_id(0)
    ps = 0
    if SPLIT:
        beyond = tile - whole
        if beyond >= 0:
            tile = whole + beyond // splits
            ps = beyond % splits
    tiles_m = tl.cdiv(M, BM)
    pm = tile % tiles_m
    pn = tile // tiles_m
    BLOCK: tl.constexpr = 512 // BITS
    HALF: tl.constexpr = BLOCK // 2
    WIDTH: tl.constexpr = HALF if HALVES else BLOCK
    N = N8 * 8
    n16 = tl.cdiv(N, 16)
    rows16 = tl.minimum(pn * (BN // 16) + tl.arange(0, BN // 16), n16 - 1)
    szs = n16 * 16
    om = pm * BM + tl.arange(0, BM)
    xrow = tl.minimum(om, M - 1).to(tl.int64) * sx
    cols = tl.arange(0, WIDTH)
    first = 0
    last = KB
    if SPLIT:  # noqa: SIM102 (a condition on a tensor cannot join one known at compile time)
        if tile >= whole:
            first = ps * KB // splits
            last = (ps + 1) * KB // splits

    zero = tl.zeros((BN, BM), tl.float32)
    acc = zero
    if PDL == 1:
        gdc_launch_dependents()
    start = tl.minimum(first, KB - 1)
    if PREFETCH >= 1:
        q = load_words(w_ptr, rows16, KB, start)
        a = load_scales(sz_ptr, group_of(start, 0, BLOCK, GROUP), szs, rows16, BN)
    if PREFETCH >= 2:
        start = tl.minimum(first + 1, KB - 1)
        q1 = load_words(w_ptr, rows16, KB, start)
        a1 = load_scales(sz_ptr, group_of(start, 0, BLOCK, GROUP), szs, rows16, BN)
    if PDL:
        if PREFETCH == 0:
            for ahead in tl.static_range(3):
                prefetch_lines(w_ptr + (rows16 * KB + tl.minimum(first + ahead, KB - 1))[:, None] * 256)
        gdc_wait()
    for kb in range(first, last):
        if PREFETCH >= 1:
            ahead = tl.minimum(kb + PREFETCH, KB - 1)
            q_next = load_words(w_ptr, rows16, KB, ahead)
            a_next = load_scales(sz_ptr, group_of(ahead, 0, BLOCK, GROUP), szs, rows16, BN)
        else:
            q = load_words(w_ptr, rows16, KB, kb)
            a = load_scales(sz_ptr, group_of(kb, 0, BLOCK, GROUP), szs, rows16, BN)
        if TMA:
            x = tl.trans(x_desc.load([pm * BM, kb * BLOCK]))
            if HALVES:
                x_right = tl.trans(x_desc.load([pm * BM, kb * BLOCK + HALF]))
        else:
            x = _load_x(x_ptr, perm_ptr, kb * BLOCK + cols, xrow, K, HAS_PERM, EVEN_K)
            if HALVES:
                x_right = _load_x(x_ptr, perm_ptr, kb * BLOCK + HALF + cols, xrow, K, HAS_PERM, EVEN_K)
        left, right = weight_tile(q, a, sz_ptr, kb, szs, rows16, BITS, GROUP, BN, SCALED, ASM)
        part = acc if SCALED else zero
        if HALVES:
            part = _product(right, x_right, _product(left, x, part, ASM), ASM)
        else:
            part = _product(side_by_side(left, right, BN, HALF), x, part, ASM)
        if SCALED:
            acc = part
            if WGMMA:
                drain()
        else:
            acc += part * _scale_tile(a, BN, BM)
        if PREFETCH == 1:
            q = q_next
            a = a_next
        if PREFETCH == 2:
            q = q1
            a = a1
            q1 = q_next
            a1 = a_next

    if PDL == 2:
        gdc_launch_dependents()
    on = pn * BN + tl.arange(0, BN)
    keep = (on < N)[:, None] & (om < M)[None, :]
    yp = y_ptr + om.to(tl.int64)[None, :] * sy + on[:, None]
    bp = bias_ptr + on
    if SPLIT:
        if tile >= whole:
            # every element is stored and loaded, also past M and N: whole vectors are faster than masked elements
            pp = part_ptr + (tile - whole) * splits * (BN * BM)
            pp += tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
            tl.store(pp + ps * (BN * BM), acc)
            tl.debug_barrier()
            done = tl.atomic_add(lock_ptr + (tile - whole), 1, sem="acq_rel")
            if done == splits - 1:
                total = tl.zeros((BN, BM), tl.float32)
                for i in range(splits):
                    total += tl.load(pp + i * (BN * BM), cache_modifier=".cg")
                _store(yp, total, multiplier, bp, on < N, keep, HAS_BIAS)
                tl.store(lock_ptr + (tile - whole), 0)
        else:
            _store(yp, acc, multiplier, bp, on < N, keep, HAS_BIAS)
    else:
        _store(yp, acc, multiplier, bp, on < N, keep, HAS_BIAS)
