"""Graphics cards as the cost model sees them: datasheet numbers, and for two of them what was measured or reported."""

from __future__ import annotations

from dataclasses import dataclass

REACH = 0.885
"""The share of the peak bandwidth that a copy reaches: 4.25 of 4.8 TB/s measured on an H200, taken for every card."""


@dataclass(frozen=True)
class Card:
    """One card.

    sm: compute capability. count: multiprocessors. clock: GHz under load. peak: GB/s of its memory, reach: the share
    of it that a copy gets. l2, cache_mib: GB/s and size of its L2 cache. start: microseconds to launch a kernel.
    mma, wgmma: fp16 multiply-adds, summed in float32, that a multiprocessor does in a cycle by mma.sync and by wgmma
    (0: it has none). memory_gib: of the card. link: GB/s from pinned host memory.
    """

    sm: int
    count: int
    clock: float
    peak: float
    start: float
    mma: int
    memory_gib: float
    l2: float
    cache_mib: float
    wgmma: int = 0
    reach: float = REACH
    link: float = 12.0


@dataclass(frozen=True)
class Limits:
    """What a multiprocessor holds at once: registers, bytes of shared memory (reserved: of each program), threads,
    programs. From NVIDIA's tables of compute capabilities."""

    registers: int
    shared: int
    reserved: int
    threads: int
    programs: int


LIMITS = {
    75: Limits(65536, 64 << 10, 0, 1024, 16),
    80: Limits(65536, 164 << 10, 1024, 2048, 32),
    86: Limits(65536, 100 << 10, 1024, 1536, 16),
    89: Limits(65536, 100 << 10, 1024, 1536, 24),
    90: Limits(65536, 228 << 10, 1024, 2048, 32),
}


def _rtx(
    sm: int, count: int, clock: float, peak: float, memory_gib: float, cache_mib: float, link: float = 24.0
) -> Card:
    # GeForce cards sum fp16 products in float32 at half the rate of the data centre cards: 256 a cycle. 32 bytes from
    # L2 a cycle and multiprocessor are an assumption on the low side.
    return Card(sm, count, clock, peak, 3.0, 256, memory_gib, 32 * count * clock, cache_mib, link=link)


CARDS = {
    # Datasheet; the clock is what 70 W allow under load (0.9 to 1.2 GHz are reported)
    "T4": Card(75, 40, 1.0, 320, 4.0, 512, 16, 1000, 4),
    "RTX 2060": _rtx(75, 30, 1.68, 336, 6, 3, 12.0),
    "RTX 2070": _rtx(75, 36, 1.62, 448, 8, 4, 12.0),
    "RTX 2080 Ti": _rtx(75, 68, 1.545, 616, 11, 5.5, 12.0),
    "A100 40GB": Card(80, 108, 1.41, 1555, 2.0, 1024, 40, 4500, 40, link=24.0),
    "A10": Card(86, 72, 1.4, 600, 3.0, 512, 24, 2000, 6, link=24.0),
    "RTX 3060": _rtx(86, 28, 1.777, 360, 12, 3),
    "RTX 3070": _rtx(86, 46, 1.725, 448, 8, 4),
    "RTX 3090": _rtx(86, 82, 1.695, 936, 24, 6),
    "L4": Card(89, 58, 1.4, 300, 3.0, 512, 24, 2000, 48, link=24.0),
    "RTX 4060": _rtx(89, 24, 2.46, 272, 8, 24, 12.0),
    "RTX 4070": _rtx(89, 46, 2.475, 504, 12, 36),
    "RTX 4090": _rtx(89, 128, 2.52, 1008, 24, 72),
    # Copy measured; start and L2 are those that bring the model nearest to the measured kernels
    "H200": Card(90, 132, 1.755, 4800, 1.2, 1280, 141, 16800, 50, 2048, link=50.0),
}
