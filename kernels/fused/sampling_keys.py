# mypy: disable-error-code="no-untyped-def"
"""What the kernels that look for a cut share: floats as integers of the same order, searches, a row's state."""

import triton
import triton.language as tl

UNIT = tl.constexpr(2.0**44)  # masses in a list are integers, in these parts of the best token's
STATE = tl.constexpr(10)
LOW = tl.constexpr(0)  # the cut is sought from here up
HIGH = tl.constexpr(1)  # and below this: at first the next float above the best logit
BOUND = tl.constexpr(2)  # LOW at first: what is below does not count
BEST = tl.constexpr(3)  # the largest logit
TOTAL = tl.constexpr(4)  # mass of the row, in units of the best token's
LEAST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def ordered(x):
    """int32 that orders as the float32 x does, -0 as 0: no key is -1."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key):
    """The float32 of a key of `ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def scaled(y, best, temperature):
    """s(y): two roundings, as the reference makes them."""
    return tl.math.div_rn(y - best, temperature)


@triton.jit
def largest_key(key, weight, lo, hi, need):
    """The largest v in lo..hi for which the weights of keys >= v add to `need` (as they do at lo). lo, hi: int64."""
    while lo < hi:
        mid = lo + (hi - lo + 1) // 2
        enough = tl.sum(tl.where(key >= mid.to(tl.int32), weight, 0)) >= need
        lo = tl.where(enough, mid, lo)
        hi = tl.where(enough, hi, mid - 1)
    return lo


@triton.jit
def smallest_kept(lo, hi, best, temperature, least):
    """The smallest float of keys lo..hi (int64) with s(y) >= least, which holds at hi."""
    while lo < hi:
        mid = lo + (hi - lo) // 2
        enough = scaled(unordered(mid.to(tl.int32)), best, temperature) >= least
        hi = tl.where(enough, mid, hi)
        lo = tl.where(enough, lo, mid + 1)
    return unordered(hi.to(tl.int32))
