"""The packed GEMM and the attention kernels under NVIDIA's compute-sanitizer, on a machine with a GPU:

    python tests/support/sanitize.py           # memcheck, synccheck, racecheck; exit status 0 where all are clean

compute-sanitizer comes with the CUDA toolkit (or `pip install nvidia-cuda-sanitizer-api`, or COMPUTE_SANITIZER=path).
Each tool runs a small set through this file's --cases: of layers every kind of launch, sizes that fill no tile,
act-order, split sums; of attention every kind of cache, decode in one part and in many, prefill, writes of keys.
For memcheck torch's allocator is off, so that a read past the end of a tensor is seen.

racecheck takes the launches whose products are `mma.sync`: on an H200 with CUDA 13.0 it ends with an internal error of
its own ("failed to handle a hardware exception") on kernels that the other tools find clean. `--racecheck LEVEL` tries
the others: wgmma (Hopper's products), tma (its copies and programmatic launches too).
"""

from __future__ import annotations

import argparse
import os
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "synccheck", "racecheck")
LEVELS = ("mma", "wgmma", "tma")
KERNELS = tuple(
    f"kernel_substring={name}"
    for name in ("w4a16_gemm", "dequantize_rows", "paged_decode", "prefill_kernel", "write_kv")
)


def find_tool() -> str | None:
    """compute-sanitizer: COMPUTE_SANITIZER, on the PATH, in CUDA_HOME, or from the pip package."""
    given = os.environ.get("COMPUTE_SANITIZER") or shutil.which("compute-sanitizer")
    if given:
        return given
    homes = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"]
    for folder in {sysconfig.get_path("purelib"), *site.getsitepackages(), site.getusersitepackages()}:
        homes += sorted(Path(folder, "nvidia").glob("**/bin/compute-sanitizer"))
    return next((str(path) for path in homes if path.is_file()), None)


def chosen() -> int:
    """Layers with the launch that the engine chooses, against the exact product; how many."""
    import torch
    from packed_cases import TOLERANCE, Case, error, make

    from qengine.kernels.w4a16 import dequantize, dequantize_ref, gated_ref, w4a16_gated, w4a16_linear

    layers = (
        Case(24, 136, 2, group=-1), Case(200, 264, 9, group=16, bias=True), Case(72, 520, 33, bits=8, group=64),
        Case(136, 384, 3, group=32, act_order=True), Case(336, 640, 70, bias=True), Case(272, 512, 2100),
    )  # fmt: skip
    for case in layers:
        x, weight, bias, exact = make(case, "cuda")
        assert error(w4a16_linear(x, weight, bias), exact) < TOLERANCE[case.dtype], case
        assert torch.equal(dequantize(weight), dequantize_ref(weight, torch.float16)), case
        if case.n % 16 == 0:
            gated = w4a16_gated(x, weight, bias, "silu")
            assert error(gated, gated_ref(x, weight, bias, "silu").double().cpu()) < 2 * TOLERANCE[case.dtype], case
    return len(layers)


def launches(level: str) -> int:
    """Every kind of launch up to a level, against the exact product; how many."""
    import torch
    from packed_cases import TOLERANCE, Case, error, make

    from qengine.kernels.launch import Launch
    from qengine.kernels.w4a16.ops import run

    found = [
        Launch(bm=8, bn=32, split=3, whole=2, warps=2, prefetch=2),
        Launch(bm=16, bn=64, split=2, warps=2, prefetch=1),
        Launch(bm=64, bn=32, split=3, warps=2, scaled=True, spread=True),
        Launch("dequantize"),
    ]
    if torch.cuda.get_device_capability() >= (8, 0):
        found.append(Launch(bm=16, bn=64, split=2, warps=2, stages=3))
    if level != "mma":
        found += [Launch(bm=16, bn=64, split=2, stages=3), Launch(bm=64, bn=128, split=2, stages=3, scaled=True)]
    if level == "tma" and torch.cuda.get_device_capability() == (9, 0):
        wide = Launch(bm=64, bn=128, split=2, whole=1, warps=8, stages=3, scaled=True, pdl=2, tma=True)
        shared = Launch(bm=64, bn=64, split=2, stages=3, scaled=True, pdl=2, tma=True, overlap=True, spread=True)
        found += [wide, shared]
    for launch in found:
        x, weight, bias, exact = make(Case(328, 1152, 37, bias=True), "cuda")
        out = torch.full((37, 328), float("nan"), dtype=torch.float16, device="cuda")
        run(x, weight, bias, out, launch)
        assert error(out, exact) < TOLERANCE[torch.float16], launch
    return len(found)


