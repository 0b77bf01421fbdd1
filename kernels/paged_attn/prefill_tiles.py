# mypy: disable-error-code="no-untyped-def"
"""The order in which tiles of new tokens are worked on, made on the device: those with most keys first."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILES_A_PROGRAM = 64
SEQUENCES_AT_ONCE = 32


@triton.jit(do_not_specialize=["P", "N"], do_not_specialize_on_alignment=["start_ptr", "len_ptr"])
def order_tiles(start_ptr, len_ptr, tile_ptr, P, N, ROWS: tl.constexpr, BP: tl.constexpr, BT: tl.constexpr):
    """tile int32 [N, 8]: every tile of ROWS tokens, the one with most keys first; then sequence -1.

    An entry is (sequence, tile, the sequence's first row of q, its new tokens, its tokens before these, unused): all
    that a program would otherwise look up one after the other.

    start int32 [P + 1], len int32 [P]: see paged_prefill. N is at least start[P] // ROWS + P: sequence p's tiles are
    the candidates from start[p] // ROWS + p on. A tile's place is the number of tiles with more keys (ties: of earlier
    sequences), which needs no sorting: the tiles of one sequence end ROWS keys apart.
    """
    i = tl.program_id(0) * BT + tl.arange(0, BT)
    seq = tl.full((BT,), -1, tl.int32)
    total = 0
    for p0 in range(0, P, BP):
        p = p0 + tl.arange(0, BP)
        start = tl.load(start_ptr + p, mask=p < P, other=0)
        stop = tl.load(start_ptr + p + 1, mask=p < P, other=0)
        seq += tl.sum(((start // ROWS + p)[None, :] <= i[:, None]) & (p < P)[None, :], 1).to(tl.int32)
        total += tl.sum((stop - start + ROWS - 1) // ROWS)
    own = tl.maximum(seq, 0)
    start = tl.load(start_ptr + own)
    count = tl.load(start_ptr + own + 1) - start
    tile = i - (start // ROWS + own)
    context = tl.load(len_ptr + own) - count
    last = context + tl.minimum((tile + 1) * ROWS, count)
    rank = tl.zeros((BT,), tl.int32)
    for p0 in range(0, P, BP):
        p = p0 + tl.arange(0, BP)
        begin = tl.load(start_ptr + p, mask=p < P, other=0)
        size = tl.load(start_ptr + p + 1, mask=p < P, other=0) - begin
        others = tl.load(len_ptr + p, mask=p < P, other=0) - size
        before = last[:, None] - others[None, :] - (p[None, :] < own[:, None]).to(tl.int32)
        more = (size[None, :] + ROWS - 1) // ROWS - tl.maximum(before, 0) // ROWS
        rank += tl.sum(tl.where(before < size[None, :], more, 0), 1)
    exists = (seq >= 0) & (i < N) & (tile * ROWS < count)
    entry = tile_ptr + rank * 8
    tl.store(entry, own, mask=exists)
    tl.store(entry + 1, tile, mask=exists)
    tl.store(entry + 2, start, mask=exists)
    tl.store(entry + 3, count, mask=exists)
    tl.store(entry + 4, context, mask=exists)
    tl.store(tile_ptr + i * 8, -1, mask=(i >= total) & (i < N))


def tile_count(tokens: int, sequences: int, rows: int, max_query_len: int) -> int:
    """Most tiles of `rows` tokens that `sequences` chunks of `tokens` tokens in all can have."""
    return min(tokens // rows + sequences, sequences * -(-max_query_len // rows))


def prefill_tiles(query_starts: torch.Tensor, seq_lens: torch.Tensor, tokens: int, rows: int) -> torch.Tensor:
    """int32 [tokens // rows + P, 8]: tiles of `rows` tokens, most keys first, then sequence -1; see order_tiles.

    query_starts int32 [P + 1], seq_lens int32 [P] on the device; tokens: at least query_starts[P].
    """
    sequences = seq_lens.shape[0]
    count = tokens // rows + sequences
    tiles = torch.empty(count, 8, dtype=torch.int32, device=seq_lens.device)
    block = min(SEQUENCES_AT_ONCE, triton.next_power_of_2(sequences))
    order_tiles[(-(-count // TILES_A_PROGRAM),)](
        query_starts, seq_lens, tiles, sequences, count, ROWS=rows, BP=block, BT=TILES_A_PROGRAM, num_warps=4
    )
    return tiles
