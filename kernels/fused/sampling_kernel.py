# mypy: disable-error-code="no-untyped-def"
"""Device code of the sampler: one read of the logits, then one program a row.

`block_stats` reads every logit once and leaves, for each block of BLOCK tokens, the largest logit and the sum of
exp((logit - largest) / T), and for each group of GROUP tokens the largest logit. `finish_plain` turns a row's blocks
into its token: the first largest logit, or one draw by the inverse of the cumulative distribution in token order, for
which it reads the one block again that the draw falls in. Rows with top_k, top_p or min_p are finished in
sampling_cut_kernel.py.

BLOCK and the number of warps are constants, never chosen by batch size: sums then have one order, and a row's token
does not depend on the rows beside it.

Parameters of a row are float64, ROW of them, in the columns named below.
"""

import triton
import triton.language as tl

ROW = tl.constexpr(16)
KIND = tl.constexpr(0)  # 0: no row, 1: greedy, 2: drawn, 3: drawn from what top_k, top_p and min_p leave
SOURCE = tl.constexpr(1)  # row of the logits
CHANGED = tl.constexpr(2)  # row of the buffer of changed logits, or -1
TEMPERATURE = tl.constexpr(3)
TOP_K = tl.constexpr(4)  # 0: no limit
TOP_P = tl.constexpr(5)  # 2: no limit
LOG_MIN_P = tl.constexpr(6)  # -inf: no limit
UNIFORM = tl.constexpr(7)  # in [0, 1)
REPETITION = tl.constexpr(8)
PRESENCE = tl.constexpr(9)
FREQUENCY = tl.constexpr(10)
COUNTS = tl.constexpr(11)  # row of the token counts, or -1
FIRST = tl.constexpr(12)  # of the row's entries
ENTRIES = tl.constexpr(13)  # how many
ALLOW = tl.constexpr(14)  # 1: tokens without an entry that allows them are -inf; -1 - m: those not in mask m are
BAD = tl.constexpr(15)  # how many entries are bad words

GREEDY = tl.constexpr(1)
DRAWN = tl.constexpr(2)
CUT = tl.constexpr(3)

NEVER = tl.constexpr(float("-inf"))
LOG2E = tl.constexpr(1.4426950408889634)
INF_BITS = tl.constexpr(0x7F800000)
FAR = tl.constexpr(0x7FFFFFFF)
MOST = tl.constexpr(32767)  # bits of a token's count


@triton.jit
def parameter(params_ptr, row, COLUMN: tl.constexpr):
    """One float64 parameter of a row."""
    return tl.load(params_ptr + row * ROW + COLUMN)


@triton.jit
def penalized(x, counts, repetition, presence, frequency):
    """X with repetition, frequency and presence penalties; counts: int16, as sampling_rules_kernel.py has them."""
    times = (counts.to(tl.int32) & MOST).to(tl.float32)
    x = tl.where(counts != 0, tl.where(x > 0, tl.math.div_rn(x, repetition), x * repetition), x)
    return x - frequency * times - presence * (times > 0).to(tl.float32)


@triton.jit
def row_view(
    logits_ptr, changed_ptr, counts_ptr, params_ptr, row, stride, changed_stride, counts_stride, RULES: tl.constexpr
):
    """Where a row's logits come from, for load_scores."""
    row_ptr = logits_ptr + parameter(params_ptr, row, SOURCE).to(tl.int64) * stride
    if RULES:
        slot = parameter(params_ptr, row, CHANGED).to(tl.int64)
        of = parameter(params_ptr, row, COUNTS).to(tl.int64)
        return (
            row_ptr,
            slot,
            changed_ptr + slot * changed_stride,
            of,
            counts_ptr + of * counts_stride,
            parameter(params_ptr, row, REPETITION).to(tl.float32),
            parameter(params_ptr, row, PRESENCE).to(tl.float32),
            parameter(params_ptr, row, FREQUENCY).to(tl.float32),
        )
    else:
        return (row_ptr,)


