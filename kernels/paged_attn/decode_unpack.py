# mypy: disable-error-code="no-untyped-def"
"""Device functions of the decode kernel: cached words (int32) to fp16 or bf16, each with a twin in plain Triton.

Inline PTX does not run in Triton's interpreter, so each takes a constexpr ASM: with it the PTX twin is compiled,
without it the plain one. All are exact. int8 codes become fp16 by putting their bits into the mantissa of 1024:
int8 as 1152 + q less 1152; fp8 by moving its bits to where fp16 has them, which is its value times 2^-8 (the caller
multiplies the result by 2^8). int4 codes need nothing put to them: a nibble in the lowest bits of 16 is a subnormal
fp16, q * 2^-24, and one in the next four bits is q * 2^-20, which tensor cores take as they are (the caller multiplies
the results).

A word holds 2, 4 or 8 elements, the first in the lowest bits; of int4's eight the low nibbles are elements of the
first half of a head, the high nibbles of the second.
"""

import triton
import triton.language as tl

from .decode_kinds import FP8, INT8

LOW_NIBBLE, HIGH_NIBBLE = tl.constexpr(2.0**-24), tl.constexpr(2.0**-20)
"""What a 1 in a code of a low and of a high nibble becomes."""


@triton.jit
def _half(w, SHIFT: tl.constexpr, BF: tl.constexpr):
    bits = ((w >> SHIFT) & 0xFFFF).to(tl.int16)
    if BF:
        return bits.to(tl.bfloat16, bitcast=True)
    else:
        return bits.to(tl.float16, bitcast=True)


@triton.jit
def _code(w, SHIFT: tl.constexpr, KIND: tl.constexpr):
    # element at bit SHIFT of a word, as the PTX twins give it
    if KIND == INT8:
        return ((w << (24 - SHIFT)) >> 24).to(tl.float16)
    elif KIND == FP8:
        byte = (w >> SHIFT) & 0xFF
        return (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        return (((w >> SHIFT) & 15) << (SHIFT % 8)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def halves(w, BF: tl.constexpr, ASM: tl.constexpr):
    """The two 16-bit floats of each word."""
    if ASM:
        if BF:
            return tl.inline_asm_elementwise(
                "mov.b32 {$0, $1}, $2;",
                constraints="=h,=h,r",
                args=[w],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=1,
            )
        else:
            return tl.inline_asm_elementwise(
                "mov.b32 {$0, $1}, $2;",
                constraints="=h,=h,r",
                args=[w],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=1,
            )
    else:
        return _half(w, 0, BF), _half(w, 16, BF)


@triton.jit
def bytes4(w, KIND: tl.constexpr, ASM: tl.constexpr):
    """The four int8 or fp8 elements of each word, in their order."""
    if ASM:
        if KIND == INT8:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 x, a, b, c;
                mov.b32 c, 0x64806480;
                xor.b32 x, $4, 0x80808080;
                prmt.b32 a, x, 0x64646464, 0x4140;
                prmt.b32 b, x, 0x64646464, 0x4342;
                sub.f16x2 a, a, c;
                sub.f16x2 b, b, c;
                mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b;
                }""",
                constraints="=h,=h,=h,=h,r",
                args=[w],
                dtype=(tl.float16,) * 4,
                is_pure=True,
                pack=1,
            )
        else:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 a, b, c, d;
                prmt.b32 a, $4, 0, 0x1404;
                prmt.b32 b, $4, 0, 0x3424;
                shr.u32 c, a, 1;
                shr.u32 d, b, 1;
                and.b32 c, c, 0x3f803f80;
                and.b32 d, d, 0x3f803f80;
                lop3.b32 a, a, 0x80008000, c, 0xea;
                lop3.b32 b, b, 0x80008000, d, 0xea;
                mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b;
                }""",
                constraints="=h,=h,=h,=h,r",
                args=[w],
                dtype=(tl.float16,) * 4,
                is_pure=True,
                pack=1,
            )
    else:
        return _code(w, 0, KIND), _code(w, 8, KIND), _code(w, 16, KIND), _code(w, 24, KIND)


@triton.jit
def nibbles8(w, KIND: tl.constexpr, ASM: tl.constexpr):
    """Each word's eight int4 codes: low nibbles of bytes 0, 2, 1, 3 times 2^-24, then the high ones times 2^-20."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, t;
            shr.u32 t, $8, 8;
            and.b32 a, $8, 0x000f000f;
            and.b32 b, t, 0x000f000f;
            and.b32 c, $8, 0x00f000f0;
            and.b32 d, t, 0x00f000f0;
            mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; mov.b32 {$4, $5}, c; mov.b32 {$6, $7}, d;
            }""",
            constraints="=h,=h,=h,=h,=h,=h,=h,=h,r",
            args=[w],
            dtype=(tl.float16,) * 8,
            is_pure=True,
            pack=1,
        )
    else:
        return (
            _code(w, 0, KIND),
            _code(w, 16, KIND),
            _code(w, 8, KIND),
            _code(w, 24, KIND),
            _code(w, 4, KIND),
            _code(w, 20, KIND),
            _code(w, 12, KIND),
            _code(w, 28, KIND),
        )


