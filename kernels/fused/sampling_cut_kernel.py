# mypy: disable-error-code="no-untyped-def"
"""Device code of the sampler for rows with top_k, top_p or min_p: the exact cut without a sort, and the draw above it.

A cut is one number: with s(y) = (y - best) / T rounded as in the reference, a row keeps the logits y with
s(y) >= s(y*), where y* is the largest logit with which count (top_k) or mass (top_p) is reached. Equal s stay or go
together.

`finish_cut` needs a look at few logits only. What block_stats found of each group bounds the cut from below: at least k
logits are as large as the k-th largest group maximum, and groups whose maximum is below w have all of their mass below
it. Groups that reach the bound are gathered in token order, their logits above it kept in a list, and the exact cut is
searched in the list, by bisection over the order-preserving integer form of floats. `finish_list` does so for longer
lists, and sampling_flat_kernel.py takes the rows whose list would be longer still (a flat distribution, a top_k of
thousands, many equal logits).

Masses in a list are integers, multiples of 2^-44 of the best token's: their sums are exact in any order.
"""

import triton
import triton.language as tl

from .sampling_kernel import (
    CUT,
    FAR,
    INF_BITS,
    KIND,
    LOG_MIN_P,
    NEVER,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    UNIFORM,
    block_masses,
    cuts_by_mass,
    inverse,
    load_scores,
    mass_of,
    parameter,
    pick,
    row_best,
    row_view,
    write_token,
)
from .sampling_keys import (
    BEST,
    BOUND,
    HIGH,
    LEAST,
    LOW,
    STATE,
    TOTAL,
    UNIT,
    largest_key,
    ordered,
    scaled,
    smallest_kept,
    unordered,
)

COARSE = tl.constexpr(14)
"""Bits of a float that the bounds leave open."""
REST = tl.constexpr(2**14 - 1)
INF_COARSE = tl.constexpr(0x7F800000 >> 14)
ONE_COARSE = tl.constexpr(0x3F800000 >> 14)


@triton.jit
def cut_key(key, q, live, lo, best_key, k, p, total):
    """Key of y* in a list of all of a row's logits from lo up.

    key, q: int32 keys and int64 masses, 0 where not live. lo, best_key: int64 range of the answer. k: 0 or top_k; p:
    top_p or 2. total: int64 mass that top_p is a part of, where top_k leaves all.
    """
    one = live.to(tl.int64)
    if (k > 0) & (k < tl.sum(one)):
        lo = largest_key(key, one, lo, best_key, k)
        more = key > lo.to(tl.int32)
        # of equal logits at the cut as many count as make k
        left = k - tl.sum(tl.where(more, one, 0))
        own = tl.max(tl.where(key == lo.to(tl.int32), q, 0))
        total = tl.sum(tl.where(more, q, 0)) + left * own
    if p <= 1.0:
        lo = largest_key(key, q, lo, best_key, tl.ceil(p * total.to(tl.float64)).to(tl.int64))
    return lo


@triton.jit
def nearest(bits, k):
    """A coarse distance, as float bits, within which k of the distances `bits` lie or more; inf's if fewer do."""
    lo = tl.full((), 0, tl.int32)
    hi = tl.full((), INF_COARSE, tl.int32)
    while lo < hi:
        mid = (lo + hi) // 2
        enough = tl.sum(((bits >> COARSE) <= mid).to(tl.int32)) >= k
        hi = tl.where(enough, mid, hi)
        lo = tl.where(enough, lo, mid + 1)
    return tl.where(hi < INF_COARSE, (hi << COARSE) + REST, INF_BITS)


@triton.jit
def lightest(e, rest, tail, GROUP: tl.constexpr):
    """A coarse mass w below which a row has at most the mass `tail`.

    e: largest mass of each group, rest: the mass of its others. A group below w counts whole; of one that reaches w the
    others count, as far as they can be below w.
    """
    lo = tl.full((), 0, tl.int32)
    hi = tl.full((), ONE_COARSE, tl.int32)
    while lo < hi:
        mid = (lo + hi + 1) // 2
        w = (mid << COARSE).to(tl.float32, bitcast=True)
        below = tl.sum(tl.where(e < w, e + rest, tl.minimum(rest, (GROUP - 1) * w)))
        lo = tl.where(below <= tail, mid, lo)
        hi = tl.where(below <= tail, hi, mid - 1)
    return (lo << COARSE).to(tl.float32, bitcast=True)


