"""Time the packed INT4 GEMM and its peers on this GPU, side by side in one run.

    python benchmarks/gemm.py --out benchmarks/results

Every product is timed in a CUDA graph over as many different weights as defeat the cache, the median of the replays;
the bandwidth of a large copy is measured first. Peers: cuBLAS in fp16, torch's tinygemm (`_weight_int4pack_mm`, bf16),
and gemlite where it is installed. Writes gemm.json (figures, GPU, versions, commit), gemm.md and gemm.png.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from qengine.kernels.w4a16 import W4A16Weight, w4a16_linear
from qengine.kernels.w4a16.ops import choose, run
from qengine.kernels.w4a16.tuning import random_weight, time_graph, weight_sets

MODELS = {
    "Llama-2-7B": ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008)),
    "Qwen2.5-7B": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SLOW_PEER_ROWS = 256
BARS = {1: 45.0, 16: 48.0, 64: 85.0, 256: 190.0}
Call = Callable[[], None]


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


def ours(m: int, weights: list[W4A16Weight]) -> list[Call]:
    """The engine's own choice for m rows."""
    x = torch.randn(m, weights[0].k, device="cuda", dtype=torch.float16)
    out = torch.empty(m, weights[0].n, device="cuda", dtype=torch.float16)
    launch = choose(m, weights[0], x.device)
    return [lambda w=w: run(x, w, None, out, launch) for w in weights]


def cublas(m: int, n: int, k: int) -> list[Call]:
    """fp16 weights through torch.mm."""
    sets = weight_sets(n * k * 2) if m <= 256 else 3
    weights = [torch.randn(n, k, device="cuda", dtype=torch.float16) for _ in range(sets)]
    x = torch.randn(m, k, device="cuda", dtype=torch.float16)
    out = torch.empty(m, n, device="cuda", dtype=torch.float16)
    return [lambda w=w: torch.mm(x, w.t(), out=out) for w in weights]


