# mypy: disable-error-code="no-untyped-def"
"""Bringing a tile's keys and values into L2 before the decode kernel loads them.

The assembler puts loads for the next turn of a loop off to its end, as nothing in this turn needs them, and waits for
them together with others. A prefetch takes no register and nothing waits for it: it is asked for a whole turn ahead,
and the loads then find their bytes in L2.
"""

import triton
import triton.language as tl


@triton.jit
def lane_blocks(table, at, low, high, TOK: tl.constexpr, WARPS: tl.constexpr, SHIFT: tl.constexpr):
    """(token, block id) [WARPS * 32] of each lane's share of a tile that starts at token `at`, within low..high."""
    token = at + (tl.arange(0, WARPS * 32) * TOK) // 32
    token = tl.minimum(tl.maximum(token, low), high)
    return token, tl.load(table + (token >> SHIFT))


@triton.jit
def _bring(address, LINES: tl.constexpr):
    # `LINES` lines of 128 bytes from each address [LANES], int64
    for line in tl.static_range(LINES):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            constraints="=r,l",
            args=[address + line * 128],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def prefetch_tile(
    kp, vp, ksp, vsp, token, block, stride, TOK: tl.constexpr, BS: tl.constexpr, WW: tl.constexpr, KE: tl.constexpr,
    VE: tl.constexpr,
):  # fmt: skip
    """Ask for the words and scales of a tile, of which lane_blocks gave each lane's token and its block.

    stride: words from block to block. WW: words of a token. KE, VE: scales of a key and of a value, 0 for none.
    """
    LANES: tl.constexpr = token.shape[0]
    WORDS: tl.constexpr = TOK * WW // 32
    place = token & (BS - 1)
    before = block.to(tl.int64) * stride
    at = before + place * WW
    if TOK < 32:
        at += tl.arange(0, LANES) * WORDS % WW
    _bring((kp + at).to(tl.int64), (WORDS + 31) // 32)
    _bring((vp + at).to(tl.int64), (WORDS + 31) // 32)
    if KE > 0:
        _bring((ksp + (before * 2 + place * KE)).to(tl.int64), 1)
        _bring((vsp + (before * 2 + place * VE)).to(tl.int64), 1)
