"""Counts of the engine: what waits, what was preempted, what moved between the tiers, what the prefix cache found."""

from __future__ import annotations

from dataclasses import dataclass

from qengine.engine.scheduler import Scheduler
from qengine.engine.sequence import Status


@dataclass(frozen=True)
class EngineStats:
    """A snapshot.

    running, waiting, swapped: sequences now; those swapped out are counted in `waiting` too. compiling: sequences
    whose grammar is not ready yet, in none of these. gpu_blocks, cpu_blocks:
    blocks of each tier, and how many of them are in use (cached ones that nobody uses are free).
    preemptions_swapped, preemptions_recomputed: times a sequence gave up its blocks, by how it gets its cache back.
    blocks_out, blocks_in, bytes_out, bytes_in: copies to CPU memory and back. prefix_queried_tokens, prefix_hit_tokens:
    prompt tokens looked up and found in the prefix cache, cpu_hit_tokens those of them found in CPU memory.
    evicted_blocks: cached blocks whose place on the device was given up. dropped_blocks: those that CPU memory gave up.
    """

    running: int
    waiting: int
    swapped: int
    gpu_blocks: int
    gpu_blocks_used: int
    cpu_blocks: int
    cpu_blocks_used: int
    preemptions_swapped: int
    preemptions_recomputed: int
    blocks_out: int
    blocks_in: int
    bytes_out: int
    bytes_in: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    cpu_hit_tokens: int
    evicted_blocks: int
    dropped_blocks: int
    compiling: int = 0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the looked up prompt tokens that were found; 0 before any was looked up."""
        return self.prefix_hit_tokens / self.prefix_queried_tokens if self.prefix_queried_tokens else 0.0


def engine_stats(scheduler: Scheduler) -> EngineStats:
    """The scheduler's and the block manager's counts as they are now."""
    blocks = scheduler.blocks
    moved, prefix, cpu = blocks.tier.stats, blocks.stats, blocks.tier.pool
    block_bytes = 0 if blocks.policy is None else blocks.policy.block_bytes
    return EngineStats(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        swapped=sum(seq.status is Status.SWAPPED for seq in scheduler.waiting),
        gpu_blocks=blocks.num_blocks,
        gpu_blocks_used=blocks.num_blocks - blocks.num_free,
        cpu_blocks=cpu.num_blocks,
        cpu_blocks_used=cpu.num_blocks - cpu.num_free,
        preemptions_swapped=scheduler.preemptions.swapped,
        preemptions_recomputed=scheduler.preemptions.recomputed,
        blocks_out=moved.blocks_out,
        blocks_in=moved.blocks_in,
        bytes_out=moved.blocks_out * block_bytes,
        bytes_in=moved.blocks_in * block_bytes,
        prefix_queried_tokens=prefix.queried_tokens,
        prefix_hit_tokens=prefix.hit_tokens,
        cpu_hit_tokens=prefix.cpu_hit_tokens,
        evicted_blocks=prefix.evicted_blocks,
        dropped_blocks=moved.dropped_blocks,
    )