def attention() -> int:
    """Decode, prefill and cache writes of every kind of cache; how many."""
    import decode_cases
    import kv_cache_cases
    import prefill_cases
    import torch

    from qengine.kernels.paged_attn.decode import paged_decode
    from qengine.kernels.paged_attn.prefill import paged_prefill
    from qengine.kernels.paged_attn.write import write_kv

    kinds, short, ragged, count = ("float16", "int8", "int4"), (1, 0, 17, 300, 129), ((33, 70), (1, 9), (90, 0)), 0
    for kind in kinds:
        offsets = 1 + (kind == "int4")
        for lens, size in ((short, 80), (short, 256), ((5000, 3, 700), 128)):
            case = decode_cases.Case(lens, kind, size, 14, 2, offsets=offsets)
            step = decode_cases.make(case, "cuda")
            out = torch.full(step.q.shape, float("nan"), dtype=case.dtype, device="cuda")
            paged_decode(step.q, step.cache, step.tables, step.lens, out, max_seq_len=max(lens), **case.options)
            assert decode_cases.error(out, step.exact) < decode_cases.TOLERANCE[case.dtype], case
        for size, block in ((64, 16), (128, 64), (80, 16)):
            one = prefill_cases.Case(kind, 14, 2, size, block, ragged, offsets=offsets)
            chunk = prefill_cases.make(one, "cuda")
            paged_prefill(
                chunk.q, chunk.cache, chunk.block_tables, chunk.seq_lens, chunk.query_starts, chunk.out,
                max_query_len=max(n for n, _ in ragged), **chunk.options,
            )  # fmt: skip
            assert prefill_cases.error(chunk, one) < prefill_cases.TOLERANCE[(kind, one.dtype)], one
        new = kv_cache_cases.Case(kind, 96, (2, 2), 40, rotary=96)
        inputs, pool = kv_cache_cases.make(new).to("cuda"), kv_cache_cases.pool_for(new, "cuda")
        write_kv(inputs.qkv, pool.layer(1), inputs.slots, **inputs.options)
        count += 7
    torch.cuda.synchronize()
    return count


def run_tool(tool: str, name: str, level: str) -> int:
    """Run the cases of a level under one tool; its exit status."""
    paths = [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in paths if p))
    if name == "memcheck":
        env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    this = [sys.executable, __file__, "--cases", level]
    # without a tool first: compiling takes its time under one
    subprocess.run(this, env=env, check=True, stdout=subprocess.DEVNULL)
    filters = [word for kernel in KERNELS for word in ("--kernel-name", kernel)]
    command = [tool, "--tool", name, "--error-exitcode", "9", "--target-processes", "application-only", *filters]
    status = subprocess.run([*command, *this], env=env, check=False).returncode
    print(f"{name}, {level}: {'clean' if status == 0 else f'FAILED, status {status}'}", flush=True)
    return status


def main() -> int:
    """Run every tool; the number of those that found something."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", choices=LEVELS, help="run the cases up to a level, without a tool")
    parser.add_argument("--tools", default=",".join(TOOLS), help="by commas")
    parser.add_argument("--racecheck", choices=LEVELS, default="mma", help="the level that racecheck takes")
    options = parser.parse_args()
    if options.cases:
        count = launches(options.cases) + (chosen() + attention() if options.cases == "tma" else 0)
        print(f"{count} cases are right")
        return 0
    tool = find_tool()
    if tool is None:
        sys.exit("compute-sanitizer was not found: pip install nvidia-cuda-sanitizer-api, or set COMPUTE_SANITIZER")
    levels = {name: options.racecheck if name == "racecheck" else "tma" for name in options.tools.split(",")}
    return sum(run_tool(tool, name, level) != 0 for name, level in levels.items())


if __name__ == "__main__":
    sys.exit(main())
