"""Time the fused operators and torch's own on this GPU, beside the time that their bytes take.

    python benchmarks/fused_ops.py [--out benchmarks/results] [--sweep] [--quick]
    python benchmarks/fused_ops.py --check     # no GPU: every form compiled for Turing, against its budget

Microseconds a call, the median of the replays of one CUDA graph that holds calls on as many different tensors as defeat
the cache. floor: bytes read and written / the bandwidth of a large copy, or the time of an empty kernel in such a
graph if that is longer. --sweep: every launch of a kernel; --quick: one replay (compiles everything).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton

from qengine.bench.about import commit
from qengine.kernels.fused import aot, ops, ref
from qengine.kernels.fused.activation import launch_for, run_act_and_mul
from qengine.kernels.fused.embedding import launch_for as embedding_launch
from qengine.kernels.fused.embedding import run_embedding
from qengine.kernels.fused.norm import Shape, run_norm, shape_for
from qengine.kernels.w4a16.tuning import time_graph

HIDDEN = {3584: 18944, 4096: 11008}
ROWS = (1, 32, 256, 2048)
COLD_BYTES = 256 << 20
HALF = torch.float16
Call = Callable[[], Any]


@triton.jit
def nothing(x_ptr):  # type: ignore[no-untyped-def]
    """An empty kernel."""


def randn(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def copy_bandwidth() -> float:
    """Bytes a microsecond of a device-to-device copy of 1 GiB by a kernel (a graph would use a copy engine)."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    times = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        b.copy_(a)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return 2 * a.numel() / sorted(times)[4]


def sets(size: int) -> int:
    """How many calls of `size` bytes exceed the cache several times."""
    return max(2, min(64, math.ceil(COLD_BYTES / size)))


def cases(rows: int, size: int, inner: int) -> dict[str, tuple[int, Callable[[], tuple[Call, Call]]]]:
    """Name -> (bytes of a call, a maker of one call of ours and one of torch's on tensors of their own)."""
    w, w32 = randn(size), randn(size, dtype=torch.float32)
    value = rows * size * 2

    def rms() -> tuple[Call, Call]:
        x = randn(rows, size)
        return lambda: ops.rms_norm(x, w, 1e-5), lambda: F.rms_norm(x, (size,), w, 1e-5)

    def add_rms() -> tuple[Call, Call]:
        h, d = randn(rows, size), randn(rows, size) * 1e-3
        return lambda: ops.add_rms_norm(h, d, w, 1e-5), lambda: ref.add_rms_norm(h, d, w, 1e-5)

    def add_layer() -> tuple[Call, Call]:
        h, d = randn(rows, size), randn(rows, size) * 1e-3
        return lambda: ops.add_layer_norm(h, d, w, w, 1e-5), lambda: ref.add_layer_norm(h, d, w, w, 1e-5)

    def sandwich() -> tuple[Call, Call]:
        h, d = randn(rows, size, dtype=torch.float32), randn(rows, size) * 1e-3
        args = (h, d, w32, 1e-6, w32, 1e-6, HALF)
        return lambda: ops.norm_add_norm(*args), lambda: ref.norm_add_norm(*args)

    def silu() -> tuple[Call, Call]:
        x = randn(rows, 2 * inner)
        return lambda: ops.act_and_mul(x, "silu"), lambda: ref.act_and_mul(x[:, :inner], x[:, inner:], "silu")

    return {
        "rms_norm": (2 * value, rms),
        "add_rms_norm": (4 * value, add_rms),
        "add_layer_norm": (4 * value, add_layer),
        "norm_add_norm, float32 residual": (6 * value, sandwich),
        f"silu and mul, {inner}": (3 * rows * inner * 2, silu),
    }


