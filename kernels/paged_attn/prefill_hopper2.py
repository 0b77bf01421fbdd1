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
def _work(
    k, programs, works, tiles, chunk, tile_ptr, start_ptr, len_ptr, window, ROWS: gl.constexpr, BN: gl.constexpr,
    LISTED: gl.constexpr, SLIDING: gl.constexpr,
):  # fmt: skip
    """The k-th work of this program: (sequence, tile, start, count, context, head group, lo, first, full, hi).

    Works go round the programs there and back, the longest first, which gives all of them about the same. One that
    is not there has no tokens and no keys. lo to hi: see paged_prefill_kernel.
    """
    pid = gl.program_id(0)
    at = k * programs + gl.where(k % 2 == 0, pid, programs - 1 - pid)
    exists = at < works
    at = gl.minimum(at, works - 1)
    # the order of prefill_load.place_of
    group = at // (tiles * chunk) * chunk + at % chunk
    tile = at % (tiles * chunk) // chunk
    seq = 0
    if LISTED:
        entry = tile_ptr + tile * 8
        seq = gl.load(entry)
        tile = gl.load(entry + 1)
        start = gl.load(entry + 2)
        count = gl.load(entry + 3)
        context = gl.load(entry + 4)
        exists = exists & (seq >= 0)
        seq = gl.where(exists, seq, 0)
    else:
        start = gl.load(start_ptr)
        count = gl.load(start_ptr + 1) - start
        context = gl.load(len_ptr) - count
        tile = gl.cdiv(count, ROWS) - 1 - tile
        exists = exists & (tile >= 0)
    tile = gl.where(exists, tile, 0)
    count = gl.where(exists, count, 0)
    context = gl.where(exists, context, 0)
    begin = context + tile * ROWS
    hi = gl.maximum(gl.minimum(begin + ROWS, context + count), 0)
    full = gl.minimum(gl.maximum(begin + 1, 0), hi) // BN * BN
    lo = 0
    first = 0
    if SLIDING:
        lo = gl.minimum(gl.maximum(begin - window + 1, 0), hi) // BN * BN
        first = gl.cdiv(gl.maximum(hi - window, 0), BN) * BN
    return seq, tile, start, count, context, group, lo, first, full, hi


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
    desc, k_smem, v_smem, k_full, k_free, v_full, v_free, bt_ptr, sbt, kv_rows, v_rows, tile_ptr, start_ptr, len_ptr,
    rounds, programs, works, tiles, chunk, window, PER: gl.constexpr, ROWS: gl.constexpr, BS: gl.constexpr,
    BN: gl.constexpr, BOX: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr, LISTED: gl.constexpr, SLIDING: gl.constexpr,
):  # fmt: skip
    """Copy keys and values, the last tile of each work first. A token's keys are in row block * kv_rows + place."""
    n = 0
    for k in range(rounds):
        seq, _, _, _, _, group, lo, _, _, hi = _work(
            k, programs, works, tiles, chunk, tile_ptr, start_ptr, len_ptr, window, ROWS, BN, LISTED, SLIDING
        )
        table = bt_ptr + seq * sbt
        k_row = group // PER * BS
        last = gl.maximum(hi - 1, 0) // BS
        top = gl.cdiv(hi, BN) - 1
        ids = _blocks(table, gl.maximum(top, 0) * BN, last, BS, BOX, BN // BOX)
        for i in range(top + 1 - lo // BN):
            j = (top - i) * BN
            stage = n % STAGES
            free = ((n // STAGES) & 1) ^ 1
            ahead = _blocks(table, gl.maximum(j - BN, 0), last, BS, BOX, BN // BOX)
            mbarrier.wait(k_free.index(stage), free)
            _copy_tile(desc, k_smem, k_full, stage, ids, j, kv_rows, k_row, BS, BN, BOX, CHUNKS)
            mbarrier.wait(v_free.index(stage), free)
            _copy_tile(desc, v_smem, v_full, stage, ids, j, kv_rows, v_rows + k_row, BS, BN, BOX, CHUNKS)
            ids = ahead
            n += 1


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
def _scores(q, k_tiles, k_full, n, S_LAYOUT: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    # begins the product with the n-th tile of keys, once that is there
    mbarrier.wait(k_full.index(n % STAGES), (n // STAGES) & 1)
    return warpgroup_mma(
        q, k_tiles.index(n % STAGES).permute((1, 0)), gl.zeros((64, BN), gl.float32, S_LAYOUT), use_acc=False,
        is_async=True,
    )  # fmt: skip


@gluon.jit
def _add(p, v_tiles, v_full, n, acc, STAGES: gl.constexpr):
    # begins to add the n-th tile of values with weights p
    mbarrier.wait(v_full.index(n % STAGES), (n // STAGES) & 1)
    return warpgroup_mma(p, v_tiles.index(n % STAGES), acc, is_async=True)


@gluon.jit
def _turn(
    n, j, pin, p, acc, m, l, q, k_tiles, v_tiles, k_full, k_free, v_full, v_free, pos, window, c, cap,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, SOFTCAP: gl.constexpr,
    SLIDING: gl.constexpr, PIN: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores and weights of the n-th tile, of keys from j on, while the one before, whose weights are p, adds to acc."""
    s = _scores(q, k_tiles, k_full, n, S_LAYOUT, BN, STAGES)
    acc = _add(p, v_tiles, v_full, n - 1, acc, STAGES)
    s = warpgroup_mma_wait(1, [s])
    mbarrier.arrive(k_free.index(n % STAGES), count=1)
    w, m, l, shrink = _weights(s, m, l, j, pos, window, c, cap, S_LAYOUT, BN, SOFTCAP, SLIDING, MASKED)
    if PIN:
        # without a store that needs all weights before it, the assembler moves them behind the wait
        pin.store(l)
        _barrier()
    acc, p = warpgroup_mma_wait(0, [acc, p])
    mbarrier.arrive(v_free.index((n - 1) % STAGES), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return gl.convert_layout(w.to(q.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2)), acc, m, l


@gluon.jit
def _places(
    which: gl.constexpr, zero, start, tile, count, group, stride8, PACK: gl.constexpr, HEAD: gl.constexpr,
    DP: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Elements before those of a half tile's rows in q or out, and which of them there are. zero: is added, see below."""
    ROWS: gl.constexpr = 128 // PACK
    r = which * 64 + gl.arange(0, 64, gl.SliceLayout(1, WIDE)) + zero
    token = tile * ROWS + r // PACK
    d = gl.arange(0, DP, gl.SliceLayout(0, WIDE))
    keep = ((r // PACK < ROWS) & (token < count))[:, None] & (d < HEAD)[None, :]
    return ((start + token).to(gl.int64) * stride8 * 8 + (group * PACK + r % PACK) * HEAD)[:, None] + d[None, :], keep


@gluon.jit
def _consume(
    which: gl.constexpr, pins, q_smem, k_smem, v_smem, k_full, k_free, v_full, v_free, q_ptr, out_ptr, sq8, so8,
    tile_ptr, start_ptr, len_ptr, rounds, programs, works, tiles, chunk, window, c, cap, PACK: gl.constexpr,
    HEAD: gl.constexpr, DP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, LISTED: gl.constexpr,
    SOFTCAP: gl.constexpr, SLIDING: gl.constexpr, PIN: gl.constexpr,
):  # fmt: skip
    """Rows 64 * which to 64 * which + 63 of each work's tile."""
    ROWS: gl.constexpr = 128 // PACK
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DP, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DP, DP // 8], [4, 1], [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q = q_smem.index(which)
    pin = pins.index(which)
    k_tiles = _as_tiles(k_smem, DTYPE, [STAGES, BN, DP], TILE)
    v_tiles = _as_tiles(v_smem, DTYPE, [STAGES, BN, DP], TILE)
    n = 0
    seq, tile, start, count, context, group, lo, first, full, hi = _work(
        0, programs, works, tiles, chunk, tile_ptr, start_ptr, len_ptr, window, ROWS, BN, LISTED, SLIDING
    )
    at, keep = _places(which, 0, start, tile, count, group, sq8, PACK, HEAD, DP, WIDE)
    q.store(gl.load(q_ptr + at, mask=keep, other=0.0))
    fence_async_shared()
    _barrier()
    for k in range(rounds):
        rs = which * 64 + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
        pos = gl.minimum(context + tile * ROWS + rs // PACK, hi - 1)
        m = gl.full((64,), -1e30, gl.float32, gl.SliceLayout(1, S_LAYOUT))
        l = gl.zeros((64,), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        acc = gl.zeros((64, DP), gl.float32, O_LAYOUT)
        p = gl.zeros((64, BN), DTYPE, P_LAYOUT)
        top = gl.cdiv(hi, BN) - 1
        turns = top + 1 - lo // BN
        if turns > 0:
            # the tile around the diagonal: places past the last key hold anything, and must not count
            s = warpgroup_mma_wait(0, [_scores(q, k_tiles, k_full, n, S_LAYOUT, BN, STAGES)])
            mbarrier.arrive(k_free.index(n % STAGES), count=1)
            w, m, l, _ = _weights(s, m, l, top * BN, pos, window, c, cap, S_LAYOUT, BN, SOFTCAP, SLIDING, True)
            p = gl.convert_layout(w.to(DTYPE), P_LAYOUT)
            if hi % BN != 0:
                mbarrier.wait(v_full.index(n % STAGES), (n // STAGES) & 1)
                there = top * BN + gl.arange(0, BN, gl.SliceLayout(1, WIDE)) < hi
                v = v_tiles.index(n % STAGES)
                v.store(gl.where(there[:, None], v.load(WIDE), 0.0))
                fence_async_shared()
                _barrier()
        near = gl.maximum(top + 1 - full // BN, 1)
        far = gl.maximum(top + 1 - first // BN, near)
        for i in range(1, near):
            p, acc, m, l = _turn(
                n + i, (top - i) * BN, pin, p, acc, m, l, q, k_tiles, v_tiles, k_full, k_free, v_full, v_free, pos,
                window, c, cap, S_LAYOUT, O_LAYOUT, BN, STAGES, SOFTCAP, SLIDING, PIN, True,
            )  # fmt: skip
        for i in range(near, gl.minimum(far, turns)):
            p, acc, m, l = _turn(
                n + i, (top - i) * BN, pin, p, acc, m, l, q, k_tiles, v_tiles, k_full, k_free, v_full, v_free, pos,
                window, c, cap, S_LAYOUT, O_LAYOUT, BN, STAGES, SOFTCAP, SLIDING, PIN, False,
            )  # fmt: skip
        if SLIDING:
            for i in range(far, turns):
                p, acc, m, l = _turn(
                    n + i, (top - i) * BN, pin, p, acc, m, l, q, k_tiles, v_tiles, k_full, k_free, v_full, v_free, pos,
                    window, c, cap, S_LAYOUT, O_LAYOUT, BN, STAGES, SOFTCAP, SLIDING, PIN, True,
                )  # fmt: skip
        # the next work's queries come while this one's last values are added and its rows go out
        old_start, old_tile, old_count, old_group = start, tile, count, group
        seq, tile, start, count, context, group, lo, first, full, hi = _work(
            k + 1, programs, works, tiles, chunk, tile_ptr, start_ptr, len_ptr, window, ROWS, BN, LISTED, SLIDING
        )
        at, keep = _places(which, 0, start, tile, count, group, sq8, PACK, HEAD, DP, WIDE)
        ahead = gl.load(q_ptr + at, mask=keep, other=0.0)
        if turns > 0:
            n += turns
            acc = _add(p, v_tiles, v_full, n - 1, acc, STAGES)
            acc, p = warpgroup_mma_wait(0, [acc, p])
            mbarrier.arrive(v_free.index((n - 1) % STAGES), count=1)
        inverse = gl.where(l == 0.0, 0.0, 1.0 / l)
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT))[:, None]
        # worked out from a zero that the compiler does not know: else every row's place takes registers in the loops
        zero = gl.load(start_ptr, volatile=True) - gl.load(start_ptr, volatile=True)
        at, keep = _places(which, zero, old_start, old_tile, old_count, old_group, so8, PACK, HEAD, DP, WIDE)
        gl.store(out_ptr + at, gl.convert_layout(acc.to(DTYPE), WIDE), mask=keep)
        q.store(ahead)
        fence_async_shared()
        _barrier()


@gluon.jit(
    do_not_specialize=[
        "rounds", "programs", "works", "tiles", "chunk", "sq8", "so8", "kv_rows", "v_rows", "sbt", "window",
    ],
    do_not_specialize_on_alignment=["bt_ptr", "len_ptr", "start_ptr", "tile_ptr"],
)  # fmt: skip
def hopper_prefill_kernel(
    q_ptr, desc, bt_ptr, len_ptr, start_ptr, tile_ptr, out_ptr, rounds, programs, works, tiles, chunk, sq8, so8, kv_rows, v_rows,
    sbt, c, cap, window, GROUP: gl.constexpr, PACK: gl.constexpr, HEAD: gl.constexpr, DP: gl.constexpr,
    BS: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, LISTED: gl.constexpr,
    SOFTCAP: gl.constexpr, SLIDING: gl.constexpr, PIN: gl.constexpr,
):  # fmt: skip
    """out, a work at a time: a tile of 128 rows for a group of PACK heads. Arguments as paged_prefill_kernel's, and:

    works: tiles * head groups of them, `rounds` for each of the `programs`. desc: the cache as rows of HEAD elements, kv_rows
    of them a block (keys, then values from v_rows on), in boxes of BOX rows by 64 elements. DP: HEAD padded to 64, 128
    or 256. STAGES: tiles of keys, and of values, in flight. PIN: see _turn.
    """
    CHUNKS: gl.constexpr = DP // 64
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
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
                tile_ptr, start_ptr, len_ptr, rounds, programs, works, tiles, chunk, window, c, cap, PACK, HEAD, DP, BN, STAGES,
                LISTED, SOFTCAP, SLIDING, PIN,
            )),
            (_consume, (
                gl.constexpr(1), pins, q_smem, k_smem, v_smem, k_full, k_free, v_full, v_free, q_ptr, out_ptr, sq8, so8,
                tile_ptr, start_ptr, len_ptr, rounds, programs, works, tiles, chunk, window, c, cap, PACK, HEAD, DP, BN, STAGES,
                LISTED, SOFTCAP, SLIDING, PIN,
            )),
            (_produce, (
                desc, k_smem, v_smem, k_full, k_free, v_full, v_free, bt_ptr, sbt, kv_rows, v_rows, tile_ptr, start_ptr,
                len_ptr, rounds, programs, works, tiles, chunk, window, gl.constexpr(GROUP // PACK),
                gl.constexpr(128 // PACK), BS, BN, BOX, CHUNKS, STAGES, LISTED, SLIDING,
            )),
        ],
        [4, 1],
        [240, 32],
    )  # fmt: skip
