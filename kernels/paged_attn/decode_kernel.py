# mypy: disable-error-code="no-untyped-def"
"""The decode kernel: one new token a sequence against its paged keys and values.

Work is cut into tiles of WARPS * TOK consecutive tokens of one sequence, KV head and group of query rows. All tiles of
a step, sequence by sequence and head by head, stand in one row, of which each program takes as many as any other, or
one more: whatever mixture of lengths a step has, programs end together. Where the shares begin is worked out on the
device from the lengths. A head whose tiles are one program's is written as it is; of a head in several pieces, each
leaves a partial result, and the last to finish adds them in the order of the context. Equal inputs give equal bits.

Each warp of a program has its own TOK tokens of a tile, its own running maximum and its own sums, joined at the end of
a piece, so that nothing in the loop waits for another warp. Loaded words become operands of `mma` in the registers that
they were loaded to: for the scores the keys are the right operand, whose lanes hold 4 x 16 bytes of a token; for the
output the values are the left operand (out^T = V^T P^T), whose lanes hold 8 x 16 bytes of a token; the scores of 8
tokens come out in the lanes where the second product takes their probabilities. The order in which a head's elements
pass through the first product, and leave the second, follows from that: `load_query` and `output_order` say it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .decode_kinds import BF16, FP8, FP16, INT4
from .decode_loads import load_blocks, load_keys, load_query, load_values, unit_starts
from .decode_operands import (
    add_values,
    hide,
    key_operands,
    output_order,
    query_operand,
    query_sums,
    scale_and_offsets,
    scores,
    sum_in_lanes,
    value_operand,
    value_unit,
)
from .decode_parts import LOWEST, hand_over, worker_of
from .decode_prefetch import lane_blocks, prefetch_tile


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
    OFFSETS: tl.constexpr,
    QBF: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BS: tl.constexpr,
    SHIFT: tl.constexpr,
    GROUP: tl.constexpr,
    HKV: tl.constexpr,
    H: tl.constexpr,
    LIVE: tl.constexpr,
    VK: tl.constexpr,
    VV: tl.constexpr,
    WARPS: tl.constexpr,
    TOK: tl.constexpr,
    TILE_SHIFT: tl.constexpr,
    SB: tl.constexpr,
    FETCH: tl.constexpr,
    SKIP: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    ASM: tl.constexpr,
):
    """out[s, h] = softmax(scale q . K) V over the cached tokens of sequence s, for `rows` sequences.

    q, out [rows, HKV * GROUP, D] in fp16 or, with QBF, bf16; q as int32 words, 16 * sq16 bytes from row to row, out
    with row stride so. k_ptr, v_ptr: a layer's cache as int32 words, [NB, HKV, BS, words], 16 * stride16 bytes from
    block to block; ks_ptr, vs_ptr: its scales, float16, as many bytes from block to block (unused by FP16 and BF16).
    OFFSETS of an INT4 key: 1 or 2 (then 4 numbers a key, see cache.py).
    table int32 [rows, st], lens int32 [rows].

    part: float32 [2 programs, LIVE, DP], stat: float32 [2 programs, 2, LIVE], where LIVE is GROUP as a power of two, at
    most ROWS. lock: int32 [2 programs], 0 before and after. to_score: factor that turns q . k into the exponent of 2,
    and with HAS_CAP into that of tanh's, whose multiple `cap` is then the exponent of 2. window: tokens a query sees,
    with HAS_WINDOW. A program has at least min_tiles tiles, but where the step has fewer; others leave at once.

    H: groups of 8 query rows that a program serves together (1 or 2). D padded to a power of two is DP. VK, VV: words
    of a token that a lane loads at once. SB: a power of two, at least `rows`. FETCH: values are loaded after the scores
    are computed (0), with the keys (1), or so, and keys a tile ahead (2), or both a tile ahead (3). SKIP: tiles that
    lie within low..high are not masked. AHEAD: the next tile is brought to L2 while this one is worked on. PDL:
    launched with programmatic dependent launch (compute capability 9.0): the shares are worked out, from lengths that
    the kernel before must not write, while that one still runs.
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
    # scales of a key, and of a value
    KE: tl.constexpr = 2 * OFFSETS if KIND == INT4 else (1 if SCALED else 0)
    VE: tl.constexpr = 2 if KIND == INT4 else (1 if SCALED else 0)

    # parts loaded at once where they are added, 64 or, with few warps, 128 registers' worth
    FEW: tl.constexpr = max(1, (128 if WARPS <= 2 else 64) * LANES // (LIVE * DP))

    if PDL:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    idx = tl.arange(0, SB)
    lens = tl.maximum(tl.load(len_ptr + idx, mask=idx < rows, other=0), 0)
    tiles = (lens + ((1 << TILE_SHIFT) - 1)) >> TILE_SHIFT
    if HAS_WINDOW:
        tiles -= tl.maximum(lens - window, 0) >> TILE_SHIFT
    ends = tl.cumsum(tiles, 0) * HR
    total = tl.sum(tiles, 0) * HR
    # of the workers the first `more` get size + 1 tiles, the others size
    workers = tl.minimum(tl.num_programs(0), tl.maximum(total // min_tiles, 1))
    size = total // workers
    more = total - size * workers
    at_tile = pid * size + tl.minimum(pid, more)
    last_tile = at_tile + size + (pid < more).to(tl.int32)
    seq = tl.sum((ends <= at_tile).to(tl.int32), 0)
    # first tile of the head
    zero_tile = tl.sum(tl.where(idx < seq, tiles, 0), 0) * HR
    head = 0

    lane = tl.arange(0, LANES) % 32
    # scores and their maximum are held in units of which this many are a power of 2
    unit = 1.0 if HAS_CAP else to_score
    stride = stride16.to(tl.int64) * 4
    if pid >= workers:
        last_tile = at_tile
    if at_tile < last_tile:
        here = tl.sum(tl.where(idx == seq, tiles, 0), 0)
        head = (at_tile - zero_tile) // here
        zero_tile += head * here
    if PDL:
        gdc_wait()
    while at_tile < last_tile:
        length = tl.load(len_ptr + seq)
        first = 0
        if HAS_WINDOW:
            first = tl.maximum(length - window, 0)
        skipped = first >> TILE_SHIFT
        here = ((length + ((1 << TILE_SHIFT) - 1)) >> TILE_SHIFT) - skipped
        begin = at_tile - zero_tile
        end = tl.minimum(here, last_tile - zero_tile)
        # the programs that have the head's first and last tile
        left = worker_of(zero_tile, size, more)
        pieces = worker_of(zero_tile + here - 1, size, more) - left + 1
        piece = pid - left
        hk = head // GROUPS
        row0 = head % GROUPS * ROWS
        # the last token of this piece; what is fetched for the next tile stays below it too
        high = tl.minimum(length, (skipped + end) << TILE_SHIFT) - 1
        table = table_ptr + seq.to(tl.int64) * st
        kp = k_ptr + hk * (BS * WW)
        vp = v_ptr + hk * (BS * WW)
        ksp = ks_ptr + hk * (BS * KE)
        vsp = vs_ptr + hk * (BS * VE)

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
        if AHEAD:
            near, near_block = lane_blocks(table, at, first, high, TOK, WARPS, SHIFT)
            if ASM:
                prefetch_tile(kp, vp, ksp, vsp, near, near_block, stride, TOK, BS, WW, KE, VE)
            near, near_block = lane_blocks(table, at + WARPS * TOK, first, high, TOK, WARPS, SHIFT)
        if FETCH >= 2:
            kw0, kw1, ksw = load_keys(kp, ksp, bw, starts, lane, IH, VK, N8, BS, WW, WP, KIND, KE)
        if FETCH == 3:
            vw0, vw1, vsw = load_values(vp, vsp, bw, starts, first, high, lane, IV, VV, N8, BS, WW, WP, KIND)
        qa = query_operand(qw0, qw1, I, VK, WARPS, DP, KIND, QBF, ASM)
        qb = qa
        if H == 2:
            qb = query_operand(qw2, qw3, I, VK, WARPS, DP, KIND, QBF, ASM)
        if KIND == INT4:
            q_first, q_last = query_sums(qa, qb, WARPS, H)
            if OFFSETS == 1:
                q_first += q_last

        m = tl.full((WARPS, H, 8), LOWEST, tl.float32)
        l = tl.zeros((WARPS, H, 8, 4), tl.float32)
        shift = tl.zeros((WARPS, H, 8, 4), tl.float32)
        acc = tl.zeros((WARPS, DP, ROWS), tl.float32)
        for _ in range(begin, end):
            bw1 = blocks1.to(tl.int64) * stride
            if AHEAD and ASM:
                prefetch_tile(kp, vp, ksp, vsp, near, near_block, stride, TOK, BS, WW, KE, VE)
            if AHEAD:
                near, near_block = lane_blocks(table, at + 2 * WARPS * TOK, first, high, TOK, WARPS, SHIFT)
            if FETCH < 2:
                kw0, kw1, ksw = load_keys(kp, ksp, bw, starts, lane, IH, VK, N8, BS, WW, WP, KIND, KE)
            if FETCH == 1 or FETCH == 2:
                vw0, vw1, vsw = load_values(vp, vsp, bw, starts, first, high, lane, IV, VV, N8, BS, WW, WP, KIND)
            if FETCH == 3:
                kn0, kn1, ksn = load_keys(kp, ksp, bw1, starts1, lane, IH, VK, N8, BS, WW, WP, KIND, KE)
                vn0, vn1, vsn = load_values(vp, vsp, bw1, starts1, first, high, lane, IV, VV, N8, BS, WW, WP, KIND)
            k0, k1 = key_operands(kw0, kw1, NT, I, VK, WARPS, DP, KIND, ASM)
            s = scores(qa, qb, k0, k1, TOK, WARPS, H, KIND, ASM)
            if FETCH == 0:
                vw0, vw1, vsw = load_values(vp, vsp, bw, starts, first, high, lane, IV, VV, N8, BS, WW, WP, KIND)
            if SCALED:
                k_scale, k_first, k_last = scale_and_offsets(ksw, NT, WARPS, KIND, OFFSETS)
                s = s * k_scale
                if KIND == INT4:
                    s += q_first * k_first
                    if OFFSETS == 2:
                        s += q_last * k_last
            if FETCH == 2:
                kw0, kw1, ksw = load_keys(kp, ksp, bw1, starts1, lane, IH, VK, N8, BS, WW, WP, KIND, KE)
            starts = starts1
            bw = bw1
            starts1 = unit_starts(at + 2 * WARPS * TOK, first, high, UNIT, NU, WARPS)
            blocks1 = load_blocks(table, starts1, SHIFT)

            if HAS_CAP:
                s = cap - (2.0 * cap) / (1.0 + tl.exp2(s * to_score))
            v_scale, v_offset = s, s
            if SCALED:
                v_scale, v_offset, _ = scale_and_offsets(vsw, NT, WARPS, KIND, 1)
            if SKIP:
                if (at + WARPS * TOK > high + 1) | (at < first):
                    s, v_scale, v_offset = hide(s, v_scale, v_offset, at, first, high, WARPS, TOK, KIND)
            else:
                s, v_scale, v_offset = hide(s, v_scale, v_offset, at, first, high, WARPS, TOK, KIND)
            top = tl.maximum(m, tl.max(s, 3))
            fade = tl.exp2((m - top) * unit)
            m = top
            p = tl.exp2(s * unit - tl.expand_dims(top * unit - LIFT, 3))
            l = l * tl.expand_dims(fade, 3) + sum_in_lanes(p, NT, WARPS, H)
            if KIND == INT4:
                # x = (q - 7.5) scale + (offset + 7.5 scale), of which this is the second part
                lost = p * (v_offset + 7.5 * v_scale)
                shift = shift * tl.expand_dims(fade, 3) + sum_in_lanes(lost, NT, WARPS, H)
            if SCALED:
                p = p * v_scale
            pv = p.to(tl.bfloat16 if KIND == BF16 else tl.float16)
            pv = tl.reshape(tl.permute(pv, (0, 3, 1, 2)), (WARPS, TOK, ROWS))
            values = value_operand(vw0, vw1, NT, IV, VV, WARPS, DP, KIND, ASM)
            acc = acc * tl.reshape(fade, (WARPS, 1, ROWS))
            acc = add_values(acc, values, pv, WARPS, TOK, DP, ROWS, KIND, ASM)
            if FETCH == 3:
                kw0, kw1, ksw = kn0, kn1, ksn
                vw0, vw1, vsw = vn0, vn1, vsn
            at += WARPS * TOK

        # the warps' results become the piece's: weights of each warp, then sums over warps
        m_all = tl.max(m, 0)
        weight = tl.exp2((m - m_all[None, :, :]) * unit)
        l_all = tl.reshape(tl.sum(tl.sum(l, 3) * weight, 0), (ROWS,))
        o = tl.sum(acc * tl.reshape(weight, (WARPS, 1, ROWS)), 0)
        if KIND == INT4:
            o = o * value_unit(DP)[:, None] + tl.reshape(tl.sum(tl.sum(shift, 3) * weight, 0), (1, ROWS))
        if KIND == FP8:
            o *= 256.0
        m_all = tl.reshape(m_all, (ROWS,)) * unit
        dm, dm_real = output_order(DP, VV, IV, KIND, D)
        n = tl.arange(0, ROWS)
        op = out_ptr + seq.to(tl.int64) * so + (hk * GROUP + row0 + n[None, :]) * D + dm[:, None]
        real = dm_real[:, None] & (row0 + n < GROUP)[None, :]
        if pieces == 1:
            tl.store(op, (o / l_all[None, :]).to(out_ptr.dtype.element_ty), mask=real)
        else:
            rows_ptr = out_ptr + seq.to(tl.int64) * so + (hk * GROUP + row0) * D
            hand_over(part_ptr, stat_ptr, lock_ptr, rows_ptr, GROUP - row0, left, piece, pieces, o, m_all, l_all,
                      D, DP, VV, IV, KIND, ROWS, LIVE, FEW)  # fmt: skip
        at_tile = zero_tile + end
        if end == here:
            zero_tile += here
            head += 1
            if head == HR:
                head = 0
                seq += 1
                if at_tile < last_tile:
                    while tl.load(len_ptr + seq) <= 0:
                        seq += 1

    # padding rows of a captured step: zeros
    for row in range(pid, rows, tl.num_programs(0)):
        if tl.load(len_ptr + row) <= 0:
            for c in range(0, HKV * GROUP * D, 1024):
                x = c + tl.arange(0, 1024)
                nothing = tl.zeros((1024,), out_ptr.dtype.element_ty)
                tl.store(out_ptr + row * so.to(tl.int64) + x, nothing, mask=x < HKV * GROUP * D)
