"""Measuring launches on the card at hand: what `qengine tune` and the GEMM benchmark time.

A product is timed in a CUDA graph that runs it over as many different weights as defeat the cache, so the figure is
what a model sees: every weight comes from memory, and launches follow each other without gaps of the host.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from qengine.kernels.launch import Launch, pick, shared_bytes, split_for

from .layout import W4A16Weight
from .ops import device_limits, reserve, run

COLD_BYTES = 256 << 20
LARGE_ROWS = 256
FINALISTS = 4


def random_weight(n: int, k: int, bits: int, group_size: int, device: torch.device | str = "cuda") -> W4A16Weight:
    """A packed weight of random codes, zeros and scales (group_size 0: one group), made on the device."""
    block = 512 // bits
    kb, n16 = math.ceil(k / block), math.ceil(n / 16)
    groups = math.ceil(kb * block / group_size) if group_size else 1
    words = torch.randint(-(2**31), 2**31 - 1, (n16, kb, 256), dtype=torch.int64, device=device).to(torch.int32)
    scales = (torch.rand(groups, n16, 8, 2, device=device) * 0.5 + 0.25).half()
    zeros = (torch.randint(0, 2**bits, (groups, n16, 8, 2), device=device) + 1024).half()
    packed = torch.stack([scales, zeros], -1).view(torch.int32).squeeze(-1)
    return W4A16Weight(words, packed, None, n, k, bits, group_size, 2.0**-4)


def weight_sets(weight_bytes: int, cold_bytes: int = COLD_BYTES) -> int:
    """How many weights of this size exceed the cache several times."""
    return max(2, min(96, math.ceil(cold_bytes / max(weight_bytes, 1))))


def time_graph(calls: Iterable[Callable[[], None]], replays: int = 5) -> float:
    """Microseconds a call, the median of `replays` replays of one CUDA graph that holds all the calls."""
    calls = list(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        reserve("cuda")
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        times = []
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / len(calls))
    return sorted(times)[len(times) // 2]


def candidates(m: int, sm: int, smem: int, bits: int, group_size: int) -> list[Launch]:
    """Launches worth timing for a bucket of m rows, without their split."""
    fine = 0 < group_size < 512 // bits
    found = _small(m, sm, fine) if m <= 32 else _large(m, sm)
    if m >= 512:
        found.append(Launch("dequantize"))
    return [c for c in found if shared_bytes(c, bits) <= smem]


def _small(m: int, sm: int, fine: bool) -> list[Launch]:
    bm = 8 if m <= 8 else 16 if m <= 16 else 32
    tiles = ((32, 2), (64, 2), (64, 4), (128, 4))
    found = [Launch(bm=bm, bn=bn, warps=warps, prefetch=p) for bn, warps in tiles for p in (1, 2)]
    if sm >= 80:
        found += [Launch(bm=bm, bn=bn, warps=warps, stages=s) for bn, warps in tiles[1:] for s in (3, 4)]
    if sm == 90:
        found += [Launch(bm=bm, bn=128, warps=8, prefetch=p) for p in (1, 2)]
        found += [Launch(bm=bm, bn=bn, warps=w, stages=s) for bn, w in ((32, 1), (64, 2), (64, 4)) for s in (5, 6)]
        found = [replace(c, pdl=p) for c in found for p in (0, 1, 2)]
    return [replace(c, scaled=fine, halves=sm != 90 and bm > 16) for c in found]


def _large(m: int, sm: int) -> list[Launch]:
    tiles: tuple[tuple[int, int, int], ...]
    if sm != 90:
        tiles = ((64, 64, 4), (64, 128, 4), (64, 128, 8), (64, 256, 8))
        depths = (2, 3) if sm >= 80 else (1,)
        return [
            Launch(bm=bm, bn=bn, warps=w, stages=s, prefetch=p, scaled=True, halves=True)
            for (bm, bn, w), s, p in itertools.product(tiles, depths, (0,) if sm >= 80 else (0, 1))
        ]
    if m <= 64:
        tiles = ((64, 64, 4), (64, 128, 4), (64, 128, 8))
    else:
        tiles = ((128, 64, 4), (128, 128, 4), (128, 128, 8), (256, 64, 4), (256, 128, 8))
    found = [
        Launch(bm=bm, bn=bn, warps=w, stages=s, scaled=True, pdl=2, tma=True, spread=True)
        for (bm, bn, w), s in itertools.product(tiles, (3, 4))
    ]
    # unpacking beside the products pays where one program fills a multiprocessor
    return found + [replace(c, overlap=True) for c in found if c.bm * c.bn > 8192]


def with_splits(launch: Launch, m: int, n: int, k: int, bits: int, count: int) -> list[Launch]:
    """The launch with each split of K worth timing on a card of `count` multiprocessors."""
    if launch.kernel != "gemm":
        return [launch]
    blocks = math.ceil(k / (512 // bits))
    tiles = math.ceil(m / launch.bm) * math.ceil(n / launch.bn)
    found = {(1, 0)}
    for residents in (2, 4, 6, 8, 12) if m <= 32 else (1, 2, 3, 4):
        slots = count * residents
        found.add((split_for(m, n, k, launch.bm, launch.bn, 512 // bits, slots), 0))
        found.add((max(1, slots // tiles), 0))
        whole = tiles // slots * slots
        if 0 < whole < tiles and residents <= 4:
            found.add((max(1, slots // (tiles - whole)), whole))
            found.add((max(1, 2 * slots // (tiles - whole)), whole))
    return [replace(launch, split=s, whole=w) for s, w in sorted(found) if s <= min(blocks, 32) and (s > 1 or w == 0)]


@dataclass(frozen=True)
class Shape:
    """A linear layer as the kernels see it: N x K, 4 or 8 bits as packed, columns a group (0: one group)."""

    n: int
    k: int
    bits: int
    group: int


@dataclass(frozen=True)
class TuningCard:
    """The card that is tuned for: capability, bytes of shared memory a program may use, multiprocessors, name."""

    sm: int
    smem: int
    count: int
    name: str


class Timer(Protocol):
    """Times launches of one shape."""

    def prepare(self, shape: Shape) -> None:
        """Make the weights of a shape; what was there before may go."""

    def time(self, m: int, launch: Launch) -> float:
        """Microseconds of a launch for m rows; infinity where the card cannot run it."""


class CardTimer:
    """Times on the current CUDA device, over weights enough to defeat its cache."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        self.dtype = dtype
        self._weights: list[W4A16Weight] = []

    def prepare(self, shape: Shape) -> None:
        """See Timer."""
        self._weights = []
        first = random_weight(shape.n, shape.k, shape.bits, shape.group)
        more = weight_sets(first.nbytes()) - 1
        self._weights = [first, *(random_weight(shape.n, shape.k, shape.bits, shape.group) for _ in range(more))]
        # an idle card's clock is low: without this the first figures would be its
        self.time(1, pick_for(1, shape, this_card()))
        self.time(1024, Launch("dequantize"))

    def time(self, m: int, launch: Launch) -> float:
        """See Timer."""
        weights = self._weights if m <= LARGE_ROWS else self._weights[:3]
        x = torch.randn(m, weights[0].k, device="cuda", dtype=self.dtype)
        out = torch.empty(m, weights[0].n, device="cuda", dtype=self.dtype)
        try:
            return time_graph([lambda w=w: run(x, w, None, out, launch) for w in weights])  # type: ignore[misc]
        except Exception as error:
            if "out of resource" not in str(error):
                raise
            return math.inf


