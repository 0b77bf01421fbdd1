"""The packed GEMM under NVIDIA's compute-sanitizer, on a machine with a GPU:

    pip install nvidia-cuda-sanitizer-api      # or a CUDA toolkit, or COMPUTE_SANITIZER=/path/to/compute-sanitizer
    python tests/support/sanitize.py           # memcheck, racecheck, synccheck; exit status 0 where all are clean

Each tool runs a small set of layers through this file's --cases: every kind of launch, sizes that fill no tile,
act-order, split sums. torch's allocator is off, so that a read past the end of a tensor is seen.
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
TOOLS = ("memcheck", "racecheck", "synccheck")
KERNELS = "kernel_substring=w4a16_gemm", "kernel_substring=dequantize_rows"


def find_tool() -> str | None:
    """compute-sanitizer: COMPUTE_SANITIZER, on the PATH, in CUDA_HOME, or from the pip package."""
    given = os.environ.get("COMPUTE_SANITIZER") or shutil.which("compute-sanitizer")
    if given:
        return given
    homes = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"]
    for folder in {sysconfig.get_path("purelib"), *site.getsitepackages(), site.getusersitepackages()}:
        homes += sorted(Path(folder, "nvidia").glob("**/bin/compute-sanitizer"))
    return next((str(path) for path in homes if path.is_file()), None)


def cases() -> None:
    """Run the small set; wrong results exit with status 1."""
    import torch
    from packed_cases import TOLERANCE, Case, error, make

    from qengine.kernels.launch import Launch
    from qengine.kernels.w4a16 import dequantize, dequantize_ref, w4a16_linear
    from qengine.kernels.w4a16.ops import run

    hopper = torch.cuda.get_device_capability() == (9, 0)
    deep = torch.cuda.get_device_capability() >= (8, 0)
    for case in (
        Case(24, 136, 2, group=-1), Case(200, 264, 9, group=16, bias=True), Case(72, 520, 33, bits=8, group=64),
        Case(136, 384, 3, group=32, act_order=True), Case(328, 640, 70, bias=True), Case(264, 512, 1100),
    ):  # fmt: skip
        x, weight, bias, exact = make(case, "cuda")
        assert error(w4a16_linear(x, weight, bias), exact) < TOLERANCE[case.dtype], case
        assert torch.equal(dequantize(weight), dequantize_ref(weight, torch.float16)), case
    launches = [
        Launch(bm=8, bn=32, split=3, whole=2, warps=2, prefetch=2),
        Launch(bm=16, bn=64, split=2, prefetch=1),
        Launch(bm=32, bn=64, split=4, halves=True, scaled=True),
        Launch("dequantize"),
    ]
    if deep:
        launches += [Launch(bm=16, bn=64, split=2, stages=3), Launch(bm=64, bn=128, split=2, stages=3, scaled=True)]
    if hopper:
        wide = Launch(bm=64, bn=128, split=2, whole=1, warps=8, stages=3, scaled=True, pdl=2, tma=True)
        launches += [wide, Launch(bm=64, bn=64, split=2, stages=3, scaled=True, pdl=2, tma=True, overlap=True)]
    for launch in launches:
        x, weight, bias, exact = make(Case(328, 1152, 37, bias=True), "cuda")
        out = torch.full((37, 328), float("nan"), dtype=torch.float16, device="cuda")
        run(x, weight, bias, out, launch)
        assert error(out, exact) < TOLERANCE[torch.float16], launch
    print(f"{len(launches) + 6} cases are right")


def main() -> int:
    """Run every tool; the number of those that found something."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", action="store_true", help="run the cases alone, without a tool")
    parser.add_argument("--tools", default=",".join(TOOLS), help="by commas")
    options = parser.parse_args()
    if options.cases:
        cases()
        return 0
    tool = find_tool()
    if tool is None:
        sys.exit("compute-sanitizer was not found: pip install nvidia-cuda-sanitizer-api, or set COMPUTE_SANITIZER")
    paths = [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    env = dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1", PYTHONPATH=os.pathsep.join(p for p in paths if p))
    # compiled without a tool first: ptxas and a cold cache take their time under one
    subprocess.run([sys.executable, __file__, "--cases"], env=env, check=True)
    failed = 0
    for name in options.tools.split(","):
        filters = [word for kernel in KERNELS for word in ("--kernel-name", kernel)]
        command = [tool, "--tool", name, "--error-exitcode", "9", "--target-processes", "application-only", *filters]
        done = subprocess.run([*command, sys.executable, __file__, "--cases"], env=env, check=False)
        print(f"{name}: {'clean' if done.returncode == 0 else f'FAILED, status {done.returncode}'}", flush=True)
        failed += done.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
