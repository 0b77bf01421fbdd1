"""Who owns which block of the paged KV cache. Plain Python: no tensor, no device.

A block is free (in `_free`) or used by one or more block tables (its reference count). A full block whose content is
known by hash stays findable while free, until another sequence needs the space; the free blocks are a queue from the
least to the most recently used.

A block's hash is sha256 over its parent's hash and its token ids; the chain starts at a hash of the salt. So equal
hashes mean equal tokens from the beginning on under the same salt, and nothing that a user can choose (a token id, a
salt) can be taken for something else: the first byte of what is hashed tells the two kinds apart.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

Copy = tuple[int, int]
"""(source block, destination block): content to be copied on the device before anything of the step is written."""


def root_hash(salt: bytes) -> bytes:
    """The parent of a chain's first block."""
    return hashlib.sha256(b"s" + salt).digest()


def block_hash(parent: bytes, token_ids: Seq[int]) -> bytes:
    """The hash of a full block of `token_ids` that follows the block with hash `parent`."""
    return hashlib.sha256(b"b" + parent + struct.pack(f"<{len(token_ids)}q", *token_ids)).digest()


@dataclass
class PrefixStats:
    """Prompt tokens looked up in the prefix cache, those found, and hashed blocks given up for space."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0


class _Table:
    """A sequence's blocks, and the hashes of its leading full blocks."""

    def __init__(self, salt: bytes) -> None:
        self.blocks: list[int] = []
        self.hashes: list[bytes] = []
        self.root = root_hash(salt)


class BlockManager:
    """Block tables, reference counts and the prefix cache of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.stats = PrefixStats()
        self._refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._tables: dict[int, _Table] = {}
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, those that the prefix cache remembers included."""
        return len(self._free)

    def table(self, seq_id: int) -> list[int]:
        """The block table of a running sequence: not to be changed by the caller."""
        return self._tables[seq_id].blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def begin(
        self, seq_id: int, token_ids: Seq[int], *, salt: bytes = b"", read_cache: bool = True, headroom: int = 0
    ) -> int | None:
        """Give a sequence blocks for all of `token_ids`, the leading ones from the prefix cache where possible.

        Returns the number of tokens that are cached already (at least one token is left to compute, as its logits are
        needed), or None, with nothing changed, if fewer than the needed blocks plus `headroom` are free.
        """
        assert seq_id not in self._tables, f"sequence {seq_id} has a block table already"
        table = _Table(salt)
        if self.enable_prefix_caching and read_cache:
            self._match(table, token_ids)
        hits = len(table.blocks)
        new = self.blocks_for(len(token_ids)) - hits
        unused_hits = sum(self._refs[block] == 0 for block in table.blocks)
        if new + headroom > len(self._free) - unused_hits:
            return None
        for block in table.blocks:
            self._take(block)
        table.blocks += [self._allocate() for _ in range(new)]
        self._tables[seq_id] = table
        if self.enable_prefix_caching and read_cache:
            self.stats.queried_tokens += len(token_ids)
            self.stats.hit_tokens += hits * self.block_size
        return hits * self.block_size

    def reserve(self, seq_id: int, start: int, end: int) -> list[Copy] | None:
        """Make positions [start, end) of a sequence writable: blocks for all, none of those shared with another.

        Returns the copies that must be made first (copy on write), or None, with nothing changed, if blocks run out.
        """
        blocks = self._tables[seq_id].blocks
        written = range(start // self.block_size, min(self.blocks_for(end), len(blocks)))
        shared = [i for i in written if self._refs[blocks[i]] > 1]
        new = max(0, self.blocks_for(end) - len(blocks))
        if new + len(shared) > len(self._free):
            return None
        copies = []
        for i in shared:
            source, blocks[i] = blocks[i], self._allocate()
            self._release(source)
            copies.append((source, blocks[i]))
        blocks += [self._allocate() for _ in range(new)]
        return copies

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """Give `child_id` the parent's blocks of the first `num_tokens` tokens, shared."""
        assert child_id not in self._tables, f"sequence {child_id} has a block table already"
        parent = self._tables[parent_id]
        child = _Table(b"")
        child.root = parent.root
        child.blocks = parent.blocks[: self.blocks_for(num_tokens)]
        child.hashes = parent.hashes[: num_tokens // self.block_size]
        for block in child.blocks:
            self._take(block)
        self._tables[child_id] = child

    def commit(self, seq_id: int, token_ids: Seq[int], num_computed: int) -> None:
        """Note that the first `num_computed` of `token_ids` are in the cache: full blocks become findable."""
        if not self.enable_prefix_caching:
            return
        table, size = self._tables[seq_id], self.block_size
        for i in range(len(table.hashes), num_computed // size):
            parent = table.hashes[-1] if table.hashes else table.root
            digest = block_hash(parent, token_ids[i * size : (i + 1) * size])
            table.hashes.append(digest)
            block = table.blocks[i]
            if digest not in self._block_of and block not in self._hash_of:
                self._block_of[digest] = block
                self._hash_of[block] = digest

    def free(self, seq_id: int) -> None:
        """Give a sequence's blocks back. The end of a prompt is forgotten before its beginning."""
        for block in reversed(self._tables.pop(seq_id).blocks):
            self._release(block)

    def check_integrity(self) -> None:
        """Raise AssertionError if counts, free list, tables and hashes contradict each other. For tests."""
        refs = [0] * self.num_blocks
        for seq_id, table in self._tables.items():
            assert len(set(table.blocks)) == len(table.blocks), f"sequence {seq_id} has a block twice: {table.blocks}"
            for block in table.blocks:
                refs[block] += 1
        assert refs == self._refs, f"reference counts {self._refs} but tables hold {refs}"
        free = {block for block, count in enumerate(refs) if count == 0}
        assert free == set(self._free), f"free list {sorted(self._free)} but unused blocks are {sorted(free)}"
        assert {d: b for b, d in self._hash_of.items()} == self._block_of, "hash maps are not each other's inverse"

    def _match(self, table: _Table, token_ids: Seq[int]) -> None:
        """Append to `table` the cached blocks that begin `token_ids`; none of them counted yet."""
        size, parent = self.block_size, table.root
        for i in range((len(token_ids) - 1) // size):
            parent = block_hash(parent, token_ids[i * size : (i + 1) * size])
            block = self._block_of.get(parent)
            if block is None:
                return
            table.blocks.append(block)
            table.hashes.append(parent)

    def _take(self, block: int) -> None:
        """Count one more user of a block that holds content."""
        if self._refs[block] == 0:
            del self._free[block]
        self._refs[block] += 1

    def _allocate(self) -> int:
        """The least recently used free block, its content forgotten."""
        block, _ = self._free.popitem(last=False)
        self._refs[block] = 1
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
            self.stats.evicted_blocks += 1
        return block

    def _release(self, block: int) -> None:
        """Count one user less; a block without any is free: last in the queue if findable, else first."""
        assert self._refs[block] > 0, f"block {block} is released but not used"
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free[block] = None
            if block not in self._hash_of:
                self._free.move_to_end(block, last=False)
