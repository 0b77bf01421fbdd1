"""Time decode attention on a paged cache on this GPU, beside the bandwidth of a copy.

    python benchmarks/attn_decode.py --out benchmarks/results
    python benchmarks/attn_decode.py --sweep 32x8192,1x32768    # the best launches for these steps

Each step is timed in a CUDA graph over several layers' caches, enough to defeat the L2 cache, as the median of the
replays. Rates count the bytes of K and V that a step must read (with their scales). Results are first checked against
float32. Writes attn_decode.json and attn_decode.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import triton

from qengine.bench.about import commit
from qengine.kernels.paged_attn.cache import BlockLayout, Kind, KVPool, LayerCache
from qengine.kernels.paged_attn.decode import _device, paged_decode, paged_decode_ref, run
from qengine.kernels.paged_attn.decode_launch import DecodeLaunch
from qengine.kernels.w4a16 import reserve

MODELS = {"Llama-2-7B": (32, 32), "Qwen2.5-7B": (28, 4)}
BATCHES = (1, 8, 32, 64, 256)
CONTEXTS = (512, 2048, 8192, 32768)
KINDS: tuple[Kind, ...] = ("float16", "int8", "int4", "fp8")
HEAD_DIM, BLOCK = 128, 32
MOST_BYTES = 20 << 30
COLD_BYTES = 300 << 20


@dataclass(frozen=True)
class Step:
    """Inputs of one decode step: `layers` caches of the same sequences."""

    q: torch.Tensor
    layers: list[LayerCache]
    tables: torch.Tensor
    lens: torch.Tensor
    longest: int
    nbytes: int


def copy_bandwidth() -> float:
    """TB/s of a device-to-device copy of 2 GiB, bytes read and written."""
    a = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        b.copy_(a)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * a.numel() / sorted(times)[5] / 1e9


def make_step(kind: Kind, heads: int, kv_heads: int, lens: list[int], head_dim: int = HEAD_DIM) -> Step:
    """A step with shuffled blocks and random finite contents."""
    layout = BlockLayout(kind, kv_heads, head_dim, BLOCK)
    counts = [math.ceil(n / BLOCK) for n in lens]
    layers = max(1, math.ceil(COLD_BYTES / (sum(counts) * layout.block_bytes)))
    storage = torch.empty(layers, sum(counts), layout.block_bytes, dtype=torch.uint8, device="cuda")
    pool = KVPool(storage, layout)
    # bytes 0x20 to 0x3b are small positive float16, and any byte is a code
    storage.random_(0x20, 0x3B) if kind in ("float16", "bfloat16") else storage.random_(0, 0x7E)
    views = [pool.layer(i) for i in range(layers)]
    for view in views:
        for scales in (view.k_scale, view.v_scale):
            if scales is not None:
                scales.fill_(0.01)
    ids = torch.randperm(sum(counts), device="cuda").int()
    tables = torch.zeros(len(lens), max(counts), dtype=torch.int32, device="cuda")
    start = 0
    for row, count in enumerate(counts):
        tables[row, :count] = ids[start : start + count]
        start += count
    q = torch.randn(len(lens), heads, head_dim, device="cuda", dtype=torch.float16)
    nbytes = sum(lens) * sum(size for _, size in layout.parts) // BLOCK
    return Step(q, views, tables, torch.tensor(lens, dtype=torch.int32, device="cuda"), max(lens), nbytes)


def time_step(step: Step, call: Callable[[LayerCache], None], replays: int = 7) -> float:
    """Microseconds of one layer's step."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        reserve("cuda")
        call(step.layers[0])
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        repeats = max(1, 3 // len(step.layers))
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                for layer in step.layers:
                    call(layer)
        graph.replay()
        times = []
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / len(step.layers) / repeats)
    return statistics.median(times)


def decode(step: Step, longest: int | None = None) -> Callable[[LayerCache], None]:
    """The engine's own choice; longest: the bound that the launch is told."""
    out = torch.empty_like(step.q)
    bound = longest or step.longest
    return lambda layer: paged_decode(
        step.q, layer, step.tables, step.lens, out, scale=HEAD_DIM**-0.5, max_seq_len=bound
    )


def with_launch(step: Step, launch: DecodeLaunch, splits: int | None = None) -> Callable[[LayerCache], None]:
    """A given launch."""
    out = torch.empty_like(step.q)
    return lambda layer: run(
        step.q, layer, step.tables, step.lens, out, launch, scale=HEAD_DIM**-0.5, max_seq_len=step.longest,
        num_splits=splits,
    )  # fmt: skip


def check() -> dict[str, float]:
    """Relative errors against float32 of a step with a very long, a short, an empty and a one-token sequence."""
    errors = {}
    for (model, (heads, kv_heads)), kind in itertools.product(MODELS.items(), KINDS):
        step = make_step(kind, heads, kv_heads, [32768, 700, 0, 1])
        options = {"scale": HEAD_DIM**-0.5}
        exact = paged_decode_ref(step.q, step.layers[0], step.tables, step.lens, **options)
        out = torch.full_like(step.q, float("nan"))
        paged_decode(step.q, step.layers[0], step.tables, step.lens, out, max_seq_len=step.longest, **options)
        errors[f"{model} {kind}"] = float((out.float() - exact).norm() / exact.norm())
    return errors


