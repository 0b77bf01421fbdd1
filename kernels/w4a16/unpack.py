# mypy: disable-error-code="no-untyped-def"
"""Device functions that turn packed words into weights, each with a twin in plain Triton.

Inline PTX does not run in Triton's interpreter, so every function takes a constexpr ASM: with it the PTX twin is
compiled, without it the plain one. Tests hold the two against each other on a GPU.

How it works: OR-ing an unsigned integer into the low mantissa bits of a power of two gives that power plus the
integer, exactly. In fp16, bits 0-3 of 0x6400 count in ones (1024 + q) and bits 4-7 of 0x5400 do so too (64 + q), so
two of a half's four codes need no shift. Subtracting 1024 + z or 64 + z in fp16 is exact as well: what is left is
q - z, a small integer.
"""

import triton
import triton.language as tl


@triton.jit
def zero_pair(sz, ASM: tl.constexpr):
    """(1024 + z) twice, as the two halves of an int32, from a scale-and-zero word. The plain twin returns z itself."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $1, 0x3232;", constraints="=r,r", args=[sz], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return ((sz >> 16) & 0xFFFF) - 0x6400


@triton.jit
def high_zero_pair(zz, ASM: tl.constexpr):
    """(64 + z) twice, from what zero_pair returned."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 c; mov.b32 c, 0xe380e380; add.f16x2 $0, $1, c; }",
            constraints="=r,r",
            args=[zz],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return zz


