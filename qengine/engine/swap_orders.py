"""The block copies between a device and CPU memory that a step asks for. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field

Copy = tuple[int, int]
"""(source block, destination block)."""


@dataclass
class SwapOrders:
    """Copies between the tiers, made in the order of the lists; those of one list are independent of each other.

    out, late_out: (GPU block, CPU block). in_, late_in: (CPU block, GPU block). out and in_ are finished before the
    step copies, reads or writes any block on the device. late_out and late_in may overlap the step, which leaves the
    GPU blocks that they read and fill alone; they are finished before the next step copies or computes anything, and
    before any of its orders. No block is filled twice.
    """

    out: list[Copy] = field(default_factory=list)
    in_: list[Copy] = field(default_factory=list)
    late_out: list[Copy] = field(default_factory=list)
    late_in: list[Copy] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.out or self.in_ or self.late_out or self.late_in)

    @property
    def num_out(self) -> int:
        """Blocks that go to CPU memory."""
        return len(self.out) + len(self.late_out)

    @property
    def num_in(self) -> int:
        """Blocks that come back."""
        return len(self.in_) + len(self.late_in)
