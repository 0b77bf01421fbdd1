# mypy: disable-error-code="no-untyped-def"
"""The GEMM kernel: y = x @ W^T with W packed as layout.py says."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .parts import share_sums, store_tile, sum_parts, to_flat
from .tile import group_of, load_scales, load_words, scale_tile, scaled_block, side_by_side, weight_tile
from .unpack import drain, opaque, prefetch_lines


@triton.jit
def load_x(x_ptr, perm_ptr, at, xrow, K, HAS_PERM: tl.constexpr, EVEN_K: tl.constexpr):
    """X at the packed columns `at`, transposed: [columns, BM]; columns past K count as 0."""
    if HAS_PERM:
        at = tl.load(perm_ptr + at)
    if EVEN_K:
        return tl.load(x_ptr + xrow[None, :] + at[:, None])
    else:
        return tl.load(x_ptr + xrow[None, :] + at[:, None], mask=(at < K)[:, None], other=0.0)


@triton.jit
def product(w, x, acc, ASM: tl.constexpr):
    """Acc + w @ x. The interpreter has no bf16 products: its twin multiplies the same values in float32."""
    if ASM:
        return tl.dot(opaque(w.to(x.dtype)), x, acc)
    else:
        return tl.dot(w.to(x.dtype).to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")


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
    OVERLAP: tl.constexpr,
    SPREAD: tl.constexpr,
    ACT: tl.constexpr,
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
    (compute capability 9.0, no perm). WGMMA: products may be Hopper's wgmma (9.0, four warps or more).
    OVERLAP (with SCALED, without PREFETCH and HALVES): the weights of a block are unpacked while the products of the
    block before it run, which helps where one program fills a multiprocessor.
    SPREAD: all programs of a tile in parts wait for each other and add up a share each, for large tiles.
    ACT: "", or a function of fused/activation.py: the rows of W are gate and up as `layout.paired_rows` orders them,
    and y [M, N / 2] is act(gate) * up, rounded where it would be if the product were stored first (activate_quickly).
    ASM: False in Triton's interpreter, which knows neither assembly nor CUDA's math library.
    """
    tl.static_assert(not OVERLAP or (SCALED and PREFETCH == 0 and not HALVES), "OVERLAP keeps one sum of whole blocks")
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
    if OVERLAP:
        # no product is issued before the one before it is done: only the unpacking in between is hidden
        w = scaled_block(w_ptr, sz_ptr, rows16, KB, start, szs, BITS, GROUP, BN, ASM)
        for kb in range(first, last):
            if TMA:
                x = tl.trans(x_desc.load([pm * BM, kb * BLOCK]))
            else:
                x = load_x(x_ptr, perm_ptr, kb * BLOCK + cols, xrow, K, HAS_PERM, EVEN_K)
            if WGMMA:
                # the products of the block before have read its weights from registers when this returns
                drain()
            acc = product(w, x, acc, ASM)
            w = scaled_block(w_ptr, sz_ptr, rows16, KB, tl.minimum(kb + 1, KB - 1), szs, BITS, GROUP, BN, ASM)
        last = first
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
            x = load_x(x_ptr, perm_ptr, kb * BLOCK + cols, xrow, K, HAS_PERM, EVEN_K)
            if HALVES:
                x_right = load_x(x_ptr, perm_ptr, kb * BLOCK + HALF + cols, xrow, K, HAS_PERM, EVEN_K)
        left, right = weight_tile(q, a, sz_ptr, kb, szs, rows16, BITS, GROUP, BN, SCALED, ASM)
        part = acc if SCALED else zero
        if HALVES:
            part = product(right, x_right, product(left, x, part, ASM), ASM)
        else:
            part = product(side_by_side(left, right, BN, HALF), x, part, ASM)
        if SCALED:
            acc = part
            if WGMMA:
                drain()
        else:
            acc += part * scale_tile(a, BN, BM)
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
    if SPLIT:
        if tile >= whole:
            # every element is stored and loaded, also past M and N: whole vectors are faster than masked elements
            parts = part_ptr + (tile - whole) * splits * (BN * BM)
            lock = lock_ptr + (tile - whole)
            tl.store(parts + ps * (BN * BM) + tl.arange(0, BN * BM), to_flat(acc, BM, BN))
            tl.debug_barrier()
            done = tl.atomic_add(lock, 1, sem="acq_rel")
            if SPREAD:
                share_sums(
                    parts, lock, splits, ps, y_ptr, sy, multiplier, bias_ptr, pn, pm, M, N, BM, BN, HAS_BIAS, ACT, ASM
                )
            elif done == splits - 1:
                total = sum_parts(parts + tl.arange(0, BN * BM), splits, BM, BN)
                store_tile(y_ptr, sy, total, multiplier, bias_ptr, pn, om, M, N, HAS_BIAS, ACT, ASM)
                tl.store(lock, 0)
        else:
            store_tile(y_ptr, sy, acc, multiplier, bias_ptr, pn, om, M, N, HAS_BIAS, ACT, ASM)
    else:
        store_tile(y_ptr, sy, acc, multiplier, bias_ptr, pn, om, M, N, HAS_BIAS, ACT, ASM)