@cache
def tables(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One table of embeddings, in pinned memory and on the device."""
    table = torch.randint(-999, 999, (32768, size)).half()
    return table.pin_memory(), table.cuda()


def small_cases(rows: int, size: int) -> dict[str, tuple[int, Callable[[], tuple[Call, Call]]]]:
    """As cases: the embedding, from the device and from pinned memory, and the angles."""
    pinned, held = tables(size)
    inverse = (1 / 10000.0 ** (torch.arange(64) / 64)).cuda()

    def embed(where: torch.Tensor) -> tuple[Call, Call]:
        ids = torch.randint(0, 32768, (rows,), device="cuda")
        return lambda: ops.embed(ids, where, 1.0, HALF), lambda: F.embedding(ids, held)

    def angles() -> tuple[Call, Call]:
        positions = torch.randint(0, 131072, (rows,), device="cuda")
        args = (positions, inverse, 1.0, HALF, False)
        return lambda: ops.rotary_angles(*args), lambda: ref.rotary_angles(*args)

    return {
        "embed": (2 * rows * size * 2, partial(embed, held)),
        "embed, pinned table": (2 * rows * size * 2, partial(embed, pinned)),
        "rotary_angles, 128": (2 * rows * 128 * 2, angles),
    }


def measure(replays: int) -> dict:
    """Microseconds of everything, with the bandwidth and the time of an empty kernel."""
    bandwidth = copy_bandwidth()
    x = randn(16)
    empty = time_graph([lambda: nothing[(1,)](x)] * 64, replays)
    rows = []
    for size, inner in HIDDEN.items():
        for count in ROWS:
            found = cases(count, size, inner) | (small_cases(count, size) if size == 3584 else {})
            for name, (size_bytes, make) in found.items():
                made = [make() for _ in range(sets(size_bytes))]
                ours, theirs = (time_graph([pair[i] for pair in made], replays) for i in (0, 1))
                floor = max(size_bytes / bandwidth, empty)
                row = {"op": name, "hidden": size, "rows": count, "us": ours, "torch_us": theirs, "floor_us": floor}
                rows.append(row)
    properties = torch.cuda.get_device_properties(0)
    command = f"python3 {' '.join(sys.argv)}"
    versions = {"torch": torch.__version__, "triton": triton.__version__, "commit": commit(), "command": command}
    return {"gpu": properties.name, **versions, "copy_tb_s": bandwidth / 1e6, "empty_us": empty, "rows": rows}


def sweep(replays: int) -> None:
    """Print, for each kernel and number of rows, the fastest launches and the chosen one."""
    for size, stream in ((4096, HALF), (3584, torch.float32)):
        w = randn(size, dtype=stream)
        inner = w if stream == torch.float32 else None
        for count in ROWS:
            usual = shape_for(size, count, {2, w.element_size()})
            need = range(sets(count * size * 8))
            pairs = [(randn(count, size, dtype=stream), randn(count, size) * 1e-3) for _ in need]
            out, timed = randn(count, size), list[tuple[float, object, bool]]()
            for warps in (2, 4, 8, 16, 32) if stream == HALF else (4, 8, 16, 32):
                for pdl in (False, True):
                    shape = Shape(usual.block, usual.vector, True, warps)
                    call = partial(run_norm, inner=inner, inner_eps=1e-6, shape=shape, pdl=pdl)
                    calls = [partial(call, h, out, w, None, 1e-6, delta=d) for h, d in pairs]
                    timed.append((time_graph(calls, replays), warps, pdl))
            show(f"norm {size} {str(stream)[6:]} x {count}", timed, f"{usual.warps} warps")
    for count in ROWS:
        xs = [randn(count, 2 * 11008) for _ in range(sets(count * 11008 * 6))]
        out, timed = randn(count, 11008), list[tuple[float, object, bool]]()
        for launch in ((256, 1), (512, 1), (512, 2), (1024, 2), (1024, 4), (2048, 4), (2048, 8)):
            for pdl in (False, True):
                calls = [
                    partial(run_act_and_mul, x[:, :11008], x[:, 11008:], out, "silu", launch=launch, pdl=pdl)
                    for x in xs
                ]
                timed.append((time_graph(calls, replays), launch, pdl))
        show(f"silu 11008 x {count}", timed, str(launch_for(11008, count)))
    for place, table in zip(("pinned", "device"), tables(3584), strict=True):
        for count in ROWS[1:]:
            ids = [torch.randint(0, 32768, (count,), device="cuda") for _ in range(sets(count * 3584 * 4))]
            out, timed = randn(count, 3584), list[tuple[float, object, bool]]()
            for launch in ((512, 1), (512, 2), (1024, 2), (1024, 4), (2048, 4), (4096, 4), (4096, 8), (4096, 16)):
                calls = [partial(run_embedding, i, table, 1.0, out, launch=launch, pdl=False) for i in ids]
                timed.append((time_graph(calls, replays), launch, False))
            show(f"embed 3584 {place} x {count}", timed, str(embedding_launch(3584)))


def show(name: str, timed: list, usual: str) -> None:
    """One line: the four fastest, and the slowest."""
    timed.sort(key=lambda t: t[0])
    texts = [f"{us:.2f} {launch}{' pdl' if pdl else ''}" for us, launch, pdl in [*timed[:4], timed[-1]]]
    plain = min((t for t in timed if not t[2]), key=lambda t: t[0])
    print(f"{name}: {' | '.join(texts)} | best without pdl {plain[0]:.2f} {plain[1]} | now {usual}")


def report(result: dict) -> str:
    """The figures as a Markdown table: a line an operator, for each number of rows qengine / torch / floor."""
    head = f"{result['gpu']}, copy {result['copy_tb_s']:.2f} TB/s, an empty kernel {result['empty_us']:.2f} us"
    made = f"torch {result['torch']}, Triton {result['triton']}, commit {result['commit']}, `{result['command']}`"
    lines = [f"{head}; {made}. Microseconds: qengine / torch / floor", ""]
    lines += ["| operator | hidden | " + " | ".join(f"{n} rows" for n in ROWS) + " |", "|---" * (2 + len(ROWS)) + "|"]
    table: dict[tuple[str, int], list[str]] = {}
    for r in result["rows"]:
        figures = f"{r['us']:.2f} / {r['torch_us']:.2f} / {r['floor_us']:.2f}"
        table.setdefault((r["op"], r["hidden"]), []).append(figures)
    lines += [f"| {op} | {hidden} | {' | '.join(cells)} |" for (op, hidden), cells in table.items()]
    return "\n".join(lines)


def _judge(index: int) -> str:
    # by number: a Triton kernel cannot be sent to another process
    variant = list(aot.variants())[index]
    code, shared = aot.inspect_variant(variant, 75)
    return ", ".join(aot.over_budget(code, shared, variant.warps * 32))


def check() -> int:
    """Compile every form for compute capability 7.5; the number that exceed their budget is the exit status."""
    found = list(aot.variants())
    with ProcessPoolExecutor() as pool:
        reasons = list(pool.map(_judge, range(len(found))))
    for variant, reason in zip(found, reasons, strict=True):
        if reason:
            print(f"{variant.name}: {reason}")
    failed = sum(map(bool, reasons))
    print(f"{len(found) - failed} of {len(found)} fused kernels are within their budget on sm_75")
    return min(failed, 100)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for fused_ops.json and fused_ops.md")
    parser.add_argument("--sweep", action="store_true", help="time every launch as well")
    parser.add_argument("--quick", action="store_true", help="one replay of each graph")
    parser.add_argument("--check", action="store_true", help="compile for Turing and judge; needs no GPU")
    args = parser.parse_args()
    if args.check:
        return check()
    replays = 1 if args.quick else 7
    result = measure(replays)
    print(report(result))
    if args.sweep:
        sweep(replays)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "fused_ops.json").write_text(json.dumps(result, indent=1) + "\n")
        (args.out / "fused_ops.md").write_text(report(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
