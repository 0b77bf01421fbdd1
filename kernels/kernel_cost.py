"""The cost model of one linear layer: see cost.py for what it is made of and how near it comes to measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from qengine.kernels.cards import LIMITS, Card
from qengine.kernels.code_facts import CodeFacts, code_facts, instructions_a_weight
from qengine.kernels.launch import SHARED, Launch, pick

LIBRARY = 0.8
"""The share of the tensor cores that cuBLAS reaches on large products: 0.80 of wgmma's on an H200 at M = 2048."""
L2_RESIDENT = 2 << 20
EXPOSED, EXPOSED_STAGED = 540, 330
"""Cycles of a turn that a program waits for x, without and with copies in flight."""
PARTS = 1.4
"""Microseconds that a split's hand-over takes."""
PART_BYTES = 53.0
"""Bytes a nanosecond at which one program adds up parts."""
OVERLAP = 4.5
"""Exponent by which throughput and latency join: both hidden by the larger but for a little."""


@dataclass(frozen=True)
class KernelCost:
    """Microseconds of y [m, n] = x [m, k] @ W^T by resource, what the launch takes, and shares of the card.

    us: the prediction. bound_us: start and the slowest of memory, l2, issue and tensor. latency_us: of the programs on
    the busiest multiprocessor, one after the other. bandwidth_share, bandwidth_bound: of the peak bandwidth, at us and
    at bound_us. tensor_share: of the tensor cores, at us. facts: of the machine code, None where cuBLAS computes.
    launch: None for a plain weight.
    """

    m: int
    n: int
    k: int
    bits: int
    group: int
    us: float
    bound_us: float
    memory_us: float
    l2_us: float
    issue_us: float
    tensor_us: float
    latency_us: float
    bandwidth_share: float
    bandwidth_bound: float
    tensor_share: float
    launch: Launch | None
    facts: CodeFacts | None = None
    instructions_a_weight: float = 0.0


