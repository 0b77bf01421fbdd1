# mypy: disable-error-code="no-untyped-def"
"""The kernel behind `write_kv`: q/k norm, rotary embedding, rotation, quantization and the cache write in one pass.

A program takes BT tokens and HG heads of one of three parts: q, k or v. A head is held as its two halves a and b,
each [BT, HG, HALF] in float32 with HALF the power of two that holds D/2: element i of both halves sits in one thread,
which is what rotary pairs, the nibbles of int4 and the first step of a Hadamard product want. Everything happens in
registers, and each result is rounded once.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

NORM_NONE = tl.constexpr(0)
NORM_RMS = tl.constexpr(1)
NORM_LAYER = tl.constexpr(2)
# Adding 1.5 * 2^23 to a float32 of at most 2^22 rounds it to the nearest integer, ties to even, and leaves that
# integer in the low bits: far cheaper than a conversion.
_ROUND = tl.constexpr(12582912.0)
_HALF_MAX = tl.constexpr(65504.0)


@triton.jit
def _swap_pairs(x, BT: tl.constexpr, HG: tl.constexpr, HALF: tl.constexpr):
    """x with elements 2i and 2i + 1 exchanged."""
    even, odd = tl.split(tl.reshape(x, (BT, HG, HALF // 2, 2)))
    return tl.reshape(tl.join(odd, even), (BT, HG, HALF))


@triton.jit
def _sylvester(x, STEPS: tl.constexpr, BT: tl.constexpr, HG: tl.constexpr, HALF: tl.constexpr):
    """Sylvester's +-1 matrix times each run of 2^STEPS elements of the last dimension.

    A step takes the highest bit of the place within a run as the pair's and puts it back as the lowest, so that after
    STEPS steps, all alike, every bit has had its turn and is where it was.
    """
    RUN: tl.constexpr = 1 << STEPS
    for _ in tl.static_range(STEPS):
        pairs = tl.permute(tl.reshape(x, (BT * HG, HALF // RUN, 2, RUN // 2)), (0, 1, 3, 2))
        first, second = tl.split(pairs)
        x = tl.reshape(tl.join(first + second, first - second), (BT, HG, HALF))
    return x


@triton.jit
def _rotated(
    x, axis, columns, STEPS: tl.constexpr, BT: tl.constexpr, HG: tl.constexpr, HALF: tl.constexpr, N: tl.constexpr
):
    """A half of N elements times rotation.py's R of its head's axis, int32 [1, HG, 1]. x is 0 from N on."""
    SPREAD: tl.constexpr = N**-0.5
    BLOCK: tl.constexpr = 1 << STEPS
    NORM: tl.constexpr = BLOCK**-0.5
    inside = columns < N
    chosen = tl.where(columns == axis, x, 0.0)
    x = _sylvester(x, STEPS, BT, HG, HALF) * NORM
    # u: the axis's element after Sylvester's matrix, +-NORM by the parity of the bits that place and axis share
    bits = columns & axis & (BLOCK - 1)
    bits = bits ^ (bits >> 4)
    bits = bits ^ (bits >> 2)
    odd = ((bits ^ (bits >> 1)) & 1) != 0
    u = tl.where((columns // BLOCK == axis // BLOCK) & inside, tl.where(odd, -NORM, NORM), 0.0)
    # the reflection's vector is u - SPREAD; the elements of u add up to nothing but for a run's first place
    away = tl.where((axis & (BLOCK - 1)) == 0, 1.0 - (BLOCK / N) ** 0.5, 1.0)
    share = tl.sum(chosen - x * SPREAD, axis=2)[:, :, None] / tl.where(away > 1e-6, away, 1.0)
    return tl.where(inside, x - share * u + share * SPREAD, 0.0)


@triton.jit
def _load(ptr, rows, columns, inside):
    return tl.load(ptr + rows + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _angle_pair(ptr, rows, columns, live, REST: tl.constexpr, D: tl.constexpr, R: tl.constexpr):
    """cos or sin [BT, 1, HALF] of both halves; REST where a head does not rotate."""
    low = tl.load(ptr + rows + columns, mask=live & (columns < min(R, D // 2)), other=REST)
    high = tl.load(ptr + rows + columns + D // 2, mask=live & (columns < max(R - D // 2, 0)), other=REST)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _codes(x, scale, HIGHEST: tl.constexpr, LOWEST: tl.constexpr):
    """x / scale to the nearest integer within the limits, int32: its low bits are the code. A scale of 0 gives 0."""
    inverse = tl.where(scale > 0, tl.div_rn(1.0, scale), 0.0)
    scaled = tl.minimum(tl.maximum(x * inverse[:, :, None], LOWEST), HIGHEST)
    return (scaled + _ROUND).to(tl.int32, bitcast=True)


@triton.jit
def _extent(x, shown):
    """(low, high) of a half; high is infinite where something is not finite."""
    high = tl.max(tl.where(shown, tl.where(tl.abs(x) < float("inf"), x, float("inf")), float("-inf")), axis=2)
    return tl.min(tl.where(shown, x, float("inf")), axis=2), high


@triton.jit
def _half(x):
    """float16, kept within its range."""
    return tl.minimum(tl.maximum(x, -_HALF_MAX), _HALF_MAX).to(tl.float16)


@triton.jit
def _bits(x):
    """The bits of float16 numbers, in the low half of an int32."""
    return x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _centred_codes(x, low, high, scale, shown, N: tl.constexpr):
    """(codes of a half, the float16 offset that keeps its mean)."""
    start = (low + high) * 0.5 - 7.5 * scale
    codes = _codes(x - start[:, :, None], scale, 15.0, 0.0) & 15
    rest = tl.where(shown, x - codes.to(tl.float32) * scale[:, :, None], 0.0)
    return codes, _half(tl.sum(rest, axis=2) / N)


@triton.jit
def _store(
    a, b, values_ptr, scales_ptr, value_rows, scale_rows, live, columns,
    KIND: tl.constexpr, D: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """Quantize heads and write them. value_rows [BT, HG, 1] and scale_rows [BT, HG]: places; live [BT, HG].

    OFFSETS of int4: 1 or 2.
    """
    inside = live[:, :, None] & (columns < D // 2)
    at = values_ptr + value_rows + columns
    infinity = float("inf")
    if KIND == "float16" or KIND == "bfloat16":
        tl.store(at, a.to(values_ptr.dtype.element_ty), mask=inside)
        tl.store(at + D // 2, b.to(values_ptr.dtype.element_ty), mask=inside)
    elif KIND == "int4" and OFFSETS == 2:
        shown = columns < D // 2
        low_a, high_a = _extent(a, shown)
        low_b, high_b = _extent(b, shown)
        broken = (high_a == infinity) | (high_b == infinity)
        scale = _half(tl.div_rn(tl.maximum(high_a - low_a, high_b - low_b), 15.0))
        wide = scale.to(tl.float32)
        codes_a, offset_a = _centred_codes(a, low_a, high_a, wide, shown, D // 2)
        codes_b, offset_b = _centred_codes(b, low_b, high_b, wide, shown, D // 2)
        tl.store(at, (codes_a | (codes_b << 4)).to(tl.uint8), mask=inside)
        first = tl.where(broken, 0x7E007E00, _bits(scale) | (_bits(offset_a) << 16))
        second = tl.where(broken, 0x7E00, _bits(offset_b))
        words = (first.to(tl.int64) & 0xFFFFFFFF) | (second.to(tl.int64) << 32)
        tl.store(scales_ptr + scale_rows, words, mask=live)
    elif KIND == "int4":
        shown = columns < D // 2
        low_a, high_a = _extent(a, shown)
        low_b, high_b = _extent(b, shown)
        high = tl.maximum(high_a, high_b)
        broken = high == infinity
        offset = _half(tl.minimum(low_a, low_b))
        wide_offset = offset.to(tl.float32)
        scale = _half(tl.maximum(tl.div_rn(high - wide_offset, 15.0), 0.0))
        wide_scale = scale.to(tl.float32)
        low_codes = _codes(a - wide_offset[:, :, None], wide_scale, 15.0, 0.0)
        high_codes = _codes(b - wide_offset[:, :, None], wide_scale, 15.0, 0.0)
        tl.store(at, ((low_codes & 15) | ((high_codes & 15) << 4)).to(tl.uint8), mask=inside)
        words = _bits(scale) | (_bits(offset) << 16)
        tl.store(scales_ptr + scale_rows, tl.where(broken, 0x7E007E00, words), mask=live)
    else:
        LARGEST: tl.constexpr = 127.0 if KIND == "int8" else 448.0
        size_a, size_b = tl.abs(a), tl.abs(b)
        size_a = tl.where(size_a < infinity, size_a, infinity)
        size_b = tl.where(size_b < infinity, size_b, infinity)
        largest = tl.max(tl.where(columns < D // 2, tl.maximum(size_a, size_b), 0.0), axis=2)
        broken = largest == infinity
        scale = tl.minimum(tl.div_rn(largest, LARGEST), _HALF_MAX).to(tl.float16)
        wide = scale.to(tl.float32)
        if KIND == "int8":
            tl.store(at, _codes(a, wide, LARGEST, -LARGEST).to(tl.int8), mask=inside)
            tl.store(at + D // 2, _codes(b, wide, LARGEST, -LARGEST).to(tl.int8), mask=inside)
        else:
            inverse = tl.where(wide > 0, tl.div_rn(1.0, wide), 0.0)[:, :, None]
            for_a = tl.minimum(tl.maximum(a * inverse, -LARGEST), LARGEST)
            for_b = tl.minimum(tl.maximum(b * inverse, -LARGEST), LARGEST)
            tl.store(at, for_a.to(tl.float8e4nv), mask=inside)
            tl.store(at + D // 2, for_b.to(tl.float8e4nv), mask=inside)
        tl.store(
            scales_ptr + scale_rows, tl.where(broken, float("nan"), scale.to(tl.float32)).to(tl.float16), mask=live
        )


@triton.jit
def write_kv_kernel(
    qkv_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, slots_ptr, norm_ptr, cos_ptr, sin_ptr, axes_ptr,
    tokens, qkv_stride, cos_stride, sin_stride, block_stride, k_scale_stride, v_scale_stride, eps,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, KIND: tl.constexpr, KEY_OFFSETS: tl.constexpr,
    ROTATE: tl.constexpr, STEPS: tl.constexpr,
    BS: tl.constexpr, TURN_Q: tl.constexpr, BT: tl.constexpr, HG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens / BT, parts): q's parts of HG heads (none where q stays as it is), then k's, then v's.

    norm_ptr: [HQ + HKV, D]. cos, sin: rows of R. axes: int32 [HKV], with ROTATE; STEPS: log2 of the Hadamard block.
    block_stride: between blocks in values; the scales' strides count scales, which for int4 are words that hold all
    numbers of a head and token: int32, or int64 for keys with two offsets. PDL: launched with programmatic dependent
    launch (compute capability 9.0).
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    QUERY_PARTS: tl.constexpr = (HQ + HG - 1) // HG if TURN_Q else 0
    KEY_PARTS: tl.constexpr = (HKV + HG - 1) // HG
    WIDTH: tl.constexpr = D // 2 if KIND == "int4" else D
    part = tl.program_id(1)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    present = token < tokens
    slot = tl.load(slots_ptr + token, mask=present, other=-1)
    columns = tl.arange(0, HALF)[None, None, :]

    if part < QUERY_PARTS:
        of_part = part * HG + tl.arange(0, HG)
        head, heads = of_part, HQ
    elif part < QUERY_PARTS + KEY_PARTS:
        of_part = (part - QUERY_PARTS) * HG + tl.arange(0, HG)
        head, heads = of_part + HQ, HKV
    else:
        of_part = (part - QUERY_PARTS - KEY_PARTS) * HG + tl.arange(0, HG)
        head, heads = of_part + HQ + HKV, HKV
    live = present[:, None] & (of_part < heads)[None, :]
    inside = live[:, :, None] & (columns < D // 2)
    rows = (token.to(tl.int64) * qkv_stride)[:, None, None] + (head * D)[None, :, None]
    a = _load(qkv_ptr, rows, columns, inside)
    b = _load(qkv_ptr, rows, columns + D // 2, inside)

    kept = live & (slot >= 0)[:, None]
    block = slot // BS
    value_rows = (block * block_stride + (slot % BS) * WIDTH)[:, None] + (of_part * (BS * WIDTH))[None, :]
    scale_row = (slot % BS)[:, None] + (of_part * BS)[None, :]

    if part < QUERY_PARTS + KEY_PARTS:
        weights = (head * D)[None, :, None]
        weighted = (head < HQ + HKV)[None, :, None] & (columns < D // 2)
        mean = tl.zeros((BT, HG), dtype=tl.float32)
        if NORM == NORM_LAYER:
            mean = tl.sum(a + b, axis=2) / D
            a = tl.where(inside, a - mean[:, :, None], 0.0)
            b = tl.where(inside, b - mean[:, :, None], 0.0)
        if NORM != NORM_NONE:
            rate = tl.rsqrt(tl.sum(a * a + b * b, axis=2) / D + eps)[:, :, None]
            a = a * rate * _load(norm_ptr, weights, columns, weighted)
            b = b * rate * _load(norm_ptr, weights, columns + D // 2, weighted)
        if R > 0:
            with_token = present[:, None, None]
            cos_rows = (token.to(tl.int64) * cos_stride)[:, None, None]
            sin_rows = (token.to(tl.int64) * sin_stride)[:, None, None]
            cos_a, cos_b = _angle_pair(cos_ptr, cos_rows, columns, with_token, 1.0, D, R)
            sin_a, sin_b = _angle_pair(sin_ptr, sin_rows, columns, with_token, 0.0, D, R)
            if INTERLEAVED:
                other_a = _swap_pairs(a, BT, HG, HALF)
                other_b = _swap_pairs(b, BT, HG, HALF)
            elif R == D:
                other_a, other_b = b, a
            else:
                # pairs that lie across a's and b's threads: read again, before anything is written
                partner_a = tl.where(columns < R // 2, columns + R // 2, columns - R // 2)
                partner_b = columns + D // 2 - R // 2
                turns_a = live[:, :, None] & (columns < min(R, D // 2))
                turns_b = live[:, :, None] & (columns < max(R - D // 2, 0))
                other_a = _load(qkv_ptr, rows, partner_a, turns_a)
                other_b = _load(qkv_ptr, rows, partner_b, turns_b)
                if NORM != NORM_NONE:
                    other_a = (other_a - mean[:, :, None]) * rate * _load(norm_ptr, weights, partner_a, turns_a)
                    other_b = (other_b - mean[:, :, None]) * rate * _load(norm_ptr, weights, partner_b, turns_b)
                tl.debug_barrier()
            a, b = a * cos_a + other_a * sin_a, b * cos_b + other_b * sin_b
        if ROTATE:
            reads = of_part
            if part < QUERY_PARTS:
                reads = of_part // (HQ // HKV)
            axis = tl.load(axes_ptr + reads, mask=reads < HKV, other=0)[None, :, None]
            a = _rotated(a, axis, columns, STEPS, BT, HG, HALF, D // 2)
            b = _rotated(b, axis, columns, STEPS, BT, HG, HALF, D // 2)
        if part < QUERY_PARTS:
            tl.store(qkv_ptr + rows + columns, a.to(qkv_ptr.dtype.element_ty), mask=inside)
            tl.store(qkv_ptr + rows + columns + D // 2, b.to(qkv_ptr.dtype.element_ty), mask=inside)
        else:
            scale_rows = scale_row + (block * k_scale_stride)[:, None]
            _store(a, b, k_ptr, k_scale_ptr, value_rows[:, :, None], scale_rows, kept, columns, KIND, D, KEY_OFFSETS)
    else:
        scale_rows = scale_row + (block * v_scale_stride)[:, None]
        _store(a, b, v_ptr, v_scale_ptr, value_rows[:, :, None], scale_rows, kept, columns, KIND, D, 1)
