"""The CPU tier of the KV cache: which block of CPU memory holds what, and the copies that the next step must make.

A CPU block holds one of three things: content that a swapped sequence wants back (it has users: the sequences that
want it), the partly filled last block of a swapped sequence (one user), or a cached block without users, which may be
dropped for another, the least recently used first. Plain Python: no tensor, no device.

What a swapped sequence wants may still lie on the device, where it costs nothing to take back. For each such block,
room is set aside here (`room` is what is left), so that it can always be saved when the device needs its place:
content that is wanted is never lost. Blocks that a copy back reads keep their content until the orders are taken.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from qengine.engine.block_pool import BlockPool
from qengine.engine.swap_orders import Copy, SwapOrders


@dataclass
class TierStats:
    """Blocks copied out and in since the start, and cached blocks that the tier dropped for others."""

    blocks_out: int = 0
    blocks_in: int = 0
    dropped_blocks: int = 0


class CpuTier:
    """`num_blocks` blocks of CPU memory. keeps_cached: content stays findable when nobody wants it any more."""

    def __init__(self, num_blocks: int, *, keeps_cached: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.stats = TierStats()
        self._keeps_cached = keeps_cached
        self._wanted: dict[bytes, int] = {}
        self._on_device = 0
        self._filling: dict[int, tuple[int, bool]] = {}
        self._late_reads: dict[int, int] = {}
        self._in: list[Copy] = []
        self._late_in: list[Copy] = []
        self._locked: list[int] = []

    @property
    def room(self) -> int:
        """Blocks that can be filled without dropping anything that is wanted."""
        return self.pool.num_free - self._on_device

    def is_wanted(self, name: bytes) -> bool:
        """Whether a swapped sequence wants this content back."""
        return name in self._wanted

    def find(self, name: bytes) -> int | None:
        """The CPU block that holds this content."""
        return self.pool.find(name)

    def needs_room(self, name: bytes) -> bool:
        """Whether `want` takes a block of `room`."""
        block = self.pool.find(name)
        return name not in self._wanted if block is None else not self.pool.users(block)

    def want(self, name: bytes) -> None:
        """Keep content within reach that is on the device or here. Needs room where `needs_room` says so."""
        assert self.room > 0 or not self.needs_room(name), "no room to set aside in the CPU tier"
        block = self.pool.find(name)
        if block is not None:
            self.pool.take(block)
        elif name not in self._wanted:
            self._on_device += 1
        self._wanted[name] = self._wanted.get(name, 0) + 1

    def unwant(self, name: bytes) -> None:
        """Take back one `want`."""
        self._wanted[name] -= 1
        if not self._wanted[name]:
            del self._wanted[name]
        block = self.pool.find(name)
        if block is not None:
            self._release(block)
        elif name not in self._wanted:
            self._on_device -= 1

    def save(self, device_block: int, name: bytes, *, late: bool = False) -> None:
        """Copy a device block's content here, unless it is here or (unwanted) finds no room.

        late: the coming step leaves the device block alone.
        """
        block, wanted = self.pool.find(name), self._wanted.get(name, 0)
        if block is not None:
            self.pool.touch(block)
            return
        if not wanted and (not self._keeps_cached or self.room <= 0):
            return
        block = self._allocate()
        self.pool.set_name(block, name)
        for _ in range(wanted - 1):
            self.pool.take(block)
        if wanted:
            self._on_device -= 1
        else:
            self.pool.release(block)
        self._fill(block, device_block, late)

    def save_tail(self, device_block: int, *, late: bool) -> int:
        """Copy a partly filled block here; needs room. The block is the caller's until `drop`. late: as in `save`."""
        assert self.room > 0, "no room for a partly filled block"
        block = self._allocate()
        self._fill(block, device_block, late)
        return block

    def drop(self, block: int) -> None:
        """Give a block of `save_tail` back."""
        self._filling.pop(block, None)
        self._release(block)

    def lock(self, block: int) -> None:
        """Keep a block's content until the orders are taken."""
        self.pool.take(block)
        self._locked.append(block)

    def fetch(self, block: int, device_block: int, *, late: bool) -> None:
        """Copy a locked block to the device. late: the coming step leaves the device block alone."""
        assert not self._filling.get(block, (0, False))[1], f"CPU block {block} is read before it is filled"
        (self._late_in if late else self._in).append((block, device_block))

    def hurry(self, device_block: int) -> None:
        """The coming step will write this device block after all: what is to be copied from it must be, before."""
        block = self._late_reads.pop(device_block, None)
        if block is not None and self._filling.get(block) == (device_block, True):
            self._filling[block] = (device_block, False)

    def take_orders(self) -> SwapOrders:
        """The copies since the last call, to be made with the coming step."""
        orders = SwapOrders(in_=self._in, late_in=self._late_in)
        for block, (device_block, late) in self._filling.items():
            (orders.late_out if late else orders.out).append((device_block, block))
        self._filling, self._late_reads, self._in, self._late_in = {}, {}, [], []
        for block in self._locked:
            self._release(block)
        self._locked = []
        self.stats.blocks_out += orders.num_out
        self.stats.blocks_in += orders.num_in
        return orders

    def check_integrity(self, wanted: dict[bytes, int], tails: list[int]) -> None:
        """Raise AssertionError unless what is held is what swapped sequences want, and their tails. For tests."""
        assert wanted == self._wanted, "what is wanted is not what swapped sequences need"
        away = sum(self.pool.find(name) is None for name in wanted)
        assert away == self._on_device, f"{self._on_device} wanted blocks are counted on the device, {away} are"
        assert self.room >= 0, f"{-self.room} wanted blocks have no room in the CPU tier"
        users = Counter([*tails, *self._locked])
        for name, count in wanted.items():
            block = self.pool.find(name)
            if block is not None:
                users[block] += count
        assert len(set(tails)) == len(tails), "two sequences own one partly filled block"
        self.pool.check_integrity(users)

    def _allocate(self) -> int:
        [block] = self.pool.upcoming(1)
        self.stats.dropped_blocks += self.pool.name_of(block) is not None
        return self.pool.allocate()

    def _release(self, block: int) -> None:
        self.pool.release(block)
        if not self._keeps_cached and not self.pool.users(block):
            self.pool.forget(block)

    def _fill(self, block: int, device_block: int, late: bool) -> None:
        """Order a copy here; it replaces one to the same block that was ordered for the same step."""
        self._filling[block] = (device_block, late)
        if late:
            self._late_reads[device_block] = block
