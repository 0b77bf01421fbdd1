"""Compile small kernels for sm_75 and sm_80 without a GPU and print, as JSON, what came of each."""

import json
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qengine.kernels import turing
from qengine.kernels.sass import disassemble


@triton.jit
def product(a_ptr, b_ptr, c_ptr, K, PRECISION: tl.constexpr, OUT: tl.constexpr, STAGES: tl.constexpr):
    """C [64, 64] = A [64, K] @ B [K, 64]."""
    i = tl.arange(0, 64)
    k = tl.arange(0, 32)
    acc = tl.zeros((64, 64), OUT)
    for k0 in tl.range(0, K, 32, num_stages=STAGES):
        a = tl.load(a_ptr + i[:, None] * K + (k0 + k)[None, :])
        b = tl.load(b_ptr + (k0 + k)[:, None] * 64 + i[None, :])
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=OUT)
    tl.store(c_ptr + i[:, None] * 64 + i[None, :], acc)


@triton.jit
def scale(a_ptr, c_ptr, K):
    """C [K] = 2 A [K], in a loop and without a dot."""
    i = tl.arange(0, 128)
    for k0 in range(0, K, 128):
        tl.store(c_ptr + k0 + i, tl.load(a_ptr + k0 + i) * 2)


def compiled(sm: int, kind: str, *, stages: int = 1, loop=None, out=tl.float32, precision: str = "tf32"):
    """What the PTX and SASS hold, or the refusal's text."""
    sums = "*i32" if kind == "*i8" else "*fp32" if out == tl.float32 else "*fp16"
    out = tl.int32 if kind == "*i8" else out
    names = {"a_ptr": kind, "b_ptr": kind, "c_ptr": sums, "K": "i32"}
    names.update(PRECISION="constexpr", OUT="constexpr", STAGES="constexpr")
    source = ASTSource(product, names, {"PRECISION": precision, "OUT": out, "STAGES": loop})
    return finish(source, sm, stages)


def finish(source: ASTSource, sm: int, stages: int):
    try:
        kernel = triton.compile(source, target=GPUTarget("cuda", sm, 32), options={"num_stages": stages})
    except turing.TuringError as error:
        return f"TuringError: {error}"
    ptx = kernel.asm["ptx"]
    found = {name: name in ptx for name in ("m16n8k8", "m16n8k16", "cp.async")}
    return {**found, "hmma": "HMMA" in disassemble(kernel.asm["cubin"])}


def main() -> None:
    """Print the results of all kernels as one line of JSON."""
    results: dict = {"triton": triton.__version__}
    if sys.argv[1] == "hook":
        turing.install()
        first = triton.knobs.runtime.add_stages_inspection_hook
        turing.install()
        results["installed twice"] = first is triton.knobs.runtime.add_stages_inspection_hook
        results["75 float16, 3 stages"] = compiled(75, "*fp16", stages=3)
        results["75 a loop of 2 stages"] = compiled(75, "*fp16", loop=2)
        results["75 bfloat16"] = compiled(75, "*bf16")
        results["75 int8"] = compiled(75, "*i8")
        results["75 float8"] = compiled(75, "*fp8e5")
        results["75 float32"] = compiled(75, "*fp32")
        results["75 sums in float16"] = compiled(75, "*fp16", out=tl.float16)
        results["75 float32 ieee"] = compiled(75, "*fp32", precision="ieee")
        results["80 float16"] = compiled(80, "*fp16", stages=3)
        plain = ASTSource(scale, {"a_ptr": "*fp32", "c_ptr": "*fp32", "K": "i32"})
        results["75 no dot, 3 stages"] = finish(plain, 75, 3)
    results["75 float16"] = compiled(75, "*fp16")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
