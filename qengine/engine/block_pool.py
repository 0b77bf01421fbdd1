"""One tier's blocks: how many users each has, which content each holds, which free one goes next. Plain Python.

A block without users is free and may be handed out. Content that is known by a name (a hash) stays findable while its
block is free; free blocks are a queue: those without a name first, then from the least to the most recently used.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from itertools import islice


class BlockPool:
    """Users and names of the blocks 0 to num_blocks - 1. A name belongs to one block at most."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # Blocks beyond these were never used: a tier of millions of small ones costs nothing until it is needed.
        self._users: list[int] = []
        self._free: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks without users, findable ones included."""
        return len(self._free) + self.num_blocks - len(self._users)

    def users(self, block: int) -> int:
        """How many users a block has; it must have been allocated once."""
        return self._users[block]

    def find(self, name: bytes) -> int | None:
        """The block that holds this content."""
        return self._block_of.get(name)

    def name_of(self, block: int) -> bytes | None:
        """The content of a block, if it is known."""
        return self._name_of.get(block)

    def set_name(self, block: int, name: bytes) -> None:
        """Make a block findable; neither the block nor the name may be known yet."""
        assert name not in self._block_of, f"block {self._block_of[name]} has this name already, block {block} gets it"
        assert block not in self._name_of, f"block {block} has another name already"
        self._block_of[name] = block
        self._name_of[block] = name

    def forget(self, block: int) -> None:
        """Make a block's content unfindable. Does nothing if it is."""
        name = self._name_of.pop(block, None)
        if name is not None:
            del self._block_of[name]
            if block in self._free:
                self._free.move_to_end(block, last=False)

    def forget_all(self) -> None:
        """Make no content findable."""
        for block in list(self._name_of):
            self.forget(block)

    def take(self, block: int) -> None:
        """Count one more user of a block that holds content."""
        if self._users[block] == 0:
            del self._free[block]
        self._users[block] += 1

    def release(self, block: int) -> None:
        """Count one user less; a block without any is free: last in the queue if it is findable, else first."""
        assert self._users[block] > 0, f"block {block} is released but not used"
        self._users[block] -= 1
        if self._users[block] == 0:
            self._free[block] = None
            if block not in self._name_of:
                self._free.move_to_end(block, last=False)

    def touch(self, block: int) -> None:
        """Note the use of a free block's content: it goes to the end of the queue."""
        if block in self._free:
            self._free.move_to_end(block)

    def upcoming(self, count: int) -> list[int]:
        """The free blocks that `allocate` will return next, at most `count`."""
        found: list[int] = []
        for block in self._free:
            if len(found) == count or block in self._name_of:
                break
            found.append(block)
        used, unnamed = len(self._users), len(found)
        found += range(used, min(used + count - unnamed, self.num_blocks))
        return found + list(islice(self._free, unnamed, unnamed + count - len(found)))

    def allocate(self) -> int:
        """The first free block of the queue, with one user and its content forgotten. There must be one."""
        first = next(iter(self._free), None)
        if len(self._users) < self.num_blocks and (first is None or first in self._name_of):
            self._users.append(1)
            return len(self._users) - 1
        block, _ = self._free.popitem(last=False)
        self._users[block] = 1
        self.forget(block)
        return block

    def check_integrity(self, users: Counter[int]) -> None:
        """Raise AssertionError unless the blocks have these users and free list and names agree. For tests."""
        counted = {block: count for block, count in enumerate(self._users) if count}
        assert users == counted, f"reference counts {counted} but there are {dict(users)} users"
        free = set(range(len(self._users))) - counted.keys()
        assert free == set(self._free), f"free list {sorted(self._free)} but unused blocks are {sorted(free)}"
        assert {d: b for b, d in self._name_of.items()} == self._block_of, "name maps are not each other's inverse"
        named = [block in self._name_of for block in self._free]
        assert named == sorted(named), "a free block without a name comes after one with a name"