def kernel_time(
    card: Card, m: int, n: int, k: int, bits: int = 4, group: int = 128, launch: Launch | None = None
) -> KernelCost:
    """The cost of a packed linear layer with the launch that `pick` gives on this card, or with the one given.

    bits: 4 or 8 as packed. Raises CostError where neither figures of the launch nor Triton are there.
    """
    launch = launch or pick(m, n, k, group, card.sm, SHARED[card.sm], bits, card.count)
    if launch.kernel == "dequantize":
        return _dequantize_time(card, m, n, k, bits, group, launch)
    facts = code_facts(launch, card.sm, bits, group)
    work = _Work.of(card, launch, m, n, k, bits)
    issue = work.busiest * facts.instructions * launch.warps / 4 / card.clock / 1e3
    rate = card.wgmma if facts.wide else card.mma
    products = launch.bm * launch.bn * (512 // bits) / rate
    packed = _packed_bytes(n, k, bits, group)
    moved = packed + 2 * m * k * _rereads(m, n, k, launch) + 2 * m * n
    # parts are written and read; what half the cache does not hold goes through memory
    parts = 8 * work.parts * launch.bm * launch.bn
    moved += parts if parts / 2 > card.cache_mib * 2**19 else 0
    own = math.ceil(n / launch.bn) * m * k * 2
    memory = moved / (card.peak * card.reach) / 1e3
    l2 = (packed + own + 2 * m * n + parts) / card.l2 / 1e3
    resources = (memory, l2, issue, work.busiest * products / card.clock / 1e3)
    issued = facts.instructions * max(1.0, launch.warps / 4)
    turn = max(issued, products) if launch.overlap else issued + products
    turn += EXPOSED_STAGED if launch.stages > 1 else EXPOSED
    latency, after = work.latency(card, launch, facts, turn)
    return _cost(card, (m, n, k, bits, group), resources, moved, rate, latency, after, launch, facts)


def dense_time(card: Card, m: int, n: int, k: int) -> KernelCost:
    """The cost of a plain fp16 weight through cuBLAS."""
    moved = 2 * (n * k + m * k + m * n)
    rate = card.wgmma or card.mma
    memory = moved / (card.peak * card.reach) / 1e3
    tensor = m * n * k / (rate * LIBRARY * card.count * card.clock) / 1e3
    return _cost(card, (m, n, k, 16, 0), (memory, 0.0, 0.0, tensor), moved, rate, 0.0, 0.0, None, None)


def _dequantize_time(card: Card, m: int, n: int, k: int, bits: int, group: int, launch: Launch) -> KernelCost:
    # two kernels, one after the other: weights to fp16, then cuBLAS
    product = dense_time(card, m, n, k)
    unpacked = _packed_bytes(n, k, bits, group) + 2 * n * k
    extra = unpacked / (card.peak * card.reach) / 1e3 + card.start
    total = product.us + extra
    return replace(
        product, bits=bits, group=group, launch=launch, us=total, bound_us=product.bound_us + extra,
        memory_us=product.memory_us + extra - card.start, bandwidth_share=product.bandwidth_share * product.us / total,
        bandwidth_bound=product.bandwidth_bound * product.bound_us / (product.bound_us + extra),
        tensor_share=product.tensor_share * product.us / total,
    )  # fmt: skip


@dataclass(frozen=True)
class _Work:
    """How a launch's programs fall on the multiprocessors.

    whole, parts: programs of a tile each, and of a part of a tile each. blocks, share: turns of the loop of either.
    busiest: turns of the main loop on the multiprocessor with the most.
    """

    whole: int
    parts: int
    blocks: int
    share: int
    busiest: int

    @classmethod
    def of(cls, card: Card, launch: Launch, m: int, n: int, k: int, bits: int) -> _Work:
        blocks = math.ceil(k / (512 // bits))
        tiles = math.ceil(m / launch.bm) * math.ceil(n / launch.bn)
        whole = min(launch.whole, tiles) if launch.split > 1 else tiles
        parts = (tiles - whole) * launch.split
        share = math.ceil(blocks / launch.split)
        busiest = math.ceil(whole / card.count) * blocks + math.ceil(parts / card.count) * share
        return cls(whole, parts, blocks, share, busiest)

    def latency(self, card: Card, launch: Launch, facts: CodeFacts, turn: float) -> tuple[float, float]:
        """(Microseconds of rounds of programs whose turns take `turn` cycles, of what comes after the last)."""
        slots = card.count * _residents(card, launch, facts)
        rounds = math.ceil(self.whole / slots), math.ceil(self.parts / slots)
        turns = rounds[0] * self.blocks + rounds[1] * self.share
        # one program adds up all parts of a tile, or each of them a share
        added = (1 if launch.spread else launch.split) * launch.bm * launch.bn * 4
        after = PARTS + added / PART_BYTES / 1e3 if self.parts else 0.0
        return turns * turn / card.clock / 1e3, after


def _residents(card: Card, launch: Launch, facts: CodeFacts) -> int:
    """Programs that a multiprocessor holds at once."""
    limits = LIMITS[card.sm]
    registers = math.ceil(facts.registers / 8) * 8 * 32 * launch.warps
    shared = facts.shared + limits.reserved
    found = (limits.registers // registers, limits.shared // max(shared, 1), limits.threads // (32 * launch.warps))
    return max(1, min(*found, limits.programs))


def _packed_bytes(n: int, k: int, bits: int, group: int) -> float:
    return n * k * bits / 8 + (math.ceil(k / group) if group else 1) * n * 4


def _rereads(m: int, n: int, k: int, launch: Launch) -> float:
    # x comes from memory once while it fits in the cache, else again for every eighth column of programs
    return 1.0 if 2 * m * k < L2_RESIDENT else max(1.0, math.ceil(n / launch.bn) / 8)


def _cost(
    card: Card,
    shape: tuple[int, int, int, int, int],
    resources: tuple[float, float, float, float],
    moved: float,
    rate: int,
    latency: float,
    after: float,
    launch: Launch | None,
    facts: CodeFacts | None,
) -> KernelCost:
    bound = card.start + max(resources)
    busy = math.hypot(*resources)
    total = card.start + (busy**OVERLAP + latency**OVERLAP) ** (1 / OVERLAP) + after
    m, n, k, bits, group = shape
    instructions = instructions_a_weight(facts, launch, bits) if facts and launch else 0.0
    return KernelCost(
        m, n, k, bits, group, total, bound, *resources, latency, moved / (total * 1e3) / card.peak,
        moved / (bound * 1e3) / card.peak, m * n * k / (total * 1e3 * card.clock * card.count * rate), launch, facts,
        instructions,
    )  # fmt: skip
