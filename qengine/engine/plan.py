"""What the scheduler decides for one step. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field

from qengine.engine.sequence import Sequence
from qengine.engine.swap_orders import Copy, SwapOrders


@dataclass
class Chunk:
    """`length` tokens of `seq` from position `start` on. forks: siblings that share its prompt from now on."""

    seq: Sequence
    start: int
    length: int
    forks: list[Sequence] = field(default_factory=list)

    @property
    def end(self) -> int:
        """One past the last position computed."""
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """True if the chunk reaches the sequence's last token, so that a next token follows from it."""
        return self.end == len(self.seq.token_ids)


@dataclass
class Plan:
    """One step: chunks to compute, and block copies to make before: on the device, and between it and CPU memory.

    budget: tokens that may still be added. preempted: sequences that lost their blocks. arriving: sequences that were
    admitted and are computed from the next step on, as their blocks come back during this one.
    """

    budget: int
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    swap: SwapOrders = field(default_factory=SwapOrders)
    preempted: list[Sequence] = field(default_factory=list)
    arriving: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences whose blocks the step fills: those computed, their forks, and those that arrive."""
        computed = [seq for chunk in self.chunks for seq in (chunk.seq, *chunk.forks)]
        return computed + self.arriving
