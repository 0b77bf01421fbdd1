# mypy: disable-error-code="no-untyped-def,assignment"
"""Causal attention of prompt chunks over a 16-bit paged cache on compute capability 9.0, by roles of warps.

The same tiles, masks and order as prefill_kernel.py. One warp copies keys and values to shared memory, block by block,
through the tensor memory accelerator; two groups of four warps take 64 rows each. A group's product of the next keys
and its product of the last values run while it computes the softmax between them.

Written in Gluon, Triton's lower level, since Triton's own pipeline neither overlaps the softmax nor copies blocks of
fewer tokens than a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.6 to 3.8 know a barrier of the role's warps by the first name, 3.9 by the second
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_UNDERSCORE = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))


@gluon.jit
def _as_tiles(smem, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    # the boxes of a tile lie as the tile itself would: 64 elements of all its tokens, then the next 64
    if _UNDERSCORE:
        return smem._reinterpret(DTYPE, SHAPE, LAYOUT)
    else:
        return smem.reinterpret(DTYPE, SHAPE, LAYOUT)


@gluon.jit
def _blocks(bt_ptr, j, last, BS: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr):
    # ids of the blocks of a tile's boxes, loaded together: one after the other would wait for each
    ids = ()
    for b in gl.static_range(BOXES):
        ids = ids + (gl.load(bt_ptr + gl.minimum((j + b * BOX) // BS, last)),)  # noqa: RUF005 (Gluon knows no unpacking)
    return ids


@gluon.jit
def _copy_tile(
    desc, smem, full, stage, ids, j, kv_rows, first_row, BS: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr,
    CHUNKS: gl.constexpr,
):  # fmt: skip
    BOXES: gl.constexpr = BN // BOX
    mbarrier.expect(full.index(stage), BN * CHUNKS * 128)
    for b in gl.static_range(BOXES):
        row = ids[b] * kv_rows + first_row + (j + b * BOX) % BS
        for c in gl.static_range(CHUNKS):
            _copy(desc, [row, c * 64], full.index(stage), smem.index((stage * CHUNKS + c) * BOXES + b))


@gluon.jit
def _produce(
    desc, k_smem, v_smem, k_full, k_free, v_full, v_free, bt_ptr, lo, hi, kv_rows, k_row, v_row, BS: gl.constexpr,
    BN: gl.constexpr, BOX: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy tiles of BN keys and values, the last first. A token's keys are in row block * kv_rows + k_row + place."""
    count = gl.cdiv(hi, BN) - lo // BN
    last = gl.maximum(hi - 1, 0) // BS
    top = gl.cdiv(hi, BN) - 1
    ids = _blocks(bt_ptr, gl.maximum(top, 0) * BN, last, BS, BOX, BN // BOX)
    for i in range(count):
        j = (top - i) * BN
        stage = i % STAGES
        free = ((i // STAGES) & 1) ^ 1
        ahead = _blocks(bt_ptr, gl.maximum(j - BN, 0), last, BS, BOX, BN // BOX)
        mbarrier.wait(k_free.index(stage), free)
        _copy_tile(desc, k_smem, k_full, stage, ids, j, kv_rows, k_row, BS, BN, BOX, CHUNKS)
        mbarrier.wait(v_free.index(stage), free)
        _copy_tile(desc, v_smem, v_full, stage, ids, j, kv_rows, v_row, BS, BN, BOX, CHUNKS)
        ids = ahead


@gluon.jit
def _weights(
    s, m, l, j, pos, window, c, cap, S_LAYOUT: gl.constexpr, BN: gl.constexpr, SOFTCAP: gl.constexpr,
    SLIDING: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Softmax of a tile's scores so far: (weights, maxima, sums, what older sums shrink by)."""
    if SOFTCAP:
        s = cap - (2.0 * cap) / (gl.exp2(s * c) + 1.0)
    if MASKED:
        t = (j + gl.arange(0, BN, gl.SliceLayout(0, S_LAYOUT)))[None, :]
        seen = t <= pos[:, None]
        if SLIDING:
            seen = seen & (t > pos[:, None] - window)
        s = gl.where(seen, s, float("-inf"))
    if SOFTCAP:
        high = gl.maximum(m, gl.max(s, 1))
        p = gl.exp2(s - high[:, None])
    else:
        high = gl.maximum(m, gl.max(s, 1) * c)
        p = gl.exp2(s * c - high[:, None])
    shrink = gl.exp2(m - high)
    return p, high, l * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _turn(
    i, pin, top, p, acc, m, l, q, k_tiles, v_tiles, k_full, k_free, v_full, v_free, pos, window, c, cap,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, SOFTCAP: gl.constexpr,
    SLIDING: gl.constexpr, PIN: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores and weights of tile i while the weighted sum of tile i - 1, whose weights are p, is added to acc."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    stage = i % STAGES
    before = (i - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
    s = warpgroup_mma(
        q, k_tiles.index(stage).permute((1, 0)), gl.zeros((64, BN), gl.float32, S_LAYOUT), use_acc=False, is_async=True
    )
    mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
    acc = warpgroup_mma(p, v_tiles.index(before), acc, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    mbarrier.arrive(k_free.index(stage), count=1)
    w, m, l, shrink = _weights(s, m, l, (top - i) * BN, pos, window, c, cap, S_LAYOUT, BN, SOFTCAP, SLIDING, MASKED)
    if PIN:
        # without a store that needs all weights before it, the assembler moves them behind the wait
        pin.store(l)
        _barrier()
    acc, p = warpgroup_mma_wait(0, [acc, p])
    mbarrier.arrive(v_free.index(before), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return gl.convert_layout(w.to(q.dtype), P_LAYOUT), acc, m, l


@gluon.jit
def _places(
    r, start, tile, count, group, stride8, PACK: gl.constexpr, HEAD: gl.constexpr, DP: gl.constexpr, WIDE: gl.constexpr
):
    """Elements before those of the tile's rows r in q or out, and which of them there are."""
    ROWS: gl.constexpr = 128 // PACK
    token = tile * ROWS + r // PACK
    d = gl.arange(0, DP, gl.SliceLayout(0, WIDE))
    keep = ((r // PACK < ROWS) & (token < count))[:, None] & (d < HEAD)[None, :]
    return ((start + token).to(gl.int64) * stride8 * 8 + (group * PACK + r % PACK) * HEAD)[:, None] + d[None, :], keep


@gluon.jit
def _consume(
    which: gl.constexpr, pins, q_smem, k_smem, v_smem, k_full, k_free, v_full, v_free, q_ptr, out_ptr, sq8, so8,
    start_ptr, seq, start, count, context, tile, group, lo, first, full, hi, window, c, cap, PACK: gl.constexpr,
    HEAD: gl.constexpr,
    DP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, SOFTCAP: gl.constexpr, SLIDING: gl.constexpr,
    PIN: gl.constexpr,
):  # fmt: skip
    """Rows 64 * which to 64 * which + 63 of the tile."""
    ROWS: gl.constexpr = 128 // PACK
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DP, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DP, DP // 8], [4, 1], [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)

    r = which * 64 + gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    at, keep = _places(r, start, tile, count, group, sq8, PACK, HEAD, DP, WIDE)
    q = q_smem.index(which)
    q.store(gl.load(q_ptr + at, mask=keep, other=0.0))
    fence_async_shared()
    _barrier()
    k_tiles = _as_tiles(k_smem, DTYPE, [STAGES, BN, DP], TILE)
    v_tiles = _as_tiles(v_smem, DTYPE, [STAGES, BN, DP], TILE)

    pin = pins.index(which)
    rs = which * 64 + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
    pos = gl.minimum(context + tile * ROWS + rs // PACK, hi - 1)
    m = gl.full((64,), -1e30, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    l = gl.zeros((64,), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros((64, DP), gl.float32, O_LAYOUT)
    top = gl.cdiv(hi, BN) - 1
    turns = top + 1 - lo // BN
    if turns > 0:
        # the tile around the diagonal: places past the last key hold anything, and must not count
        mbarrier.wait(k_full.index(0), 0)
        s = warpgroup_mma(
            q, k_tiles.index(0).permute((1, 0)), gl.zeros((64, BN), gl.float32, S_LAYOUT), use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(k_free.index(0), count=1)
        w, m, l, _ = _weights(s, m, l, top * BN, pos, window, c, cap, S_LAYOUT, BN, SOFTCAP, SLIDING, True)
        p = gl.convert_layout(w.to(DTYPE), P_LAYOUT)
        if hi % BN != 0:
            mbarrier.wait(v_full.index(0), 0)
            n = gl.arange(0, BN, gl.SliceLayout(1, WIDE))
            v = v_tiles.index(0).load(WIDE)
            v_tiles.index(0).store(gl.where((top * BN + n < hi)[:, None], v, 0.0))
            fence_async_shared()
            _barrier()
        near = gl.maximum(top + 1 - full // BN, 1)
        far = gl.maximum(top + 1 - first // BN, near)
        for i in range(1, near):
            p, acc, m, l = _turn(
                i, pin, top, p, acc, m, l, q, k_tiles, v_tiles, k_full, k_free, v_full, v_free, pos, window, c, cap,
                S_LAYOUT, O_LAYOUT, BN, STAGES, SOFTCAP, SLIDING, PIN, True,
            )  # fmt: skip
        for i in range(near, gl.minimum(far, turns)):
            p, acc, m, l = _turn(
                i, pin, top, p, acc, m, l, q, k_tiles, v_tiles, k_full, k_free, v_full, v_free, pos, window, c, cap,
                S_LAYOUT, O_LAYOUT, BN, STAGES, SOFTCAP, SLIDING, PIN, False,
            )  # fmt: skip
        if SLIDING:
            for i in range(far, turns):
                p, acc, m, l = _turn(
                    i, pin, top, p, acc, m, l, q, k_tiles, v_tiles, k_full, k_free, v_full, v_free, pos, window, c,
                    cap, S_LAYOUT, O_LAYOUT, BN, STAGES, SOFTCAP, SLIDING, PIN, True,
                )  # fmt: skip
        final = (turns - 1) % STAGES
        mbarrier.wait(v_full.index(final), ((turns - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_tiles.index(final), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, [acc, p])

    inverse = gl.where(l == 0.0, 0.0, 1.0 / l)
    acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT))[:, None]
    # worked out anew from a value that the compiler does not know: else every row's place takes registers in the loops
    again = gl.load(start_ptr + seq, volatile=True)
    at, keep = _places(r + (again - start), again, tile, count, group, so8, PACK, HEAD, DP, WIDE)
    gl.store(out_ptr + at, gl.convert_layout(acc.to(DTYPE), WIDE), mask=keep)


@gluon.jit(
    do_not_specialize=["tiles", "chunk", "sq8", "so8", "kv_rows", "v_rows", "sbt", "window"],
    do_not_specialize_on_alignment=["bt_ptr", "len_ptr", "start_ptr", "tile_ptr"],
)
def hopper_prefill_kernel(
    q_ptr, desc, bt_ptr, len_ptr, start_ptr, tile_ptr, out_ptr, tiles, chunk, sq8, so8, kv_rows, v_rows, sbt, c, cap,
    window, GROUP: gl.constexpr, PACK: gl.constexpr, HEAD: gl.constexpr, DP: gl.constexpr, BS: gl.constexpr,
    BN: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, LISTED: gl.constexpr, SOFTCAP: gl.constexpr,
    SLIDING: gl.constexpr, PIN: gl.constexpr,
):  # fmt: skip
    """One tile of 128 rows of out; arguments as paged_prefill_kernel's, and:

    desc: the cache as rows of HEAD elements, kv_rows of them a block (keys, then values from v_rows on), in boxes of
    BOX rows by 64 elements. DP: HEAD padded to 64, 128 or 256. STAGES: tiles of keys, and of values, in flight.
    """
    # the order of prefill_load.place_of
    at = gl.program_id(0)
    group = at // (tiles * chunk) * chunk + at % chunk
    tile = at % (tiles * chunk) // chunk
    ROWS: gl.constexpr = 128 // PACK
    CHUNKS: gl.constexpr = DP // 64
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    seq = 0
    if LISTED:
        tile_ptr += tile * 8
        seq = gl.load(tile_ptr)
        tile = gl.load(tile_ptr + 1)
        start = gl.load(tile_ptr + 2)
        count = gl.load(tile_ptr + 3)
        context = gl.load(tile_ptr + 4)
        if seq < 0:
            return
    else:
        start = gl.load(start_ptr)
        count = gl.load(start_ptr + 1) - start
        context = gl.load(len_ptr) - count
        tile = gl.cdiv(count, ROWS) - 1 - tile
        if tile < 0:
            return
    bt_ptr += seq * sbt
    k_row = group // (GROUP // PACK) * BS
    hi = gl.maximum(context + gl.minimum((tile + 1) * ROWS, count), 0)
    begin = context + tile * ROWS
    full = gl.maximum(begin + 1, 0) // BN * BN
    lo = 0
    first = 0
    if SLIDING:
        lo = gl.maximum(begin - window + 1, 0) // BN * BN
        first = gl.cdiv(gl.maximum(hi - window, 0), BN) * BN
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(DTYPE, [2, 64, DP], TILE)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES * CHUNKS * (BN // BOX), BOX, 64], TILE)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES * CHUNKS * (BN // BOX), BOX, 64], TILE)
    pins = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(k_free.index(s), count=2)
        mbarrier.init(v_free.index(s), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                gl.constexpr(0), pins, q_smem, k_smem, v_smem, k_full, k_free, v_full, v_free, q_ptr, out_ptr, sq8, so8,
                start_ptr, seq, start, count, context, tile, group, lo, first, full, hi, window, c, cap, PACK, HEAD, DP,
                BN, STAGES, SOFTCAP, SLIDING, PIN,
            )),
            (_consume, (
                gl.constexpr(1), pins, q_smem, k_smem, v_smem, k_full, k_free, v_full, v_free, q_ptr, out_ptr, sq8, so8,
                start_ptr, seq, start, count, context, tile, group, lo, first, full, hi, window, c, cap, PACK, HEAD, DP,
                BN, STAGES, SOFTCAP, SLIDING, PIN,
            )),
            (_produce, (
                desc, k_smem, v_smem, k_full, k_free, v_full, v_free, bt_ptr, lo, hi, kv_rows, k_row, v_rows + k_row,
                BS, BN, BOX, CHUNKS, STAGES,
            )),
        ],
        [4, 1],
        [240, 32],
    )  # fmt: skip
