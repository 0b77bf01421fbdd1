# mypy: disable-error-code="no-untyped-def"
"""Device code of the sampler for flat distributions with one limit: the cut's range narrowed by all blocks at once.

    tally_blocks, twice    each block counts its logits, and their mass, from each of PIVOTS pivots up
    gather_range           each block writes its logits between the two pivots of the last round that enclose the cut
    finish_wide            the exact cut within that list, the block a draw falls in, and the token

Every program of a round first sums what the blocks found in the round before, in one order. What finish_wide cannot do
(too many logits between two pivots) is left to finish_flat, as are rows with both top_k and top_p.
"""

import triton
import triton.language as tl

from .sampling_cut_kernel import UNIT, largest_key, ordered, scaled, smallest_kept, unordered
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
    block_masses,
    inverse,
    load_block,
    mass_of,
    parameter,
    pick,
    row_best,
    row_view,
    write_token,
)


@triton.jit
def is_wide(params_ptr, left_ptr, row):
    """True if finish_cut left the row (left = -1) and it has not both top_k and top_p."""
    both = (parameter(params_ptr, row, TOP_K) > 0) & (parameter(params_ptr, row, TOP_P) <= 1.0)
    return (parameter(params_ptr, row, KIND) == CUT) & (tl.load(left_ptr + row) < 0) & (both == 0)


@triton.jit
def spread(lo, hi, PIVOTS: tl.constexpr):
    """float32 [PIVOTS]: lo and evenly spaced values below hi."""
    part = tl.arange(0, PIVOTS).to(tl.float32) / PIVOTS
    return tl.where(part > 0, tl.minimum(lo * (1.0 - part) + hi * part, hi), lo)


@triton.jit
def one_of(values, i, SIZE: tl.constexpr):
    """Element i of a tensor [SIZE]; 0 outside."""
    return tl.sum(tl.where(tl.arange(0, SIZE) == i, values, 0))


