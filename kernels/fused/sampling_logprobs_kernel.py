# mypy: disable-error-code="no-untyped-def"
"""Device code for logprobs: of the token itself, its rank, and the most likely tokens, over the raw logits."""

import triton
import triton.language as tl

from .sampling_kernel import FAR, LOG2E, NEVER, mass_of


@triton.jit
def _row_of(rows_ptr, i):
    return tl.load(rows_ptr + i).to(tl.int64)


@triton.jit(do_not_specialize=["width", "vocab", "nb", "ng"])
def raw_stats(
    logits_ptr, rows_ptr, tokens_ptr, bmax_ptr, bsum_ptr, rank_ptr, gmax_ptr, stride, width, vocab, nb, ng,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Program (b, i): block b of line i, which is row rows[2 i] of the logits and token tokens[rows[2 i + 1]].

    logits fp32 or fp16 [., width]; ids from `vocab` on count for the sum alone. Writes bmax, bsum fp32 and rank int32
    (logits above the token's own) [lines, nb], and with TOP gmax fp32 [lines, ng] as block_stats does.
    """
    b = tl.program_id(0)
    i = tl.program_id(1)
    row_ptr = logits_ptr + _row_of(rows_ptr, 2 * i) * stride
    token = tl.load(tokens_ptr + _row_of(rows_ptr, 2 * i + 1))
    own = tl.load(row_ptr + token).to(tl.float32)
    at = b * BLOCK + tl.arange(0, BLOCK)
    if (b + 1) * BLOCK <= width:
        x = tl.load(row_ptr + at).to(tl.float32)
    else:
        x = tl.load(row_ptr + at, mask=at < width, other=NEVER).to(tl.float32)
    m = tl.max(x)
    total = tl.sum(mass_of(x, tl.where(m == NEVER, 0.0, m), LOG2E))
    to = i.to(tl.int64) * nb + b
    tl.store(bmax_ptr + to, m)
    tl.store(bsum_ptr + to, total)
    tl.store(rank_ptr + to, tl.sum(((x > own) & (at < vocab)).to(tl.int32)))
    if TOP:
        x = tl.where(at < vocab, x, NEVER)
        groups = tl.max(tl.reshape(x, (BLOCK // GROUP, GROUP)), axis=1)
        tl.store(gmax_ptr + i.to(tl.int64) * ng + b * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP), groups)


@triton.jit(do_not_specialize=["vocab", "nb", "ng", "top"])
def finish_logprobs(
    logits_ptr, rows_ptr, tokens_ptr, bmax_ptr, bsum_ptr, rank_ptr, gmax_ptr, out_ptr, stride, out_stride, vocab, nb,
    ng, top, NB: tl.constexpr, NG: tl.constexpr, GROUP: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Program i: line i of out, int32 [lines, 2 + 2 most]: logprob (float32 bits), rank, then `top` tokens and their
    logprobs' bits. Equal logits are listed in token order.
    """
    i = tl.program_id(0)
    row_ptr = logits_ptr + _row_of(rows_ptr, 2 * i) * stride
    token = tl.load(tokens_ptr + _row_of(rows_ptr, 2 * i + 1))
    block = tl.arange(0, NB)
    from_ = i.to(tl.int64) * nb + block
    m = tl.load(bmax_ptr + from_, mask=block < nb, other=NEVER)
    s = tl.load(bsum_ptr + from_, mask=block < nb, other=0.0)
    best = tl.max(m)
    total = tl.sum(tl.where(m > NEVER, s.to(tl.float64) * mass_of(m, best, LOG2E).to(tl.float64), 0.0))
    log_total = tl.log(total.to(tl.float32))
    rank = tl.sum(tl.load(rank_ptr + from_, mask=block < nb, other=0)) + 1
    line = out_ptr + i.to(tl.int64) * out_stride
    own = tl.load(row_ptr + token).to(tl.float32)
    tl.store(line, (own - best - log_total).to(tl.int32, bitcast=True))
    tl.store(line + 1, rank)
    if TOP:
        group = tl.arange(0, NG)
        g = tl.load(gmax_ptr + i.to(tl.int64) * ng + group, mask=group < ng, other=NEVER)
        real = group * GROUP < vocab
        last = tl.full((), float("inf"), tl.float32)
        last_at = -1
        for j in range(top):
            largest = tl.max(tl.where(real, g, NEVER))
            which = tl.min(tl.where(real & (g == largest), group, FAR))
            which = tl.where(which == FAR, 0, which)
            at = which * GROUP + tl.arange(0, GROUP)
            x = tl.load(row_ptr + at, mask=at < vocab, other=NEVER).to(tl.float32)
            # what comes after the one before, by value and then by token
            open_ = (at < vocab) & ((x < last) | ((x == last) & (at > last_at)))
            value = tl.max(tl.where(open_, x, NEVER))
            where = tl.min(tl.where(open_ & (x == value), at, FAR))
            later = open_ & ((x < value) | (at > where))
            tl.store(line + 2 + j, where)
            tl.store(line + 2 + top + j, (value - best - log_total).to(tl.int32, bitcast=True))
            g = tl.where(group == which, tl.max(tl.where(later, x, NEVER)), g)
            # a group with nothing left is out, also where its logits are -inf
            real = real & ((group != which) | (tl.max(later.to(tl.int32)) > 0))
            last = value
            last_at = where