def tinygemm(m: int, n: int, k: int, sets: int) -> list[Call]:
    """torch's own INT4 product (bf16 activations, group 128)."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    packed, scales = [], torch.rand(k // 128, n, 2, device="cuda", dtype=torch.bfloat16)
    for _ in range(sets):
        raw = torch.randint(0, 255, (n, k // 2), device="cuda", dtype=torch.uint8)
        packed.append(torch._convert_weight_to_int4pack(raw, 8))
    return [lambda w=w: torch._weight_int4pack_mm(x, w, 128, scales) for w in packed]


def gemlite(m: int, n: int, k: int, sets: int) -> list[Call]:
    """gemlite's A16W4 linear with its shipped tables."""
    from gemlite import set_autotune
    from gemlite.core import DType, GemLiteLinearTriton

    set_autotune("fast")
    layers = []
    for _ in range(sets):
        layer = GemLiteLinearTriton(4, 128, k, n, DType.FP16, DType.FP16)
        codes = torch.randint(0, 16, (n, k), device="cuda", dtype=torch.uint8)
        scales = torch.rand(n * k // 128, 1, device="cuda", dtype=torch.float16)
        zeros = torch.randint(0, 16, (n * k // 128, 1), device="cuda").half()
        layer.pack(codes, scales, zeros, None)
        layers.append(layer)
    x = torch.randn(m, k, device="cuda", dtype=torch.float16)
    layers[0](x)
    return [lambda layer=layer: layer(x) for layer in layers]


def check(n: int, k: int) -> float:
    """Relative error of the engine's product against float64, on the shapes that are timed."""
    weight = random_weight(n, k, 4, 128)
    from qengine.kernels.w4a16 import dequantize_ref

    plain = dequantize_ref(weight).double()
    worst = 0.0
    for m in (1, 16, 64, 256, 2048):
        x = torch.randn(m, k, device="cuda", dtype=torch.float16)
        exact = x.double() @ plain.T
        worst = max(worst, float((w4a16_linear(x, weight).double() - exact).norm() / exact.norm()))
    return worst


def measure(peers: list[str], batches: tuple[int, ...]) -> list[dict]:
    """One row a model, shape and batch: microseconds of the engine and of every peer."""
    rows = []
    for model, shapes in MODELS.items():
        for n, k in shapes:
            error = check(n, k)
            first = random_weight(n, k, 4, 128)
            sets = weight_sets(first.nbytes())
            weights = [first] + [random_weight(n, k, 4, 128) for _ in range(sets - 1)]
            # an idle card's clock is low: the first figures would be its
            time_graph(ours(1, weights), replays=100)
            for m in batches:
                some = weights if m <= 256 else weights[:3]
                row = {"model": model, "n": n, "k": k, "m": m, "error": error}
                row["qengine"] = time_graph(ours(m, some), replays=15)
                row["cublas_fp16"] = time_graph(cublas(m, n, k))
                if "tinygemm" in peers and m <= SLOW_PEER_ROWS:
                    row["tinygemm"] = time_graph(tinygemm(m, n, k, sets))
                if "gemlite" in peers and m in (1, 16, 64, 256):
                    row["gemlite"] = time_graph(gemlite(m, n, k, sets))
                rows.append(row)
                print(json.dumps({a: round(b, 5) if isinstance(b, float) else b for a, b in row.items()}), flush=True)
            del weights
    return rows


def sums(rows: list[dict]) -> list[dict]:
    """The four linears of a layer added up, for each model and batch."""
    found = []
    for model in MODELS:
        for m in sorted({r["m"] for r in rows}):
            group = [r for r in rows if r["model"] == model and r["m"] == m]
            names = [p for p in ("qengine", "cublas_fp16", "gemlite", "tinygemm") if all(p in r for r in group)]
            total = {p: sum(r[p] for r in group) for p in names}
            floor = sum(r["n"] * r["k"] * (0.5 + 4 / 128) for r in group)
            found.append({"model": model, "m": m, "weight_bytes": floor, **total})
    return found


def table(layer: list[dict], bandwidth: float) -> str:
    """The sums as a Markdown table."""
    lines = ["| model | M | floor | qengine | cuBLAS fp16 | gemlite | tinygemm | bar |", "|---" * 8 + "|"]
    for r in layer:
        cells = [f"{r[p]:.1f}" if p in r else "" for p in ("qengine", "cublas_fp16", "gemlite", "tinygemm")]
        bar = str(BARS.get(r["m"], "")) if r["model"] == "Llama-2-7B" else ""
        floor = r["weight_bytes"] / bandwidth / 1e6
        lines.append(f"| {r['model']} | {r['m']} | {floor:.1f} | " + " | ".join([*cells, bar]) + " |")
    return "\n".join(lines)


def plot(layer: list[dict], path: Path) -> None:
    """Time against batch, one panel a model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(MODELS), figsize=(11, 4.2), sharey=True)
    for axis, model in zip(axes, MODELS, strict=True):
        for peer, style in (("qengine", "o-"), ("cublas_fp16", "s--"), ("gemlite", "^:"), ("tinygemm", "v:")):
            points = [(r["m"], r[peer]) for r in layer if r["model"] == model and peer in r]
            if points:
                axis.loglog(*zip(*points, strict=True), style, base=2, label=peer)
        axis.set(title=f"{model}, four linears, group 128", xlabel="rows of x (M)", ylabel="microseconds")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def commit() -> str:
    """The checkout's commit, or "unknown" outside one."""
    command = ["git", "rev-parse", "--verify", "-q", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip() or "unknown"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--peers", default="gemlite,tinygemm", help="which to time, by commas; cuBLAS always is")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="rows of x, by commas")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gemm.py needs a CUDA device")
    bandwidth = copy_bandwidth()
    rows = measure(options.peers.split(","), tuple(int(m) for m in options.batches.split(",")))
    layer = sums(rows)
    text = table(layer, bandwidth)
    properties = torch.cuda.get_device_properties(0)
    result = {
        "gpu": properties.name, "sm": properties.major * 10 + properties.minor, "copy_tb_per_s": bandwidth,
        "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda,
        "python": platform.python_version(), "commit": commit(), "command": "python " + " ".join(sys.argv),
        "bars_us": BARS, "layers": layer, "rows": rows,
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gemm.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "gemm.md").write_text(f"{properties.name}, copy {bandwidth:.2f} TB/s, microseconds\n\n{text}\n")
    plot(layer, options.out / "gemm.png")
    print(f"copy {bandwidth:.2f} TB/s\n{text}")


if __name__ == "__main__":
    main()