def this_card() -> TuningCard:
    """The current CUDA device."""
    sm, smem, count = device_limits(torch.cuda.current_device())
    return TuningCard(sm, smem, count, torch.cuda.get_device_name())


def pick_for(m: int, shape: Shape, card: TuningCard) -> Launch:
    """What `pick` gives for m rows of a shape on a card."""
    return pick(m, shape.n, shape.k, shape.group, card.sm, card.smem, shape.bits, card.count)


def first_round(m: int, shape: Shape, card: TuningCard) -> list[Launch]:
    """Every tile worth timing for m rows, each with the split that the rule gives it; what `pick` gives comes first."""
    block = 512 // shape.bits
    found = [pick_for(m, shape, card)]
    for launch in candidates(m, card.sm, card.smem, shape.bits, shape.group):
        if launch.kernel == "gemm":
            slots = card.count * (4 if m <= 32 else 1)
            launch = replace(launch, split=split_for(m, shape.n, shape.k, launch.bm, launch.bn, block, slots))
        found.append(launch)
    return list(dict.fromkeys(found))


def second_round(m: int, shape: Shape, card: TuningCard, timed: list[tuple[float, Launch]]) -> list[Launch]:
    """The fastest tiles of the first round with every split worth timing."""
    best = sorted(timed, key=lambda t: t[0])[: max(FINALISTS, len(timed) // 6)]
    splits = [s for _, launch in best for s in with_splits(launch, m, shape.n, shape.k, shape.bits, card.count)]
    known = {launch for _, launch in timed}
    return [launch for launch in dict.fromkeys(splits) if launch not in known]


def tune_rows(
    m: int, shape: Shape, card: TuningCard, timer: Timer, progress: Callable[[int, int], None] | None = None
) -> list[tuple[float, Launch]]:
    """(microseconds, launch) of every candidate for m rows, the fastest first; the timer holds the shape's weights.

    progress(done, total) is called after each launch; the total grows once, when the second round is known.
    """
    timed: list[tuple[float, Launch]] = []
    launches = first_round(m, shape, card)
    expected = 2 * len(launches)
    for launch in launches:
        timed.append((timer.time(m, launch), launch))
        if progress:
            progress(len(timed), expected)
    more = second_round(m, shape, card, timed)
    for launch in more:
        timed.append((timer.time(m, launch), launch))
        if progress:
            progress(len(timed), len(launches) + len(more))
    return sorted(timed, key=lambda t: t[0])
