# mypy: disable-error-code="no-untyped-def"
"""Device code of the sampler for rows with top_k, top_p or min_p whose cut lies among many logits.

`finish_flat` narrows the range of the cut with PIVOTS pivots a pass over the row, until at most LIST logits or a single
value is left, searches the list, and draws in a last pass.
"""

import triton
import triton.language as tl

from .sampling_kernel import (
    CUT,
    FAR,
    KIND,
    LOG_MIN_P,
    NEVER,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    UNIFORM,
    inverse,
    load_scores,
    mass_of,
    parameter,
    pick,
    row_best,
    row_view,
    write_token,
)
from .sampling_keys import LEAST, UNIT, largest_key, ordered, scaled, smallest_kept, unordered


@triton.jit
def load_step(view, start, vocab, STEP: tl.constexpr, RULES: tl.constexpr):
    """Logits start .. start + STEP - 1 of a row, -inf from `vocab` on: always masked, which keeps this kernel small."""
    at = start + tl.arange(0, STEP)
    return load_scores(view, at, at < vocab, RULES)


@triton.jit
def tally(view, vocab, best, scale, pivot, PIVOTS: tl.constexpr, STEP: tl.constexpr, RULES: tl.constexpr):
    """(count int64, mass float64) [PIVOTS] of a row's logits that are at least as large as each pivot."""
    counts = tl.zeros((PIVOTS, STEP), tl.int32)
    masses = tl.zeros((PIVOTS, STEP), tl.float32)
    for start in range(0, vocab, STEP):
        y = load_step(view, start, vocab, STEP, RULES)
        within = y[None, :] >= pivot[:, None]
        counts += within.to(tl.int32)
        # a lane's sum is of few enough logits for float32
        masses += tl.where(within, mass_of(y, best, scale)[None, :], 0.0)
    return tl.sum(counts.to(tl.int64), axis=1), tl.sum(masses.to(tl.float64), axis=1)


@triton.jit
def tighten(
    view, vocab, lo, hi, STEP: tl.constexpr,
    RULES: tl.constexpr,
):  # fmt: skip
    """int64 keys of the smallest and the largest of a row's logits within keys lo..hi."""
    low = unordered(lo.to(tl.int32))
    high = unordered(hi.to(tl.int32))
    small = tl.full((STEP,), float("inf"), tl.float32)
    large = tl.full((STEP,), NEVER, tl.float32)
    for start in range(0, vocab, STEP):
        y = load_step(view, start, vocab, STEP, RULES)
        keep = (y >= low) & (y <= high)
        small = tl.minimum(small, tl.where(keep, y, float("inf")))
        large = tl.maximum(large, tl.where(keep, y, NEVER))
    return ordered(tl.min(small)).to(tl.int64), ordered(tl.max(large)).to(tl.int64)


@triton.jit
def narrow(
    view, list_ptr, vocab, best, scale,
    lo, hi, at_lo, need, by_mass, PIVOTS: tl.constexpr, STEP: tl.constexpr, LIST: tl.constexpr,
    RULES: tl.constexpr,
):  # fmt: skip
    """(key, count from it up, count and mass above it) of the largest v in lo..hi with which `need` is reached.

    need: float64, a mass or (not by_mass) a count; the logits from v up have it, as those from lo up do. lo, hi: int64
    keys, hi the best logit's. at_lo: count of logits from lo up.
    """
    above = tl.full((), 0, tl.int64)
    above_mass = tl.full((), 0.0, tl.float64)
    while (lo < hi) & (at_lo - above > LIST):
        before = at_lo - above
        a = unordered(lo.to(tl.int32))
        b = unordered(hi.to(tl.int32))
        # the last pivot is hi itself, so that the range shrinks in every pass
        part = (tl.arange(0, PIVOTS) + 1).to(tl.float32) / PIVOTS
        pivot = tl.where(part < 1.0, tl.minimum(a * (1.0 - part) + b * part, b), b)
        counts, masses = tally(
            view, vocab, best, scale, pivot,
            PIVOTS, STEP, RULES,
        )  # fmt: skip
        keys = ordered(pivot).to(tl.int64)
        enough = tl.where(by_mass, masses, counts.to(tl.float64)) >= need
        at_lo = tl.minimum(at_lo, tl.min(tl.where(enough, counts, at_lo)))
        under = tl.where(keys == 0, -2, keys - 1)
        lo = tl.maximum(lo, tl.max(tl.where(enough, keys, lo)))
        above = tl.maximum(above, tl.max(tl.where(enough, 0, counts)))
        above_mass = tl.maximum(above_mass, tl.max(tl.where(enough, 0.0, masses)))
        hi = tl.minimum(hi, tl.min(tl.where(enough, hi, under)))
        hi = tl.maximum(hi, lo)
        # hardly fewer than before: equal logits, which a range of logits that occur finds out at once
        if (at_lo - above) * 2 > before:
            lo, hi = tighten(view, vocab, lo, hi, STEP, RULES)
    if lo < hi:
        low = unordered(lo.to(tl.int32))
        high = unordered(hi.to(tl.int32))
        count = 0
        for start in range(0, vocab, STEP):
            y = load_step(view, start, vocab, STEP, RULES)
            keep = (y >= low) & (y <= high)
            to = count + tl.cumsum(keep.to(tl.int32), 0) - 1
            tl.store(list_ptr + to, y.to(tl.int32, bitcast=True), mask=keep & (to < LIST))
            count += tl.sum(keep.to(tl.int32))
        tl.debug_barrier()
        lane = tl.arange(0, LIST)
        live = lane < count
        y = tl.load(list_ptr + lane, mask=live, other=0).to(tl.float32, bitcast=True)
        tl.debug_barrier()
        key = tl.where(live, ordered(y), -FAR - 1)
        e = tl.where(live, mass_of(y, best, scale).to(tl.float64), 0.0)
        one = live.to(tl.int64)
        left = tl.where(by_mass, (need - above_mass) * UNIT, need - above.to(tl.float64))
        weight = tl.where(by_mass, (e * UNIT).to(tl.int64), one)
        lo = largest_key(key, weight, lo, hi, tl.ceil(left).to(tl.int64))
        more = key > lo.to(tl.int32)
        at_lo = above + tl.sum(tl.where(key >= lo.to(tl.int32), one, 0))
        above += tl.sum(tl.where(more, one, 0))
        above_mass += tl.sum(tl.where(more, e, 0.0))
    return lo, at_lo, above, above_mass


