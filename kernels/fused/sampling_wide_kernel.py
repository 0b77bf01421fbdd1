# mypy: disable-error-code="no-untyped-def"
"""Device code of the sampler for flat distributions with one limit: the cut's range narrowed by all blocks at once.

    tally_blocks, choose_range, twice    each block counts its logits, and their mass, from each of PIVOTS pivots up;
                                         the row's sums say between which two the cut lies
    gather_range                         each block writes its logits in that range to the row's list
    finish_wide                          the exact cut within the list, the block that a draw falls in, and the token

Where no more than min_p is asked for the cut is known, and one tally does. What finish_wide cannot do (too many logits
between two pivots) is left to finish_flat, as are rows with both top_k and top_p.

A row's state is float64, STATE values in the columns named below. finish_cut writes the first five.
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
    load_block,
    mass_of,
    parameter,
    pick,
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

FIRST_INDEX = tl.constexpr(5)  # of HIGH's pivot in the first tally; PIVOTS: none
SECOND_INDEX = tl.constexpr(6)  # the same in the second tally; PIVOTS: the first tally's
ABOVE = tl.constexpr(7)  # count of logits from HIGH up
ABOVE_MASS = tl.constexpr(8)  # their mass
COUNT = tl.constexpr(9)  # logits in the final range


@triton.jit
def is_wide(params_ptr, left_ptr, row):
    """True if finish_cut left the row (left = -1) and it has not both top_k and top_p."""
    both = (parameter(params_ptr, row, TOP_K) > 0) & (parameter(params_ptr, row, TOP_P) <= 1.0)
    return (parameter(params_ptr, row, KIND) == CUT) & (tl.load(left_ptr + row) < 0) & (both == 0)


@triton.jit
def seeks(params_ptr, row):
    """True if the cut has to be sought: it is a matter of top_k or top_p."""
    return (parameter(params_ptr, row, TOP_K) > 0) | (parameter(params_ptr, row, TOP_P) <= 1.0)


@triton.jit
def spread(state_ptr, PIVOTS: tl.constexpr):
    """float32 [PIVOTS]: LOW and evenly spaced values below HIGH, none smaller than the one before."""
    part = tl.arange(0, PIVOTS).to(tl.float64) / PIVOTS
    low = tl.load(state_ptr + LOW)
    high = tl.load(state_ptr + HIGH)
    values = (low + (tl.minimum(high, -LEAST) - low) * part).to(tl.float32)
    below = ordered(high.to(tl.float32)) - 1
    below = unordered(tl.where(below == -1, -2, below))
    return tl.maximum(tl.minimum(values, below), low.to(tl.float32))


@triton.jit
def one_of(values, i, SIZE: tl.constexpr):
    """Element i of a tensor [SIZE]; 0 outside."""
    return tl.sum(tl.where(tl.arange(0, SIZE) == i, values, 0))


@triton.jit
def add_part(counts, masses, x, pivot, best, scale, PIVOTS: tl.constexpr, PART: tl.constexpr):
    """Counts and masses [PIVOTS, PART] with the logits x [PART] added where they reach a pivot."""
    reach = (x[None, :] >= pivot[:, None]).to(tl.float32)
    e = tl.broadcast_to(mass_of(x, best, scale)[None, :], (PIVOTS, PART))
    return counts + reach, tl.fma(reach, e, masses)


@triton.jit(do_not_specialize=["vocab", "nb"])
def tally_blocks(
    logits_ptr, changed_ptr, counts_ptr, params_ptr, left_ptr, state_ptr, tcount_ptr, tmass_ptr, stride,
    changed_stride, counts_stride, vocab, nb, SECOND: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
    PIVOTS: tl.constexpr, RULES: tl.constexpr,
):  # fmt: skip
    """Program (b, row) of the first or SECOND tally: block b's count and mass from each pivot up.

    tcount int32, tmass fp32 [2, rows, nb, PIVOTS]. Where nothing is sought, only the first pivot of the first tally.
    """
    b = tl.program_id(0)
    row = tl.program_id(1)
    if is_wide(params_ptr, left_ptr, row):
        state_ptr += row.to(tl.int64) * STATE
        best = tl.load(state_ptr + BEST).to(tl.float32)
        scale = inverse(parameter(params_ptr, row, TEMPERATURE))
        to = row.to(tl.int64) * nb * PIVOTS + b * PIVOTS + tl.arange(0, PIVOTS)
        if SECOND:
            to += tl.num_programs(1).to(tl.int64) * nb * PIVOTS
        view = row_view(
            logits_ptr, changed_ptr, counts_ptr, params_ptr, row, stride, changed_stride, counts_stride, RULES
        )
        if seeks(params_ptr, row):
            pivot = spread(state_ptr, PIVOTS)
            counts = tl.zeros((PIVOTS, PART), tl.float32)
            masses = tl.zeros((PIVOTS, PART), tl.float32)
            for start in range(b * BLOCK, b * BLOCK + BLOCK, 2 * PART):
                x = load_block(view, start, vocab, PART, RULES)
                y = load_block(view, start + PART, vocab, PART, RULES)
                counts, masses = add_part(counts, masses, x, pivot, best, scale, PIVOTS, PART)
                counts, masses = add_part(counts, masses, y, pivot, best, scale, PIVOTS, PART)
            tl.store(tcount_ptr + to, tl.sum(counts, axis=1).to(tl.int32))
            tl.store(tmass_ptr + to, tl.sum(masses, axis=1))
        elif not SECOND:
            x = load_block(view, b * BLOCK, vocab, BLOCK, RULES)
            reach = x >= tl.load(state_ptr + LOW).to(tl.float32)
            first = row.to(tl.int64) * nb * PIVOTS + b * PIVOTS
            tl.store(tcount_ptr + first, tl.sum(reach.to(tl.int32)))
            tl.store(tmass_ptr + first, tl.sum(tl.where(reach, mass_of(x, best, scale), 0.0)))


@triton.jit
def of_blocks(t_ptr, row, nb, first, second, ahead, NB: tl.constexpr, PIVOTS: tl.constexpr):
    """Each block's tally [NB] from HIGH up, where `first` and `second` are its indices."""
    block = tl.arange(0, NB)
    at = row.to(tl.int64) * nb * PIVOTS + block * PIVOTS
    in_second = second < PIVOTS
    at = tl.where(in_second, at + ahead + second, at + first)
    return tl.load(t_ptr + at, mask=block < tl.where(in_second | (first < PIVOTS), nb, 0), other=0)