@triton.jit
def load_scores(view, at, keep, RULES: tl.constexpr):
    """Logits `at` of a row in float32, with its rules applied; -inf outside `keep` (None: all).

    From the changed copy where the row has one; else its penalties, which need no copy, are applied here.
    """
    other: tl.constexpr = None if keep is None else NEVER
    if RULES:
        if view[1] >= 0:
            x = tl.load(view[2] + at, mask=keep, other=other)
        else:
            x = tl.load(view[0] + at, mask=keep, other=other).to(tl.float32)
            if view[3] >= 0:
                none: tl.constexpr = None if keep is None else 0
                counts = tl.load(view[4] + at, mask=keep, other=none)
                x = penalized(x, counts, view[5], view[6], view[7])
    else:
        x = tl.load(view[0] + at, mask=keep, other=other).to(tl.float32)
    return x


@triton.jit
def load_block(view, start, vocab, SIZE: tl.constexpr, RULES: tl.constexpr):
    """Logits start .. start + SIZE - 1 of a row as load_scores gives them; -inf from `vocab` on.

    Without a mask wherever it can be: masked loads are wide only if vocab is a multiple of the vector.
    """
    at = start + tl.arange(0, SIZE)
    if start + SIZE <= vocab:
        x = load_scores(view, at, None, RULES)
    else:
        x = load_scores(view, at, at < vocab, RULES)
    return x


@triton.jit
def has_nan(x):
    """True if any of x, float32, is not a number."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > INF_BITS


@triton.jit
def inverse(temperature):
    """log2(e) / T in float32."""
    return ((1.0 / temperature) * LOG2E).to(tl.float32)


@triton.jit
def mass_of(x, best, scale):
    """exp((x - best) / T) where scale = log2(e) / T; 0 for -inf."""
    return tl.exp2((x - best) * scale)


@triton.jit
def row_best(bmax_ptr, row, nb, NB: tl.constexpr):
    """(each block's largest logit, the row's, whether that is a number and finite) of a row of `nb` blocks."""
    block = tl.arange(0, NB)
    m = tl.load(bmax_ptr + row.to(tl.int64) * nb + block, mask=block < nb, other=NEVER)
    best = tl.max(m)
    valid = (tl.abs(best) < float("inf")) & (has_nan(m) == 0)
    return m, best, valid


@triton.jit
def pick(cumulative, mass, target, at):
    """The first of `at` whose cumulative mass exceeds target; the last with any mass where rounding leaves none.

    Only what has a mass is chosen: equal sums may round apart in a parallel scan.
    """
    some = mass > 0
    first = tl.min(tl.where(some & (cumulative > target), at, FAR))
    last = tl.max(tl.where(some, at, 0))
    return tl.where(first < FAR, first, last)


@triton.jit
def write_token(out_ptr, n_rows, row, token, valid):
    """out int64 [2, n_rows]: the token, and 1 if the row had a finite maximum."""
    tl.store(out_ptr + row, token.to(tl.int64))
    tl.store(out_ptr + n_rows + row, valid.to(tl.int64))


@triton.jit
def cuts_by_mass(params_ptr, row):
    """True if top_p is the row's only limit: the cut then is a matter of the whole row's mass."""
    p = parameter(params_ptr, row, TOP_P)
    return (p < 1.0) & (parameter(params_ptr, row, TOP_K) == 0) & (parameter(params_ptr, row, LOG_MIN_P) == NEVER)


@triton.jit(do_not_specialize=["vocab", "nb", "ng"])
def block_stats(
    logits_ptr,
    changed_ptr,
    counts_ptr,
    params_ptr,
    bmax_ptr,
    bsum_ptr,
    gmax_ptr,
    gsum_ptr,
    stride,
    changed_stride,
    counts_stride,
    vocab,
    nb,
    ng,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    SUMS: tl.constexpr,
    CUTS: tl.constexpr,
    RULES: tl.constexpr,
):
    """Program (b, row): statistics of tokens b BLOCK to (b + 1) BLOCK - 1.

    logits fp32 or fp16 [., V], changed fp32, counts int16 (row strides given). Writes bmax and bsum, fp32 [rows, nb];
    with CUTS gmax, fp32 [rows, ng = nb BLOCK / GROUP], for rows that cut, and gsum, each group's sum in units of its
    largest mass, for those that cut by mass alone. A block with a nan has the maximum nan. SUMS: False where every
    row is greedy.
    """
    b = tl.program_id(0)
    row = tl.program_id(1)
    kind = parameter(params_ptr, row, KIND).to(tl.int32)
    if kind > 0:
        view = row_view(
            logits_ptr, changed_ptr, counts_ptr, params_ptr, row, stride, changed_stride, counts_stride, RULES
        )
        x = load_block(view, b * BLOCK, vocab, BLOCK, RULES)
        bad = has_nan(x)
        to = row.to(tl.int64) * ng + b * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        if CUTS:
            groups = tl.max(tl.reshape(x, (BLOCK // GROUP, GROUP)), axis=1)
            m = tl.max(groups)
            if kind == CUT:
                tl.store(gmax_ptr + to, groups)
        else:
            m = tl.max(x)
        if SUMS:
            scale = inverse(parameter(params_ptr, row, TEMPERATURE))
            e = mass_of(x, tl.where(m == NEVER, 0.0, m), scale)
            if CUTS:  # noqa: SIM102 (a condition on a tensor cannot join one known at compile time)
                if (kind == CUT) & cuts_by_mass(params_ptr, row):
                    largest = mass_of(groups, tl.where(m == NEVER, 0.0, m), scale)
                    sums = tl.sum(tl.reshape(e, (BLOCK // GROUP, GROUP)), axis=1)
                    tl.store(gsum_ptr + to, tl.where(largest > 0, sums / largest, 1.0))
            tl.store(bsum_ptr + row.to(tl.int64) * nb + b, tl.sum(e))
        tl.store(bmax_ptr + row.to(tl.int64) * nb + b, tl.where(bad, float("nan"), m))


@triton.jit
def block_masses(m, best, bsum_ptr, row, nb, scale, NB: tl.constexpr):
    """float64 [NB]: each block's sum in units of exp(best / T)."""
    block = tl.arange(0, NB)
    s = tl.load(bsum_ptr + row.to(tl.int64) * nb + block, mask=block < nb, other=0.0)
    return tl.where(m > NEVER, s.to(tl.float64) * mass_of(m, best, scale).to(tl.float64), 0.0)


