"""Compiling a launch of the packed GEMM for a card that is not here."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qengine.kernels import sass, turing
from qengine.kernels.launch import Launch

from .gemm import w4a16_gemm

_TYPES = {
    "w_ptr": "*i32",
    "sz_ptr": "*i32",
    "perm_ptr": "*i32",
    "part_ptr": "*fp32",
    "lock_ptr": "*i32",
    "multiplier": "fp32",
}
_FLOATING = ("x_ptr", "x_desc", "bias_ptr", "y_ptr")
_INTEGERS = ("M", "N8", "K", "KB", "sx", "sy", "splits", "whole")


def compile_launch(
    launch: Launch, sm: int, bits: int, group_size: int, dtype: str = "fp16", activation: str = ""
) -> triton.compiler.CompiledKernel:
    """The kernel of a "gemm" launch for capability `sm`, with a bias, as the operator would launch it.

    dtype: fp16 or bf16. activation: ACT of the kernel. Strides count as multiples of 16, as those of the models are.
    """
    turing.ensure(sm)
    width = (512 // bits) // (2 if launch.halves else 1)
    types = {**_TYPES, **dict.fromkeys(_FLOATING, f"*{dtype}"), **dict.fromkeys(_INTEGERS, "i32")}
    if launch.tma:
        types["x_desc"] = f"tensordesc<{dtype}[{launch.bm}, {width}]>"
    constants = {
        "BITS": bits,
        "GROUP": group_size,
        "BM": launch.bm,
        "BN": launch.bn,
        "SPLIT": launch.split > 1,
        "PREFETCH": launch.prefetch,
        "SCALED": launch.scaled,
        "HALVES": launch.halves,
        "HAS_PERM": False,
        "HAS_BIAS": True,
        "EVEN_K": True,
        "PDL": launch.pdl,
        "TMA": launch.tma,
        "WGMMA": sm == 90 and launch.warps >= 4,
        "OVERLAP": launch.overlap,
        "SPREAD": launch.spread,
        "ACT": activation,
        "ASM": True,
    }
    names = w4a16_gemm.arg_names
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if types.get(name, "").startswith("*") or name in ("sx", "sy")
    }
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(w4a16_gemm, signature, constants, aligned)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def inspect_launch(launch: Launch, sm: int, bits: int, group_size: int) -> tuple[sass.Code, int]:
    """(machine code read, bytes of shared memory) of a launch compiled for `sm`."""
    kernel = compile_launch(launch, sm, bits, group_size)
    return sass.read(kernel.asm["cubin"]), kernel.metadata.shared


def weights_a_turn(launch: Launch, bits: int) -> float:
    """Weights that one warp takes in one turn of the main loop."""
    return launch.bn * (512 // bits) / launch.warps