@triton.jit
def enclose(
    params_ptr, tcount_ptr, tmass_ptr, row, nb, lo, hi, total, above, above_mass, FIRST: tl.constexpr,
    NB: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """One round's result: (lo, hi, index of hi's pivot, count and mass from hi up, total).

    The cut is within lo <= y < hi; index PIVOTS: hi is the old one. Where nothing is sought, or too few logits are
    there, lo = hi = the first pivot, which is the cut. total: the mass that top_p is a part of, with min_p known from
    the first round.
    """
    block = tl.arange(0, NB)
    pivots = tl.arange(0, PIVOTS)
    at = row.to(tl.int64) * nb * PIVOTS + block[:, None] * PIVOTS + pivots[None, :]
    here = tl.broadcast_to((block < nb)[:, None], (NB, PIVOTS))
    counts = tl.sum(tl.load(tcount_ptr + at, mask=here, other=0), axis=0)
    masses = tl.sum(tl.load(tmass_ptr + at, mask=here, other=0.0).to(tl.float64), axis=0)
    k = parameter(params_ptr, row, TOP_K)
    p = parameter(params_ptr, row, TOP_P)
    if FIRST:  # noqa: SIM102 (a condition on a tensor cannot join one known at compile time)
        if parameter(params_ptr, row, LOG_MIN_P) > NEVER:
            total = tl.max(masses)
    enough = (pivots < 0) & (pivots > 0)
    if k > 0:
        enough = counts >= k.to(tl.int32)
    elif p <= 1.0:
        enough = masses >= p * total
    index = tl.sum(enough.to(tl.int32))
    values = spread(lo, hi, PIVOTS)
    new_lo = tl.where(index > 0, one_of(values, index - 1, PIVOTS), lo)
    inside = index < PIVOTS
    new_hi = tl.where(inside, one_of(values, index, PIVOTS), hi)
    above = tl.where(inside, one_of(counts, index, PIVOTS), above)
    above_mass = tl.where(inside, one_of(masses, index, PIVOTS), above_mass)
    return new_lo, new_hi, index, above, above_mass, total


@triton.jit
def add_part(counts, masses, x, pivot, best, scale):
    """Counts and masses [PIVOTS, PART] with the logits x [PART] added where they reach a pivot."""
    within = x[None, :] >= pivot[:, None]
    return counts + within.to(tl.int32), masses + tl.where(within, mass_of(x, best, scale)[None, :], 0.0)


@triton.jit
def starting_range(params_ptr, bmax_ptr, bsum_ptr, bound_ptr, row, nb, NB: tl.constexpr):
    """(lo, hi, best, scale, total) before the first round; hi is just above the best logit."""
    m, best, _ = row_best(bmax_ptr, row, nb, NB)
    scale = inverse(parameter(params_ptr, row, TEMPERATURE))
    total = tl.sum(block_masses(m, best, bsum_ptr, row, nb, scale, NB))
    key = ordered(best) + 1
    return (tl.load(bound_ptr + row), unordered(tl.where(key == -1, 0, key)), best, scale, total)


@triton.jit(do_not_specialize=["vocab", "nb"])
def tally_blocks(
    logits_ptr, changed_ptr, counts_ptr, params_ptr, bmax_ptr, bsum_ptr, left_ptr, bound_ptr, tcount_ptr, tmass_ptr,
    stride, changed_stride, counts_stride, vocab, nb, SECOND: tl.constexpr, BLOCK: tl.constexpr,
    PART: tl.constexpr, NB: tl.constexpr, PIVOTS: tl.constexpr, RULES: tl.constexpr,
):  # fmt: skip
    """Program (b, row) of the first or SECOND round: block b's count and mass from each pivot up.

    bound fp32 [rows]: from there up the cut is sought. tcount int32, tmass fp32 [2, rows, nb, PIVOTS].
    """
    b = tl.program_id(0)
    row = tl.program_id(1)
    if is_wide(params_ptr, left_ptr, row):
        lo, hi, best, scale, total = starting_range(params_ptr, bmax_ptr, bsum_ptr, bound_ptr, row, nb, NB)
        ahead = tl.num_programs(1).to(tl.int64) * nb * PIVOTS
        to = row.to(tl.int64) * nb * PIVOTS + b * PIVOTS + tl.arange(0, PIVOTS)
        if SECOND:
            none = tl.full((), 0.0, tl.float64)
            lo, hi, _, _, _, _ = enclose(
                params_ptr, tcount_ptr, tmass_ptr, row, nb, lo, hi, total, 0, none, True, NB, PIVOTS
            )
            to += ahead
        pivot = spread(lo, hi, PIVOTS)
        counts = tl.zeros((PIVOTS, PART), tl.int32)
        masses = tl.zeros((PIVOTS, PART), tl.float32)
        view = row_view(
            logits_ptr, changed_ptr, counts_ptr, params_ptr, row, stride, changed_stride, counts_stride, RULES
        )
        for start in range(b * BLOCK, b * BLOCK + BLOCK, 2 * PART):
            x = load_block(view, start, vocab, PART, RULES)
            y = load_block(view, start + PART, vocab, PART, RULES)
            counts, masses = add_part(counts, masses, x, pivot, best, scale)
            counts, masses = add_part(counts, masses, y, pivot, best, scale)
        tl.store(tcount_ptr + to, tl.sum(counts, axis=1))
        tl.store(tmass_ptr + to, tl.sum(masses, axis=1))


@triton.jit
def final_range(
    params_ptr, bmax_ptr, bsum_ptr, bound_ptr, tcount_ptr, tmass_ptr, row, nb, NB: tl.constexpr, PIVOTS: tl.constexpr
):
    """After both rounds: (lo, hi, indices of hi's pivot in each, count and mass from hi up, total, best, scale)."""
    lo, hi, best, scale, total = starting_range(params_ptr, bmax_ptr, bsum_ptr, bound_ptr, row, nb, NB)
    ahead = tl.num_programs(1).to(tl.int64) * nb * PIVOTS
    none = tl.full((), 0.0, tl.float64)
    lo, hi, i, above, above_mass, total = enclose(
        params_ptr, tcount_ptr, tmass_ptr, row, nb, lo, hi, total, 0, none, True, NB, PIVOTS
    )
    lo, hi, j, above, above_mass, total = enclose(
        params_ptr, tcount_ptr + ahead, tmass_ptr + ahead, row, nb, lo, hi, total, above, above_mass, False, NB, PIVOTS
    )
    return lo, hi, i, j, above, above_mass, total, best, scale


@triton.jit
def of_blocks(t_ptr, row, nb, i, j, ahead, NB: tl.constexpr, PIVOTS: tl.constexpr):
    """Each block's tally [NB] from hi up, where hi is pivot j of the second round, else i of the first, else none."""
    block = tl.arange(0, NB)
    at = row.to(tl.int64) * nb * PIVOTS + block * PIVOTS
    second = j < PIVOTS
    at = tl.where(second, at + ahead + j, at + i)
    return tl.load(t_ptr + at, mask=block < tl.where(second | (i < PIVOTS), nb, 0), other=0)


@triton.jit
def of_range(tcount_ptr, row, nb, i, j, ahead, NB: tl.constexpr, PIVOTS: tl.constexpr):
    """int32 [NB]: how many logits each block has in the final range."""
    block = tl.arange(0, NB)
    at = row.to(tl.int64) * nb * PIVOTS + block * PIVOTS + ahead + tl.maximum(j - 1, 0)
    low = tl.load(tcount_ptr + at, mask=block < tl.where(j > 0, nb, 0), other=0)
    return tl.where(j > 0, low - of_blocks(tcount_ptr, row, nb, i, j, ahead, NB, PIVOTS), 0)


@triton.jit(do_not_specialize=["vocab", "nb"])
def gather_range(
    logits_ptr, changed_ptr, counts_ptr, params_ptr, bmax_ptr, bsum_ptr, left_ptr, bound_ptr, tcount_ptr, tmass_ptr,
    list_ptr, stride, changed_stride, counts_stride, vocab, nb, BLOCK: tl.constexpr, NB: tl.constexpr,
    PIVOTS: tl.constexpr, LIST: tl.constexpr, RULES: tl.constexpr,
):  # fmt: skip
    """Program (b, row): block b's logits in the final range, to their places in the row's list (bits, tokens)."""
    b = tl.program_id(0)
    row = tl.program_id(1)
    if is_wide(params_ptr, left_ptr, row):
        lo, hi, i, j, _, _, _, _, _ = final_range(
            params_ptr, bmax_ptr, bsum_ptr, bound_ptr, tcount_ptr, tmass_ptr, row, nb, NB, PIVOTS
        )
        ahead = tl.num_programs(1).to(tl.int64) * nb * PIVOTS
        block = tl.arange(0, NB)
        inside = of_range(tcount_ptr, row, nb, i, j, ahead, NB, PIVOTS)
        if (tl.sum(inside) <= LIST) & (tl.sum(tl.where(block == b, inside, 0)) > 0):
            view = row_view(
                logits_ptr, changed_ptr, counts_ptr, params_ptr, row, stride, changed_stride, counts_stride, RULES
            )
            y = load_block(view, b * BLOCK, vocab, BLOCK, RULES)
            keep = (y >= lo) & (y < hi)
            to = tl.sum(tl.where(block < b, inside, 0)) + tl.cumsum(keep.to(tl.int32), 0) - 1
            value_ptr = list_ptr + row.to(tl.int64) * (2 * LIST)
            tl.store(value_ptr + to, y.to(tl.int32, bitcast=True), mask=keep)
            tl.store(value_ptr + LIST + to, b * BLOCK + tl.arange(0, BLOCK), mask=keep)


@triton.jit(do_not_specialize=["n_rows", "vocab", "nb"])
def finish_wide(
    logits_ptr, changed_ptr, counts_ptr, params_ptr, bmax_ptr, bsum_ptr, left_ptr, bound_ptr, tcount_ptr, tmass_ptr,
    list_ptr, sums_ptr, cut_ptr, out_ptr, stride, changed_stride, counts_stride, n_rows, vocab, nb,
    BLOCK: tl.constexpr, NB: tl.constexpr, PIVOTS: tl.constexpr, LIST: tl.constexpr, RULES: tl.constexpr,
):  # fmt: skip
    """Program (0, row): the cut and the token; left is then 0. sums: float64 [rows, LIST] scratch."""
    row = tl.program_id(1)
    if is_wide(params_ptr, left_ptr, row):
        lo, hi, i, j, above, above_mass, total, best, scale = final_range(
            params_ptr, bmax_ptr, bsum_ptr, bound_ptr, tcount_ptr, tmass_ptr, row, nb, NB, PIVOTS
        )
        ahead = tl.num_programs(1).to(tl.int64) * nb * PIVOTS
        inside = of_range(tcount_ptr, row, nb, i, j, ahead, NB, PIVOTS)
        count = tl.sum(inside)
        if count <= LIST:
            temperature = parameter(params_ptr, row, TEMPERATURE).to(tl.float32)
            lane = tl.arange(0, LIST)
            live = lane < count
            value_ptr = list_ptr + row.to(tl.int64) * (2 * LIST)
            y = tl.load(value_ptr + lane, mask=live, other=0).to(tl.float32, bitcast=True)
            key = tl.where(live, ordered(y), -FAR - 1)
            e = tl.where(live, mass_of(y, best, scale).to(tl.float64), 0.0)
            cut = lo
            if count > 0:
                first = ordered(lo).to(tl.int64)
                last = ordered(best).to(tl.int64)
                last = tl.maximum(tl.minimum(last, ordered(hi).to(tl.int64)), first)
                k = parameter(params_ptr, row, TOP_K)
                by_mass = k == 0
                left = tl.where(by_mass, (parameter(params_ptr, row, TOP_P) * total - above_mass) * UNIT, k - above)
                weight = tl.where(by_mass, (e * UNIT).to(tl.int64), live.to(tl.int64))
                at_cut = largest_key(key, weight, first, last, tl.ceil(left).to(tl.int64))
                s = scaled(unordered(at_cut.to(tl.int32)), best, temperature)
                bottom = ordered(tl.full((), -3.4028234663852886e38, tl.float32)).to(tl.int64)
                cut = smallest_kept(bottom, at_cut, best, temperature, s)
            bound = tl.load(bound_ptr + row)
            # equal s below the range: another kernel's matter, unless they are out by min_p
            if (cut >= lo) | (lo == bound):
                cut = tl.maximum(cut, bound)
                tl.store(cut_ptr + row, cut)
                block = tl.arange(0, NB)
                sum_ptr = sums_ptr + row.to(tl.int64) * LIST
                tl.store(sum_ptr + lane, tl.cumsum(tl.where(y >= cut, e, 0.0), 0))
                tl.debug_barrier()
                end = tl.cumsum(inside, 0)
                upto = tl.load(sum_ptr + end - 1, mask=end > 0, other=0.0)
                before = tl.load(sum_ptr + end - inside - 1, mask=end > inside, other=0.0)
                w = of_blocks(tmass_ptr, row, nb, i, j, ahead, NB, PIVOTS).to(tl.float64)
                w += tl.where(inside > 0, upto - before, 0.0)
                cumulative = tl.cumsum(w, 0)
                target = parameter(params_ptr, row, UNIFORM) * tl.max(cumulative)
                chosen = pick(cumulative, w, target, block)
                rest = target - tl.sum(tl.where(block < chosen, w, 0.0))
                view = row_view(
                    logits_ptr, changed_ptr, counts_ptr, params_ptr, row, stride, changed_stride, counts_stride, RULES
                )
                x = load_block(view, chosen * BLOCK, vocab, BLOCK, RULES)
                f = tl.where(x >= cut, mass_of(x, best, scale), 0.0).to(tl.float64)
                token = pick(tl.cumsum(f, 0), f, rest, chosen * BLOCK + tl.arange(0, BLOCK))
                write_token(out_ptr, n_rows, row, token, token >= 0)
                tl.store(left_ptr + row, 0)