@triton.jit(do_not_specialize=["nb"])
def choose_range(
    params_ptr, left_ptr, state_ptr, tcount_ptr, tmass_ptr, starts_ptr, nb, SECOND: tl.constexpr, NB: tl.constexpr,
    PIVOTS: tl.constexpr,
):  # fmt: skip
    """Program (0, row): the pivots around the cut, LOW <= cut < HIGH, from the first or SECOND tally, into the state.

    Where nothing is sought, or too few logits are there, LOW = HIGH = the first pivot: the cut. With min_p the first
    tally finds TOTAL, the mass that top_p is a part of. After the SECOND: starts int32 [rows, NB], where each block's
    logits in the range begin in the row's list.
    """
    row = tl.program_id(1)
    if is_wide(params_ptr, left_ptr, row):
        state_ptr += row.to(tl.int64) * STATE
        ahead = tl.num_programs(1).to(tl.int64) * nb * PIVOTS
        block = tl.arange(0, NB)
        pivots = tl.arange(0, PIVOTS)
        at = row.to(tl.int64) * nb * PIVOTS + block[:, None] * PIVOTS + pivots[None, :]
        if SECOND:
            at += ahead
        sought = seeks(params_ptr, row)
        # only the first pivot's tally was written where nothing is sought
        here = tl.broadcast_to((block < nb)[:, None], (NB, PIVOTS))
        here &= tl.broadcast_to((pivots < tl.where(sought, PIVOTS, 1))[None, :], (NB, PIVOTS))
        counts = tl.sum(tl.load(tcount_ptr + at, mask=here, other=0), axis=0)
        masses = tl.sum(tl.load(tmass_ptr + at, mask=here, other=0.0).to(tl.float64), axis=0)
        values = spread(state_ptr, PIVOTS)
        k = parameter(params_ptr, row, TOP_K)
        p = parameter(params_ptr, row, TOP_P)
        total = tl.load(state_ptr + TOTAL)
        if not SECOND:  # noqa: SIM102 (a condition on a tensor cannot join one known at compile time)
            if parameter(params_ptr, row, LOG_MIN_P) > NEVER:
                total = tl.max(masses)
                tl.store(state_ptr + TOTAL, total)
        reached = tl.where(k > 0, counts.to(tl.float64), masses) >= tl.where(k > 0, k, p * total)
        index = tl.sum(reached.to(tl.int32)) * sought.to(tl.int32)
        if SECOND:  # noqa: SIM102
            if sought == 0:
                index = tl.full((), PIVOTS, tl.int32)
        low = one_of(values, tl.maximum(index - 1, 0), PIVOTS)
        inside = index < PIVOTS
        tl.debug_barrier()
        if inside:
            tl.store(state_ptr + HIGH, one_of(values, index, PIVOTS).to(tl.float64))
            tl.store(state_ptr + ABOVE, one_of(counts, index, PIVOTS).to(tl.float64))
            tl.store(state_ptr + ABOVE_MASS, one_of(masses, index, PIVOTS))
        if sought:
            tl.store(state_ptr + LOW, low.to(tl.float64))
        if SECOND:
            tl.store(state_ptr + SECOND_INDEX, index.to(tl.float64))
            first = tl.load(state_ptr + FIRST_INDEX).to(tl.int32)
            from_low = row.to(tl.int64) * nb * PIVOTS + block * PIVOTS + ahead + tl.maximum(index - 1, 0)
            some = sought & (index > 0)
            inside_range = tl.load(tcount_ptr + from_low, mask=block < tl.where(some, nb, 0), other=0)
            upper = of_blocks(tcount_ptr, row, nb, first, index, ahead, NB, PIVOTS)
            inside_range -= tl.where(some, upper, 0)
            tl.store(starts_ptr + row * NB + block, tl.cumsum(inside_range, 0) - inside_range)
            tl.store(state_ptr + COUNT, tl.sum(inside_range).to(tl.float64))
        else:
            tl.store(state_ptr + FIRST_INDEX, index.to(tl.float64))
            if index == PIVOTS:
                tl.store(state_ptr + ABOVE, 0.0)
                tl.store(state_ptr + ABOVE_MASS, 0.0)


