# mypy: disable-error-code="no-untyped-def"
"""Loading a tile of keys or values from the paged cache, and turning what quantized kinds hold into the dot's dtype.

Inline PTX does not run in Triton's interpreter, so what uses it takes a constexpr ASM and has a plain twin. Both are
declared impure: Triton would otherwise convert in the layout of the dot's operand, which every warp holds whole, and so
convert everything once a warp.
"""

import triton
import triton.language as tl


@triton.jit
def _halves8(x, s, ASM: tl.constexpr):
    """int8 codes times their fp16 scales (of the same shape), rounded once to fp16."""
    if ASM:
        # 1024 + (code + 128) is exact in fp16: the byte is its low mantissa bits
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, a, b, c;
            mov.b32 c, 0x64806480;
            xor.b32 t, $2, 0x80808080;
            prmt.b32 a, t, 0x64646464, 0x4140;
            prmt.b32 b, t, 0x64646464, 0x4342;
            sub.f16x2 a, a, c;
            sub.f16x2 b, b, c;
            mul.f16x2 $0, a, $3;
            mul.f16x2 $1, b, $4;
            }""",
            constraints="=r,=r,r,r,r",
            args=[x, s],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )
    else:
        return (x.to(tl.float32) * s.to(tl.float32)).to(tl.float16)


@triton.jit
def _halves4(x, s, o, p, ASM: tl.constexpr):
    """(low, high) nibbles less 8, times the fp16 scales, plus their fp16 offsets o and p, rounded once to fp16."""
    if ASM:
        # 1024 + q and 64 + q are exact in fp16: the nibble is in the low mantissa bits, or four bits up
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 l, h, a, b, c, d, z, y;
            mov.b32 z, 0x64086408;
            mov.b32 y, 0x54805480;
            and.b32 l, $4, 0x0f0f0f0f;
            and.b32 h, $4, 0xf0f0f0f0;
            prmt.b32 a, l, 0x64646464, 0x4140;
            prmt.b32 b, l, 0x64646464, 0x4342;
            prmt.b32 c, h, 0x54545454, 0x4140;
            prmt.b32 d, h, 0x54545454, 0x4342;
            sub.f16x2 a, a, z;
            sub.f16x2 b, b, z;
            sub.f16x2 c, c, y;
            sub.f16x2 d, d, y;
            fma.rn.f16x2 $0, a, $5, $7;
            fma.rn.f16x2 $1, b, $6, $8;
            fma.rn.f16x2 $2, c, $5, $9;
            fma.rn.f16x2 $3, d, $6, $10;
            }""",
            constraints="=r,=r,=r,=r,r,r,r,r,r,r,r",
            args=[x, s, o, p],
            dtype=(tl.float16, tl.float16),
            is_pure=False,
            pack=4,
        )
    else:
        low = ((x & 15).to(tl.float32) - 8.0) * s.to(tl.float32) + o.to(tl.float32)
        high = ((x >> 4).to(tl.float32) - 8.0) * s.to(tl.float32) + p.to(tl.float32)
        return low.to(tl.float16), high.to(tl.float16)


@triton.jit
def _load(ptr, row_ok, col_ok, ROWS: tl.constexpr, COLS: tl.constexpr):
    # a load without a mask where none is needed
    if ROWS and COLS:
        return tl.load(ptr, mask=row_ok & col_ok, other=0)
    elif ROWS:
        return tl.load(ptr, mask=row_ok, other=0)
    elif COLS:
        return tl.load(ptr, mask=col_ok, other=0)
    else:
        return tl.load(ptr)


@triton.jit
def place_of(at, tiles, chunk):
    """(tile, head group) of the at-th program: all tiles for `chunk` head groups, then for the next ones.

    A chunk is as small as fills the card: its keys and values then stay in the cache while its tiles read them.
    """
    part = at // (tiles * chunk)
    at = at % (tiles * chunk)
    return at // chunk, part * chunk + at % chunk


