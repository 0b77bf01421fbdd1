"""What preempted sequences want back: full blocks by name, and a partly filled last one in CPU memory. Plain Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass

from qengine.engine.block_pool import BlockPool
from qengine.engine.cpu_tier import CpuTier
from qengine.engine.swap_policy import SwapPolicy


@dataclass
class Table:
    """A running sequence's blocks and the names of its leading full ones. reads: it may use blocks of others."""

    root: bytes
    reads: bool
    blocks: list[int]
    names: list[bytes]


@dataclass
class Swapped:
    """A preempted sequence's leading full blocks by name, and the CPU block that holds `tail_tokens` tokens more."""

    root: bytes
    names: list[bytes]
    tail: int | None = None
    tail_tokens: int = 0


class SwappedSequences:
    """Decides what a preempted sequence keeps, and keeps it within reach: on the device or in the CPU tier."""

    def __init__(self, pool: BlockPool, tier: CpuTier, policy: SwapPolicy | None) -> None:
        self._pool = pool
        self._tier = tier
        self._policy = policy
        self._kept: dict[int, Swapped] = {}

    def get(self, seq_id: int) -> Swapped | None:
        """What a sequence keeps; None if it is not swapped out."""
        return self._kept.get(seq_id)

    def within_reach(self, name: bytes) -> bool:
        """Whether this content is on the device or in the CPU tier."""
        return self._pool.find(name) is not None or self._tier.find(name) is not None

    def keep(self, seq_id: int, table: Table, num_computed: int) -> bool:
        """Keep of a sequence what cost and room say, before its blocks are given back. False if that is nothing.

        num_computed: its tokens that are in the cache; the table has the names of all blocks that these fill.
        """
        if self._policy is None:
            return False
        full, tail_tokens = divmod(num_computed, self._policy.block_size)
        count, lead, blocks_out, blocks_in = self._count(table, full)
        if not self._policy.pays((count - lead) * self._policy.block_size, blocks_out, blocks_in):
            return False
        kept = self._kept[seq_id] = Swapped(table.root, table.names[:count])
        for name in kept.names:
            self._tier.want(name)
        if count == full and tail_tokens and self._tier.room > 0 and self._policy.pays(tail_tokens, 1, 1):
            block = table.blocks[full]
            # Another user of the block may go on writing it in the coming step.
            kept.tail = self._tier.save_tail(block, late=self._pool.users(block) == 1)
            kept.tail_tokens = tail_tokens
        if count > lead or kept.tail is not None or count == full > 0:
            return True
        self.drop(seq_id)
        return False

    def drop(self, seq_id: int) -> None:
        """A sequence wants nothing back any more. Does nothing if it is not swapped out."""
        kept = self._kept.pop(seq_id, None)
        if kept is not None:
            for name in kept.names:
                self._tier.unwant(name)
            if kept.tail is not None:
                self._tier.drop(kept.tail)

    def drop_all(self) -> None:
        """No sequence wants anything back any more."""
        for seq_id in list(self._kept):
            self.drop(seq_id)

    def check_integrity(self, running: Container[int]) -> None:
        """Raise AssertionError if what is kept, and the CPU tier, contradict each other. For tests."""
        both = [seq_id for seq_id in self._kept if seq_id in running]
        assert not both, f"sequences {both} have a block table and are swapped out"
        wanted = Counter(name for kept in self._kept.values() for name in kept.names)
        self._tier.check_integrity(wanted, [kept.tail for kept in self._kept.values() if kept.tail is not None])
        assert all(map(self.within_reach, wanted)), "content that a swapped sequence wants is lost"

    def _count(self, table: Table, full: int) -> tuple[int, int, int, int]:
        """(leading blocks of the `full` ones that find room, those of them that cost nothing, copies out, copies in).

        Leading blocks that other sequences use, or that are in the CPU tier already, cost nothing where the prefix
        cache would give them back to a sequence that is computed anew.
        """
        room = self._tier.room
        count = lead = blocks_out = blocks_in = 0
        for name, block in zip(table.names[:full], table.blocks, strict=False):
            room -= self._tier.needs_room(name)
            if room < 0:
                break
            place, saved = self._pool.find(name), self._tier.find(name) is not None
            shared = place is not None and self._pool.users(place) > (place == block)
            if lead == count and table.reads and (shared or saved):
                lead += 1
            else:
                blocks_out += not (saved or shared)
                blocks_in += not shared
            count += 1
        return count, lead, blocks_out, blocks_in