@triton.jit(do_not_specialize=["vocab", "nb"])
def gather_range(
    logits_ptr, changed_ptr, counts_ptr, params_ptr, left_ptr, state_ptr, starts_ptr, list_ptr, stride,
    changed_stride, counts_stride, vocab, nb, BLOCK: tl.constexpr, NB: tl.constexpr, LIST: tl.constexpr,
    RULES: tl.constexpr,
):  # fmt: skip
    """Program (b, row): block b's logits in the final range, to their places in the row's list (bits, tokens)."""
    b = tl.program_id(0)
    row = tl.program_id(1)
    if is_wide(params_ptr, left_ptr, row):
        state_ptr += row.to(tl.int64) * STATE
        count = tl.load(state_ptr + COUNT).to(tl.int32)
        start = tl.load(starts_ptr + row * NB + b)
        end = tl.load(starts_ptr + row * NB + b + 1, mask=b + 1 < NB, other=0)
        end = tl.where(b + 1 < nb, end, count)
        if (count <= LIST) & (end > start):
            view = row_view(
                logits_ptr, changed_ptr, counts_ptr, params_ptr, row, stride, changed_stride, counts_stride, RULES
            )
            y = load_block(view, b * BLOCK, vocab, BLOCK, RULES)
            keep = y >= tl.load(state_ptr + LOW).to(tl.float32)
            keep &= y < tl.load(state_ptr + HIGH).to(tl.float32)
            to = start + tl.cumsum(keep.to(tl.int32), 0) - 1
            value_ptr = list_ptr + row.to(tl.int64) * (2 * LIST)
            tl.store(value_ptr + to, y.to(tl.int32, bitcast=True), mask=keep)
            tl.store(value_ptr + LIST + to, b * BLOCK + tl.arange(0, BLOCK), mask=keep)


