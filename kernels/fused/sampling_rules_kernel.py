# mypy: disable-error-code="no-untyped-def"
"""Device code of the sampler's rules: rows with bans or biases, copied with these and their penalties applied.

Rows with penalties alone need no copy: load_scores applies them wherever a logit is read.

Token counts of a sequence are int16 [V]: the bits below the sign count the occurrences in the output, up to MOST; the
sign bit says that the token is in the prompt.
"""

import triton
import triton.language as tl

from .sampling_kernel import (
    ALLOW,
    BAD,
    CHANGED,
    COUNTS,
    ENTRIES,
    FIRST,
    FREQUENCY,
    KIND,
    MOST,
    NEVER,
    PRESENCE,
    REPETITION,
    ROW,
    SOURCE,
    parameter,
    penalized,
)

ENTRY = tl.constexpr(3)  # float64 values of an entry: token, bias, and what it is (bits)
ALLOWED = tl.constexpr(1)
BAD_WORD = tl.constexpr(2)
BANNED = tl.constexpr(4)


@triton.jit
def masked(x, masks_ptr, masks_stride, allow, at, keep):
    """X with -inf for the tokens `at` that mask -1 - allow leaves out; allow: the row's parameter, below 0."""
    own_ptr = masks_ptr + (-1 - allow).to(tl.int64) * masks_stride
    words = tl.load(own_ptr + (at >> 5), mask=keep, other=0)
    return tl.where(((words >> (at & 31)) & 1) != 0, x, NEVER)


