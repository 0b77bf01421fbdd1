"""Who owns which block of the paged KV cache, on the device and in CPU memory. Plain Python: no tensor, no device.

A block of the device is free or used by one or more block tables. Full blocks have names (see block_hashes.py) by
which the prefix cache finds them, used or free, until another sequence needs the space of a free one. Then its content
goes to the CPU tier (see cpu_tier.py), if there is one with room, and is copied back when a prompt begins with it.

A preempted sequence gives all its blocks back. If the cost model says so it keeps its content within reach: its full
blocks are noted as wanted, which means they are copied to the CPU tier no later than their place on the device is
needed, and the partly filled last one is copied there. `begin` then takes what is still on the device, copies back
the rest, and leaves only what is in neither place to be computed. Where prefix caching is off names are private: they
are given when a sequence is swapped, and only it and those forked from the same prompt find its blocks.

Copies of either kind are collected until `take_orders` hands them to the step. All methods that say None have then
changed nothing.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from qengine.engine.block_hashes import block_hash, private_root, root_hash
from qengine.engine.block_match import Hit, PrefixStats, match
from qengine.engine.block_pool import BlockPool
from qengine.engine.cpu_tier import CpuTier
from qengine.engine.swap_orders import Copy, SwapOrders
from qengine.engine.swap_policy import SwapPolicy
from qengine.engine.swapped import Swapped, SwappedSequences, Table

__all__ = ["BlockManager", "Copy", "PrefixStats", "block_hash", "root_hash"]


class BlockManager:
    """Block tables, reference counts and the prefix cache of `num_blocks` blocks of `block_size` tokens.

    policy, num_cpu_blocks: the cost model and the size of the CPU tier; without either there is none.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        num_cpu_blocks: int = 0,
        policy: SwapPolicy | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.policy = policy
        self.stats = PrefixStats()
        caches = enable_prefix_caching and policy is not None and policy.keeps_evicted
        self.tier = CpuTier(0 if policy is None else num_cpu_blocks, keeps_cached=caches)
        self._pool = BlockPool(num_blocks)
        self._swapped = SwappedSequences(self._pool, self.tier, policy)
        self._tables: dict[int, Table] = {}
        self._roots = itertools.count()
        self._arriving: set[int] = set()
        self._late: set[int] = set()
        self._copied_from: Counter[int] = Counter()

    @property
    def num_free(self) -> int:
        """Blocks of the device that can be handed out, those that the prefix cache remembers included."""
        return self._pool.num_free

    def table(self, seq_id: int) -> list[int]:
        """The block table of a running sequence: not to be changed by the caller."""
        return self._tables[seq_id].blocks

    def is_swapped(self, seq_id: int) -> bool:
        """Whether a preempted sequence's content is kept within reach."""
        return self._swapped.get(seq_id) is not None

    def is_late(self, seq_id: int) -> bool:
        """Whether blocks of a sequence are being filled while the coming step runs, which must thus leave it out."""
        return seq_id in self._late

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def fits(
        self,
        seq_id: int,
        token_ids: Seq[int],
        *,
        salt: bytes = b"",
        read_cache: bool = True,
        headroom: int = 0,
        without: Iterable[int] = (),
    ) -> bool:
        """Whether `begin` with these arguments would succeed once the sequences `without` have given their blocks."""
        kept = self._swapped.get(seq_id)
        table = self._new_table(kept, salt, read_cache)
        hits = self._match(table, kept, token_ids)
        gone = Counter(block for other in without for block in self._tables[other].blocks)
        freed = sum(self._pool.users(block) == count for block, count in gone.items())
        return self._missing(token_ids, hits, gone) + headroom <= self._pool.num_free + freed

    def begin(
        self,
        seq_id: int,
        token_ids: Seq[int],
        *,
        salt: bytes = b"",
        read_cache: bool = True,
        headroom: int = 0,
        count: bool = True,
        overlap: bool = False,
    ) -> int | None:
        """Give a sequence blocks for all of `token_ids`; the leading ones hold what is cached or was swapped out.

        Returns the number of tokens whose keys and values are there (at least one token is left to compute, as its
        logits are needed), or None if fewer than the needed blocks plus `headroom` are free. count: count it in the
        prefix statistics. overlap: copies back that take long may overlap the coming step, see `is_late`.
        """
        assert seq_id not in self._tables, f"sequence {seq_id} has a block table already"
        kept = self._swapped.get(seq_id)
        table = self._new_table(kept, salt, read_cache)
        hits = self._match(table, kept, token_ids)
        if self._missing(token_ids, hits, Counter()) + headroom > self._pool.num_free:
            return None
        tail = kept.tail if kept is not None and len(hits) == len(kept.names) else None
        late = self._come_late(hits, tail, overlap)
        self._hold(seq_id, hits, tail)
        for hit in hits:
            table.blocks.append(self._fetch(hit.cpu, hit.name, late) if hit.device is None else hit.device)
            table.names.append(hit.name)
        if tail is not None:
            table.blocks.append(self._fetch(tail, None, late))
        table.blocks += [self._allocate() for _ in range(self.blocks_for(len(token_ids)) - len(table.blocks))]
        self._tables[seq_id] = table
        if late:
            self._late.add(seq_id)
        if count and table.reads and kept is None:
            self.stats.add(len(token_ids), hits, self.block_size)
        cached = len(hits) * self.block_size + (0 if kept is None or tail is None else kept.tail_tokens)
        assert cached < len(token_ids), f"sequence {seq_id}: all of {len(token_ids)} tokens are cached"
        return cached

    def reserve(self, seq_id: int, start: int, end: int) -> list[Copy] | None:
        """Make positions [start, end) of a sequence writable: blocks for all, none of those shared with another.

        Returns the copies on the device that must be made first (copy on write), or None if blocks run out.
        """
        blocks, first, last = self._tables[seq_id].blocks, start // self.block_size, self.blocks_for(end)
        if last - first == 1 and last <= len(blocks) and self._pool.users(blocks[first]) == 1:
            return []  # as nearly always: the next token's place in a block of its own
        written = range(first, min(last, len(blocks)))
        shared = [i for i in written if self._pool.users(blocks[i]) - self._copied_from[blocks[i]] > 1]
        new = max(0, last - len(blocks))
        if new + len(shared) > self._pool.num_free:
            return None
        copies = []
        for i in shared:
            source, blocks[i] = blocks[i], self._allocate()
            copies.append((source, blocks[i]))
            if not self.tier.pool.num_blocks:
                self._release(source)
            else:  # nothing may be copied in over the source before it was copied: it stays used until take_orders
                self._copied_from[source] += 1
        blocks += [self._allocate() for _ in range(new)]
        return copies

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """Give `child_id` the parent's blocks of the first `num_tokens` tokens, shared."""
        assert child_id not in self._tables, f"sequence {child_id} has a block table already"
        parent, full = self._tables[parent_id], num_tokens // self.block_size
        blocks = parent.blocks[: self.blocks_for(num_tokens)]
        self._tables[child_id] = Table(parent.root, parent.reads, blocks, parent.names[:full])
        for block in blocks:
            self._pool.take(block)

    def commit(self, seq_id: int, token_ids: Seq[int], num_computed: int) -> None:
        """Note that the first `num_computed` of `token_ids` are in the cache: full blocks become findable."""
        if self.enable_prefix_caching:
            table = self._tables[seq_id]
            self._name_blocks(table, token_ids, len(table.names), num_computed // self.block_size)

    def preempt(self, seq_id: int, token_ids: Seq[int], num_computed: int) -> bool:
        """Give a running sequence's blocks back. True if its content is kept within reach, False if it is let go.

        num_computed: as many of `token_ids` are in the cache.
        """
        assert seq_id not in self._late, f"sequence {seq_id} is preempted while its blocks are being filled"
        table = self._tables[seq_id]
        if self.tier.pool.num_blocks:
            self._name_blocks(table, token_ids, 0, num_computed // self.block_size)
        kept = self._swapped.keep(seq_id, table, num_computed)
        self._give_back(seq_id)
        return kept

    def free(self, seq_id: int) -> None:
        """Give up all that a sequence holds. The end of a prompt is forgotten before its beginning."""
        self._swapped.drop(seq_id)
        if seq_id in self._tables:
            self._give_back(seq_id)

    def copy_ahead(self, count: int) -> None:
        """Save the next `count` blocks to be given up while the coming step runs, so that the one after need not wait.

        To be called last before `take_orders`.
        """
        most = 0 if self.policy is None else self.policy.blocks_ahead
        for block in self._pool.upcoming(min(count, most)):
            name = self._pool.name_of(block)
            if name is not None:
                self.tier.save(block, name, late=True)

    def take_orders(self) -> SwapOrders:
        """The copies between the tiers that the coming step must make; to be called once before each step."""
        for block in self._copied_from.elements():
            self._release(block)
        self._copied_from.clear()
        self._arriving.clear()
        self._late.clear()
        return self.tier.take_orders()

    def forget_content(self) -> None:
        """Find no block by its content any more, on the device or in CPU memory; swapped sequences keep nothing."""
        self._swapped.drop_all()
        self.take_orders()
        self._pool.forget_all()
        self.tier.pool.forget_all()

    def check_integrity(self) -> None:
        """Raise AssertionError if counts, free lists, tables and names of either tier contradict. For tests."""
        users = Counter(self._copied_from)
        for seq_id, table in self._tables.items():
            assert len(set(table.blocks)) == len(table.blocks), f"sequence {seq_id} has a block twice: {table.blocks}"
            users.update(table.blocks)
        self._pool.check_integrity(users)
        self._swapped.check_integrity(self._tables)

    def _new_table(self, kept: Swapped | None, salt: bytes, read_cache: bool) -> Table:
        if kept is not None:
            root = kept.root
        else:
            root = root_hash(salt) if self.enable_prefix_caching else private_root(next(self._roots))
        return Table(root, read_cache and self.enable_prefix_caching, [], [])

    def _match(self, table: Table, kept: Swapped | None, token_ids: Seq[int]) -> list[Hit]:
        return match(self._pool, self.tier, table, [] if kept is None else kept.names, token_ids, self.block_size)

    def _missing(self, token_ids: Seq[int], hits: list[Hit], gone: Counter[int]) -> int:
        """Free blocks that are needed: new ones, and cached ones without users other than those counted in `gone`."""
        cached = [hit.device for hit in hits if hit.device is not None]
        unused = sum(self._pool.users(block) == gone[block] for block in cached)
        return self.blocks_for(len(token_ids)) - len(cached) + unused

    def _come_late(self, hits: list[Hit], tail: int | None, overlap: bool) -> bool:
        """Whether the sequence sits out the coming step: its blocks, or some that it shares, arrive during that."""
        copies = sum(hit.device is None for hit in hits) + (tail is not None)
        late = copies > 0 and self.policy is not None and self.policy.may_be_late(copies)
        arriving = any(hit.device in self._arriving for hit in hits)
        assert overlap or not arriving, "a sequence that should run now begins with blocks that arrive later"
        return overlap and (late or arriving)

    def _hold(self, seq_id: int, hits: list[Hit], tail: int | None) -> None:
        """Use the blocks found, so that making room takes none of them; the sequence is swapped out no more."""
        for hit in hits:
            if hit.device is not None:
                self._pool.take(hit.device)
            elif hit.cpu is not None:
                self.tier.lock(hit.cpu)
        if tail is not None:
            self.tier.lock(tail)
        self._swapped.drop(seq_id)

    def _fetch(self, cpu_block: int | None, name: bytes | None, late: bool) -> int:
        """A new block of the device that a locked CPU block is copied to."""
        assert cpu_block is not None, "a block without a place is fetched"
        block = self._allocate()
        if name is not None:
            self._pool.set_name(block, name)
        if late:
            self._arriving.add(block)
        self.tier.fetch(cpu_block, block, late=late)
        return block

    def _name_blocks(self, table: Table, token_ids: Seq[int], start: int, end: int) -> None:
        """Make the full blocks [start, end) of a sequence findable, unless the same content is already."""
        size = self.block_size
        for i in range(start, end):
            if i == len(table.names):
                parent = table.names[-1] if table.names else table.root
                table.names.append(block_hash(parent, token_ids[i * size : (i + 1) * size]))
            name, block = table.names[i], table.blocks[i]
            if self._pool.find(name) is None and self._pool.name_of(block) is None:
                self._pool.set_name(block, name)

    def _give_back(self, seq_id: int) -> None:
        for block in reversed(self._tables.pop(seq_id).blocks):
            self._release(block)

    def _allocate(self) -> int:
        """The least recently used free block; what it held is saved in the CPU tier if there is one with room."""
        [block] = self._pool.upcoming(1)
        name = self._pool.name_of(block)
        if name is not None:
            self.stats.evicted_blocks += 1
            self.tier.save(block, name)
        self.tier.hurry(block)
        return self._pool.allocate()

    def _release(self, block: int) -> None:
        """Count one user less. Without prefix caching only what is wanted stays findable."""
        self._pool.release(block)
        if not self.enable_prefix_caching and not self._pool.users(block):
            name = self._pool.name_of(block)
            if name is not None and not self.tier.is_wanted(name):
                self._pool.forget(block)
