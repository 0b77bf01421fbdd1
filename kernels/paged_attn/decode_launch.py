"""How a decode step is launched: constants that follow from the cache, and `pick_decode`, the choice of parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .decode_kinds import KIND_NUMBERS

SM_COUNT = {75: 40, 80: 108, 86: 84, 89: 128, 90: 132}
WIDE_HEAD = 192


@dataclass(frozen=True)
class DecodeLaunch:
    """One launch of the decode kernel.

    warps: of a program. tokens: of each warp in a tile, a power of two from 16. fetch: see the kernel (0 takes the
    fewest registers, 3 keeps most loads in flight). per_sm: programs that a multiprocessor runs at once. min_tiles: the
    fewest tiles worth a program. registers: the most a thread may have, or None for the compiler's choice. skip: tiles
    that lie within a sequence are not masked, at the cost of a few registers. ahead: a tile is brought to L2 while the
    one before it is worked on. rounds: of programs that work is shared out to. pdl: programmatic dependent launch.
    """

    warps: int = 4
    tokens: int = 16
    fetch: int = 2
    per_sm: int = 3
    min_tiles: int = 2
    registers: int | None = None
    skip: bool = False
    ahead: bool = False
    rounds: int = 1
    pdl: bool = False

    @property
    def tile(self) -> int:
        """Tokens of a tile."""
        return self.warps * self.tokens


@dataclass(frozen=True)
class DecodeShape:
    """What the kernel's constants follow from.

    kind: of the cache. head_dim: D. group: query heads of a KV head. block_size: tokens a block. key_offsets: of a key
    of an int4 cache, 1 or 2.
    """

    kind: str
    head_dim: int
    group: int
    block_size: int
    key_offsets: int = 1

    @property
    def padded(self) -> int:
        """D as a power of two, at least 64."""
        return max(64, 1 << (self.head_dim - 1).bit_length())

    @property
    def row_groups(self) -> int:
        """Groups of 8 query rows served by one program: 1 or 2; wide heads leave registers for 1."""
        return 1 if self.group <= 8 or self.head_dim >= WIDE_HEAD else 2

    @property
    def rows(self) -> int:
        """Query rows of a program."""
        return 8 * self.row_groups

    @property
    def live(self) -> int:
        """Rows of a program that are some head's: the group as a power of two, at most `rows`."""
        return min(self.rows, 1 << (self.group - 1).bit_length())

    @property
    def passes(self) -> int:
        """Programs that read a KV head's tokens, for all its query heads."""
        return math.ceil(self.group / self.rows)

    @property
    def elements_a_word(self) -> int:
        """Cached elements in 4 bytes."""
        return {"float16": 2, "bfloat16": 2, "int8": 4, "fp8": 4, "int4": 8}[self.kind]

    def vector(self, lanes: int, chunks: int = 1) -> int:
        """Words of a token that each of `lanes` lanes loads at once, in `chunks` or more: up to 4, as aligned."""
        words = self.head_dim // self.elements_a_word
        return min(4, self.padded // self.elements_a_word // (lanes * chunks), words & -words)

    def constants(self, launch: DecodeLaunch, kv_heads: int) -> dict[str, int | bool]:
        """The kernel's constants, but for SB, HAS_CAP, HAS_WINDOW and ASM."""
        return {
            "KIND": KIND_NUMBERS[self.kind],
            "OFFSETS": self.key_offsets,
            "D": self.head_dim,
            "DP": self.padded,
            "BS": self.block_size,
            "SHIFT": self.block_size.bit_length() - 1,
            "GROUP": self.group,
            "HKV": kv_heads,
            "H": self.row_groups,
            "LIVE": self.live,
            "VK": self.vector(4, 1 if self.kind == "int4" else 2),
            "VV": self.vector(8),
            "WARPS": launch.warps,
            "TOK": launch.tokens,
            "TILE_SHIFT": launch.tile.bit_length() - 1,
            "FETCH": launch.fetch,
            "SKIP": launch.skip,
            "AHEAD": launch.ahead,
            "PDL": launch.pdl,
        }


def pick_decode(shape: DecodeShape, rows: int, max_seq_len: int, sm: int) -> DecodeLaunch:
    """The launch for `rows` sequences of at most `max_seq_len` tokens on compute capability `sm`. Pure.

    What limits it are registers: a lane's share of a tile of keys and of one of values is in flight at once, 64
    registers each at most. With asynchronous memory to fill, one warp a program was the fastest on an H200 for every
    kind, batch and context (benchmarks/attn_decode.py --sweep); Turing's rule is set so that nothing spills. Bringing
    tiles to L2 makes int4 a tenth faster there, whose loads the assembler puts off the most, and other kinds slower.
    """
    return replace(_tiles(shape, sm), pdl=sm >= 90)


def _tiles(shape: DecodeShape, sm: int) -> DecodeLaunch:
    bytes_a_lane = {"float16": 4, "bfloat16": 4, "int8": 2, "fp8": 2, "int4": 1}[shape.kind]
    wide = shape.padded >= 256
    if sm < 80:
        tokens = 16 if wide or shape.row_groups == 2 or bytes_a_lane == 4 else 32
        crowded = shape.row_groups == 2 and shape.kind == "int4" and shape.key_offsets == 2
        fetch = 0 if wide or crowded else 1 if shape.row_groups == 2 else 2
        return DecodeLaunch(4, tokens, fetch, per_sm=2, registers=255, skip=True)
    ahead = shape.kind == "int4"
    if wide:
        fetch = 0 if bytes_a_lane == 4 else 2
        return DecodeLaunch(1, 16 if bytes_a_lane == 4 else 32, fetch, per_sm=8, skip=True, ahead=ahead)
    if shape.row_groups == 2:
        fetch = 0 if ahead and sm < 90 else 2
        return DecodeLaunch(1, 16 if bytes_a_lane == 4 else 32, fetch, per_sm=8, skip=True, ahead=ahead)
    return DecodeLaunch(1, 32 if bytes_a_lane == 4 else 64, 2, per_sm=8, skip=True, ahead=ahead)


def programs(
    launch: DecodeLaunch,
    shape: DecodeShape,
    kv_heads: int,
    rows: int,
    max_seq_len: int,
    sm_count: int,
    room: int,
    num_splits: int | None = None,
) -> int:
    """Programs of a launch: as many as fill the card `rounds` times, but no more than there can be min_tiles tiles for.

    num_splits: so many for each sequence and KV head instead. room: programs that the workspace has room for.
    """
    heads = rows * kv_heads * shape.passes
    pieces = math.ceil(math.ceil(max(max_seq_len, 1) / launch.tile) / launch.min_tiles)
    wanted = heads * num_splits if num_splits is not None else sm_count * launch.per_sm * launch.rounds
    return max(1, min(wanted, heads * pieces, room))


def part_floats(shape: DecodeShape) -> int:
    """float32 numbers of workspace that a program needs: two partial results, each with two numbers a row."""
    return 2 * shape.live * (shape.padded + 2)