@triton.jit(do_not_specialize=["vocab"])
def change_rows(
    logits_ptr, params_ptr, ruled_ptr, counts_ptr, masks_ptr, changed_ptr, stride, changed_stride, counts_stride,
    masks_stride, vocab, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (b, i): block b of row ruled[i], copied to changed in float32 and penalized; -inf where it allows few.

    logits fp32 or fp16, changed fp32 [., V], counts int16 [., V], masks int32 [., >= V / 32]: bit t % 32 of word
    t // 32 is 1 where token t may be sampled. ruled: float64, as all parameters.
    """
    row = tl.load(ruled_ptr + tl.program_id(1)).to(tl.int32)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < vocab
    source = parameter(params_ptr, row, SOURCE).to(tl.int64)
    x = tl.load(logits_ptr + source * stride + at, mask=keep, other=0.0).to(tl.float32)
    allow = parameter(params_ptr, row, ALLOW)
    if allow > 0:
        x = tl.full((BLOCK,), NEVER, tl.float32)
    if allow < 0:
        x = masked(x, masks_ptr, masks_stride, allow, at, keep)
    of = parameter(params_ptr, row, COUNTS).to(tl.int64)
    if of >= 0:
        x = penalized(
            x,
            tl.load(counts_ptr + of * counts_stride + at, mask=keep, other=0),
            parameter(params_ptr, row, REPETITION).to(tl.float32),
            parameter(params_ptr, row, PRESENCE).to(tl.float32),
            parameter(params_ptr, row, FREQUENCY).to(tl.float32),
        )
    tl.store(changed_ptr + parameter(params_ptr, row, CHANGED).to(tl.int64) * changed_stride + at, x, mask=keep)


@triton.jit
def anything_left(logits_ptr, entries_ptr, entries, allow, vocab, bad_left, BLOCK: tl.constexpr, PART: tl.constexpr):
    """True if a row has a token above -inf that it allows and that is no bad word.

    bad_left: how many bad words are above -inf and allowed.
    """
    some = 0
    i = 0
    if allow > 0:
        while (i < entries) & (some == 0):
            j = i + tl.arange(0, PART)
            live = j < entries
            flags = tl.load(entries_ptr + j * ENTRY + 2, mask=live, other=0.0).to(tl.int32)
            token = tl.load(entries_ptr + j * ENTRY, mask=live, other=0.0).to(tl.int32)
            x = tl.load(logits_ptr + token, mask=live, other=NEVER).to(tl.float32)
            some += tl.sum(((x != NEVER) & ((flags & (ALLOWED | BAD_WORD)) == ALLOWED)).to(tl.int32))
            i += PART
    else:
        while (i < vocab) & (some <= bad_left):
            at = i + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + at, mask=at < vocab, other=NEVER).to(tl.float32)
            some += tl.sum((x != NEVER).to(tl.int32))
            i += BLOCK
        some -= bad_left
    return some > 0


@triton.jit(do_not_specialize=["vocab"])
def change_entries(
    logits_ptr, params_ptr, ruled_ptr, entries_ptr, counts_ptr, masks_ptr, changed_ptr, stride, changed_stride,
    counts_stride, masks_stride, vocab, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Program i: the single tokens that row ruled[i] names, after change_rows.

    entries float64 [., 3]: token, bias, bits; one entry a token. A token is -inf if it is banned, a bad word, not in
    the row's mask, or not allowed in a row that allows few; bad words count only where something else is left.
    """
    row = tl.load(ruled_ptr + tl.program_id(0)).to(tl.int32)
    entries = parameter(params_ptr, row, ENTRIES).to(tl.int32)
    if entries > 0:
        own_ptr = entries_ptr + parameter(params_ptr, row, FIRST).to(tl.int64) * ENTRY
        row_ptr = logits_ptr + parameter(params_ptr, row, SOURCE).to(tl.int64) * stride
        allow = parameter(params_ptr, row, ALLOW)
        needs = tl.where(allow > 0, ALLOWED, 0)
        never = tl.full((), BANNED | BAD_WORD, tl.int32)
        if parameter(params_ptr, row, BAD) > 0:
            bad_left = 0
            for i in range(0, entries, PART):
                j = i + tl.arange(0, PART)
                flags = tl.load(own_ptr + j * ENTRY + 2, mask=j < entries, other=0.0).to(tl.int32)
                token = tl.load(own_ptr + j * ENTRY, mask=j < entries, other=0.0).to(tl.int32)
                x = tl.load(row_ptr + token, mask=j < entries, other=NEVER).to(tl.float32)
                bad_left += tl.sum(((x != NEVER) & ((flags & BAD_WORD) != 0)).to(tl.int32))
            if anything_left(row_ptr, own_ptr, entries, allow, vocab, bad_left, BLOCK, PART) == 0:
                never = tl.full((), BANNED, tl.int32)
        of = parameter(params_ptr, row, COUNTS).to(tl.int64)
        to_ptr = changed_ptr + parameter(params_ptr, row, CHANGED).to(tl.int64) * changed_stride
        for i in range(0, entries, PART):
            j = i + tl.arange(0, PART)
            live = j < entries
            token = tl.load(own_ptr + j * ENTRY, mask=live, other=0.0).to(tl.int32)
            bias = tl.load(own_ptr + j * ENTRY + 1, mask=live, other=0.0).to(tl.float32)
            flags = tl.load(own_ptr + j * ENTRY + 2, mask=live, other=0.0).to(tl.int32)
            x = tl.load(row_ptr + token, mask=live, other=0.0).to(tl.float32)
            out = ((flags & never) != 0) | ((flags & needs) != needs)
            x = tl.where(out, NEVER, x) + bias
            if allow < 0:
                x = masked(x, masks_ptr, masks_stride, allow, token, live)
            if of >= 0:
                x = penalized(
                    x,
                    tl.load(counts_ptr + of * counts_stride + token, mask=live, other=0),
                    parameter(params_ptr, row, REPETITION).to(tl.float32),
                    parameter(params_ptr, row, PRESENCE).to(tl.float32),
                    parameter(params_ptr, row, FREQUENCY).to(tl.float32),
                )
            tl.store(to_ptr + token, x, mask=live)


@triton.jit(do_not_specialize=["n_rows"])
def count_tokens(params_ptr, out_ptr, counts_ptr, counts_stride, n_rows, PART: tl.constexpr):
    """Add each counted row's token (out int64 [rows]) to its counts. One program for all rows."""
    for i in range(0, n_rows, PART):
        row = i + tl.arange(0, PART)
        here = row < n_rows
        kind = tl.load(params_ptr + row * ROW + KIND, mask=here, other=0.0)
        of = tl.load(params_ptr + row * ROW + COUNTS, mask=here, other=-1.0).to(tl.int64)
        live = here & (kind > 0) & (of >= 0)
        at = counts_ptr + of * counts_stride + tl.load(out_ptr + row, mask=here, other=0)
        times = tl.load(at, mask=live, other=0)
        tl.store(at, tl.where((times & MOST) == MOST, times, times + 1).to(tl.int16), mask=live)
