"""Whether moving cache blocks to CPU memory and back is cheaper than computing them anew. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass

LATE_SECONDS = 1e-3
"""Copies back that take less are waited for; for longer ones a sequence sits out one step, which hides them."""
AHEAD_SECONDS = 5e-3
"""Time of the copies that a step makes for the next one's sake."""


@dataclass(frozen=True)
class SwapPolicy:
    """The cost model: bytes over the measured rate of each direction, against tokens over the measured prefill rate.

    block_bytes, block_size: of a block over all layers, in bytes and tokens. out_rate, in_rate: bytes a second from
    the device to CPU memory and back. prefill_rate: prompt tokens a second. threshold: blocks are copied where
    computing their tokens takes at least this many times as long as the copies; 0 always copies, inf never.
    late_seconds: see LATE_SECONDS; inf where copies do not overlap a step.
    """

    block_bytes: int
    block_size: int
    out_rate: float
    in_rate: float
    prefill_rate: float
    threshold: float = 1.0
    late_seconds: float = LATE_SECONDS

    def copy_seconds(self, blocks_out: int, blocks_in: int) -> float:
        """Time to copy so many blocks out and back."""
        return self.block_bytes * (blocks_out / self.out_rate + blocks_in / self.in_rate)

    def compute_seconds(self, tokens: int) -> float:
        """Time to compute so many tokens anew."""
        return tokens / self.prefill_rate

    def pays(self, tokens: int, blocks_out: int, blocks_in: int) -> bool:
        """Whether `tokens` should come back by copies of so many blocks instead of being computed anew."""
        if self.threshold == float("inf"):
            return False
        return self.compute_seconds(tokens) >= self.threshold * self.copy_seconds(blocks_out, blocks_in)

    @property
    def keeps_evicted(self) -> bool:
        """Whether a block that the prefix cache gives up is worth its copies, if it is wanted again."""
        return self.pays(self.block_size, 1, 1)

    @property
    def blocks_ahead(self) -> int:
        """Blocks that a step may copy out for the next one's sake; none where copies do not overlap a step."""
        if self.late_seconds == float("inf"):
            return 0
        return max(1, int(AHEAD_SECONDS * self.out_rate / self.block_bytes))

    def may_be_late(self, blocks_in: int) -> bool:
        """Whether copies back of so many blocks should overlap a step instead of being waited for."""
        return self.copy_seconds(0, blocks_in) >= self.late_seconds
