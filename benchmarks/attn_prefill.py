"""Time paged prefill attention on this GPU beside torch's own attention on contiguous tensors, in one run.

    python benchmarks/attn_prefill.py --out benchmarks/results
    python benchmarks/attn_prefill.py --sweep        # with other launches worth trying, too
    python benchmarks/attn_prefill.py --sweep --head-dims 192 256

Rates count the multiply-adds below the diagonal only, 2 * 2 * D * (pairs of query and visible key), for both sides. The
cache's blocks are in random order. With TRITON_OVERRIDE_ARCH=sm75 the kernel is generated as for a Turing card. Writes
attn_prefill.json (attn_prefill_sm75.json then; with --head-dims their sizes are in its name): figures, GPU, versions,
commit.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
import triton

from qengine.bench.about import commit
from qengine.kernels.paged_attn.aot_prefill import inspect_prefill
from qengine.kernels.paged_attn.cache import BlockLayout, Kind, KVPool, LayerCache, quantize
from qengine.kernels.paged_attn.prefill import capability, run_prefill
from qengine.kernels.paged_attn.prefill_launch import PrefillLaunch, kernel_kind, packing, parts, pick_prefill

SHARE_OF_SDPA = 0.75
TURING_TFLOPS = 150.0
TURING_SHARED = 65536


@dataclass(frozen=True)
class Shape:
    """Sequences of `new` tokens after `context` cached ones."""

    heads: int
    kv_heads: int
    head_dim: int
    sequences: int = 4
    new: int = 2048
    context: int = 0
    kind: Kind = "float16"
    block_size: int = 16
    window: int | None = None

    @property
    def flops(self) -> float:
        """Of the visible pairs."""
        pairs = self.new * self.context + self.new * (self.new + 1) / 2
        if self.window:
            pairs = sum(min(self.window, self.context + i + 1) for i in range(self.new))
        return 4.0 * self.sequences * self.heads * self.head_dim * pairs

    def __str__(self) -> str:
        extra = f" window {self.window}" if self.window else ""
        return (
            f"{self.heads}/{self.kv_heads}x{self.head_dim} {self.sequences} x {self.new} after {self.context} "
            f"{self.kind} block {self.block_size}{extra}"
        )


QWEN, LLAMA = Shape(28, 4, 128), Shape(32, 32, 128)
EXTRA = [
    *[Shape(28, 4, 128, block_size=b) for b in (8, 64, 256)],
    Shape(28, 4, 128, 1, 512, 0), Shape(28, 4, 128, 1, 512, 7680), Shape(28, 4, 128, 16, 64, 2048),
    Shape(28, 4, 128, 1, 8192, 0), Shape(28, 4, 128, 1, 8192, 0, window=4096),
]  # fmt: skip
KINDS: tuple[Kind, ...] = ("int8", "int4", "fp8")
SHAPES = [
    QWEN,
    LLAMA,
    *[Shape(28, 4, 128, kind=k) for k in KINDS],
    *[Shape(32, 8, d) for d in (64, 80, 96, 112, 192, 256)],
    *[Shape(32, 8, d, kind=k) for d in (192, 256) for k in KINDS[:2]],
    *EXTRA,
]


def make(shape: Shape) -> tuple[torch.Tensor, LayerCache, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, cache, block tables, seq_lens, query_starts, out) with random contents."""
    length = shape.new + shape.context
    per = -(-length // shape.block_size)
    layout = BlockLayout(shape.kind, shape.kv_heads, shape.head_dim, shape.block_size)
    cache = KVPool.allocate(layout, 1, per * shape.sequences, "cuda").layer(0)
    for values, scales in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
        new, new_scales = quantize(torch.randn(*values.shape[:3], shape.head_dim, device="cuda"), shape.kind)
        values.copy_(new)
        if scales is not None and new_scales is not None:
            scales[..., : new_scales.shape[-1]] = new_scales
            if scales.shape[-1] == 4:  # a 4-bit key's scale and an offset for each half
                scales[..., 2] = new_scales[..., 1]
    tables = torch.randperm(per * shape.sequences, device="cuda").int().view(shape.sequences, per)
    lens = torch.full((shape.sequences,), length, dtype=torch.int32, device="cuda")
    starts = torch.arange(shape.sequences + 1, dtype=torch.int32, device="cuda") * shape.new
    q = torch.randn(shape.sequences * shape.new, shape.heads, shape.head_dim, device="cuda", dtype=torch.float16)
    return q, cache, tables, lens, starts, torch.empty_like(q)


def time_graph(call: Callable[[], None], repeats: int = 4, replays: int = 9) -> float:
    """Microseconds a call: the median replay of a CUDA graph with `repeats` of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                call()
        graph.replay()
        times = []
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / repeats)
    return sorted(times)[replays // 2]


def time_sdpa(shape: Shape) -> float:
    """Microseconds of torch's attention on contiguous float16 tensors; infinity where a shape is not causal from 0."""
    if shape.context or shape.window:
        return math.inf
    q = torch.randn(shape.sequences, shape.heads, shape.new, shape.head_dim, device="cuda", dtype=torch.float16)
    k, v = (torch.randn_like(q[:, : shape.kv_heads]) for _ in range(2))
    grouped = shape.heads != shape.kv_heads

    def call() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    return time_graph(call)


def time_ours(shape: Shape, launch: PrefillLaunch | None = None) -> float:
    """Microseconds of one layer's call, its ordering of tiles included."""
    q, cache, tables, lens, starts, out = make(shape)
    launch = launch or chosen(shape)
    scale = shape.head_dim**-0.5
    return time_graph(
        lambda: run_prefill(
            q, cache, tables, lens, starts, out, launch, max_query_len=shape.new, scale=scale,
            sliding_window=shape.window,
        )
    )  # fmt: skip


def chosen(shape: Shape) -> PrefillLaunch:
    """The launch that the engine would take."""
    sm = capability(torch.cuda.current_device())
    return pick_prefill(sm, shape.head_dim, shape.kind, shape.heads // shape.kv_heads, shape.new)


def others(shape: Shape, sm: int) -> list[PrefillLaunch]:
    """Launches worth timing for a shape beside the chosen one."""
    first = chosen(shape)
    quantized = shape.kind not in ("float16", "bfloat16")
    if shape in EXTRA or shape.head_dim > 256:
        return []
    if sm == 75 and shape.head_dim > 128:
        found = turing_launches(shape)
    elif sm == 75:
        # two small programs of a multiprocessor wait at different times, for the same registers as a large one
        half = replace(first, bm=64, warps=4, sums=True, pack=packing(shape.heads // shape.kv_heads, 64, shape.new))
        found = [replace(first, prefetch=not first.prefetch), half]
    elif quantized:
        found = [replace(first, bn=64)]
    else:
        bn = 128 if shape.head_dim <= 128 else 64
        found = [PrefillLaunch(bm=128, bn=bn, stages=2, pack=packing(shape.heads // shape.kv_heads, 128, shape.new))]
        found.append(replace(first, split=False))
    return [launch for launch in dict.fromkeys(found) if launch != first]


def turing_launches(shape: Shape) -> list[PrefillLaunch]:
    """Launches for Turing's wide heads with a warp for every 16 rows, `fits` not asked yet."""
    group, found = shape.heads // shape.kv_heads, []
    width = sum(parts(shape.head_dim, kernel_kind(shape.kind)))
    for bm, bn, prefetch in itertools.product((64, 128), (16, 32), (False, True)):
        if 2 * (bm + bn) * width > TURING_SHARED:
            continue  # queries and keys alone take more
        launch = PrefillLaunch(bm, bn, packing(group, bm, shape.new), bm // 16, prefetch=prefetch)
        # without `sums` a result wider than the tile is high is spread over the warps along its columns
        found += [replace(launch, sums=sums) for sums in ((True,) if width == 256 else (False, True))]
    return found


@functools.cache
def fits(shape: Shape, launch: PrefillLaunch, sm: int) -> bool:
    """Whether a launch keeps to a Turing card, where it is for one: shared memory, no stack, no product done twice."""
    if sm != 75:
        return True
    kind = kernel_kind(shape.kind)
    code, shared = inspect_prefill(
        launch, 75, shape.head_dim, kind=kind, key_offsets=2, group=shape.heads // shape.kv_heads,
        block_size=shape.block_size, sliding=shape.window is not None, listed=shape.sequences > 1,
    )  # fmt: skip
    first, second = parts(shape.head_dim, kind, launch.whole)
    products = launch.bm * launch.bn * 2 * (first + second) / (16 * 8 * 8) / launch.warps
    done = code.main_loop().of("HMMA.1688.F32")
    return code.stack == 0 and shared <= TURING_SHARED and products <= done < 1.1 * products


def served(sm: int, head_dims: list[int] | None) -> list[Shape]:
    """The shapes that the card serves, of all heads or of some sizes."""
    of_size = [shape for shape in SHAPES if not head_dims or shape.head_dim in head_dims]
    return [shape for shape in of_size if shape.kind != "fp8" or sm >= 89]


def warm(part: int, of: int, head_dims: list[int] | None) -> None:
    """Compile every `of`-th launch of a sweep, for the cache in which a later sweep finds it."""
    sm = capability(torch.cuda.current_device())
    launches = [(shape, x) for shape in served(sm, head_dims) for x in (chosen(shape), *others(shape, sm))]
    for shape, launch in launches[part::of]:
        if launch == chosen(shape) or fits(shape, launch, sm):
            time_ours(shape, launch)
        print(f"{short(launch)}", flush=True)


def short(launch: PrefillLaunch) -> str:
    """A launch in few letters."""
    flags = [f.name for f in fields(launch) if getattr(launch, f.name) is True]
    return f"{launch.bm}x{launch.bn} p{launch.pack} w{launch.warps} s{launch.stages} {' '.join(flags)}"


def measure(sm: int, swept: bool, seconds: float, head_dims: list[int] | None) -> list[dict]:
    """One row a shape: microseconds and TFLOP/s of the engine, of torch, and of the other launches if `swept`."""
    rows, began = [], time.monotonic()
    time_sdpa(QWEN)  # an idle card's clock is low: the first figures would be its
    for shape in served(sm, head_dims):
        if time.monotonic() - began > seconds:
            print("out of time", flush=True)
            break
        ours, sdpa = time_ours(shape), time_sdpa(shape)
        row = {
            **asdict(shape), "us": ours, "tflops": shape.flops / ours / 1e6, "launch": asdict(chosen(shape)),
            "sdpa_us": None if math.isinf(sdpa) else sdpa,
            "sdpa_tflops": None if math.isinf(sdpa) else shape.flops / sdpa / 1e6,
        }  # fmt: skip
        rows.append(row)
        beside = "" if math.isinf(sdpa) else f"SDPA {row['sdpa_tflops']:.0f} {sdpa / ours:4.0%}"
        print(f"{row['tflops']:5.0f} {beside:14} {ours:7.1f} us {shape}; {short(chosen(shape))}", flush=True)
        if swept:
            row["others"] = []
            for launch in filter(lambda x: fits(shape, x, sm), others(shape, sm)):
                rate = shape.flops / time_ours(shape, launch) / 1e6
                row["others"].append({**asdict(launch), "tflops": rate})
                print(f"  {rate:5.0f} {short(launch)}", flush=True)
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--sweep", action="store_true", help="time other launches worth trying, too")
    parser.add_argument("--warm", metavar="I/N", help="only compile every N-th launch of a sweep, from the I-th on")
    parser.add_argument("--head-dims", type=int, nargs="+", metavar="D", help="only shapes with heads of these sizes")
    parser.add_argument("--seconds", type=float, default=1e9, help="leave out the shapes that are not begun by then")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/attn_prefill.py needs a CUDA device")
    sm = capability(torch.cuda.current_device())
    if options.warm:
        part, of = map(int, options.warm.split("/"))
        warm(part, of, options.head_dims)
        return
    rows = measure(sm, options.sweep, options.seconds, options.head_dims)
    result = {
        "gpu": torch.cuda.get_device_name(), "generated_for": sm, "torch": torch.__version__,
        "triton": triton.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
        "commit": commit(), "command": "python " + " ".join(sys.argv), "share_of_sdpa_due": SHARE_OF_SDPA,
        "turing_tflops_due": TURING_TFLOPS, "rows": rows,
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    name = "attn_prefill_sm75" if sm == 75 else "attn_prefill"
    # a part of the table does not replace all of it
    name += "".join(f"_{size}" for size in options.head_dims or []) + ".json"
    (options.out / name).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