@triton.jit
def byte_pairs(u, v, KIND: tl.constexpr, ASM: tl.constexpr):
    """The elements of two tokens' words side by side: u0, v0, u1, v1, u2, v2, u3, v3 (int8 or fp8)."""
    if ASM:
        if KIND == INT8:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 x, y, a, b, c, d, k;
                mov.b32 k, 0x64806480;
                prmt.b32 x, $8, $9, 0x5140;
                prmt.b32 y, $8, $9, 0x7362;
                xor.b32 x, x, 0x80808080;
                xor.b32 y, y, 0x80808080;
                prmt.b32 a, x, 0x64646464, 0x4140;
                prmt.b32 b, x, 0x64646464, 0x4342;
                prmt.b32 c, y, 0x64646464, 0x4140;
                prmt.b32 d, y, 0x64646464, 0x4342;
                sub.f16x2 a, a, k;
                sub.f16x2 b, b, k;
                sub.f16x2 c, c, k;
                sub.f16x2 d, d, k;
                mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; mov.b32 {$4, $5}, c; mov.b32 {$6, $7}, d;
                }""",
                constraints="=h,=h,=h,=h,=h,=h,=h,=h,r,r",
                args=[u, v],
                dtype=(tl.float16,) * 8,
                is_pure=True,
                pack=1,
            )
        else:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 x, a, b, c, d, t;
                prmt.b32 x, $8, $9, 0x5140;
                prmt.b32 a, x, 0, 0x1404;
                prmt.b32 b, x, 0, 0x3424;
                prmt.b32 x, $8, $9, 0x7362;
                prmt.b32 c, x, 0, 0x1404;
                prmt.b32 d, x, 0, 0x3424;
                shr.u32 t, a, 1; and.b32 t, t, 0x3f803f80; lop3.b32 a, a, 0x80008000, t, 0xea;
                shr.u32 t, b, 1; and.b32 t, t, 0x3f803f80; lop3.b32 b, b, 0x80008000, t, 0xea;
                shr.u32 t, c, 1; and.b32 t, t, 0x3f803f80; lop3.b32 c, c, 0x80008000, t, 0xea;
                shr.u32 t, d, 1; and.b32 t, t, 0x3f803f80; lop3.b32 d, d, 0x80008000, t, 0xea;
                mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; mov.b32 {$4, $5}, c; mov.b32 {$6, $7}, d;
                }""",
                constraints="=h,=h,=h,=h,=h,=h,=h,=h,r,r",
                args=[u, v],
                dtype=(tl.float16,) * 8,
                is_pure=True,
                pack=1,
            )
    else:
        return (
            _code(u, 0, KIND),
            _code(v, 0, KIND),
            _code(u, 8, KIND),
            _code(v, 8, KIND),
            _code(u, 16, KIND),
            _code(v, 16, KIND),
            _code(u, 24, KIND),
            _code(v, 24, KIND),
        )


@triton.jit
def nibble_pairs(u, v, KIND: tl.constexpr, ASM: tl.constexpr):
    """Two tokens' codes side by side, u0, v0, ... u3, v3: low nibbles times 2^-24, then high ones times 2^-20."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 x, y, s, t, a, b, c, d, e, f, g, h;
            prmt.b32 x, $16, $17, 0x5410;
            prmt.b32 y, $16, $17, 0x7632;
            shr.u32 s, x, 8;
            shr.u32 t, y, 8;
            and.b32 a, x, 0x000f000f;
            and.b32 b, s, 0x000f000f;
            and.b32 c, x, 0x00f000f0;
            and.b32 d, s, 0x00f000f0;
            and.b32 e, y, 0x000f000f;
            and.b32 f, t, 0x000f000f;
            and.b32 g, y, 0x00f000f0;
            and.b32 h, t, 0x00f000f0;
            mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; mov.b32 {$4, $5}, e; mov.b32 {$6, $7}, f;
            mov.b32 {$8, $9}, c; mov.b32 {$10, $11}, d; mov.b32 {$12, $13}, g; mov.b32 {$14, $15}, h;
            }""",
            constraints="=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            args=[u, v],
            dtype=(tl.float16,) * 16,
            is_pure=True,
            pack=1,
        )
    else:
        return (
            _code(u, 0, KIND),
            _code(v, 0, KIND),
            _code(u, 8, KIND),
            _code(v, 8, KIND),
            _code(u, 16, KIND),
            _code(v, 16, KIND),
            _code(u, 24, KIND),
            _code(v, 24, KIND),
            _code(u, 4, KIND),
            _code(v, 4, KIND),
            _code(u, 12, KIND),
            _code(v, 12, KIND),
            _code(u, 20, KIND),
            _code(v, 20, KIND),
            _code(u, 28, KIND),
            _code(v, 28, KIND),
        )
