"""Compiling a launch of the prefill kernel for a card that is not here."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qengine.kernels import sass, turing

from .prefill_kernel import paged_prefill_kernel
from .prefill_launch import PrefillLaunch, hopper_size, parts

_TABLES = ("bt_ptr", "len_ptr", "start_ptr", "tile_ptr")
_ELEMENTS = {"float": None, "int8": "i8", "int4": "u8", "fp8": "u8"}


def _aligned(names: list[str], types: dict[str, str]) -> dict[tuple[int], list[list[object]]]:
    # as at run time: values begin at multiples of 16 bytes, tables anywhere
    pointers = [i for i, name in enumerate(names) if types.get(name, "").startswith("*") and name not in _TABLES]
    return {(i,): [["tt.divisibility", 16]] for i in pointers}


def compile_prefill(
    launch: PrefillLaunch,
    sm: int,
    head_dim: int,
    *,
    kind: str = "float",
    key_offsets: int = 1,
    group: int = 7,
    block_size: int = 16,
    dtype: str = "fp16",
    softcap: bool = False,
    sliding: bool = False,
    listed: bool = True,
) -> triton.compiler.CompiledKernel:
    """The kernel of a launch for capability `sm`, as the operator would launch it.

    kind: "float", "int8", "int4" or "fp8". key_offsets: of an int4 key. group: query heads a KV head. dtype: of q and
    out, fp16 or bf16.
    """
    turing.ensure(sm)
    cache = f"*{_ELEMENTS[kind] or dtype}"
    types = {"q_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "k_ptr": cache, "v_ptr": cache}
    types |= dict.fromkeys(("ks_ptr", "vs_ptr"), f"*{dtype}" if kind == "float" else "*fp16")
    types |= dict.fromkeys(_TABLES, "*i32")
    types |= dict.fromkeys(("tiles", "chunk", "sq8", "so8", "sb16", "s_stride", "sbt", "window"), "i32")
    types |= {"c": "fp32", "cap": "fp32"}
    first, second = parts(head_dim, kind, launch.whole)
    constants = {
        "GROUP": group, "PACK": launch.pack, "HEAD": head_dim, "D1": first, "D2": second, "BS": block_size,
        "BM": launch.bm, "BN": launch.bn, "KIND": kind, "OFFSETS": key_offsets, "LISTED": listed, "SOFTCAP": softcap,
        "SLIDING": sliding, "SPLIT": launch.split, "PREFETCH": launch.prefetch, "SUMS": launch.sums,
        "ASM": True,
    }  # fmt: skip
    names = paged_prefill_kernel.arg_names
    aligned = _aligned(names, types)
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(paged_prefill_kernel, signature, constants, aligned)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def inspect_prefill(launch: PrefillLaunch, sm: int, head_dim: int, **options: object) -> tuple[sass.Code, int]:
    """(machine code read, bytes of shared memory) of a launch compiled for `sm`; options as compile_prefill's."""
    kernel = compile_prefill(launch, sm, head_dim, **options)  # type: ignore[arg-type]
    return sass.read(kernel.asm["cubin"]), kernel.metadata.shared


def compile_hopper(
    launch: PrefillLaunch,
    head_dim: int,
    *,
    group: int = 7,
    block_size: int = 16,
    dtype: str = "fp16",
    softcap: bool = False,
    sliding: bool = False,
    listed: bool = True,
) -> triton.compiler.CompiledKernel:
    """The kernel of a launch with `hopper` for capability 9.0; see compile_prefill."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from .prefill_hopper import hopper_prefill_kernel

    box = min(block_size, launch.bn)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    types = {"q_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "desc": f"tensordesc<{dtype}[{box}, 64],{layout!r}>"}
    types |= dict.fromkeys(_TABLES, "*i32")
    types |= dict.fromkeys(("tiles", "chunk", "sq8", "so8", "kv_rows", "v_rows", "sbt", "window"), "i32")
    types |= {"c": "fp32", "cap": "fp32"}
    constants = {
        "GROUP": group, "PACK": launch.pack, "HEAD": head_dim, "DP": hopper_size(head_dim), "BS": block_size,
        "BN": launch.bn, "BOX": box, "STAGES": launch.stages, "LISTED": listed, "SOFTCAP": softcap,
        "SLIDING": sliding, "PIN": launch.split,
    }  # fmt: skip
    names = hopper_prefill_kernel.arg_names
    aligned = _aligned(names, types)
    signature = {name: types.get(name, "constexpr") for name in names}
    source = GluonASTSource(hopper_prefill_kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