@triton.jit
def scale_pair(sz, ASM: tl.constexpr):
    """The scale twice, as the two halves of an int32. The plain twin returns it as fp16."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $1, 0x1010;", constraints="=r,r", args=[sz], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return (sz & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def scale_float(sz):
    """The scale in float32."""
    return (sz & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _code(q, z, SHIFT: tl.constexpr, MASK: tl.constexpr):
    return (((q >> SHIFT) & MASK) - z).to(tl.float16)


@triton.jit
def codes4(q, z0, z1, z2, z3, ASM: tl.constexpr):
    """Eight 4-bit codes of a word less their zeros, fp16: planes 0-3 of the low half, then planes 0-3 of the high.

    z0 and z2 come from zero_pair, z1 and z3 from high_zero_pair.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, t;
            lop3.b32 a, $8, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 b, $8, 0x00f000f0, 0x54005400, 0xea;
            shr.u32 t, $8, 8;
            lop3.b32 c, t, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 d, t, 0x00f000f0, 0x54005400, 0xea;
            sub.f16x2 a, a, $9;
            sub.f16x2 b, b, $10;
            sub.f16x2 c, c, $11;
            sub.f16x2 d, d, $12;
            mov.b32 {$0, $4}, a; mov.b32 {$1, $5}, b; mov.b32 {$2, $6}, c; mov.b32 {$3, $7}, d;
            }""",
            constraints="=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r",
            args=[q, z0, z1, z2, z3],
            dtype=(tl.float16,) * 8,
            is_pure=True,
            pack=1,
        )
    else:
        return (
            _code(q, z0, 0, 15),
            _code(q, z1, 4, 15),
            _code(q, z2, 8, 15),
            _code(q, z3, 12, 15),
            _code(q, z0, 16, 15),
            _code(q, z1, 20, 15),
            _code(q, z2, 24, 15),
            _code(q, z3, 28, 15),
        )


@triton.jit
def weights4(q, z0, z1, z2, z3, s0, s1, s2, s3, ASM: tl.constexpr):
    """codes4 times the scales of scale_pair, rounded once to fp16."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, t;
            lop3.b32 a, $8, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 b, $8, 0x00f000f0, 0x54005400, 0xea;
            shr.u32 t, $8, 8;
            lop3.b32 c, t, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 d, t, 0x00f000f0, 0x54005400, 0xea;
            sub.f16x2 a, a, $9;
            sub.f16x2 b, b, $10;
            sub.f16x2 c, c, $11;
            sub.f16x2 d, d, $12;
            mul.f16x2 a, a, $13;
            mul.f16x2 b, b, $14;
            mul.f16x2 c, c, $15;
            mul.f16x2 d, d, $16;
            mov.b32 {$0, $4}, a; mov.b32 {$1, $5}, b; mov.b32 {$2, $6}, c; mov.b32 {$3, $7}, d;
            }""",
            constraints="=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r,r,r,r,r",
            args=[q, z0, z1, z2, z3, s0, s1, s2, s3],
            dtype=(tl.float16,) * 8,
            is_pure=True,
            pack=1,
        )
    else:
        return (
            _code(q, z0, 0, 15) * s0,
            _code(q, z1, 4, 15) * s1,
            _code(q, z2, 8, 15) * s2,
            _code(q, z3, 12, 15) * s3,
            _code(q, z0, 16, 15) * s0,
            _code(q, z1, 20, 15) * s1,
            _code(q, z2, 24, 15) * s2,
            _code(q, z3, 28, 15) * s3,
        )


@triton.jit
def codes8(q, z0, z1, ASM: tl.constexpr):
    """Four 8-bit codes of a word less their zeros, fp16: planes 0-1 of the low half, then of the high.

    Both zeros come from zero_pair.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            prmt.b32 a, $4, 0x64646464, 0x4240;
            prmt.b32 b, $4, 0x64646464, 0x4341;
            sub.f16x2 a, a, $5;
            sub.f16x2 b, b, $6;
            mov.b32 {$0, $2}, a; mov.b32 {$1, $3}, b;
            }""",
            constraints="=h,=h,=h,=h,r,r,r",
            args=[q, z0, z1],
            dtype=(tl.float16,) * 4,
            is_pure=True,
            pack=1,
        )
    else:
        return _code(q, z0, 0, 255), _code(q, z1, 8, 255), _code(q, z0, 16, 255), _code(q, z1, 24, 255)


@triton.jit
def weights8(q, z0, z1, s0, s1, ASM: tl.constexpr):
    """codes8 times the scales of scale_pair, rounded once to fp16."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            prmt.b32 a, $4, 0x64646464, 0x4240;
            prmt.b32 b, $4, 0x64646464, 0x4341;
            sub.f16x2 a, a, $5;
            sub.f16x2 b, b, $6;
            mul.f16x2 a, a, $7;
            mul.f16x2 b, b, $8;
            mov.b32 {$0, $2}, a; mov.b32 {$1, $3}, b;
            }""",
            constraints="=h,=h,=h,=h,r,r,r,r,r",
            args=[q, z0, z1, s0, s1],
            dtype=(tl.float16,) * 4,
            is_pure=True,
            pack=1,
        )
    else:
        return (
            _code(q, z0, 0, 255) * s0,
            _code(q, z1, 8, 255) * s1,
            _code(q, z0, 16, 255) * s0,
            _code(q, z1, 24, 255) * s1,
        )


@triton.jit
def opaque(w):
    """The same 16-bit values, through an instruction that the compiler cannot look behind (it costs nothing in SASS).

    Triton 3.6 chooses the operand layout of a dot by looking for joins behind it, and would choose one that the packed
    order does not have.
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", constraints="=r,r", args=[w], dtype=w.dtype, is_pure=False, pack=2
    )


@triton.jit
def prefetch_lines(block):
    """Bring the eight 128-byte lines of each 1 KiB block of words (int32 pointers [rows, 1]) into L2, in time."""
    lines = (block + (tl.arange(0, 8) * 32)[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        constraints="=r,l",
        args=[lines],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def drain():
    """Wait for all of Hopper's running products (compute capability 9.0 only).

    They read the weights from registers while they run. Triton 3.6 to 3.9 let a product run on into the next turn of a
    loop, whose new weights overwrite those registers: wrong sums, seen on an H200.
    """
    tl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 0; mov.b32 $0, 0;",
        constraints="=r",
        args=[],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