@triton.jit(do_not_specialize=["n_rows", "vocab", "nb"])
def finish_plain(
    logits_ptr,
    changed_ptr,
    counts_ptr,
    params_ptr,
    bmax_ptr,
    bsum_ptr,
    out_ptr,
    stride,
    changed_stride,
    counts_stride,
    n_rows,
    vocab,
    nb,
    BLOCK: tl.constexpr,
    NB: tl.constexpr,
    DRAWS: tl.constexpr,
    RULES: tl.constexpr,
):
    """Program `row`: the token of a greedy row or of a row drawn from the whole softmax; other rows are left alone.

    bmax, bsum as block_stats wrote them; NB: a power of two of at least nb. DRAWS: False where every row is greedy.
    out: write_token.
    """
    row = tl.program_id(0)
    kind = parameter(params_ptr, row, KIND).to(tl.int32)
    if (kind == GREEDY) | (kind == DRAWN):
        m, best, valid = row_best(bmax_ptr, row, nb, NB)
        best = tl.where(valid, best, 0.0)
        block = tl.arange(0, NB)
        chosen = tl.min(tl.where(m == best, block, FAR))
        rest = tl.full((), 0.0, tl.float64)
        scale = inverse(parameter(params_ptr, row, TEMPERATURE))
        if DRAWS:  # noqa: SIM102
            if kind == DRAWN:
                w = block_masses(m, best, bsum_ptr, row, nb, scale, NB)
                cumulative = tl.cumsum(w, 0)
                target = parameter(params_ptr, row, UNIFORM) * tl.max(cumulative)
                chosen = pick(cumulative, w, target, block)
                rest = target - tl.sum(tl.where(block < chosen, w, 0.0))
        chosen = tl.where(valid, chosen, 0)
        view = row_view(
            logits_ptr, changed_ptr, counts_ptr, params_ptr, row, stride, changed_stride, counts_stride, RULES
        )
        x = load_block(view, chosen * BLOCK, vocab, BLOCK, RULES)
        at = chosen * BLOCK + tl.arange(0, BLOCK)
        token = tl.min(tl.where(x == best, at, FAR))
        if DRAWS:  # noqa: SIM102
            if kind == DRAWN:
                e = mass_of(x, best, scale).to(tl.float64)
                token = pick(tl.cumsum(e, 0), e, rest, at)
        write_token(out_ptr, n_rows, row, tl.where(valid, token, 0), valid)
