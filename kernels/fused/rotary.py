# mypy: disable-error-code="no-untyped-def"
r"""Cosines and signed sines of a step's rotary embeddings, in one kernel and without double precision.

    angle(t, i) = position(t) * inverse(i)      rounded to float32, as transformers rounds it
    cos(t, j) = factor * cos(angle)             sin(t, j) = \-+ factor * sin(angle)

where j and its partner, j + R/2 or, interleaved, 2i and 2i + 1, share the angle i, and the sine is negated for the
pair's first member. Angles grow to the position itself, so they are reduced to |r| <= 0.83 first, by two fused
multiply-adds (Cody and Waite): k = round(angle * 2/pi), r = angle - k pi/2. The first difference is exact, since its
last place is no finer than 2^-23; the rest of pi/2 enters rounded, k times 2^-49 at most. Then a polynomial in r.
Largest error against float64 for angles to 2^20 (1,048,576): 7.3e-8, one unit in the last place of a float32 near 1.
Angles over 4,194,304 are less exact, since k no longer fits the trick that rounds it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# pi/2 = HALF_PI + HALF_PI_REST to 50 bits; ROUND = 1.5 * 2^23, which leaves a float32 without places after the point
TWO_OVER_PI = tl.constexpr(0.6366197723675814)
HALF_PI = tl.constexpr(1.5707963705062866)
HALF_PI_REST = tl.constexpr(-4.371138828673793e-08)
ROUND = tl.constexpr(12582912.0)
# least maximal error on |r| <= 0.86: sin r = r + r^3 (S1 + S2 r^2 + S3 r^4), cos r = 1 - r^2/2 + r^4 (C1 + ...)
S1, S2, S3 = tl.constexpr(-0.16666639), tl.constexpr(0.00833139), tl.constexpr(-0.0001942753)
C1, C2, C3 = tl.constexpr(0.041666634), tl.constexpr(-0.0013886706), tl.constexpr(2.4366798e-05)


@triton.jit
def _fma(a, b: tl.constexpr, c, FUSED: tl.constexpr):
    """A * b + c, rounded once. FUSED: by the card's instruction; else through float64, for Triton 3.6's interpreter."""
    if FUSED:
        y = tl.fma(a, b, c)
    else:
        y = (a.to(tl.float64) * tl.full(a.shape, b, tl.float32).to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    return y


@triton.jit
def cos_sin(angle, FUSED: tl.constexpr):
    """(cos, sin) of float32 angles."""
    k = _fma(angle, TWO_OVER_PI, tl.full(angle.shape, ROUND, tl.float32), FUSED) - ROUND
    r = _fma(k, -HALF_PI, angle, FUSED)
    r = _fma(k, -HALF_PI_REST, r, FUSED)
    s = r * r
    sin = tl.fma(r, s * tl.fma(tl.fma(s, S3, S2), s, S1), r)
    cos = tl.fma(tl.fma(tl.fma(s, C3, C2), s, C1), s, -0.5)
    cos = tl.fma(cos, s, 1.0)
    quarter = k.to(tl.int32)
    odd = (quarter & 1) != 0
    turned_sin = tl.where(odd, cos, sin)
    turned_cos = tl.where(odd, sin, cos)
    turned_sin = tl.where((quarter & 2) != 0, -turned_sin, turned_sin)
    turned_cos = tl.where(((quarter + 1) & 2) != 0, -turned_cos, turned_cos)
    return turned_cos, turned_sin


@triton.jit
def rotary_kernel(
    positions_ptr,
    inverse_ptr,
    cos_ptr,
    sin_ptr,
    count,
    half,
    inverse_stride,
    factor,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
    FUSED: tl.constexpr,
):
    """BLOCK angles. count: all angles, tokens * half. inverse_stride: of a token's frequencies, 0 where all share."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    token = place // half
    i = place % half
    position = tl.load(positions_ptr + token, mask, other=0).to(tl.float32)
    angle = position * tl.load(inverse_ptr + token * inverse_stride + i, mask, other=0.0)
    cos, sin = cos_sin(angle, FUSED)
    DTYPE: tl.constexpr = cos_ptr.dtype.element_ty
    cos = (cos * factor).to(DTYPE)
    sin = (sin * factor).to(DTYPE)
    first = token * 2 * half + (i * 2 if INTERLEAVED else i)
    second = first + (1 if INTERLEAVED else half)
    tl.store(cos_ptr + first, cos, mask)
    tl.store(cos_ptr + second, cos, mask)
    tl.store(sin_ptr + first, -sin, mask)
    tl.store(sin_ptr + second, sin, mask)


def run_rotary(
    positions: torch.Tensor,
    inverse: torch.Tensor,
    factor: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    *,
    launch: tuple[int, int] = (256, 4),
) -> None:
    """Launch rotary_kernel: positions int64 or int32 [T], inverse float32 [R/2] or [T, R/2]; cos, sin dense T x R."""
    half = inverse.shape[-1]
    count = positions.shape[0] * half
    if count == 0:
        return
    block, warps = launch
    rotary_kernel[(triton.cdiv(count, block),)](
        positions,
        inverse,
        cos,
        sin,
        count,
        half,
        half if inverse.dim() == 2 else 0,
        factor,
        INTERLEAVED=interleaved,
        BLOCK=block,
        FUSED=positions.is_cuda,
        num_warps=warps,
        num_stages=1,
        # fused where it is written, nowhere else: the angle must be rounded before it is reduced
        enable_fp_fusion=False,
    )