@triton.jit
def cut_in_range(params_ptr, state_ptr, key, e, live, row):
    """float32: the smallest logit kept, from the keys and float64 masses of those in the final range."""
    best = tl.load(state_ptr + BEST).to(tl.float32)
    temperature = parameter(params_ptr, row, TEMPERATURE).to(tl.float32)
    first = ordered(tl.load(state_ptr + LOW).to(tl.float32)).to(tl.int64)
    last = tl.minimum(ordered(best), ordered(tl.load(state_ptr + HIGH).to(tl.float32))).to(tl.int64)
    k = parameter(params_ptr, row, TOP_K)
    mass = parameter(params_ptr, row, TOP_P) * tl.load(state_ptr + TOTAL) - tl.load(state_ptr + ABOVE_MASS)
    left = tl.where(k > 0, k - tl.load(state_ptr + ABOVE), mass * UNIT)
    weight = tl.where(k > 0, live.to(tl.int64), (e * UNIT).to(tl.int64))
    at_cut = largest_key(key, weight, first, tl.maximum(last, first), tl.ceil(left).to(tl.int64))
    s = scaled(unordered(at_cut.to(tl.int32)), best, temperature)
    bottom = ordered(tl.full((), LEAST, tl.float32)).to(tl.int64)
    return smallest_kept(bottom, at_cut, best, temperature, s)


@triton.jit(do_not_specialize=["n_rows", "vocab", "nb"])
def finish_wide(
    logits_ptr, changed_ptr, counts_ptr, params_ptr, left_ptr, state_ptr, tmass_ptr, starts_ptr, list_ptr, sums_ptr,
    cut_ptr, out_ptr, stride, changed_stride, counts_stride, n_rows, vocab, nb, BLOCK: tl.constexpr,
    NB: tl.constexpr, PIVOTS: tl.constexpr, LIST: tl.constexpr, RULES: tl.constexpr,
):  # fmt: skip
    """Program (0, row): the cut and the token; left is then 0. sums: float64 [rows, LIST] scratch."""
    row = tl.program_id(1)
    if is_wide(params_ptr, left_ptr, row):
        state_ptr += row.to(tl.int64) * STATE
        count = tl.load(state_ptr + COUNT).to(tl.int32)
        if count <= LIST:
            best = tl.load(state_ptr + BEST).to(tl.float32)
            scale = inverse(parameter(params_ptr, row, TEMPERATURE))
            low = tl.load(state_ptr + LOW).to(tl.float32)
            bound = tl.load(state_ptr + BOUND).to(tl.float32)
            lane = tl.arange(0, LIST)
            live = lane < count
            value_ptr = list_ptr + row.to(tl.int64) * (2 * LIST)
            y = tl.load(value_ptr + lane, mask=live, other=0).to(tl.float32, bitcast=True)
            e = tl.where(live, mass_of(y, best, scale).to(tl.float64), 0.0)
            cut = low
            if count > 0:
                cut = cut_in_range(params_ptr, state_ptr, tl.where(live, ordered(y), -FAR - 1), e, live, row)
            # equal s below the range are another kernel's matter, unless they are out by min_p
            if (cut >= low) | (low == bound):
                cut = tl.maximum(cut, bound)
                tl.store(cut_ptr + row, cut)
                block = tl.arange(0, NB)
                sum_ptr = sums_ptr + row.to(tl.int64) * LIST
                tl.store(sum_ptr + lane, tl.cumsum(tl.where(y >= cut, e, 0.0), 0))
                tl.debug_barrier()
                start = tl.load(starts_ptr + row * NB + block)
                end = tl.load(starts_ptr + row * NB + block + 1, mask=block + 1 < NB, other=0)
                end = tl.where(block + 1 < nb, end, count)
                some = (end > start) & (block < nb)
                upto = tl.load(sum_ptr + end - 1, mask=some, other=0.0)
                before = tl.load(sum_ptr + start - 1, mask=some & (start > 0), other=0.0)
                ahead = tl.num_programs(1).to(tl.int64) * nb * PIVOTS
                i = tl.load(state_ptr + FIRST_INDEX).to(tl.int32)
                j = tl.load(state_ptr + SECOND_INDEX).to(tl.int32)
                w = of_blocks(tmass_ptr, row, nb, i, j, ahead, NB, PIVOTS).to(tl.float64) + (upto - before)
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
