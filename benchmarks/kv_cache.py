"""What the cache's own kernels take on a GPU: the write of a step, and swaps over PCIe.

python benchmarks/kv_cache.py             # tables
python benchmarks/kv_cache.py --json      # one JSON object
python benchmarks/kv_cache.py --sweep     # launches beside the chosen ones
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from qengine.bench.about import commit, versions
from qengine.kernels.paged_attn.blocks import LINK, gather_blocks, run_move, scatter_blocks
from qengine.kernels.paged_attn.cache import KINDS, BlockLayout, Kind, KVPool
from qengine.kernels.paged_attn.write import WriteLaunch, choose_write, run_write

MODELS = {"Qwen2.5-7B": (28, 4, 128), "Llama-2-7B": (32, 32, 128)}
TOKENS = (1, 32, 256, 8192)
SHAPES = [(1, 1), (1, 2), (2, 2), (4, 2), (4, 4), (8, 4)]
SWEEP = [WriteLaunch(tokens, 4, warps) for tokens, warps in SHAPES]
LINK_SWEEP = [(p, w, 4096) for w in (2, 4, 8) for p in (4, 8, 16)]


def graph_us(call: Callable[[], object], calls: int, rounds: int = 7) -> float:
    """Microseconds of one `call`, `calls` of them in a CUDA graph, the median of rounds."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()
        times = []
        for _ in range(rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def copy_gbs() -> float:
    """GB/s, read and written, of a copy on the device."""
    a = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / graph_us(lambda: b.copy_(a), 4) / 1e3


def write_case(
    heads: tuple[int, int, int], kind: Kind, tokens: int
) -> tuple[Callable[[WriteLaunch], None], int, KVPool]:
    """(a step's write with a launch, bytes that it has to move, the pool)."""
    hq, hkv, size = heads
    pool = KVPool.allocate(BlockLayout(kind, hkv, size, 16, 2), 2, max(64, tokens // 16 * 2), "cuda")
    cache = pool.layer(1)
    qkv = torch.randn(tokens, (hq + 2 * hkv) * size, dtype=torch.float16, device="cuda")
    slots = torch.randperm(pool.num_blocks * 16, device="cuda")[:tokens]
    if tokens > 256:
        blocks = torch.randperm(pool.num_blocks, device="cuda")[: tokens // 16]
        slots = (blocks[:, None] * 16 + torch.arange(16, device="cuda")).flatten()
    cos, sin = (torch.randn(tokens, 1, size, dtype=torch.float16, device="cuda") for _ in range(2))
    moved = qkv.nbytes + tokens * hq * size * 2 + tokens * pool.layout.block_bytes // 16

    def run(launch: WriteLaunch) -> None:
        run_write(launch, qkv, cache, slots, hq, None, "rms", 1e-6, cos, sin, False)

    return run, moved, pool


def writes(models: list[str], kinds: list[Kind], sweep: bool) -> Iterator[dict[str, Any]]:
    """Times of the write for each model, kind and number of tokens."""
    for name in models:
        for kind in kinds:
            for tokens in TOKENS:
                run, moved, pool = write_case(MODELS[name], kind, tokens)
                chosen = choose_write(tokens, MODELS[name][0], pool.layer(1))
                calls = 4 if tokens > 256 else 20
                us = graph_us(functools.partial(run, chosen), calls)
                row = {"model": name, "kind": kind, "tokens": tokens, "us": us, "gbs": moved / us / 1e3}
                row["launch"] = [chosen.tokens, chosen.heads, chosen.warps]
                if sweep:
                    others = {}
                    for launch in SWEEP:
                        label = f"{launch.tokens}/{launch.heads}/{launch.warps}"
                        others[label] = graph_us(functools.partial(run, launch), calls, 3)
                    best = sorted(others, key=others.__getitem__)
                    row["others"] = " ".join(f"{label} {others[label]:.2f}" for label in best)
                yield row


def swaps(sweep: bool) -> dict[str, Any]:
    """GB/s to and from pinned memory: torch's copies of one contiguous buffer, and scattered blocks."""
    pool = KVPool.allocate(BlockLayout("float16", 4, 128, 16), 28, 512, "cuda")
    ids = torch.randperm(512, device="cuda")[:256]
    device = torch.empty(256, 28, pool.layout.block_bytes, dtype=torch.uint8, device="cuda")
    host = torch.empty(device.shape, dtype=torch.uint8, pin_memory=True)

    def rate(call: Callable[[], Any], calls: int = 2, rounds: int = 5) -> float:
        return host.nbytes / graph_us(call, calls, rounds) / 1e3

    result: dict[str, Any] = {
        "piece_bytes": pool.layout.block_bytes,
        "bytes": host.nbytes,
        "programs, warps": list(LINK),
        "copy to host": rate(lambda: host.copy_(device, non_blocking=True)),
        "gather to host": rate(lambda: gather_blocks(pool, ids, host)),
        "copy from host": rate(lambda: device.copy_(host, non_blocking=True)),
        "scatter from host": rate(lambda: scatter_blocks(pool, ids, host)),
        "gather on device": rate(lambda: gather_blocks(pool, ids, device)),
    }
    if sweep:
        for p, w, c in LINK_SWEEP:
            options: dict[str, Any] = {"programs": p, "warps": w, "chunk": c}
            result[f"programs {p} warps {w} chunk {c}"] = [
                round(rate(functools.partial(run_move, pool, ids, host, gather=g, **options), 1, 3), 1)
                for g in (True, False)
            ]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--sweep", action="store_true", help="try other launches too")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), help="heads for the write")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["float16", "int8", "int4"], help="kinds of cache")
    parser.add_argument("--no-swaps", action="store_true", help="leave the swaps out")
    arguments = parser.parse_args()
    about = {"versions": versions(), "commit": commit(), "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])}
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), **about, "copy_gbs": copy_gbs(), "writes": []}
    if not arguments.json:
        print(f"{result['device']}: a copy on the device moves {result['copy_gbs']:.0f} GB/s", flush=True)
    for row in writes(arguments.models, arguments.kinds, arguments.sweep):
        result["writes"].append(row)
        if not arguments.json:
            what = f"{row['model']:11s} {row['kind']:8s} T={row['tokens']:<5d}"
            launch = "/".join(map(str, row["launch"]))
            print(f"{what} {row['us']:8.2f} us {row['gbs']:6.0f} GB/s {launch} {row.get('others', '')}", flush=True)
    if not arguments.no_swaps:
        result["swaps"] = swaps(arguments.sweep)
        if not arguments.json:
            for name, value in result["swaps"].items():
                print(f"{name}: {value if isinstance(value, list | int) else round(value, 2)}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