@triton.jit
def bound(
    params_ptr, gmax_ptr, gsum_ptr, row, ng, best, total, scale, GROUP: tl.constexpr, NG: tl.constexpr
):  # fmt: skip
    """float32 lower bound of a row's cut, from its groups; total: the row's mass, float64."""
    far = tl.full((), float("inf"), tl.float64)
    log_min_p = parameter(params_ptr, row, LOG_MIN_P)
    if log_min_p > NEVER:
        far = -log_min_p * parameter(params_ptr, row, TEMPERATURE)
    group = tl.arange(0, NG)
    here = group < ng
    from_ = row.to(tl.int64) * ng + group
    k = parameter(params_ptr, row, TOP_K).to(tl.int32)
    if k > 0:
        g = tl.load(gmax_ptr + from_, mask=here, other=NEVER)
        edge = nearest((best - g).to(tl.int32, bitcast=True), k).to(tl.float32, bitcast=True)
        far = tl.minimum(far, edge.to(tl.float64))
    # with another limit top_p is a part of what that leaves, which the list must then hold
    if cuts_by_mass(params_ptr, row):
        e = mass_of(tl.load(gmax_ptr + from_, mask=here, other=NEVER), best, scale)
        rest = e * (tl.load(gsum_ptr + from_, mask=here, other=1.0) - 1.0)
        tail = (1.0 - parameter(params_ptr, row, TOP_P)) * total * (1.0 - 1e-4)
        w = lightest(e, tl.maximum(rest, 0.0), tail.to(tl.float32), GROUP)
        if w > 0:
            far = tl.minimum(far, -tl.log2(w).to(tl.float64) / scale.to(tl.float64))
    # logits that round to the same s are within 2^-22 of each other's distance; the rest is this sum's own rounding
    low = best.to(tl.float64) - far * (1.0 + 1e-6) - 1e-30
    return tl.maximum(low - tl.abs(low) * 2e-7, LEAST).to(tl.float32)


@triton.jit
def gather_groups(view, chosen_ptr, value_ptr, n, low, vocab, GROUP, CHUNK, LIST: tl.constexpr, RULES: tl.constexpr):
    """Write the logits >= low of n groups (numbers at chosen_ptr) to a list, in order; returns how many there are.

    list int32 [2, LIST]: bits and tokens. No more than LIST are written; a larger count says only that.
    """
    count = 0
    i = 0
    while (i < n) & (count <= LIST):
        j = i + tl.arange(0, CHUNK)
        of = tl.load(chosen_ptr + j, mask=j < n, other=0)
        at = tl.reshape(of[:, None] * GROUP + tl.arange(0, GROUP)[None, :], (CHUNK * GROUP,))
        real = tl.broadcast_to((j < n)[:, None], (CHUNK, GROUP))
        real = tl.reshape(real.to(tl.int32), (CHUNK * GROUP,)) != 0
        y = load_scores(view, at, real & (at < vocab), RULES)
        keep = y >= low
        to = count + tl.cumsum(keep.to(tl.int32), 0) - 1
        fits = keep & (to < LIST)
        tl.store(value_ptr + to, y.to(tl.int32, bitcast=True), mask=fits)
        tl.store(value_ptr + LIST + to, at, mask=fits)
        count += tl.sum(keep.to(tl.int32))
        i += CHUNK
    return count


@triton.jit
def draw_from_list(
    params_ptr, cut_ptr, out_ptr, value_ptr, n_rows, row, count, best, total, TILE: tl.constexpr, LIST: tl.constexpr
):
    """The cut and the token of a row whose candidates are a list of at most TILE logits in token order.

    total: float64 mass of the whole row, in units of the best token's.
    """
    temperature = parameter(params_ptr, row, TEMPERATURE)
    t32 = temperature.to(tl.float32)
    lane = tl.arange(0, TILE)
    y = tl.load(value_ptr + lane, mask=lane < count, other=0).to(tl.float32, bitcast=True)
    s = scaled(y, best, t32)
    live = (lane < count) & (s >= parameter(params_ptr, row, LOG_MIN_P).to(tl.float32))
    key = tl.where(live, ordered(y), -FAR - 1)
    q = tl.where(live, (mass_of(y, best, inverse(temperature)) * UNIT).to(tl.int64), 0)
    lo = tl.min(tl.where(live, key, FAR)).to(tl.int64)
    hi = ordered(best).to(tl.int64)
    k = parameter(params_ptr, row, TOP_K).to(tl.int64)
    whole = tl.where(cuts_by_mass(params_ptr, row), (total * UNIT).to(tl.int64), tl.sum(q))
    key_at_cut = cut_key(key, q, live, lo, hi, k, parameter(params_ptr, row, TOP_P), whole)
    kept = live & (s >= scaled(unordered(key_at_cut.to(tl.int32)), best, t32))
    tl.store(cut_ptr + row, tl.min(tl.where(kept, y, float("inf"))))
    q = tl.where(kept, q, 0)
    cumulative = tl.cumsum(q, 0)
    target = (parameter(params_ptr, row, UNIFORM) * tl.sum(q).to(tl.float64)).to(tl.int64)
    chosen = pick(cumulative, q, target, lane)
    token = tl.load(value_ptr + LIST + chosen)
    write_token(out_ptr, n_rows, row, token, token >= 0)


