"""Measuring launches on the card at hand: what `qengine tune` and the GEMM benchmark time.

A product is timed in a CUDA graph that runs it over as many different weights as defeat the cache, so the figure is
what a model sees: every weight comes from memory, and launches follow each other without gaps of the host.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from qengine.kernels.launch import Launch, shared_bytes, split_for

from .layout import W4A16Weight
from .ops import reserve, run

COLD_BYTES = 256 << 20


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
        found = [replace(c, pdl=p) for c in found for p in (0, 1, 2)]
    return [replace(c, scaled=fine, halves=sm < 90 and bm > 16) for c in found]


def _large(m: int, sm: int) -> list[Launch]:
    tiles: tuple[tuple[int, int, int], ...]
    if sm < 90:
        tiles = ((64, 64, 4), (64, 128, 4), (64, 128, 8), (64, 256, 8))
        depths = (2, 3) if sm >= 80 else (1,)
        return [
            Launch(bm=bm, bn=bn, warps=w, stages=s, prefetch=p, scaled=True, halves=True)
            for (bm, bn, w), s, p in itertools.product(tiles, depths, (0,) if sm >= 80 else (0, 1))
        ]
    if m <= 64:
        tiles = ((64, 64, 4), (64, 128, 4), (64, 128, 8))
    else:
        tiles = ((128, 64, 4), (128, 128, 4), (128, 128, 8), (256, 128, 8), (128, 256, 8))
    return [
        Launch(bm=bm, bn=bn, warps=w, stages=s, scaled=True, halves=h, pdl=2, tma=True)
        for (bm, bn, w), s, h in itertools.product(tiles, (2, 3, 4), (False, True))
    ]


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


def measure(launches: Iterable[Launch], m: int, weights: list[W4A16Weight], dtype: torch.dtype) -> list[float]:
    """Microseconds of each launch for m rows over the weights; infinity where it cannot be compiled or run."""
    x = torch.randn(m, weights[0].k, device="cuda", dtype=dtype)
    out = torch.empty(m, weights[0].n, device="cuda", dtype=dtype)
    times = []
    for launch in launches:
        calls = [lambda w=w, launch=launch: run(x, w, None, out, launch) for w in weights]
        try:
            times.append(time_graph(calls))
        except Exception as error:
            if "out of resource" not in str(error):
                raise
            times.append(math.inf)
    return times


def tune_shape(
    n: int, k: int, ms: Iterable[int], bits: int, group_size: int, sm: int, smem: int, count: int, dtype: torch.dtype
) -> list[tuple[int, list[tuple[float, Launch]]]]:
    """For each m: (microseconds, launch) of every candidate, the fastest first."""
    first = random_weight(n, k, bits, group_size)
    weights = [first] + [random_weight(n, k, bits, group_size) for _ in range(weight_sets(first.nbytes()) - 1)]
    result = []
    for m in ms:
        launches = [
            chosen for c in candidates(m, sm, smem, bits, group_size) for chosen in with_splits(c, m, n, k, bits, count)
        ]
        timed = sorted(zip(measure(launches, m, weights, dtype), launches, strict=True), key=lambda t: t[0])
        result.append((m, timed))
    return result