@triton.jit
def places(bt_ptr, j, hi, BS: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr):
    """(blocks, first places) of the tokens j to j + BN - 1: scalars where one block holds them all, else [BN].

    j is a multiple of BN. With MASKED the table is not read for tokens from hi on; they are given block 0.
    """
    if BS >= BN:
        if MASKED:
            block = tl.load(bt_ptr + j // BS, mask=j < hi, other=0)
        else:
            block = tl.load(bt_ptr + j // BS)
        return block.to(tl.int64), j % BS
    else:
        n = tl.arange(0, BN)
        if MASKED:
            block = tl.load(bt_ptr + j // BS + n // BS, mask=j + n < hi, other=0)
        else:
            block = tl.load(bt_ptr + j // BS + n // BS)
        return block.to(tl.int64), n % BS


@triton.jit
def fetch(
    x_ptr, s_ptr, block, place, stride, s_stride, n_ok, AXIS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    V1: tl.constexpr, V2: tl.constexpr, O2: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, WIDTH: tl.constexpr,
    KIND: tl.constexpr, OFFSETS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A tile of keys or values as they are held: (first part, second part, scales, offsets), unused ones repeated.

    An int4 tile is one part; with two OFFSETS those of the second half of a head come in place of the second.
    AXIS 0: parts are [D, BN]; 1: [BN, D]. block, place: see `places`. stride, s_stride: elements between blocks.
    n_ok [BN]: with MASKED, the tokens to read; others are 0.
    """
    OTHER: tl.constexpr = 1 - AXIS
    SCALES: tl.constexpr = 2 * OFFSETS if KIND == "int4" else 1
    n_ok = tl.expand_dims(n_ok, AXIS)
    d1 = tl.expand_dims(tl.arange(0, D1), OTHER)
    if BS >= BN:
        n = tl.expand_dims(tl.arange(0, BN), AXIS)
        xp = x_ptr + (block * stride + place * WIDTH) + n * WIDTH
        sp = s_ptr + (block * s_stride + place * SCALES) + n * SCALES
    else:
        n = tl.expand_dims(place, AXIS)
        b = tl.expand_dims(block, AXIS)
        xp = x_ptr + b * stride + n * WIDTH
        sp = s_ptr + b * s_stride + n * SCALES
    x1 = _load(xp + d1, n_ok, d1 < V1, MASKED, V1 != D1)
    x2 = x1
    if D2 > 0 and KIND != "int4":
        d2 = tl.expand_dims(tl.arange(0, D2), OTHER)
        x2 = _load(xp + O2 + d2, n_ok, d2 < V2, MASKED, V2 != D2)
    s = x1
    o = x1
    if KIND != "float":
        s = _load(sp, n_ok, n_ok, MASKED, False)
        o = s
        if KIND == "int4":
            o = _load(sp + 1, n_ok, n_ok, MASKED, False)
            if OFFSETS == 2:
                x2 = _load(sp + 2, n_ok, n_ok, MASKED, False)
    return x1, x2, s, o


@triton.jit
def _scaled(x, s, DTYPE: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):
    if KIND == "fp8":
        x = x.to(tl.float8e4nv, bitcast=True)
    if tl.float16 == DTYPE and KIND == "int8":
        return _halves8(x, tl.broadcast_to(s, x.shape), ASM)
    elif tl.float16 == DTYPE:
        return x.to(tl.float16) * s
    else:
        return (x.to(tl.float32) * s.to(tl.float32)).to(DTYPE)


@triton.jit
def values(
    x1, x2, s, o, D2: tl.constexpr, DTYPE: tl.constexpr, KIND: tl.constexpr, OFFSETS: tl.constexpr, ASM: tl.constexpr
):
    """What `fetch` brought, in DTYPE: (first part, second part)."""
    if KIND == "float":
        return x1, x2
    elif KIND == "int4":
        # codes are taken less 8: they are then as small as they can be, and so is what their rounding loses
        o = o.to(tl.float32) + s.to(tl.float32) * 8.0
        p = o
        if OFFSETS == 2:
            p = x2.to(tl.float32) + s.to(tl.float32) * 8.0
        if tl.float16 == DTYPE:
            o = tl.broadcast_to(o.to(tl.float16), x1.shape)
            if OFFSETS == 2:
                low, high = _halves4(
                    x1, tl.broadcast_to(s, x1.shape), o, tl.broadcast_to(p.to(tl.float16), x1.shape), ASM
                )  # fmt: skip
            else:
                low, high = _halves4(x1, tl.broadcast_to(s, x1.shape), o, o, ASM)
            return low, high
        else:
            low = ((x1 & 15).to(tl.float32) - 8.0) * s.to(tl.float32) + o
            high = ((x1 >> 4).to(tl.float32) - 8.0) * s.to(tl.float32) + p
            return low.to(DTYPE), high.to(DTYPE)
    else:
        y1 = _scaled(x1, s, DTYPE, KIND, ASM)
        y2 = y1
        if D2 > 0:
            y2 = _scaled(x2, s, DTYPE, KIND, ASM)
        return y1, y2