@triton.jit(do_not_specialize=["n_rows", "vocab", "nb", "ng"])
def finish_cut(
    logits_ptr,
    changed_ptr,
    counts_ptr,
    params_ptr,
    bmax_ptr,
    bsum_ptr,
    gmax_ptr,
    gsum_ptr,
    groups_ptr,
    list_ptr,
    cut_ptr,
    left_ptr,
    state_ptr,
    out_ptr,
    stride,
    changed_stride,
    counts_stride,
    n_rows,
    vocab,
    nb,
    ng,
    GROUP: tl.constexpr,
    NB: tl.constexpr,
    NG: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    LIST: tl.constexpr,
    RULES: tl.constexpr,
):
    """Program `row`: the cut and the token of a row with top_k, top_p or min_p, if TILE logits hold it.

    NB, NG: powers of two of at least nb and ng. CHUNK: groups gathered at a time. Scratch: groups int32 [rows, ng],
    list int32 [rows, 2, LIST] (logits' bits, tokens). Writes cut fp32 [rows] (the smallest kept logit), out, and left
    int32 [rows]: 0 where the row is done, the length of its list where that is longer than TILE, or -1 where it is
    longer than LIST; then state float64 [rows, STATE] is filled in, for sampling_wide_kernel.py.
    """
    row = tl.program_id(0)
    kind = parameter(params_ptr, row, KIND).to(tl.int32)
    if kind == CUT:
        m, best, valid = row_best(bmax_ptr, row, nb, NB)
        left = 0
        if valid:
            temperature = parameter(params_ptr, row, TEMPERATURE)
            scale = inverse(temperature)
            total = tl.sum(block_masses(m, best, bsum_ptr, row, nb, scale, NB))
            log_min_p = parameter(params_ptr, row, LOG_MIN_P)
            low = bound(params_ptr, gmax_ptr, gsum_ptr, row, ng, best, total, scale, GROUP, NG)
            # read again, not kept in registers
            tl.debug_barrier()
            group = tl.arange(0, NG)
            g = tl.load(gmax_ptr + row.to(tl.int64) * ng + group, mask=group < ng, other=NEVER)
            # groups that reach the bound, in token order
            some = g >= low
            n = tl.sum(some.to(tl.int32))
            chosen_ptr = groups_ptr + row.to(tl.int64) * ng
            tl.store(chosen_ptr + tl.cumsum(some.to(tl.int32), 0) - 1, group, mask=some)
            tl.debug_barrier()
            view = row_view(
                logits_ptr, changed_ptr, counts_ptr, params_ptr, row, stride, changed_stride, counts_stride, RULES
            )
            value_ptr = list_ptr + row.to(tl.int64) * (2 * LIST)
            count = gather_groups(view, chosen_ptr, value_ptr, n, low, vocab, GROUP, CHUNK, LIST, RULES)
            tl.debug_barrier()
            if count <= TILE:
                draw_from_list(params_ptr, cut_ptr, out_ptr, value_ptr, n_rows, row, count, best, total, TILE, LIST)
            else:
                left = tl.where(count <= LIST, count, -1)
                start = low
                if log_min_p > NEVER:
                    t32 = temperature.to(tl.float32)
                    first = ordered(tl.full((), LEAST, tl.float32)).to(tl.int64)
                    last = ordered(best).to(tl.int64)
                    start = tl.maximum(low, smallest_kept(first, last, best, t32, log_min_p.to(tl.float32)))
                above = ordered(best) + 1
                to = state_ptr + row.to(tl.int64) * STATE
                tl.store(to + LOW, start.to(tl.float64))
                tl.store(to + HIGH, unordered(tl.where(above == -1, 0, above)).to(tl.float64))
                tl.store(to + BOUND, start.to(tl.float64))
                tl.store(to + BEST, best.to(tl.float64))
                tl.store(to + TOTAL, total)
        else:
            tl.store(cut_ptr + row, float("inf"))
            write_token(out_ptr, n_rows, row, row * 0, valid)
        tl.store(left_ptr + row, left)


@triton.jit(do_not_specialize=["n_rows", "nb"])
def finish_list(
    params_ptr,
    bmax_ptr,
    bsum_ptr,
    list_ptr,
    cut_ptr,
    left_ptr,
    out_ptr,
    n_rows,
    nb,
    NB: tl.constexpr,
    LIST: tl.constexpr,
):
    """Program `row`: the cut and the token of a row for which finish_cut left a list."""
    row = tl.program_id(0)
    kind = parameter(params_ptr, row, KIND).to(tl.int32)
    if kind == CUT:
        count = tl.load(left_ptr + row)
        if count > 0:
            m, best, _ = row_best(bmax_ptr, row, nb, NB)
            total = tl.sum(
                block_masses(m, best, bsum_ptr, row, nb, inverse(parameter(params_ptr, row, TEMPERATURE)), NB)
            )
            value_ptr = list_ptr + row.to(tl.int64) * (2 * LIST)
            draw_from_list(params_ptr, cut_ptr, out_ptr, value_ptr, n_rows, row, count, best, total, LIST, LIST)
            tl.store(left_ptr + row, 0)