def measure() -> list[dict]:
    """One row a model, kind, batch and context."""
    rows = []
    for (model, (heads, kv_heads)), kind in itertools.product(MODELS.items(), KINDS):
        for batch, context in itertools.product(BATCHES, CONTEXTS):
            if batch * context * kv_heads * HEAD_DIM * 4 > MOST_BYTES:
                continue
            step = make_step(kind, heads, kv_heads, [context] * batch)
            time = time_step(step, decode(step))
            rows.append(row(model, kind, batch, context, step, time))
            if (batch, context) in ((1, 512), (32, 512)):
                generous = time_step(step, decode(step, 131072))
                rows.append({**row(model, kind, batch, context, step, generous), "bound": 131072})
            del step
        torch.manual_seed(0)
        mixed = [32768, 16384] + [2048] * 6 + torch.randint(16, 1024, (56,)).tolist()
        step = make_step(kind, heads, kv_heads, mixed)
        rows.append(row(model, kind, len(mixed), 0, step, time_step(step, decode(step))))
    return rows


def row(model: str, kind: str, batch: int, context: int, step: Step, time: float) -> dict:
    return {
        "model": model, "kind": kind, "batch": batch, "context": context, "us": time, "bytes": step.nbytes,
        "tb_per_s": step.nbytes / time / 1e6,
    }  # fmt: skip


def candidates(kind: Kind, sm: int) -> list[DecodeLaunch]:
    """Launches worth timing, without their per_sm."""
    most = {"float16": 32, "bfloat16": 32}.get(kind, 64)
    found = [DecodeLaunch(warps, most, 2, 1, 2, None, True) for warps in (1, 2, 4)]
    found.append(DecodeLaunch(1, most // 2, 3, 1, 2, None, True))
    if sm >= 80:
        found += [DecodeLaunch(1, tokens, 2, 1, 2, None, True, True) for tokens in (most, most // 2)]
        found += [DecodeLaunch(1, most // 2, 2, 1, 2, registers, True) for registers in (168, 184, 208)]
    return [replace(launch, pdl=sm >= 90) for launch in found]


SWEPT: list[tuple[str, Kind]] = [(model, kind) for kind in KINDS[:3] for model in MODELS]


def compile_all(shard: int, of: int) -> None:
    """Compile a share of what `sweep` times, so that it finds a warm cache."""
    for index, (model, kind) in enumerate(SWEPT):
        heads, kv_heads = MODELS[model]
        step = make_step(kind, heads, kv_heads, [64])
        for number, launch in enumerate(candidates(kind, _device(0)[0])):
            if (number + index) % of == shard:
                with_launch(step, launch)(step.layers[0])
    torch.cuda.synchronize()


def sweep(shapes: list[tuple[int, int]], bandwidth: float, top: int) -> None:
    """Print the best launches of the main shapes."""
    for model, kind in SWEPT:
        heads, kv_heads = MODELS[model]
        for batch, context in shapes:
            step = make_step(kind, heads, kv_heads, [context] * batch)
            found = []
            for launch in candidates(kind, _device(0)[0]):
                for warps in (4, 8, 11, 12, 16, 32):
                    chosen = DecodeLaunch(**{**asdict(launch), "per_sm": warps // launch.warps})
                    found.append((time_step(step, with_launch(step, chosen), 3), chosen))
            found.sort(key=lambda pair: pair[0])
            print(f"{model} {kind} {batch}x{context}: {step.nbytes / 2**20:.0f} MiB")
            for time, launch in found[:top]:
                share = step.nbytes / time / 1e6 / bandwidth
                print(f"  {time:8.1f} us {100 * share:5.1f} %  {tuple(asdict(launch).values())}", flush=True)


def table(rows: list[dict], bandwidth: float) -> str:
    """The rows as a Markdown table; context 0 is a mixture of lengths."""
    lines = ["| model | kind | batch | context | MiB | us | TB/s | of copy | bound |", "|---" * 9 + "|"]
    for r in rows:
        lines.append(
            f"| {r['model']} | {r['kind']} | {r['batch']} | {r['context'] or 'mixed'} | {r['bytes'] / 2**20:.0f} |"
            f" {r['us']:.1f} | {r['tb_per_s']:.2f} | {100 * r['tb_per_s'] / bandwidth:.0f} % | {r.get('bound', '')} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--sweep", default="", help="time launches instead, for these batch x context, by commas")
    parser.add_argument("--top", type=int, default=4, help="launches to print for each shape of --sweep")
    parser.add_argument("--compile", default="", help="compile share I/N of what --sweep times, and stop")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/attn_decode.py needs a CUDA device")
    if options.compile:
        compile_all(*map(int, options.compile.split("/")))
        return
    bandwidth = copy_bandwidth()
    if options.sweep:
        print(f"copy {bandwidth:.2f} TB/s")
        sweep([tuple(map(int, s.split("x"))) for s in options.sweep.split(",")], bandwidth, options.top)  # type: ignore[misc]
        return
    errors = check()
    print("relative errors: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()), flush=True)
    rows = measure()
    text = table(rows, bandwidth)
    properties = torch.cuda.get_device_properties(0)
    result = {
        "gpu": properties.name, "sm": properties.major * 10 + properties.minor, "copy_tb_per_s": bandwidth,
        "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda,
        "python": platform.python_version(), "commit": commit(), "command": "python " + " ".join(sys.argv),
        "head_dim": HEAD_DIM, "block_size": BLOCK, "errors": errors, "rows": rows,
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "attn_decode.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "attn_decode.md").write_text(f"{properties.name}, copy {bandwidth:.2f} TB/s\n\n{text}\n")
    print(f"copy {bandwidth:.2f} TB/s\n{text}")


if __name__ == "__main__":
    main()
