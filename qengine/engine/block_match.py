"""Where the leading blocks of a prompt are found: on the device, or in CPU memory. Plain Python."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from qengine.engine.block_hashes import block_hash
from qengine.engine.block_pool import BlockPool
from qengine.engine.cpu_tier import CpuTier
from qengine.engine.swapped import Table


@dataclass
class Hit:
    """A full block that need not be computed: on the device, or else in the CPU tier."""

    name: bytes
    device: int | None
    cpu: int | None


@dataclass
class PrefixStats:
    """Prompt tokens looked up in the prefix cache, those found (and of these those found in the CPU tier), and named
    blocks whose place on the device was given up.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    cpu_hit_tokens: int = 0
    evicted_blocks: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the looked up tokens that were found; 0 before any was looked up."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    def add(self, queried_tokens: int, hits: list[Hit], block_size: int) -> None:
        """Count one prompt."""
        self.queried_tokens += queried_tokens
        self.hit_tokens += len(hits) * block_size
        self.cpu_hit_tokens += sum(hit.device is None for hit in hits) * block_size


def match(
    pool: BlockPool, tier: CpuTier, table: Table, known: list[bytes], token_ids: Seq[int], block_size: int
) -> list[Hit]:
    """Where the leading full blocks of `token_ids` are, as far as they are anywhere; at least one token is left over.

    known: names of the first blocks, of a sequence that was swapped out: these are always found. What follows is looked
    up only if the table may read the prefix cache.
    """
    name, hits, room = table.root, list[Hit](), tier.room
    for i in range((len(token_ids) - 1) // block_size if table.reads else len(known)):
        name = known[i] if i < len(known) else block_hash(name, token_ids[i * block_size : (i + 1) * block_size])
        device = pool.find(name)
        cpu = tier.find(name) if device is None else None
        if cpu is not None and not tier.pool.users(cpu):
            room -= 1  # it stays in place until the copy is ordered
        if (device is None and cpu is None) or room < 0:
            assert i >= len(known), f"block {i} of a swapped sequence is nowhere"
            break
        hits.append(Hit(name, device, cpu))
    return hits
