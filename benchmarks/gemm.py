"""Time the packed INT4 GEMM and its peers on this GPU, side by side in one run.

    python benchmarks/gemm.py                      # measure, write benchmarks/results/gemm.{json,md,png} and READMEs
    python benchmarks/gemm.py --peers tinygemm     # with these peers only
    python benchmarks/gemm.py --report             # write the tables and the plot from gemm.json again; no GPU
    python benchmarks/gemm.py --tune-gemlite FILE  # let gemlite tune itself first, for a run with --gemlite-config FILE

Every product is timed in a CUDA graph over as many different weights as defeat the cache, the median of the replays;
the bandwidth of a large copy is measured first. Peers: cuBLAS in fp16, always; torch's tinygemm
(`_weight_int4pack_mm`, bf16) and gemlite (`pip install gemlite`) where they are there. gemlite takes minutes to tune
itself and heats the card meanwhile; its result can be made before, by --tune-gemlite, also on another card of the kind.
gemm.json has the GPU, versions, the command as it was run and the commit: of the checkout, or of QENGINE_COMMIT where
the files were copied without git.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gemm_report
import torch
import triton

from qengine.kernels.w4a16 import W4A16Weight, dequantize_ref, w4a16_linear
from qengine.kernels.w4a16.ops import choose, run
from qengine.kernels.w4a16.tuning import random_weight, time_graph, weight_sets

MODELS = {
    "Llama-2-7B": ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008)),
    "Qwen2.5-7B": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# peers are timed at these rows: tinygemm's time grows with every row, gemlite tunes for each number of rows
PEER_ROWS = {"tinygemm": (1, 2, 4, 8, 16, 32, 64, 128, 256), "gemlite": (1, 16, 64, 256)}
COLD_ROWS = 256
"""Up to so many rows every call of a graph has a weight of its own; larger products take three in turn."""
WARM_UP = 10
Call = Callable[[], object]
Peer = Callable[[int], list[Call]]
"""Rows of x -> calls, on weights that were made once."""


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


def cublas(n: int, k: int) -> Peer:
    """fp16 weights through torch.mm."""
    weights = [torch.randn(n, k, device="cuda", dtype=torch.float16) for _ in range(max(3, weight_sets(n * k * 2)))]

    def calls(m: int) -> list[Call]:
        x = torch.randn(m, k, device="cuda", dtype=torch.float16)
        out = torch.empty(m, n, device="cuda", dtype=torch.float16)
        return [lambda w=w: torch.mm(x, w.t(), out=out) for w in (weights if m <= COLD_ROWS else weights[:3])]

    return calls


def tinygemm(n: int, k: int) -> Peer:
    """torch's own INT4 product (bf16 activations, group 128)."""
    scales = torch.rand(k // 128, n, 2, device="cuda", dtype=torch.bfloat16)
    raw = torch.randint(0, 255, (n, k // 2), device="cuda", dtype=torch.uint8)
    packed = [torch._convert_weight_to_int4pack(raw, 8) for _ in range(weight_sets(n * k // 2))]

    def calls(m: int) -> list[Call]:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        return [lambda w=w: torch._weight_int4pack_mm(x, w, 128, scales) for w in packed]

    return calls


def gemlite(n: int, k: int, sets: int | None = None) -> Peer:
    """gemlite's A16W4 linear, after its own fast tuning, over so many weights (default: as defeat the cache)."""
    from gemlite import set_autotune
    from gemlite.core import DType, GemLiteLinearTriton

    set_autotune("fast")
    layers = []
    for _ in range(sets or weight_sets(n * k // 2)):
        layer = GemLiteLinearTriton(4, 128, k, n, DType.FP16, DType.FP16)
        codes = torch.randint(0, 16, (n, k), device="cuda", dtype=torch.uint8)
        scales = torch.rand(n * k // 128, 1, device="cuda", dtype=torch.float16)
        zeros = torch.randint(0, 16, (n * k // 128, 1), device="cuda").half()
        layer.pack(codes, scales, zeros, None)
        layers.append(layer)

    def calls(m: int) -> list[Call]:
        x = torch.randn(m, k, device="cuda", dtype=torch.float16)
        layers[0](x)
        return [lambda layer=layer: layer(x) for layer in layers]

    return calls


def tune_gemlite(path: Path) -> None:
    """Let gemlite tune itself for every product that is timed, and keep what it finds in `path`."""
    from gemlite.core import GemLiteLinearTriton

    for n, k in itertools.chain(*MODELS.values()):
        calls = gemlite(n, k, sets=1)
        for m in PEER_ROWS["gemlite"]:
            calls(m)
            torch.cuda.synchronize()
        GemLiteLinearTriton.cache_config(str(path))
        print(f"gemlite is tuned for {n}x{k}", flush=True)


def load_gemlite(path: Path) -> None:
    """Use what `tune_gemlite` kept."""
    from gemlite.core import GemLiteLinearTriton

    if not GemLiteLinearTriton.load_config(str(path)):
        sys.exit(f"--gemlite-config: gemlite could not read {path}; make it with --tune-gemlite {path}")


PEERS = {"tinygemm": tinygemm, "gemlite": gemlite}


def versions_of(wanted: list[str]) -> dict[str, str]:
    """Version of each wanted peer that is installed; what is not is named on the terminal and left out."""
    found = {}
    for name in wanted:
        if name not in PEERS:
            sys.exit(f"--peers: {name!r} is not known; known are {', '.join(PEERS)}")
        if name == "tinygemm":
            found[name] = f"torch {torch.__version__}"
        elif importlib.util.find_spec(name):
            found[name] = importlib.metadata.version(name)
        else:
            print(f"{name} is not installed and is left out; pip install {name}", flush=True)
    return found


def check(n: int, k: int) -> float:
    """Relative error of the engine's product against float64, on the shapes that are timed."""
    weight = random_weight(n, k, 4, 128)
    plain = dequantize_ref(weight).double()
    worst = 0.0
    for m in (1, 16, 64, 256, 2048):
        x = torch.randn(m, k, device="cuda", dtype=torch.float16)
        exact = x.double() @ plain.T
        worst = max(worst, float((w4a16_linear(x, weight).double() - exact).norm() / exact.norm()))
    return worst


def measure(peers: list[str], batches: tuple[int, ...]) -> list[dict]:
    """One row a model, shape and batch: microseconds of the engine and of every peer.

    Small batches of all shapes come before large ones, and products in float64 last: after seconds of heavy load the
    card lowers its clocks, which would be seen in the next small batches.
    """
    rows = []
    for model, shapes in MODELS.items():
        weights, others = {}, {}
        for n, k in shapes:
            first = random_weight(n, k, 4, 128)
            more = weight_sets(first.nbytes()) - 1
            weights[n, k] = [first, *(random_weight(n, k, 4, 128) for _ in range(more))]
            others[n, k] = {"cublas_fp16": cublas(n, k), **{peer: PEERS[peer](n, k) for peer in peers}}
        # an idle card's clock is low too: the first figures would be its
        for _ in range(WARM_UP):
            time_graph(ours(1, weights[shapes[0]]), replays=100)
        for m, (n, k) in itertools.product(batches, shapes):
            some = weights[n, k] if m <= COLD_ROWS else weights[n, k][:3]
            row = {"model": model, "n": n, "k": k, "m": m, "qengine": time_graph(ours(m, some), replays=15)}
            for peer, calls in others[n, k].items():
                if m in PEER_ROWS.get(peer, batches):
                    row[peer] = time_graph(calls(m), replays=15)
            rows.append(row)
            print(json.dumps({a: round(b, 3) if isinstance(b, float) else b for a, b in row.items()}), flush=True)
    errors = {shape: check(*shape) for shapes in MODELS.values() for shape in shapes}
    return [{**row, "error": errors[row["n"], row["k"]]} for row in rows]


def commit() -> str:
    """QENGINE_COMMIT, or the checkout's commit, with "-dirty" where tracked files differ from it.

    Exits where neither is there: a result that does not say what was measured cannot be repeated.
    """
    given = os.environ.get("QENGINE_COMMIT", "").strip()
    if given:
        return given

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=Path(__file__).parent)
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--verify", "-q", "HEAD")
    if not head:
        sys.exit("benchmarks/gemm.py: not a git checkout; set QENGINE_COMMIT to the commit that is measured")
    return head + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")


def describe(versions: dict[str, str]) -> dict:
    """What a result says of its run."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name, "sm": properties.major * 10 + properties.minor, "torch": torch.__version__,
        "triton": triton.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
        "commit": commit(), "command": shlex.join(sys.orig_argv), "peers": versions,
    }  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--peers", default=",".join(PEERS), help="which to time, by commas; cuBLAS always is")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="rows of x, by commas")
    parser.add_argument("--tune-gemlite", type=Path, metavar="FILE", help="only let gemlite tune itself into FILE")
    parser.add_argument("--gemlite-config", type=Path, metavar="FILE", help="what --tune-gemlite wrote")
    parser.add_argument("--report", action="store_true", help="only write tables and plot from the gemm.json there is")
    options = parser.parse_args()
    if options.report:
        gemm_report.write(json.loads((options.out / "gemm.json").read_text()), options.out)
        return
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gemm.py needs a CUDA device; --report writes tables from gemm.json without one")
    if options.tune_gemlite:
        tune_gemlite(options.tune_gemlite)
        return
    if options.gemlite_config:
        load_gemlite(options.gemlite_config)
    versions = versions_of([p for p in options.peers.split(",") if p])
    about = describe(versions)
    bandwidth = copy_bandwidth()
    rows = measure(list(versions), tuple(int(m) for m in options.batches.split(",")))
    layers = gemm_report.sums(rows)
    result = {**about, "copy_tb_per_s": bandwidth, "bars_us": gemm_report.BARS, "layers": layers, "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gemm.json").write_text(json.dumps(result, indent=1) + "\n")
    gemm_report.write(result, options.out)


if __name__ == "__main__":
    main()
