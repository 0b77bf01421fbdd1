# mypy: disable-error-code="no-untyped-def"
"""Causal attention of prompt chunks over the paged cache (flash attention), and the order in which its tiles are run.

A program takes a tile of BM rows: BM // PACK new tokens of one sequence, each with the PACK query heads that read one
key-value head, and goes through the keys BN at a time: first those that only a sliding window cuts (if any), then those
that every row sees, without a mask, then those around the diagonal. The rows of a tile share every key that is loaded,
so grouped heads and short chunks fill the tensor cores' tiles.

head_dim is taken in two parts of D1 and D2 elements (powers of two; D2 may be 0), so that 80 = 64 + 16 or
192 = 128 + 64 waste nothing. A 4-bit cache's two nibbles are such parts: the halves of a head.
"""

import triton
import triton.language as tl

from .prefill_load import fetch, place_of, places, values


@triton.jit
def _dot(a, b, acc, ASM: tl.constexpr):
    # the interpreter has no bfloat16 products: its twin multiplies the same values in float32
    if ASM:
        return tl.dot(a, b, acc)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def _rows(r, start, tile, count, group, BM: tl.constexpr, PACK: tl.constexpr):
    """(row of q, head, token of the sequence, whether there is such a row) of a tile's rows r."""
    ROWS: tl.constexpr = BM // PACK
    token = tile * ROWS + r // PACK
    ok = (r // PACK < ROWS) & (token < count)
    return (start + token).to(tl.int64), group * PACK + r % PACK, token, ok[:, None]


@triton.jit
def _keys(
    k_ptr, ks_ptr, bt_ptr, j, hi, stride, s_stride, D1: tl.constexpr, D2: tl.constexpr, V1: tl.constexpr,
    V2: tl.constexpr, O2: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    OFFSETS: tl.constexpr,
):  # fmt: skip
    # the tile that starts at j, or again the last one, as held and transposed
    j = tl.minimum(j, tl.maximum(hi - 1, 0) // BN * BN)
    block, place = places(bt_ptr, j, hi, BS, BN, True)
    ok = tl.full((BN,), True, tl.int1)
    return fetch(
        k_ptr, ks_ptr, block, place, stride, s_stride, ok, 0, D1, D2, V1, V2, O2, BN, BS, WIDTH, KIND, OFFSETS, False
    )  # fmt: skip


@triton.jit
def _step(
    m, l, acc1, acc2, x1, x2, xs, xo, q1, q2, j, hi, pos, window, k_ptr, v_ptr, ks_ptr, vs_ptr, bt_ptr, stride,
    s_stride, c, cap, D1: tl.constexpr, D2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, O2: tl.constexpr,
    BN: tl.constexpr, BS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    OFFSETS: tl.constexpr, SOFTCAP: tl.constexpr, SLIDING: tl.constexpr, MASKED: tl.constexpr,
    PREFETCH: tl.constexpr, SUMS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One tile of keys: the rows' maxima m, sums l and weighted sums acc, and with PREFETCH the next tile of keys."""
    DTYPE: tl.constexpr = q1.dtype
    n = tl.arange(0, BN)
    ok = j + n < hi
    block, place = places(bt_ptr, j, hi, BS, BN, MASKED)
    if PREFETCH:
        # the values' way from memory is hidden by the first product, the next keys' by the second
        v1, v2, vs, vo = fetch(
            v_ptr, vs_ptr, block, place, stride, s_stride, ok, 1, D1, D2, V1, V2, O2, BN, BS, WIDTH, KIND, 1, MASKED
        )
        k1, k2 = values(x1, x2, xs, xo, D2, DTYPE, KIND, OFFSETS, ASM)
    else:
        y1, y2, ys, yo = fetch(
            k_ptr, ks_ptr, block, place, stride, s_stride, ok, 0, D1, D2, V1, V2, O2, BN, BS, WIDTH, KIND, OFFSETS,
            False,
        )  # fmt: skip
        k1, k2 = values(y1, y2, ys, yo, D2, DTYPE, KIND, OFFSETS, ASM)
    s = _dot(q1, k1, tl.zeros((q1.shape[0], BN), tl.float32), ASM)
    if D2 > 0:
        s = _dot(q2, k2, s, ASM)
    if PREFETCH:
        x1, x2, xs, xo = _keys(
            k_ptr, ks_ptr, bt_ptr, j + BN, hi, stride, s_stride, D1, D2, V1, V2, O2, BN, BS, WIDTH, KIND, OFFSETS
        )
    if SOFTCAP:
        # cap * tanh(s * scale / cap), by tanh(x) = 1 - 2 / (exp(2 x) + 1); c = 2 log2(e) scale / cap
        s = cap - (2.0 * cap) / (tl.exp2(s * c) + 1.0)
    if MASKED:
        t = (j + n)[None, :]
        seen = t <= pos[:, None]
        if SLIDING:
            seen = seen & (t > pos[:, None] - window)
        s = tl.where(seen, s, float("-inf"))
    if SOFTCAP:
        high = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - high[:, None])
    else:
        high = tl.maximum(m, tl.max(s, 1) * c)
        p = tl.exp2(s * c - high[:, None])
    shrink = tl.exp2(m - high)
    if not SUMS:
        l = l * shrink + tl.sum(p, 1)
    if not PREFETCH:
        v1, v2, vs, vo = fetch(
            v_ptr, vs_ptr, block, place, stride, s_stride, ok, 1, D1, D2, V1, V2, O2, BN, BS, WIDTH, KIND, 1, MASKED
        )
    w1, w2 = values(v1, v2, vs, vo, D2, DTYPE, KIND, 1, ASM)
    p = p.to(DTYPE)
    acc1 = _dot(p, w1, acc1 * shrink[:, None], ASM)
    if D2 > 0:
        acc2 = _dot(p, w2, acc2 * shrink[:, None], ASM)
    if SUMS:
        # for mma.sync Triton lays out a turn's products as the last one, and that by its result's shape: where it is
        # wider than high the warps share rows, which doubles the first product and moves p through shared memory
        l = _dot(p, tl.full((BN, 8), 1.0, DTYPE), l * shrink[:, None], ASM)
    return high, l, acc1, acc2, x1, x2, xs, xo


@triton.jit(
    do_not_specialize=["tiles", "chunk", "sq8", "so8", "sb16", "s_stride", "sbt", "window"],
    do_not_specialize_on_alignment=["bt_ptr", "len_ptr", "start_ptr", "tile_ptr"],
)
def paged_prefill_kernel(
    q_ptr, k_ptr, v_ptr, ks_ptr, vs_ptr, bt_ptr, len_ptr, start_ptr, tile_ptr, out_ptr, tiles, chunk, sq8, so8, sb16,
    s_stride, sbt, c, cap, window, GROUP: tl.constexpr, PACK: tl.constexpr, HEAD: tl.constexpr, D1: tl.constexpr,
    D2: tl.constexpr, BS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, OFFSETS: tl.constexpr,
    LISTED: tl.constexpr, SOFTCAP: tl.constexpr, SLIDING: tl.constexpr, SPLIT: tl.constexpr, PREFETCH: tl.constexpr,
    SUMS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One tile of out for one KV head's group of query heads, or for PACK of them.

    q, out: rows of 8 sq8 and 8 so8 elements, Hq heads of HEAD elements in each. k, v, ks, vs: a layer's cache, blocks
    16 sb16 bytes apart (scales s_stride numbers), tokens and heads within a block one after the other; fp8 as uint8.
    bt int32 [P, sbt], len int32 [P], start int32 [P + 1]: see paged_prefill. tile int32 [tiles, 8]: see order_tiles,
    with LISTED; without, the programs take one sequence's tiles, the last first. tiles, chunk: see
    place_of.

    c: scale * log2(e), or with SOFTCAP 2 log2(e) scale / cap; cap then is the cap * log2(e). KIND: "float" (the cache
    holds q's dtype), "int8", "fp8" or "int4". OFFSETS: of an int4 key, 1 or 2. SPLIT: keys that every row sees go
    without a mask, in their own loop. PREFETCH: keys are loaded to registers a turn ahead, for cards without
    asynchronous copies. SUMS: rows' sums are a product with ones, of the weights as rounded to q's dtype. Each warp
    then has rows of its own, for a part that is wider than BM, too.
    """
    tile, group = place_of(tl.program_id(0), tiles, chunk)
    ROWS: tl.constexpr = BM // PACK
    HALF: tl.constexpr = HEAD // 2
    WIDTH: tl.constexpr = HALF if KIND == "int4" else HEAD
    O2: tl.constexpr = HALF if KIND == "int4" else D1
    V1: tl.constexpr = HALF if KIND == "int4" else (D1 if D2 > 0 else HEAD)
    V2: tl.constexpr = HEAD - V1
    PER_ROW: tl.constexpr = 16 // (k_ptr.dtype.element_ty.primitive_bitwidth // 8)
    seq = 0
    if LISTED:
        tile_ptr += tile * 8
        seq = tl.load(tile_ptr)
        tile = tl.load(tile_ptr + 1)
        start = tl.load(tile_ptr + 2)
        count = tl.load(tile_ptr + 3)
        context = tl.load(tile_ptr + 4)
        if seq < 0:
            return
        bt_ptr += tl.cast(seq, tl.int64) * sbt
    else:
        start = tl.load(start_ptr)
        count = tl.load(start_ptr + 1) - start
        context = tl.load(len_ptr) - count
        tile = tl.cdiv(count, ROWS) - 1 - tile
        if tile < 0:
            return
    stride = sb16.to(tl.int64) * PER_ROW
    kv_head = group // (GROUP // PACK)
    KEY_SCALES: tl.constexpr = 2 * OFFSETS if KIND == "int4" else 1
    VALUE_SCALES: tl.constexpr = 2 if KIND == "int4" else 1
    k_ptr += kv_head * (BS * WIDTH)
    v_ptr += kv_head * (BS * WIDTH)
    ks_ptr += kv_head * (BS * KEY_SCALES)
    vs_ptr += kv_head * (BS * VALUE_SCALES)

    r = tl.arange(0, BM)
    row, head, token, row_ok = _rows(r, start, tile, count, group, BM, PACK)
    d1 = tl.arange(0, D1)[None, :]
    qp = q_ptr + (row * sq8 * 8 + head * HEAD)[:, None]
    q1 = tl.load(qp + d1, mask=row_ok & (d1 < V1), other=0.0)
    q2 = q1
    acc1 = tl.zeros((BM, D1), tl.float32)
    acc2 = tl.zeros((BM, D2 if D2 > 0 else 16), tl.float32)
    if D2 > 0:
        d2 = tl.arange(0, D2)[None, :]
        q2 = tl.load(qp + O2 + d2, mask=row_ok & (d2 < V2), other=0.0)
    m = tl.full((BM,), -1e30, tl.float32)
    if SUMS:
        l = tl.zeros((BM, 8), tl.float32)
    else:
        l = tl.zeros((BM,), tl.float32)

    # keys lo to hi - 1 are seen by some row, those from `first` to `full` - 1 by all
    hi = context + tl.minimum((tile + 1) * ROWS, count)
    begin = context + tile * ROWS
    pos = tl.minimum(context + token, hi - 1)
    full = tl.maximum(begin + 1, 0) // BN * BN
    lo = 0
    first = 0
    if SLIDING:
        lo = tl.maximum(begin - window + 1, 0) // BN * BN
        first = tl.cdiv(tl.maximum(hi - window, 0), BN) * BN
    if not SPLIT:
        full = lo
        first = lo
    x1 = q1
    x2 = q1
    xs = q1
    xo = q1
    if PREFETCH:
        x1, x2, xs, xo = _keys(
            k_ptr, ks_ptr, bt_ptr, lo, hi, stride, s_stride, D1, D2, V1, V2, O2, BN, BS, WIDTH, KIND, OFFSETS
        )  # fmt: skip
    if SLIDING and SPLIT:
        for j in range(lo, tl.minimum(first, hi), BN):
            m, l, acc1, acc2, x1, x2, xs, xo = _step(
                m, l, acc1, acc2, x1, x2, xs, xo, q1, q2, j, hi, pos, window, k_ptr, v_ptr, ks_ptr, vs_ptr, bt_ptr,
                stride, s_stride, c, cap, D1, D2, V1, V2, O2, BN, BS, WIDTH, KIND, OFFSETS, SOFTCAP, SLIDING, True,
                PREFETCH, SUMS, ASM,
            )  # fmt: skip
    if SPLIT:
        for j in range(first, full, BN):
            m, l, acc1, acc2, x1, x2, xs, xo = _step(
                m, l, acc1, acc2, x1, x2, xs, xo, q1, q2, j, hi, pos, window, k_ptr, v_ptr, ks_ptr, vs_ptr, bt_ptr,
                stride, s_stride, c, cap, D1, D2, V1, V2, O2, BN, BS, WIDTH, KIND, OFFSETS, SOFTCAP, SLIDING, False,
                PREFETCH, SUMS, ASM,
            )  # fmt: skip
    for j in range(tl.maximum(first, full), hi, BN):
        m, l, acc1, acc2, x1, x2, xs, xo = _step(
            m, l, acc1, acc2, x1, x2, xs, xo, q1, q2, j, hi, pos, window, k_ptr, v_ptr, ks_ptr, vs_ptr, bt_ptr,
            stride, s_stride, c, cap, D1, D2, V1, V2, O2, BN, BS, WIDTH, KIND, OFFSETS, SOFTCAP, SLIDING, True,
            PREFETCH, SUMS, ASM,
        )  # fmt: skip

    # a row that saw nothing (no keys at all) is 0; one that saw a NaN stays NaN
    if SUMS:
        l = tl.max(l, 1)
    inverse = tl.where(l == 0.0, 0.0, 1.0 / l)[:, None]
    # worked out anew from a value that the compiler does not know: else every row's place takes registers in the loops
    again = tl.load(start_ptr + seq, volatile=True)
    row, head, token, row_ok = _rows(r + (again - start), again, tile, count, group, BM, PACK)
    op = out_ptr + (row * so8 * 8 + head * HEAD)[:, None]
    tl.store(op + d1, (acc1 * inverse).to(out_ptr.dtype.element_ty), mask=row_ok & (d1 < V1))
    if D2 > 0:
        tl.store(op + O2 + d2, (acc2 * inverse).to(out_ptr.dtype.element_ty), mask=row_ok & (d2 < V2))