@triton.jit(do_not_specialize=["n_rows", "vocab", "nb"])
def finish_flat(
    logits_ptr,
    changed_ptr,
    counts_ptr,
    params_ptr,
    bmax_ptr,
    sums_ptr,
    list_ptr,
    cut_ptr,
    left_ptr,
    out_ptr,
    stride,
    changed_stride,
    counts_stride,
    n_rows,
    vocab,
    nb,
    NB: tl.constexpr,
    PIVOTS: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
    LIST: tl.constexpr,
    RULES: tl.constexpr,
):
    """Program `row`: what is left (left is not 0), by passes over the row.

    Scratch: sums float64 [rows, STEPS], list as in finish_cut. STEPS: a power of two of at least vocab / STEP.
    """
    row = tl.program_id(0)
    kind = parameter(params_ptr, row, KIND).to(tl.int32)
    left = tl.load(left_ptr + row)
    if (kind == CUT) & (left != 0):
        _, best, valid = row_best(bmax_ptr, row, nb, NB)
        temperature = parameter(params_ptr, row, TEMPERATURE)
        t32 = temperature.to(tl.float32)
        scale = inverse(temperature)
        k = parameter(params_ptr, row, TOP_K).to(tl.int64)
        p = parameter(params_ptr, row, TOP_P)
        log_min_p = parameter(params_ptr, row, LOG_MIN_P).to(tl.float32)
        view = row_view(
            logits_ptr, changed_ptr, counts_ptr, params_ptr, row, stride, changed_stride, counts_stride, RULES
        )
        value_ptr = list_ptr + row.to(tl.int64) * (2 * LIST)
        top = ordered(best).to(tl.int64)
        bottom = ordered(tl.full((), LEAST, tl.float32)).to(tl.int64)
        least = tl.full((), LEAST, tl.float32)
        if log_min_p > NEVER:
            least = smallest_kept(bottom, top, best, t32, log_min_p)
        # the smallest logit in question, how many there are and their mass
        small = tl.full((STEP,), float("inf"), tl.float32)
        ones = tl.zeros((STEP,), tl.int32)
        mass = tl.zeros((STEP,), tl.float32)
        for start in range(0, vocab, STEP):
            y = load_step(view, start, vocab, STEP, RULES)
            keep = y >= least
            small = tl.minimum(small, tl.where(keep, y, float("inf")))
            ones += keep.to(tl.int32)
            mass += tl.where(keep, mass_of(y, best, scale), 0.0)
        lo = ordered(tl.min(small)).to(tl.int64)
        count = tl.sum(ones.to(tl.int64))
        total = tl.sum(mass.to(tl.float64))
        for phase in range(2):
            by_mass = phase == 1
            if (by_mass & (p <= 1.0)) | ((phase == 0) & (k > 0) & (k < count)):
                need = tl.where(by_mass, p * total, k.to(tl.float64))
                lo, count, more, more_mass = narrow(
                    view, value_ptr, vocab, best, scale,
                    lo, top, count, need, by_mass, PIVOTS, STEP, LIST, RULES,
                )  # fmt: skip
                # what top_k leaves: of equal logits at its cut as many as make k
                own = mass_of(unordered(lo.to(tl.int32)), best, scale).to(tl.float64)
                total = more_mass + (k - more).to(tl.float64) * own
        at_cut = unordered(lo.to(tl.int32))
        cut = smallest_kept(bottom, lo, best, t32, scaled(at_cut, best, t32))
        cut = tl.maximum(cut, least)
        tl.store(cut_ptr + row, cut)
        # one draw: the masses of the steps, the step it falls in, the token
        step_ptr = sums_ptr + row.to(tl.int64) * STEPS
        for i in range(0, tl.cdiv(vocab, STEP)):
            y = load_step(view, i * STEP, vocab, STEP, RULES)
            e = tl.where(y >= cut, mass_of(y, best, scale), 0.0).to(tl.float64)
            tl.store(step_ptr + i, tl.sum(e))
        tl.debug_barrier()
        step = tl.arange(0, STEPS)
        w = tl.load(step_ptr + step, mask=step < tl.cdiv(vocab, STEP), other=0.0)
        cumulative = tl.cumsum(w, 0)
        target = parameter(params_ptr, row, UNIFORM) * tl.max(cumulative)
        chosen = pick(cumulative, w, target, step)
        rest = target - tl.sum(tl.where(step < chosen, w, 0.0))
        at = chosen * STEP + tl.arange(0, STEP)
        y = load_step(view, chosen * STEP, vocab, STEP, RULES)
        e = tl.where(y >= cut, mass_of(y, best, scale), 0.0).to(tl.float64)
        write_token(out_ptr, n_rows, row, pick(tl.cumsum(e, 0), e, rest, at), valid)
